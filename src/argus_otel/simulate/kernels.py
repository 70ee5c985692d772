"""Kernels of a step: a few classes in each phase, whose durations add up to the phase's compute.

Micro-batches of a step are alike here: a class has the same kernels in each, of their mean work. Who
waits in a collective does so in its kernel, as with NCCL; it runs beside the phases, and in none.

Shape legend: R = ranks, K = operations of a rank in a step, X = kinds of kernels (a class in a phase
has one or two sizes), G = rows of the table, E = filled buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from argus_otel.simulate.faults import KERNEL_CLASSES
from argus_otel.wire.codes import PHASES
from argus_otel.wire.sketch import Rows, places_of

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from argus_otel.simulate.model import Model, StepArrays

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

COMMUNICATION: Final = "nccl"

_SIZES: Final = {
    "attention": ((8, 1.0),),
    "elementwise": ((32, 1.0), (8, 5.0)),
    "gemm": ((16, 1.0), (8, 4.0)),
}
"""Launches in a pass of a micro-batch, and how long one takes against the others; the smaller first."""
_OPTIMIZER: Final = ((4, 1.0),)
_STREAM: Final = 7
_COMMUNICATION_STREAM: Final = 13
_NOISE: Final = 0.01
"""Log-normal sigma of one class in one phase, step and rank."""
_PLACES: Final = 16
"""More than a place within a bucket can be, so that bucket and place are one number."""


class Key(NamedTuple):
    """What a row of the table is of."""

    name: str
    stream: int
    phase: str | None


class KernelMaker:
    """Makes the rows of one step after another.

    Args:
        model: The job.
        seed: Of the noise between classes, which leaves the rest of the job as it is.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self._model = model
        self._random = np.random.default_rng((seed, 2))
        c = model.cluster
        passes = 1 if c.sharding in ("fsdp", "hsdp") else c.micro_batches * c.chunks
        kinds = [
            (Key(name, _STREAM, phase), name, place, _SIZES[name], passes)
            for name in KERNEL_CLASSES
            for place, phase in enumerate(("forward", "backward"))
        ]
        kinds.append((Key("elementwise", _STREAM, "optimizer.step"), "", 2, _OPTIMIZER, 1))
        # As a sketch has its rows: by name, stream and phase.
        kinds.sort(key=lambda kind: (kind[0].name, PHASES.index(kind[0].phase or "")))
        self.keys = [kind[0] for kind in kinds] + [Key(COMMUNICATION, _COMMUNICATION_STREAM, None)]
        self._class_X: list[str] = []
        row, phase, count, share = [], [], [], []
        for number, (_, name, place, sizes, times) in enumerate(kinds):
            whole = sum(launches * long for launches, long in sizes) * times
            for launches, long in sizes:
                row.append(number)
                phase.append(place)
                count.append(launches * times)
                share.append(long / whole)
                self._class_X.append(name)
        self._row_X, self._phase_X = np.array(row), np.array(phase)
        self._count_X, self._share_X = np.array(count), np.array(share)
        self._sizes_of_row = np.bincount(self._row_X)

    def rows(self, arrays: StepArrays) -> tuple[Ints, Ints, Rows]:
        """Rank [G] and key [G] of each row, and the rows, by rank and key; ranks that report."""
        (rank_D,) = np.nonzero(arrays.reported_R)
        bucket_DX, place_DX = places_of(self._durations(arrays)[rank_D] * 1e9)
        waited_DK = (arrays.end_RK - arrays.arrival_RK)[rank_D] * 1e9
        known_DK = ~np.isnan(waited_DK)
        bucket_DK, place_DK = places_of(np.where(known_DK, waited_DK, 0.0))
        mark = np.where(known_DK, bucket_DK * _PLACES + place_DK, np.iinfo(np.int64).max)
        mark.sort(axis=1)
        count_D = known_DK.sum(axis=1)
        # Each rank's operations by bucket, one entry for those that share one.
        mark_N = mark[np.arange(mark.shape[1]) < count_D[:, None]]
        of_N = np.repeat(np.arange(rank_D.size), count_D)
        bucket_N = mark_N // _PLACES
        (first_E,) = np.nonzero(
            (np.diff(bucket_N, prepend=-1) != 0) | (np.diff(of_N, prepend=-1) != 0)
        )
        filled_D = np.bincount(of_N[first_E], minlength=rank_D.size)
        # Of each rank first its own kernels, then those of communication.
        kinds = self._row_X.size
        begin_D = np.cumsum(filled_D + kinds) - filled_D - kinds
        own = begin_D[:, None] + np.arange(kinds)
        before_D = np.cumsum(filled_D) - filled_D
        theirs = np.arange(first_E.size) + np.repeat(begin_D + kinds - before_D, filled_D)
        bucket, count, place_sum = np.empty((3, own.size + theirs.size), dtype=np.int64)
        bucket[own], bucket[theirs] = bucket_DX, bucket_N[first_E]
        count[own] = self._count_X
        place_sum[own] = place_DX * self._count_X
        if first_E.size:
            count[theirs] = np.diff(first_E, append=mark_N.size)
            place_sum[theirs] = np.add.reduceat(mark_N % _PLACES, first_E)
        filled_DG = np.empty((rank_D.size, len(self.keys)), dtype=np.int64)
        filled_DG[:, :-1], filled_DG[:, -1] = self._sizes_of_row, filled_D
        at, key = np.nonzero(filled_DG)
        return (
            rank_D[at],
            key,
            Rows(filled=filled_DG[at, key], bucket=bucket, count=count, place_sum=place_sum),
        )

    def _durations(self, arrays: StepArrays) -> Floats:
        """Seconds of one launch [R, X]."""
        ranks = arrays.compute_PR.shape[1]
        noise_GR = np.exp(self._random.normal(0, _NOISE, (len(self.keys), ranks)))
        part_XR = np.ones((self._row_X.size, ranks))
        for phase in (0, 1):
            parts = {}
            for row in np.unique(self._row_X[self._phase_X == phase]).tolist():
                name = self.keys[row].name
                slow = arrays.kernel_factors.get(name, 1.0)
                parts[row] = KERNEL_CLASSES[name] * slow * noise_GR[row]
            whole = sum(parts.values())
            for row, part in parts.items():
                part_XR[self._row_X == row] = part / whole
        took_XR: Floats = arrays.compute_PR[self._phase_X] * part_XR * self._share_X[:, None]
        return took_XR.T


def key_columns(keys: list[Key]) -> dict[str, pa.Array]:
    """Name, stream and phase of each key as Arrow columns, to be taken from."""
    import pyarrow as pa

    return {
        "name": pa.array([key.name for key in keys]),
        "stream": pa.array([key.stream for key in keys]),
        "phase": pa.array([key.phase for key in keys]),
    }
