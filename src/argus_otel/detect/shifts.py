"""Whether a series rose to a new level and stayed there until its end, and how sure that is.

A bar on the median of 20 steps finds what is large. What is small takes more steps, and what is large
needs fewer: here the change's own place is looked for, and its size is held against what is left of
chance with so many steps before and after it.

Shape legend: A = steps, G = series side by side.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.statistics import (
    MAD_TO_SIGMA,
    luck_of_slowest,
    median_over,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_LEAST_SIGMA: Final = 0.002
"""Of a logarithm: clocks and batches are no finer (as slow_steps has it)."""

_MOST_MEMORY: Final = 0.9
"""Beyond it noise that hangs together is a drift."""

_CLIP: Final = 2.5
"""Standard deviations at which a step's say in its level ends: single spikes count no more."""
_CLIPPED_ERROR: Final = 1.05
"""The mean of clipped values errs by so much more than that of all, where none is a spike."""

_RECENT: Final = 5
_RECENT_OVER: Final = 3
"""Three of the last five steps (DESIGN, detection)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """The rise of each series to the level that it has at its end."""

    start_G: Ints
    """Index of the first step on the new level."""
    size_G: Floats
    """Level after it less level before; NaN where too little is known."""
    z_G: Floats
    """Size in standard errors; 0 where it did not rise, or is not over half of it at the end."""
    after_G: Ints
    """Known steps on the new level."""
    over_AG: Bools
    """Steps from the start on that are nearer to the new level than to the old."""

    def beyond_chance(self) -> float:
        """What the largest z of these series rarely reaches where none of them rose.

        Each series tries as many starts as it has steps; about one in three is a new chance.
        """
        steps, series = self.over_AG.shape
        return luck_of_slowest(max(steps * series // 3, 2))


def level_shift(log_AG: Floats, *, before: int = 10, after: int = 3) -> Shift:
    """Find the start of each series' latest level, and how far beyond chance the rise is.

    Args:
        log_AG: Logarithms, NaN unknown.
        before: Known steps that the old level needs.
        after: Known steps that the new level needs.

    Source:
        Hinkley (1970), change of a mean at an unknown point; Huber (1964), a mean of clipped values;
        Bayley and Hammersley (1946), effective number of autocorrelated observations, first order.
    """
    steps, series = log_AG.shape
    known = ~np.isnan(log_AG)
    value = np.where(known, log_AG - np.nan_to_num(median_over(log_AG, axis=0)), 0.0)
    count = np.cumsum(known, axis=0)
    total = np.cumsum(value, axis=0)
    old = np.vstack([np.zeros((1, series), dtype=np.int64), count[:-1]]) if steps else count
    old_sum = total - value
    new = (count[-1:] if steps else count) - old
    enough = (old >= before) & (new >= after) & known
    rise = (total[-1:] - old_sum) / np.maximum(new, 1) - old_sum / np.maximum(old, 1)
    score = np.where(enough, rise * np.sqrt(old * new / np.maximum(old + new, 1)), -np.inf)
    usable = enough.any(axis=0)
    start = score.argmax(axis=0) if steps else np.zeros(series, dtype=np.int64)
    later = np.arange(steps)[:, None] >= start
    low = median_over(np.where(later, np.nan, log_AG), axis=0)
    size = median_over(np.where(later, log_AG, np.nan), axis=0) - low
    over = later & known & (np.nan_to_num(log_AG - low, nan=-np.inf) >= size / 2)
    n_new = np.count_nonzero(later & known, axis=0)
    n_old = np.count_nonzero(~later & known, axis=0)
    rest = np.where(known, log_AG - low - np.where(later, size, 0.0), np.nan)
    sigma = _scatter(rest)
    error = _CLIPPED_ERROR * sigma * _memory(rest)
    error = error * np.sqrt(1 / np.maximum(n_old, 1) + 1 / np.maximum(n_new, 1))
    rest = np.nan_to_num(np.clip(rest, -_CLIP * sigma, _CLIP * sigma))
    size = size + np.where(later, rest, 0.0).sum(axis=0) / np.maximum(n_new, 1)
    size -= np.where(later, 0.0, rest).sum(axis=0) / np.maximum(n_old, 1)
    recent = np.count_nonzero(over[-_RECENT:], axis=0) >= min(_RECENT_OVER, after)
    z = np.where(usable & recent & (size > 0), size / error, 0.0)
    return Shift(
        start_G=start,
        size_G=np.where(usable, size, np.nan),
        z_G=np.nan_to_num(z),
        after_G=n_new,
        over_AG=over & usable,
    )


def _scatter(rest_AG: Floats) -> Floats:
    """Standard deviation of a step about its level [G], one standard error on top.

    The larger of two: from the values, and from jumps of neighbours, which a wrong level leaves alone.
    """
    known = np.maximum(np.count_nonzero(~np.isnan(rest_AG), axis=0), 2)
    about = median_over(np.abs(rest_AG), axis=0)
    jumps = median_over(np.abs(np.diff(rest_AG, axis=0)), axis=0) / sqrt(2)
    sigma = MAD_TO_SIGMA * np.fmax(about, jumps)
    # A median absolute deviation makes use of 37 % of the values.
    scatter: Floats = np.nan_to_num(sigma) * (1 + 1 / np.sqrt(2 * 0.37 * known))
    return np.maximum(scatter, _LEAST_SIGMA)


def _memory(rest_AG: Floats) -> Floats:
    """How much larger a mean's error is because steps hang together [G]."""
    rest = np.nan_to_num(rest_AG)
    together = (rest[1:] * rest[:-1]).sum(axis=0) / np.maximum((rest**2).sum(axis=0), 1e-12)
    kept = np.clip(together, 0.0, _MOST_MEMORY)
    grown: Floats = np.sqrt((1 + kept) / (1 - kept))
    return grown
