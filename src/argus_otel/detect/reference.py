"""How much slower than its peers each rank is, and how much of that may be chance.

The reference is the fastest quarter of the peers, so that half of them may be slow and two are
enough. Its price is that somebody is always slower than the fastest: the bar therefore rises with
the number of peers and with the measured scatter (``Comparison.bar_R``).

Shape legend: S = steps of the window, R = ranks, G = groups of peers, n = ranks in a group.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.statistics import (
    MEDIAN_TO_MEAN_ERROR,
    levels,
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    median_over,
    pooled_spread,
    scatter,
    spread_of_faster_half,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.api import Params
    from argus_otel.detect.frame import Excess
    from argus_otel.detect.window import Window

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


RECENT_STEPS: Final = 5
"""The latest steps, in which 3 must be over (DESIGN, detection)."""


_SMALL: Final = 8
"""Of fewer peers the scatter is measured on few values, and the groups of the same size have a say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Each rank against its peers in one window. NaN and false where nothing can be said."""

    ratio_R: Floats
    """Median over the window of the rank's time to the reference's; about 1 for healthy ranks."""
    bar_R: Floats
    """Ratio that the unluckiest healthy rank stays under: expected extreme of n at the spread."""
    recent_ratio_R: Floats
    """As ``ratio_R``, over the latest ``RECENT_STEPS`` of the window alone."""
    recent_bar_R: Floats
    """As ``bar_R``, for so few steps."""
    step_ratio_SR: Floats
    """Ratio to the reference, step by step, [S, R]."""
    step_sigma_R: Floats
    """Scatter of one step's log ratio."""
    peers_R: NDArray[np.int64]
    """Peers with data, the rank itself not counted."""

    @property
    def judged_R(self) -> Bools:  # noqa: N802 - shape suffix
        """Ranks that could be compared at all."""
        judged: Bools = ~np.isnan(self.ratio_R)
        return judged

    def lasting(self, at_least: float, params: Params) -> Bools:
        """Ranks [R] whose median is over both bars and that are over in the latest steps too."""
        recent = self.step_ratio_SR[-int(params["recent_steps"]) :] >= at_least
        fresh = np.count_nonzero(recent, axis=0) >= params["recent_over"]
        level = np.maximum(at_least, self.bar_R)
        over: Bools = np.nan_to_num(self.ratio_R) >= np.where(fresh, level, np.inf)
        return over

    def just_begun(self, at_least: float, params: Params) -> Bools:
        """Ranks [R] that are over both bars in the latest steps, whatever was before.

        Says it after three steps, where a median over the window takes half a window. It takes the
        scatter of steps to be without memory: true of GPUs, not of cores that others use too.
        """
        recent = self.step_ratio_SR[-RECENT_STEPS:] >= at_least
        fresh = np.count_nonzero(recent, axis=0) >= params["recent_over"]
        level = np.maximum(at_least, self.recent_bar_R)
        over: Bools = fresh & (np.nan_to_num(self.recent_ratio_R) >= level)
        return over

    def intermittent(self, params: Params) -> Bools:
        """Ranks [R] that are far over in several steps, more often than luck or their peers.

        Heavy tails that all peers share (ragged batches) are ordinary; a rank stands out when its
        count is beyond what the rate among all others makes likely.
        """
        bar_R = np.maximum(log(params["burst_ratio"]), 3.0 * self.step_sigma_R)
        burst_SR = np.log(np.maximum(np.nan_to_num(self.step_ratio_SR), 1e-9)) > bar_R
        count_R = np.count_nonzero(burst_SR, axis=0)
        total, ranks = int(count_R.sum()), int(np.count_nonzero(self.judged_R))
        steps = self.step_ratio_SR.shape[0]
        # The rate among the others; half an event more, so that few ranks do not make it zero.
        rate_R = (total - count_R + 0.5) / (max(ranks - 1, 1) * steps + 1)
        expected_R = rate_R * steps
        luck = luck_of_slowest(max(ranks, 2)) * np.sqrt(expected_R * (1 - np.minimum(rate_R, 1)))
        stands_out: Bools = (count_R >= params["burst_steps"]) & (count_R >= expected_R + luck)
        return self.judged_R & stands_out


