"""Which kernels of a rank take longer than on its peers: read for a finding, and for nothing else.

What NCCL's kernels take is waiting for others, mostly, so those of communication are left out.

Shape legend: N = names of kernels that the rank and its peers have.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.tables.kernels import read_sketch_column
from argus_otel.wire.kernels import REST
from argus_otel.wire.sketch import Rows, Sketch, distances, sketch_of_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_MOST_PEERS: Final = 32
"""Of thousands of peers so many stand for all: their pooled kernels are tens of thousands."""
_MOST_STEPS: Final = 20
"""The latest of a fault, as many as a window has."""
_LEAST_S: Final = 1e-9
"""A kernel of no duration, by a clock that has no finer ticks."""
_COMMUNICATION: Final = ("nccl", "rccl")
_USUAL: Final = 0.9
"""The distance that so many of the peers stay under is how far healthy ranks are apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelComparison:
    """Kernels of a rank against those of its peers, by name, the one that costs most first."""

    names: tuple[str, ...]
    """[N]."""
    ratio_N: Floats
    """Mean duration over the peers'."""
    distance_N: Floats
    """Wasserstein-1 distance to the peers' pooled kernels, as a share of their median."""
    usual_distance_N: Floats
    """What nine of ten peers stay under."""
    launches_ratio_N: Floats
    """How many in a step over the peers'."""
    extra_s_N: Floats
    """Seconds in a step that they take more than the peers'; below 0 where less."""
    total_extra_s: float
    """The same of all kernels but those of communication, also of those that cannot be compared."""
    only_here: Mapping[str, float]
    """Kernels that no peer has among its largest → seconds in a step; the longest first."""
    peers: int
    steps: int


def compare_kernels(
    run: Run, rank: int, steps: tuple[int, int], *, leave_out: Collection[int] = ()
) -> KernelComparison | str | None:
    """Compare a rank's kernels with its peers'.

    Args:
        run: The run.
        rank: Its index.
        steps: First and last ordinal of what is looked into; of many, the latest 20 are read.
        leave_out: Indices of ranks that are no measure, for something is wrong with them.

    Returns:
        None where the run has no kernels of the rank; a reason where there is nothing to compare
        them with.

    Raises:
        ValueError: The table is damaged.
    """
    window = run.ordinals_A[(run.ordinals_A >= steps[0]) & (run.ordinals_A <= steps[1])]
    window = window[-_MOST_STEPS:]
    if not run.has_gpu_R[rank]:
        return None
    label_R = run.peers.label_R
    alike_R = (label_R == label_R[rank]) & (label_R[rank] >= 0)
    alike_R[[rank, *leave_out]] = False
    peers = np.flatnonzero(alike_R)
    if peers.size > _MOST_PEERS:
        peers = peers[np.linspace(0, peers.size - 1, _MOST_PEERS).astype(int)]
    ranks = run.ranks_R[[rank, *peers]]
    table = run.read_rows("kernels", window, ranks.tolist())
    if table is None:
        return None
    rows = _Kernels(table, ranks)
    if not rows.of(0).any():
        return None
    with_kernels = [place for place in range(1, ranks.size) if rows.of(place).any()]
    if not with_kernels:
        return "kernels of a peer that nothing is wrong with"
    return _compare(rows, with_kernels)


def is_communication(name: str) -> bool:
    """Whether a kernel is one of NCCL's or RCCL's."""
    return name.lower().startswith(_COMMUNICATION)


