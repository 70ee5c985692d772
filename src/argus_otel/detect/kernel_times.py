"""Seconds of each kernel in each step of some ranks, to compare two runs by.

Shape legend: S = steps, P = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from argus_otel.detect.kernels import is_communication
from argus_otel.tables.kernels import read_sketch_column
from argus_otel.wire.kernels import REST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_MOST_RANKS: Final = 64
"""Of thousands so many are read: a rank and step have up to nine rows."""
_MOST_STEPS: Final = 60
"""The latest of those compared."""


def ranks_to_read(ranks: Sequence[int], suspects: Sequence[int]) -> list[int]:
    """Which ranks' kernels are worth reading: those that stand out, and others evenly spread.

    Args:
        ranks: All that could be read, ascending.
        suspects: Those that stand out, worst first; one may be named several times.

    Returns:
        At most 64, ascending.
    """
    if len(ranks) <= _MOST_RANKS:
        return list(ranks)
    there = set(ranks)
    # Half at most: where many stand out, healthy ones must still be there to tell from.
    chosen = [rank for rank in dict.fromkeys(suspects) if rank in there][: _MOST_RANKS // 2]
    others = np.array(sorted(there.difference(chosen)))
    spread = np.linspace(0, others.size - 1, _MOST_RANKS - len(chosen)).astype(int)
    return sorted([*chosen, *others[spread].tolist()])


def kernel_seconds(run: Run, index_S: Ints, ranks: Sequence[int]) -> dict[str, Floats]:
    """What each kernel took in a step, streams and phases together.

    Kernels of communication are left out: what they take is waiting for others, mostly. A kernel that
    is not among a step's largest is unknown there, not 0.

    Args:
        run: The run.
        index_S: Indices of the steps; of many, the latest are read.
        ranks: Rank numbers.

    Returns:
        Name → seconds [S, P], NaN unknown; nothing where the run has no kernels.

    Raises:
        StoreError: The store cannot be read.
        ValueError: The table is damaged.
    """
    ordinals = run.ordinals_A[index_S][-_MOST_STEPS:]
    if not run.has_gpu_R.any():
        return {}
    table = run.read_rows("kernels", ordinals, ranks)
    if table is None or not table.num_rows:
        return {}
    # Compiling steps lie between, and are not compared.
    table = table.filter(pc.is_in(table["ordinal"], value_set=pa.array(ordinals)))
    encoded = table["name"].combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    total_s = read_sketch_column(table["sketch"]).totals_ns * 1e-9
    step = np.searchsorted(ordinals, table["ordinal"].to_numpy())
    place = np.searchsorted(np.array(ranks), table["rank"].to_numpy())
    kind = encoded.indices.to_numpy().astype(np.int64)
    shape = (len(names), ordinals.size, len(ranks))
    cell = np.ravel_multi_index((kind, step, place), shape)
    size = int(np.prod(shape))
    seconds = np.bincount(cell, weights=total_s, minlength=size).astype(np.float64)
    seconds[np.bincount(cell, minlength=size) == 0] = np.nan
    return {
        name: values
        for name, values in zip(names, seconds.reshape(shape), strict=True)
        if name != REST and not is_communication(name)
    }
