"""Time per unit of work, where ranks say how much work they had (tokens, samples, Σ length²).

Shape legend: S = steps, R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.statistics import median_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from argus_otel.detect.peers import Peers

    Floats = NDArray[np.float64]

_WORK: Final = ("tokens", "sum_len2", "samples")

_LEAST_VARIATION: Final = 0.02
"""Below 2 % from step to step, work says nothing about how time follows it."""

_MOST_ELASTIC: Final = 1.5
"""Time grows at most about as work to the power of 1.5: attention is quadratic in length, but
never the whole step."""


def normalised_logs(log_SR: Floats, columns: Mapping[str, Floats], peers: Peers) -> list[Floats]:
    """Log times with the part that follows from the amount of work taken out.

    Where work varies from step to step, how time follows it is measured (the slope of log time on
    log work, pooled). Where each rank's work is constant but ranks differ, the slope cannot be
    known: both extremes are returned, time as it is and time per unit.

    Args:
        log_SR: Log seconds [S, R], NaN unknown.
        columns: Name → [S, R]; tokens, sum_len2 and samples are looked at.
        peers: Who is compared with whom.

    Returns:
        One or more candidates [S, R].
    """
    best: tuple[float, Floats] | None = None
    candidates = [log_SR]
    for name in _WORK:
        work = columns[name]
        known = ~np.isnan(work) & (work > 0)
        if not known.any() or not known[~np.isnan(log_SR)].all():
            continue
        log_work = np.log(np.where(known, work, np.nan))
        if np.nanmax(log_work) - np.nanmin(log_work) < 1e-6:
            continue
        rest_work, rest_time = _residual(log_work, peers), _residual(log_SR, peers)
        both = ~np.isnan(rest_work) & ~np.isnan(rest_time)
        x, y = rest_work[both], rest_time[both]
        centred = log_work - median_over(log_work, axis=1)[:, None]
        if x.size == 0 or np.std(x) < _LEAST_VARIATION:
            candidates.append(log_SR - centred)
            continue
        slope = float(np.clip(np.dot(x, y) / np.dot(x, x), 0.0, _MOST_ELASTIC))
        left = float(np.std(y - slope * x))
        if best is None or left < best[0]:
            best = (left, log_SR - slope * centred)
    return [best[1], *candidates[1:]] if best is not None else candidates


def _residual(log_SR: Floats, peers: Peers) -> Floats:
    """What is left of log values after each rank's level and each step's level among peers."""
    rest = log_SR - median_over(log_SR, axis=0)[None, :]
    for bucket in peers.buckets:
        rest[:, bucket] -= median_over(rest[:, bucket], axis=-1)[..., None]
    return rest