class _Kernels:
    """Rows of the kernels table, without those of communication and those folded into one."""

    def __init__(self, table: pa.Table, ranks: Ints) -> None:
        encoded = table["name"].combine_chunks().dictionary_encode()
        if hasattr(encoded, "combine_chunks"):
            encoded = encoded.combine_chunks()
        self.names: tuple[str, ...] = tuple(encoded.dictionary.to_pylist())
        own = [not is_communication(name) for name in self.names]
        name_G = encoded.indices.to_numpy().astype(np.int64)
        self._own_G = np.array(own, dtype=bool)[name_G]
        is_rest = np.array([name == REST for name in self.names], dtype=bool)
        self._wanted_G = self._own_G & ~is_rest[name_G]
        self._name_G = name_G
        order = np.argsort(ranks)
        self._place_G = order[np.searchsorted(ranks[order], table["rank"].to_numpy())]
        self._ordinal_G = table["ordinal"].to_numpy()
        self._rows = read_sketch_column(table["sketch"])
        self.steps = np.unique(self._ordinal_G).size

    def of(self, place: int) -> NDArray[np.bool_]:
        """Which rows are of a rank."""
        rows: NDArray[np.bool_] = self._wanted_G & (self._place_G == place)
        return rows

    def seconds(self, places: Sequence[int]) -> float:
        """Of all kernels in a step of a rank, those folded into one too."""
        sketch, steps = self.sketch(places, self._own_G)
        return float(sketch.totals_ns.sum()) * 1e-9 / steps

    def sketch(
        self, places: Sequence[int], wanted_G: NDArray[np.bool_] | None = None
    ) -> tuple[Sketch, int]:
        """Kernels of some ranks by name, and of how many steps they are."""
        wanted_G = self._wanted_G if wanted_G is None else wanted_G
        at = wanted_G & np.isin(self._place_G, places)
        step = self._place_G[at] * (int(self._ordinal_G.max()) + 1) + self._ordinal_G[at]
        entries = np.repeat(at, self._rows.filled)
        rows = Rows(
            filled=self._rows.filled[at],
            bucket=self._rows.bucket[entries],
            count=self._rows.count[entries],
            place_sum=self._rows.place_sum[entries],
            error_per_mille=self._rows.error_per_mille,
        )
        nothing = np.zeros(rows.filled.size, dtype=np.int64)
        sketch = sketch_of_rows(rows, self._name_G[at], nothing, nothing - 1, names=self.names)
        return sketch, np.unique(step).size


def _compare(kernels: _Kernels, places: Sequence[int]) -> KernelComparison | str:
    mine, my_steps = kernels.sketch([0])
    theirs, their_steps = kernels.sketch(places)
    row_of = {name: row for row, name in enumerate(theirs.name.tolist())}
    common = [row for row, name in enumerate(mine.name.tolist()) if name in row_of]
    if not common:
        return "kernels of the same names on a peer"
    there = np.array([row_of[mine.name[row]] for row in common])
    my_count, their_count = mine.counts[common] / my_steps, theirs.counts[there] / their_steps
    my_s = mine.totals_ns[common] / my_steps * 1e-9
    their_s = theirs.totals_ns[there] / their_steps * 1e-9
    each = np.full((len(places), len(kernels.names)), np.nan)
    for at, place in enumerate(places):
        one, _ = kernels.sketch([place])
        each[at, one.name] = distances(one, theirs)
    usual = np.nanquantile(each[:, mine.name[common]], _USUAL, axis=0)
    extra_s = my_s - their_s
    all_mine_s = mine.totals_ns / my_steps * 1e-9
    only = [row for row in np.argsort(-all_mine_s).tolist() if mine.name[row] not in row_of]
    order = np.argsort(-extra_s, kind="stable")
    return KernelComparison(
        names=tuple(kernels.names[mine.name[common[place]]] for place in order.tolist()),
        ratio_N=((my_s / my_count) / np.maximum(their_s / their_count, _LEAST_S))[order],
        distance_N=distances(mine, theirs)[common][order],
        usual_distance_N=usual[order],
        launches_ratio_N=(my_count / their_count)[order],
        extra_s_N=extra_s[order],
        total_extra_s=kernels.seconds([0]) - kernels.seconds(places),
        only_here={kernels.names[mine.name[row]]: float(all_mine_s[row]) for row in only},
        peers=len(places),
        steps=kernels.steps,
    )