def compare(window: Window, name: str, excess: Excess | None = None) -> Comparison:
    """Compare a column with the peers' over a window.

    Args:
        window: The steps.
        name: Column; see ``Window.column``.
        excess: Ratios to use instead of ``window.excess(name)``.
    """
    excess = window.excess(name) if excess is None else excess
    steps, ranks = excess.log_SR.shape
    ratio_R = np.full(ranks, np.nan)
    bar_R = np.full(ranks, np.nan)
    sigma_R = np.full(ranks, np.nan)
    offset_R = np.full(ranks, np.nan)
    recent_ratio_R = np.full(ranks, np.nan)
    recent_bar_R = np.full(ranks, np.nan)
    peers_R = np.zeros(ranks, dtype=np.int64)
    for bucket in window.frame.peers.buckets:
        n = bucket.shape[1]
        part = np.moveaxis(excess.log_SR[:, bucket], 0, 1)  # [G, S, n]
        known = np.count_nonzero(~np.isnan(part), axis=1)
        level, rest = levels(part)
        # In a single step somebody is always lucky; the reference is who is fastest as a rule.
        offset_R[bucket] = lowest_mean(median_over(part, axis=1), axis=1)[:, None]
        # Less than half of the window says too little about a rank.
        level = np.where(known * 2 >= steps, level, np.nan)
        with_data = np.count_nonzero(~np.isnan(level), axis=1)
        level[with_data < 2] = np.nan  # itself and one other
        above = level - lowest_mean(level, axis=1)[:, None]
        ratio_R[bucket] = np.exp(above)
        peers_R[bucket] = np.maximum(with_data - 1, 0)[:, None]
        sigma = np.fmax(scatter(rest), excess.sigma_R[bucket[:, 0]])
        if n < _SMALL:
            # A quiet time of a few ranks is luck: the others have the same noise.
            sigma = np.fmax(sigma, median_over(sigma, axis=0))
        sigma_R[bucket] = sigma[:, None]
        noise = sigma * MEDIAN_TO_MEAN_ERROR / np.sqrt(np.maximum(np.max(known, axis=1), 1))
        spread = np.fmax(noise, spread_of_faster_half(level))
        spread = np.fmax(spread, pooled_spread(level))
        luck = luck_of_slowest(n) + luck_of_fastest_quarter(n)
        bar_R[bucket] = np.exp(luck * spread)[:, None]
        # What ranks differ by beyond the noise of so many steps is there in few steps too.
        lasting = np.maximum(spread**2 - noise**2, 0.0)
        above, noise = _latest(part, sigma)
        recent_ratio_R[bucket] = np.exp(above)
        recent_bar_R[bucket] = np.exp(luck * np.sqrt(noise**2 + lasting))[:, None]
    return Comparison(
        ratio_R=ratio_R,
        bar_R=bar_R,
        recent_ratio_R=recent_ratio_R,
        recent_bar_R=recent_bar_R,
        step_ratio_SR=np.exp(excess.log_SR - offset_R),
        step_sigma_R=sigma_R,
        peers_R=peers_R,
    )


def _latest(part: Floats, sigma: Floats) -> tuple[Floats, Floats]:
    """Each rank's level above the fastest quarter's in the latest steps [G, n], and its noise [G]."""
    latest = part[:, -RECENT_STEPS:]
    known = np.count_nonzero(~np.isnan(latest), axis=1)
    level = np.where(known * 2 > latest.shape[1], median_over(latest, axis=1), np.nan)
    level[np.count_nonzero(~np.isnan(level), axis=1) < 2] = np.nan
    above = level - lowest_mean(level, axis=1)[:, None]
    noise = sigma * MEDIAN_TO_MEAN_ERROR / np.sqrt(np.maximum(np.max(known, axis=1), 1))
    return above, noise
