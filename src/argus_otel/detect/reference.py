"""How much slower than its peers each rank is, and how much of that may be chance.

The reference is the fastest quarter of the peers, so that half of them may be slow and two are
enough. Its price is that somebody is always slower than the fastest: the bar therefore rises with
the number of peers and with the measured scatter (``Comparison.bar``).

Shape legend: S = steps of the window, R = ranks, G = groups of peers, n = ranks in a group.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import log
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.statistics import (
    FEW_PEERS,
    MEDIAN_TO_MEAN_ERROR,
    levels,
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    median_over,
    scatter,
    spread_between,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.definition import Params
    from argus_otel.detect.frame import Excess
    from argus_otel.detect.peers import Peers
    from argus_otel.detect.window import Window

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ranks = NDArray[np.int64] | list[int]
    """Rank indices."""


RECENT_STEPS: Final = 5
"""The latest steps, in which 3 must be over (DESIGN, detection)."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Each rank against its peers in one window. NaN and false where nothing can be said.

    What chance makes of a group of peers costs several times as much to say as who is slow, and is
    worked out for groups that somebody asks about.
    """

    excess: Excess
    """What was compared."""
    peers: Peers
    ratio_R: Floats
    """Median over the window of the rank's time to the reference's; about 1 for healthy ranks."""
    peers_R: NDArray[np.int64]
    """Peers with data, the rank itself not counted."""
    level_R: Floats
    """Median log ratio over the window."""
    known_R: NDArray[np.int64]
    """Steps of the window that are known."""
    offset_R: Floats
    """Level of the reference."""
    _chance: _Chance = field(repr=False)

    @property
    def judged_R(self) -> Bools:  # noqa: N802 - shape suffix
        """Ranks that could be compared at all."""
        judged: Bools = ~np.isnan(self.ratio_R)
        return judged

    @cached_property
    def recent_ratio_R(self) -> Floats:  # noqa: N802 - shape suffix
        """As ``ratio_R``, over the latest ``RECENT_STEPS`` of the window alone."""
        latest = self.excess.log_SR[-RECENT_STEPS:]
        known = np.count_nonzero(~np.isnan(latest), axis=0) * 2 > latest.shape[0]
        level_R = np.where(known, median_over(latest, axis=0), np.nan)
        ratio_R = np.full(level_R.size, np.nan)
        for bucket in self.peers.buckets:
            ratio_R[bucket] = np.exp(_above_reference(level_R[bucket]))
        return ratio_R

    def step_ratio(self, ranks: Ranks) -> Floats:
        """Ratio to the reference, step by step, [S, ranks]."""
        ratio: Floats = np.exp(self.excess.log_SR[:, ranks] - self.offset_R[ranks])
        return ratio

    def bar(self, ranks: Ranks) -> Floats:
        """Ratio [ranks] that the unluckiest healthy one of each one's peers stays under.

        The expected extreme of so many, at the spread.
        """
        self._work_out(ranks)
        return self._chance.bar_R[ranks]

    def recent_bar(self, ranks: Ranks) -> Floats:
        """As ``bar``, for the latest ``RECENT_STEPS``."""
        self._work_out(ranks)
        return self._chance.recent_bar_R[ranks]

    def step_sigma(self, ranks: Ranks) -> Floats:
        """Scatter of one step's log ratio among each one's peers [ranks]."""
        self._work_out(ranks)
        return self._chance.sigma_R[ranks]

    def lasting(self, at_least: float, params: Params) -> Bools:
        """Ranks [R] whose median is over both bars and that are over in the latest steps too."""
        ranks = np.flatnonzero(self.ratio_R >= at_least)
        ranks = ranks[self._fresh(ranks, at_least, params)]
        over_R = np.zeros(self.ratio_R.size, dtype=bool)
        over_R[ranks] = self.ratio_R[ranks] >= self.bar(ranks)
        return over_R

    def just_begun(self, at_least: float, params: Params) -> Bools:
        """Ranks [R] that are over both bars in the latest steps, whatever was before.

        Says it after three steps, where a median over the window takes half a window. It takes the
        scatter of steps to be without memory: true of GPUs, not of cores that others use too.
        """
        ranks = np.flatnonzero(self.recent_ratio_R >= at_least)
        ranks = ranks[self._fresh(ranks, at_least, params, of=RECENT_STEPS)]
        over_R = np.zeros(self.ratio_R.size, dtype=bool)
        over_R[ranks] = self.recent_ratio_R[ranks] >= self.recent_bar(ranks)
        return over_R

    def _fresh(self, ranks: Ranks, at_least: float, params: Params, of: int | None = None) -> Bools:
        """Which of these ranks are over in most of the latest steps."""
        steps = int(params["recent_steps"]) if of is None else of
        recent = self.step_ratio(ranks)[-steps:] >= at_least
        fresh: Bools = np.count_nonzero(recent, axis=0) >= params["recent_over"]
        return fresh

    def intermittent(self, params: Params) -> Bools:
        """Ranks [R] that are far over in several steps, more often than luck or their peers.

        Heavy tails that all peers share (ragged batches) are ordinary; a rank stands out when its
        count is beyond what the rate among all others makes likely.
        """
        log_SR, least = self.excess.log_SR, log(params["burst_ratio"])
        count_R = np.count_nonzero(log_SR > self.offset_R + least, axis=0)
        if not (count_R >= params["burst_steps"]).any():
            return np.zeros(count_R.size, dtype=bool)
        ever = np.flatnonzero(count_R)
        bar = self.offset_R[ever] + np.maximum(least, 3.0 * self.step_sigma(ever))
        count_R[ever] = np.count_nonzero(log_SR[:, ever] > bar, axis=0)
        total, ranks = int(count_R.sum()), int(np.count_nonzero(self.judged_R))
        steps = log_SR.shape[0]
        # The rate among the others; half an event more, so that few ranks do not make it zero.
        rate_R = (total - count_R + 0.5) / (max(ranks - 1, 1) * steps + 1)
        expected_R = rate_R * steps
        luck = luck_of_slowest(max(ranks, 2)) * np.sqrt(expected_R * (1 - np.minimum(rate_R, 1)))
        stands_out: Bools = (count_R >= params["burst_steps"]) & (count_R >= expected_R + luck)
        return self.judged_R & stands_out

    def _work_out(self, ranks: Ranks) -> None:
        """Fill in what chance makes of the groups of these ranks, where it is not known yet."""
        chance = self._chance
        asked_R = np.zeros(self.ratio_R.size, dtype=bool)
        asked_R[ranks] = True
        asked_R &= ~chance.known_R
        for bucket in self.peers.buckets if asked_R.any() else ():
            asked = np.flatnonzero(asked_R[bucket].any(axis=1))
            if not asked.size:
                continue
            n = bucket.shape[1]
            # A quiet time of a few ranks is luck: the others have the same noise.
            these = bucket if n < FEW_PEERS else bucket[asked]
            _, rest = levels(np.moveaxis(self.excess.log_SR[:, these], 0, 1))
            sigma = np.fmax(scatter(rest), self.excess.sigma_R[these[:, 0]])
            if n < FEW_PEERS:
                sigma = np.fmax(sigma, median_over(sigma, axis=0))
            noise = _noise(sigma, np.max(self.known_R[these], axis=1))
            noise_G = np.full(len(bucket), np.nan)
            noise_G[asked if n >= FEW_PEERS else slice(None)] = noise
            spread = spread_between(self.level_R[bucket], noise_G)
            spread = spread if n < FEW_PEERS else spread[asked]
            luck = luck_of_slowest(n) + luck_of_fastest_quarter(n)
            # What ranks differ by beyond the noise of so many steps is there in few steps too.
            lasting = np.maximum(spread**2 - noise**2, 0.0)
            latest = self.excess.log_SR[-RECENT_STEPS:][:, these]
            noise = _noise(sigma, np.max(np.count_nonzero(~np.isnan(latest), axis=0), axis=1))
            chance.sigma_R[these] = sigma[:, None]
            chance.bar_R[these] = np.exp(luck * spread)[:, None]
            chance.recent_bar_R[these] = np.exp(luck * np.sqrt(noise**2 + lasting))[:, None]
            chance.known_R[these] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chance:
    """What was worked out of a ``Comparison`` so far; NaN elsewhere."""

    known_R: Bools
    sigma_R: Floats
    bar_R: Floats
    recent_bar_R: Floats


def compare(window: Window, name: str, excess: Excess | None = None) -> Comparison:
    """Compare a column with the peers' over a window.

    Args:
        window: The steps.
        name: Column; see ``Window.column``.
        excess: Ratios to use instead of ``window.excess(name)``.
    """
    excess = window.excess(name) if excess is None else excess
    steps, ranks = excess.log_SR.shape
    known_R = np.count_nonzero(~np.isnan(excess.log_SR), axis=0)
    median_R = median_over(excess.log_SR, axis=0)
    offset_R, level_R, ratio_R, sigma_R, bar_R, recent_bar_R = np.full((6, ranks), np.nan)
    peers_R = np.zeros(ranks, dtype=np.int64)
    for bucket in window.frame.peers.buckets:
        # In a single step somebody is always lucky; the reference is who is fastest as a rule.
        offset_R[bucket] = lowest_mean(median_R[bucket], axis=1)[:, None]
        level = median_R[bucket]
        if bucket.shape[1] < FEW_PEERS:
            level, _ = levels(np.moveaxis(excess.log_SR[:, bucket], 0, 1))
        # Less than half of the window says too little about a rank.
        level[known_R[bucket] * 2 < steps] = np.nan
        ratio_R[bucket] = np.exp(_above_reference(level))
        level_R[bucket] = level
        with_data = np.count_nonzero(~np.isnan(level), axis=1)
        peers_R[bucket] = np.maximum(with_data - 1, 0)[:, None]
    return Comparison(
        excess=excess,
        peers=window.frame.peers,
        ratio_R=ratio_R,
        peers_R=peers_R,
        level_R=level_R,
        known_R=known_R,
        offset_R=offset_R,
        _chance=_Chance(
            known_R=np.zeros(ranks, dtype=bool),
            sigma_R=sigma_R,
            bar_R=bar_R,
            recent_bar_R=recent_bar_R,
        ),
    )


def _above_reference(level: Floats) -> Floats:
    """Levels [G, n] above the fastest quarter's; NaN, in place too, for one that has no other."""
    level[np.count_nonzero(~np.isnan(level), axis=1) < 2] = np.nan
    above: Floats = level - lowest_mean(level, axis=1)[:, None]
    return above


def _noise(sigma: Floats, steps: NDArray[np.int64]) -> Floats:
    """How far the median of so many steps is off by chance [G]."""
    noise: Floats = sigma * MEDIAN_TO_MEAN_ERROR / np.sqrt(np.maximum(steps, 1))
    return noise
