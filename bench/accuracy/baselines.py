"""What people have today, from the published descriptions, to be scored on the same runs.

Each method is given what our detectors are given, and says whether it raises an alarm and which
ranks it names. Thresholds are the published ones; where a paper leaves one open, the comment says what
was taken.

Sources: ARGUS, arXiv 2606.20374 (levels 1-3 as read by its reviewers: see docs/explanation/accuracy.md);
NVIDIA Resiliency Extension, straggler detection (relative score, default 0.75); StageFrontier,
arXiv 2606.06751.

Shape legend: A = steps, R = ranks, n = ranks of one group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]
    Said = tuple[bool, frozenset[int]]

_WARM_UP: Final = 10
_MOST_RANKS_FOR_PAIRS: Final = 512


def _settled(run: Run) -> slice:
    return slice(int(np.searchsorted(run.ordinals_A, _WARM_UP)), None)


def _phases(run: Run) -> dict[str, Floats]:
    """Compute-only phases of every step and rank [A, R]."""
    at = _settled(run)
    data = np.nan_to_num(run.columns["data_wait_s"][at])
    return {"data.wait": data, "compute": run.columns["busy_s"][at] - data}


def _groups(run: Run) -> Iterator[NDArray[np.intp]]:
    """Ranks that are compared with each other."""
    for bucket in run.peers.buckets:
        yield from bucket


def _job_step_s(run: Run) -> Floats:
    step: Floats = np.nanmedian(run.columns["step_s"][_settled(run)], axis=1)
    return step[~np.isnan(step)]


def step_change_point(run: Run) -> Said:
    """A bare change point in step time: the best split, and 10 % between its sides."""
    step = _job_step_s(run)
    best = 0.0
    for cut in range(5, step.size - 5):
        before, after = step[:cut], step[cut:]
        spread = np.sqrt(before.var() / before.size + after.var() / after.size)
        if after.mean() >= 1.10 * before.mean() and spread > 0:
            best = max(best, (after.mean() - before.mean()) / spread)
    return best > 5, frozenset()


def argus_levels(run: Run) -> Said:
    """ARGUS's automatic levels together: an alarm of any is an alarm."""
    named = _argus_l2(run) | _argus_l3(run)
    return _argus_l1(run) or bool(named), frozenset(named)


def _argus_l1(run: Run) -> bool:
    """Jitter (window 8, max/min ≥ 2) and regression (mean ratio ≥ 1.5, RSD ≤ 0.35, margins 5)."""
    step = _job_step_s(run)
    for begin in range(step.size - 7):
        window = step[begin : begin + 8]
        if window.max() >= 2 * window.min():
            return True
    for cut in range(5, step.size - 5):
        before, after = step[:cut], step[cut:]
        steady = max(before.std() / before.mean(), after.std() / after.mean()) <= 0.35
        if steady and after.mean() >= 1.5 * before.mean():
            return True
    return False


def _argus_l2(run: Run) -> set[int]:
    """Mean phase duration in each group: CV ≥ 0.15 and z ≥ 2."""
    named: set[int] = set()
    for values in _phases(run).values():
        mean_R = np.nanmean(values, axis=0)
        for group in _groups(run):
            mean, std = mean_R[group].mean(), mean_R[group].std()
            if mean > 0 and std / mean >= 0.15:
                named |= set(group[(mean_R[group] - mean) / std >= 2].tolist())
    return {int(run.ranks_R[rank]) for rank in named}


def _argus_l3(run: Run) -> set[int]:
    """Mean Wasserstein distance to every other rank: over Q3 + 1.5 IQR and twice the median.

    Of the distribution of a rank's compute over the run: these runs have no kernels.
    """
    compute = _phases(run)["compute"]
    named: set[int] = set()
    for group in _groups(run):
        if group.size > _MOST_RANKS_FOR_PAIRS:
            continue
        ordered = np.sort(np.nan_to_num(compute[:, group]), axis=0)
        # Equal sample sizes: W1 is the mean distance of the order statistics.
        distance = np.abs(ordered[:, :, None] - ordered[:, None, :]).mean(0)
        mean = distance.sum(1) / max(group.size - 1, 1)
        q1, q3 = np.percentile(mean, (25, 75))
        over = (mean > q3 + 1.5 * (q3 - q1)) & (mean >= 2 * np.median(mean))
        named |= {int(run.ranks_R[rank]) for rank in group[over]}
    return named


def nvrx_relative(run: Run) -> Said:
    """Relative score: fastest median section time over the rank's own; under 0.75 is a straggler."""
    named: set[int] = set()
    median_R = np.nanmedian(_phases(run)["compute"], axis=0)
    for group in _groups(run):
        with np.errstate(divide="ignore", invalid="ignore"):
            score = np.nanmin(median_R[group]) / median_R[group]
        named |= {int(run.ranks_R[rank]) for rank in group[score < 0.75]}
    return bool(named), frozenset(named)


def stage_frontier(run: Run) -> Said:
    """At each stage boundary, who is furthest along in time; its lead says where delay appears.

    The paper labels windows and leaves the alarm to its user: taken here where one rank leads its
    group in most steps, by 10 % of the step over the group's median.
    """
    step = np.nanmedian(run.columns["step_s"][_settled(run)], axis=1)
    reached = np.zeros((step.size, run.ranks_R.size))
    leads: dict[int, float] = {}
    for values in _phases(run).values():
        reached = reached + np.nan_to_num(values)
        for group in _groups(run):
            front, middle = reached[:, group].max(1), np.median(reached[:, group], axis=1)
            leader = group[reached[:, group].argmax(1)]
            ranks, counts = np.unique(leader, return_counts=True)
            first = int(ranks[counts.argmax()])
            lead = float(np.nanmedian(((front - middle) / step)[leader == first]))
            if counts.max() * 2 > step.size and lead >= 0.10:
                leads[first] = lead
    if not leads:
        return False, frozenset()
    worst = max(leads, key=leads.__getitem__)
    return True, frozenset({int(run.ranks_R[worst])})


BASELINES: Final[Mapping[str, Callable[[Run], Said]]] = {
    "ARGUS L1-L3": argus_levels,
    "NVRx relative score": nvrx_relative,
    "StageFrontier": stage_frontier,
    "step-time change point": step_change_point,
}
