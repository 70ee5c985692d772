"""Arithmetic on sets of time intervals, as arrays of begins and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def union(begin: Floats, end: Floats) -> tuple[Floats, Floats]:
    """The same time as disjoint intervals, in order."""
    if not begin.size:
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.r_[True, begin[1:] > reach[:-1]]
    return begin[first], reach[np.r_[np.flatnonzero(first)[1:] - 1, begin.size - 1]]


def length(begin: Floats, end: Floats) -> float:
    """Time covered, each moment once."""
    begin, end = union(begin, end)
    return float((end - begin).sum())


def length_outside(begin: Floats, end: Floats, other_begin: Floats, other_end: Floats) -> float:
    """Time covered by the first set and not by the other."""
    both = length(np.r_[begin, other_begin], np.r_[end, other_end])
    return max(both - length(other_begin, other_end), 0.0)


def inside(at: Floats, begin: Floats, end: Floats) -> NDArray[np.bool_]:
    """Whether each moment lies in an interval of a set."""
    begin, end = union(begin, end)
    if not begin.size:
        return np.zeros(at.shape, dtype=bool)
    place = np.searchsorted(begin, at, side="right") - 1
    result: NDArray[np.bool_] = (place >= 0) & (at < end[np.maximum(place, 0)])
    return result
