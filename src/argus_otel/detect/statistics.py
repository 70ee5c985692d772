"""Medians, spreads and the luck of the draw among n ranks, with missing values left missing.

Shape legend: S = steps, R = ranks, n = ranks in one group of peers.
"""

from __future__ import annotations

from functools import cache
from math import ceil, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MAD_TO_SIGMA: Final = 1.4826
"""Median absolute deviation → standard deviation, for a normal distribution."""

_MAD_EFFICIENCY: Final = 0.37
"""Share of normal values that a median absolute deviation makes use of (asymptotically)."""

FEW_PEERS: Final = 8
"""Below this many the fastest quarter is one rank, whose jitter would be everybody's, and the scatter
is measured on few values: groups of the same size have a say."""

_AT_ONCE: Final = 100_000
"""Numbers that are sorted at once, where there are more of them."""
_SHORT: Final = 10
_MANY: Final = 20_000
"""So short an axis, of so many values in all, is sorted for all its neighbours at once."""

_ENOUGH: Final = 16
"""Ranks in several groups that together say how far healthy ranks differ."""

MEDIAN_TO_MEAN_ERROR: Final = sqrt(np.pi / 2)
"""The median of k normal values scatters this much more than their mean (asymptotically)."""

FALSE_ALARM_PER_WINDOW: Final = 1e-6
"""Chance that the unluckiest of n healthy peers is taken for slow in one window. A month of
one-second steps has some 10⁵ windows without a step in common; none of them should cry wolf."""


def median_over(values: Floats, axis: int) -> Floats:
    """Median along an axis; NaN is skipped, and stays NaN where nothing is known.

    ``numpy.nanmedian`` is 20 to 50 times slower on the short axes that windows have.
    """
    return _of_sorted(_middle, values, axis)


def lower_middle(values: NDArray[np.floating[Any]], axis: int) -> Floats:
    """As ``median_over``; of an even number the lesser of the two in the middle, so that half may be large."""
    return _of_sorted(_lower_middle, values, axis)


def lowest_mean(values: Floats, *, axis: int) -> Floats:
    """Mean of the fastest quarter (one value at least) along an axis.

    Args:
        values: NaN where unknown; skipped.
        axis: Axis to reduce.

    Returns:
        Shape of ``values`` without ``axis``; NaN where nothing is known.
    """
    return _of_sorted(_mean_of_quarter, values, axis)


