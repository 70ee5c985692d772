"""Tokens of each expert: read for a finding, and for nothing else.

Shape legend: A = all steps, R = ranks, X = experts of a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.run import Run

_MOST_STEPS: Final = 20
"""The latest of a fault, as many as a window has."""


def expert_tokens(run: Run, over_A: NDArray[np.bool_]) -> NDArray[np.float64] | None:
    """Mean tokens of each expert in the latest of some steps.

    Args:
        run: The run.
        over_A: Which steps; of many, the latest 20 are read.

    Returns:
        Shape [R, X], NaN where a rank holds fewer or said nothing; None where nobody counts.
    """
    wanted = run.ordinals_A[over_A][-_MOST_STEPS:]
    table = run.read_rows("experts", wanted)
    if table is None:
        return None
    # A list column as it comes: its flat values, and how many of them are in each row.
    lists = table["tokens"].combine_chunks()
    size_N = np.diff(lists.offsets.to_numpy()) if table.num_rows else np.empty(0, np.int64)
    experts = int(size_N.max(initial=0))
    if not experts:
        return None
    flat = lists.flatten().to_numpy()
    row_E = np.repeat(np.arange(size_N.size), size_N)
    expert_E = np.arange(flat.size) - (np.cumsum(size_N) - size_N)[row_E]
    rank_N = np.minimum(
        np.searchsorted(run.ranks_R, table["rank"].to_numpy()), run.ranks_R.size - 1
    )
    known_N = np.isin(table["ordinal"].to_numpy(), wanted)
    known_N &= run.ranks_R[rank_N] == table["rank"].to_numpy()
    at_E = (rank_N[row_E] * experts + expert_E)[known_N[row_E]]
    size = run.ranks_R.size * experts
    total = np.bincount(at_E, flat[known_N[row_E]], size)
    count = np.bincount(at_E, minlength=size)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean.reshape(run.ranks_R.size, experts)