def _of_sorted(
    take: Callable[[Floats], Floats], values: NDArray[np.floating[Any]], axis: int
) -> Floats:
    """What a function makes of values that ascend along the first axis, NaN last."""
    other = 1 if axis % values.ndim == 0 else 0
    if values.size > _AT_ONCE and values.ndim > 1 and values.shape[other] > 1:
        # What is sorted stays in the processor's cache, and no copy is as large as what was given.
        count = min(values.size // _AT_ONCE + 1, values.shape[other])
        parts = np.array_split(values, count, axis=other)
        return np.concatenate([_of_sorted(take, part, axis) for part in parts])
    if values.shape[axis] == 0:
        return np.full(np.moveaxis(values, axis, -1).shape[:-1], np.nan)
    return take(_ascending(values, axis))


def _known(ordered: Floats) -> NDArray[np.int64]:
    known: NDArray[np.int64] = ordered.shape[0] - np.count_nonzero(np.isnan(ordered), axis=0)
    return known


def _middle(ordered: Floats) -> Floats:
    length = ordered.shape[0]
    if not np.isnan(ordered[-1]).any():
        among: Floats = (ordered[(length - 1) // 2] + ordered[length // 2]) / 2
        return among
    known = _known(ordered)
    places = np.stack((np.maximum(known - 1, 0) // 2, np.minimum(known // 2, length - 1)))
    pair = np.take_along_axis(ordered, places, axis=0)
    return np.where(known > 0, (pair[0] + pair[1]) / 2, np.nan)


def _lower_middle(ordered: Floats) -> Floats:
    if not np.isnan(ordered[-1]).any():
        lower: Floats = ordered[(ordered.shape[0] - 1) // 2]
        return lower
    places = np.maximum(_known(ordered) - 1, 0) // 2
    lower = np.take_along_axis(ordered, places[None], axis=0)[0]
    return lower


def _mean_of_quarter(ordered: Floats) -> Floats:
    known = _known(ordered)
    quarter = np.maximum((known + 3) // 4, 1)
    most = int(quarter.max(initial=1))
    # Summed with the axis in one piece: a sum in another order ends in another last digit.
    lowest = np.ascontiguousarray(np.moveaxis(ordered[:most], 0, -1))
    lowest[np.arange(most) >= quarter[..., None]] = 0.0
    return np.where(known > 0, lowest.sum(axis=-1) / quarter, np.nan)


def _ascending(values: NDArray[np.floating[Any]], axis: int) -> Floats:
    """A sorted copy, the sorted axis first; NaN comes last."""
    length = values.shape[axis]
    if length > _SHORT or values.size < _MANY:
        # The axis in one piece: sorting it in strides takes three times as long.
        ordered = np.array(np.moveaxis(values, axis, -1), order="C")
        ordered.sort(axis=-1)
        return np.moveaxis(ordered, -1, 0)
    # Sorting rows of three to ten values one by one takes three to ten times as long as this.
    rows = list(np.array(np.moveaxis(values, axis, 0), order="C"))
    spare = np.empty_like(rows[0])
    for low, high in _network(length):
        np.fmin(rows[low], rows[high], out=spare)
        np.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return np.stack(rows)


@cache
def _network(length: int) -> list[tuple[int, int]]:
    """Pairs of places which, each put in order, sort so many values.

    Source:
        Batcher (1968), odd-even merge sort.
    """
    pairs = []
    merged = 1
    while merged < length:
        apart = merged
        while apart:
            pairs += [
                (low, low + apart)
                for first in range(apart % merged, length - apart, 2 * apart)
                for low in range(first, min(first + apart, length - apart))
                if low // (2 * merged) == (low + apart) // (2 * merged)
            ]
            apart //= 2
        merged *= 2
    return pairs


@cache
def luck_of_slowest(n: int, false_alarm: float = FALSE_ALARM_PER_WINDOW) -> float:
    """Standard deviations that the slowest of n equal peers rarely exceeds.

    Rarely is with probability ``false_alarm``: 4.9 at n = 2, 5.6 at 128, 6.4 at 12,960.
    """
    # (1 - false_alarm) ** (1 / n), written so that it keeps its digits near 1.
    tail = -np.expm1(np.log1p(-false_alarm) / max(n, 1))
    return -NormalDist().inv_cdf(float(tail))


@cache
def luck_of_fastest_quarter(n: int) -> float:
    """How far below average, in standard deviations, the fastest quarter of n equal peers lies.

    Source:
        Blom (1958): the i-th of n normal values is expected at the (i - 3/8) / (n + 1/4) quantile.
    """
    places = (np.arange(1, ceil(n / 4) + 1) - 0.375) / (n + 0.25)
    return -float(np.mean([NormalDist().inv_cdf(float(place)) for place in places]))


def levels(part: Floats) -> tuple[Floats, Floats]:
    """Each rank's usual value, and what is left of each value.

    What is left is free of the step's own level, by the mean over the ranks: the median of
    few ranks would hide the scatter of the middle ones.

    Args:
        part: Log ratios [..., S, n], NaN unknown.

    Returns:
        Medians [..., n], residuals [..., S, n].
    """
    level = median_over(part, axis=-2)
    rest = part - level[..., None, :]
    known = ~np.isnan(rest)
    count = np.maximum(np.count_nonzero(known, axis=-1), 1)
    common = np.where(known, rest, 0.0).sum(axis=-1) / count
    rest -= common[..., None]
    if part.shape[-1] < FEW_PEERS:
        level = median_over(part - common[..., None], axis=-2)
    return level, rest


def scatter(residual: Floats, blocks: int = 1) -> Floats:
    """Standard deviation of one value, from what ``levels`` left, outliers passed over.

    Args:
        residual: Shape [..., S, n]; NaN unknown.
        blocks: Windows of this length that the estimate will be pooled over.

    Returns:
        Shape [...]; one standard error of the estimate is added.
    """
    steps, peers = residual.shape[-2:]
    flat = np.abs(residual).reshape(*residual.shape[:-2], -1)
    sigma = MAD_TO_SIGMA * median_over(flat, axis=-1)
    # The step's level swallows a part of the scatter where peers are few.
    sigma = sigma * sqrt(peers / max(peers - 1, 1))
    # A spread that is itself measured on few values: one standard error on top of it.
    free = _MAD_EFFICIENCY * max(peers - 1, 1) * max(steps - 1, 1) * blocks
    return np.asarray(sigma * (1 + 1 / sqrt(2 * free)))


def spread_of_faster_half(level: Floats, least: int = FEW_PEERS) -> Floats:
    """Standard deviation between ranks, from the faster half alone: half may be slow.

    Args:
        level: Shape [..., n], NaN unknown.
        least: Of fewer than so many ranks order statistics say too little, and 0 is returned.

    Returns:
        Shape [...], 0 or more.
    """
    n = level.shape[-1]
    if n < least:
        return np.zeros(level.shape[:-1])
    ordered = np.sort(level, axis=-1)
    quarter = n // 4
    places = (np.arange(1, 2 * quarter + 1) - 0.375) / (n + 0.25)
    scores = np.array([NormalDist().inv_cdf(float(place)) for place in places])
    gap = ordered[..., quarter : 2 * quarter].mean(-1) - ordered[..., :quarter].mean(-1)
    spread: Floats = gap / (scores[quarter:].mean() - scores[:quarter].mean())
    return np.nan_to_num(np.maximum(spread, 0.0))


def pooled_spread(level: Floats) -> float:
    """As ``spread_of_faster_half``, of several groups together: of one, it is itself a chance.

    Args:
        level: Shape [groups, n], NaN unknown. Below 4 ranks a group, or 16 in all, 0 is returned.
    """
    groups, n = level.shape
    if level.size < _ENOUGH or n < FEW_PEERS // 2:
        return 0.0
    # One standard error on top, as for the scatter: a gap between few ranks varies by three quarters.
    error = 0.75 / sqrt(groups * (n // 4))
    return float(spread_of_faster_half(level, least=FEW_PEERS // 2).mean()) * (1 + error)


def spread_between(level: Floats, noise: Floats) -> Floats:
    """Standard deviation between the healthy ranks of each group, half of which may be slow.

    Where a gap that no luck makes parts the slower ranks from the others, those are all the healthy
    ranks there are, and not the faster half of them: what they differ by is taken then.

    Args:
        level: Shape [groups, n], NaN unknown.
        noise: Shape [groups]; what a level errs by. NaN for groups that are not asked about, and only
            say how far ranks of other groups are apart.

    Returns:
        Shape [groups], ``noise`` or more.
    """
    groups, n = level.shape
    usual = np.fmax(noise, spread_of_faster_half(level))
    if n < FEW_PEERS // 2:
        return usual
    least = -(-n // 2)
    ordered = np.sort(level, axis=-1)
    gaps = np.nan_to_num(np.diff(ordered, axis=-1)[:, least - 1 :])
    healthy = least + gaps.argmax(axis=-1)
    within = np.where(np.arange(n) < healthy[:, None], ordered, np.nan)
    own = _standard_deviation(within)
    free = healthy - 1
    if n < 2 * FEW_PEERS:
        # What so few differ by is itself a chance: the groups of the same size have a say.
        others = (least - 1) * spread_of_faster_half(level, least=FEW_PEERS // 2) ** 2
        variance = free * own**2 + others.sum() - others
        free = free + (groups - 1) * (least - 1)
        own = np.sqrt(variance / free)
    enough = free >= FEW_PEERS - 1
    error, gap = 1 + 1 / np.sqrt(2 * free), gaps.max(axis=-1) / luck_of_slowest(n)
    # Which groups say it does not depend on which are asked about, and so not on noise.
    usual = np.fmax(usual, pooled_spread(level[(gap <= own * error) | ~enough]))
    own = np.fmax(own, noise) * error
    return np.where((gap > own) & enough, own, usual)


def _standard_deviation(values: Floats) -> Floats:
    """Of what is known along the last axis; NaN of fewer than two."""
    known = ~np.isnan(values)
    count = np.count_nonzero(known, axis=-1)
    mean = np.where(known, values, 0.0).sum(axis=-1) / np.maximum(count, 1)
    square = np.where(known, values - mean[..., None], 0.0) ** 2
    return np.where(count > 1, np.sqrt(square.sum(axis=-1) / np.maximum(count - 1, 1)), np.nan)


def start_of_lasting_change(over: NDArray[np.bool_]) -> int:
    """Index from which ``over`` holds most of the time until the end.

    The start of the suffix in which hits outnumber misses by the most; 0 for no hit at all.
    """
    gain = np.cumsum(np.where(over, 1.0, -1.0)[::-1])[::-1]
    return int(np.argmax(gain)) if gain.size else 0


def step_scatter(log: Floats, *, block: int = 10) -> float:
    """Standard deviation of one step's log ratio, from differences of neighbours, where it is worst.

    The worst block of steps counts: where noise begins in the middle of a run, the run's own median
    would still be that of the quiet part.

    Args:
        log: [steps, ...], NaN unknown.
        block: Steps of a block.
    """
    jumps = np.abs(np.diff(log, axis=0))
    blocks = max(jumps.shape[0] // block, 1)
    parts = [part.ravel() for part in np.array_split(jumps, blocks)]
    worst = max((float(np.nan_to_num(median_over(part, axis=0))) for part in parts), default=0.0)
    return MAD_TO_SIGMA * worst / sqrt(2)


SUDDEN: Final = 2.0
"""A bar for the median of 20 steps, in logs, times this is one for the median of 5: sqrt(20 / 5)."""


def lasting_or_sudden(
    log: Floats, floor: Floats | float, bar: Floats | float, *, recent: int = 5
) -> NDArray[np.bool_]:
    """Steps that show something which lasts, or which has just begun and is beyond chance already.

    Args:
        log: Log ratio to the reference, [steps, ...]; NaN unknown.
        floor: Least log ratio that matters.
        bar: Log ratio that the median of 20 steps rarely reaches by chance.
        recent: Steps that the quick answer looks at; more than half of them have to be over.
    """
    known = ~np.isnan(log)
    slow = lasting(log >= np.maximum(floor, bar), known)
    quick = lasting(log >= np.maximum(floor, SUDDEN * bar), known, window=recent, recent=recent)
    shown: NDArray[np.bool_] = slow | quick
    return shown


def lasting(
    over: NDArray[np.bool_],
    known: NDArray[np.bool_],
    *,
    window: int = 20,
    recent: int = 5,
    recent_over: int = 3,
) -> NDArray[np.bool_]:
    """Steps that show something which lasts; all false for what comes and goes by chance.

    It lasts where at least half of the known steps of a window are over (its median is), and
    some of the latest (DESIGN, detection). Isolated steps before it are not counted.

    Args:
        over: Whether a step is over the bar, [steps, ...].
        known: Whether anything is known of it.
        window: Steps of a window; half of them have to be known.
        recent: Latest steps.
        recent_over: How many of those have to be over.
    """
    over = over & known
    shown = np.zeros((over.shape[0], int(np.prod(over.shape[1:]))), dtype=bool)
    followed = over.reshape(shown.shape)
    # Most series of a large run are over in no step or two: these cannot fire.
    enough = np.flatnonzero(np.count_nonzero(followed, axis=0) >= recent_over)
    if enough.size:
        shown[:, enough] = _shown(
            followed[:, enough], known.reshape(shown.shape)[:, enough], window, recent, recent_over
        )
    return shown.reshape(over.shape)


def _shown(
    over: NDArray[np.bool_], known: NDArray[np.bool_], window: int, recent: int, recent_over: int
) -> NDArray[np.bool_]:
    """``lasting``, for known steps of series side by side."""
    seen, hits = _trailing(known, window), _trailing(over, window)
    fires = (seen * 2 >= window) & (hits * 2 >= seen) & (_trailing(over, recent) >= recent_over)
    steps, series = over.shape
    # A window that fires speaks for each of its steps; one that has company belongs to it.
    ahead = np.concatenate((fires, np.zeros((window - 1, series), dtype=bool)))
    spoken_for = _trailing(ahead, window)[window - 1 :] > 0
    half = recent // 2
    around = np.concatenate((over, np.zeros((half, series), dtype=bool)))
    company = _trailing(around, recent)[half : half + steps]
    shown: NDArray[np.bool_] = over & spoken_for & (company >= recent_over - 1)
    return shown


def _trailing(flags: NDArray[np.bool_], width: int) -> NDArray[np.int32]:
    """How many of the latest ``width`` are true, [steps, series]."""
    total = np.cumsum(flags, axis=0, dtype=np.int32)
    total[width:] -= total[:-width].copy()
    return total
