"""Devices that lower their clocks and say so, held against how slow their ranks are.

Shape legend: A = all steps, R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Finding,
    Params,
    Run,
    abstain_run,
    device_texts,
    device_values,
    join_by_onset,
    lowest_mean,
    make_run_finding,
    median_over,
    name_run_ranks,
    own_time,
    ratio_to_peers,
    settled_steps,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HARMLESS = {"idle", "gpu_idle", "applications_clocks_setting", "applications_clocks", "none"}
"""Reasons that NVML reports of a device that is well."""

_FEW_STEPS = 5
"""Fewer do not say what is usual."""


def detect(run: Run, params: Params) -> Diagnosis:
    """Name the ranks whose devices hold them up."""
    clock_AR = device_values(run, "clock_ratio")
    told_AR = ~np.isnan(clock_AR)
    if not told_AR.any() and not run.has_gpu_R.any():
        return Diagnosis()
    if not told_AR.any():
        return abstain_run(run, params, "missing_data", "GPU clocks, which no device reported")
    reasons = _reasons(run)
    low_AR = np.zeros(told_AR.shape, dtype=bool)
    for step, rank in reasons:
        low_AR[step, rank] = True
    low_AR &= np.nan_to_num(clock_AR, nan=1.0) < params["clock_ratio"]
    first_R = np.argmax(low_AR, axis=0)
    held_R = np.count_nonzero(low_AR, axis=0)
    reports_R = np.count_nonzero(
        told_AR & (np.arange(told_AR.shape[0])[:, None] >= first_R), axis=0
    )
    throttled_R = (held_R >= params["held_rows"]) & (held_R >= params["held_share"] * reports_R)
    suspects = np.flatnonzero(throttled_R)
    if not suspects.size:
        return Diagnosis()
    told = int(np.count_nonzero(told_AR.any(axis=0)))
    if suspects.size >= params["all_ranks"] * told and suspects.size > 1:
        groups = [suspects.tolist()]
    else:
        groups = [
            ranks
            for reason in sorted({_usual(reasons, low_AR, int(rank)) for rank in suspects})
            for ranks in join_by_onset(
                {
                    int(rank): int(first_R[rank])
                    for rank in suspects
                    if _usual(reasons, low_AR, int(rank)) == reason
                }
            )
        ]
    own_AR = own_time(run)
    findings = [
        _finding(run, params, ranks, reasons, low_AR, clock_AR, own_AR, widely=len(ranks) * 2 >= told)
        for ranks in groups
    ]  # fmt: skip
    return Diagnosis(findings=tuple(finding for finding in findings if finding))


def _reasons(run: Run) -> dict[tuple[int, int], str]:
    """(step index, rank index) → reasons that mean trouble, as the device says them."""
    found = {}
    for step, rank, text in device_texts(run, "throttle_reasons"):
        bad = [part for part in text.split(",") if part.strip().lower() not in _HARMLESS]
        if bad:
            found[step, rank] = ",".join(part.strip() for part in bad)
    return found


def _usual(
    reasons: dict[tuple[int, int], str], low_AR: NDArray[np.bool_], rank: int
) -> str:  # fmt: skip
    said = [reasons[int(step), rank] for step in np.flatnonzero(low_AR[:, rank])]
    return max(sorted(set(said)), key=said.count)


def _finding(
    run: Run, params: Params, ranks: list[int], reasons: dict[tuple[int, int], str],
    low_AR: NDArray[np.bool_], clock_AR: NDArray[np.float64], own_AR: NDArray[np.float64],
    *, widely: bool,
) -> Finding | None:  # fmt: skip
    over_A = _between_reports(np.any(low_AR[:, ranks], axis=1))
    peers_too = _peers_low_too(run, ranks, low_AR)
    slow_R = _slowness(run, over_A, own_AR, by_past=widely or peers_too)[ranks]
    beside = bool(np.isnan(slow_R).all()) and widely and not peers_too
    if beside:
        # There is no before; a quarter of peers that are well shows what is usual all the same.
        well_AR = np.where(low_AR.any(axis=0), np.nan, own_AR)
        slow_R = _beside_the_well(run, over_A, own_AR, well_AR)[ranks]
    clock = float(median_over(clock_AR[:, ranks][low_AR[:, ranks]], axis=0))
    slowdown = float(np.nanmax(np.append(slow_R, 1.0)))
    by_clock = peers_too and not widely and bool(np.isnan(slow_R).all())
    if by_clock:
        # Whoever does the same work is throttled too, and always was: the clock is all there is.
        well = float(median_over(clock_AR[:, ~low_AR.any(axis=0)].ravel(), axis=0))
        slow_R = well / median_over(np.where(low_AR, clock_AR, np.nan)[:, ranks], axis=0)
        slowdown = float(np.nanmax(np.append(slow_R, 1.0)))
    slow = slowdown >= params["ratio"]
    if not slow and clock >= params["own_clock"]:
        return None
    worst = ranks[int(np.nanargmax(np.append(slow_R, -1.0)[:-1]))] if slow else ranks[0]
    reason = _usual(reasons, low_AR, worst)
    own_s = float(median_over(own_AR[over_A, worst], axis=0))
    level = params.severity(slowdown=slowdown) if slow else "info"
    everywhere = len(ranks) >= params["everywhere"] * np.count_nonzero(
        ~np.isnan(clock_AR).all(axis=0)
    )
    if widely:
        who = f"{len(ranks)} of {run.ranks_R.size} GPUs run at {clock:.0%} of their clocks"
    else:
        who = f"{name_run_ranks(run, sorted(ranks))}: the GPU runs at {clock:.0%} of its clock"
    against = "its peers'"
    if (widely or peers_too) and not beside:
        against = "as long as others' by the clock" if by_clock else "as long as before"
    effect = (
        f"its own part of the step takes {slowdown:.2f} times {against}"
        if slow
        else "nobody is slower for it so far"
    )
    return make_run_finding(
        run,
        params,
        cause="gpu_throttled",
        # All of them: a setting, or the room, and no rank to look at.
        ranks=[] if everywhere else [worst, *(rank for rank in ranks if rank != worst)],
        over_A=over_A,
        severity=level or "info",
        slowdown=slowdown,
        lost_s=own_s * (1 - 1 / slowdown) if slow and np.isfinite(own_s) else 0.0,
        summary=f"{who} ({reason}); {effect}.",
        evidence={
            "pattern": "all ranks" if everywhere else "lasting",
            "throttle_reason": reason,
            "clock_ratio": round(clock, 3),
            "own_work_ratio": round(slowdown, 3),
            "slowdown_by_rank": {
                str(int(run.ranks_R[rank])): round(float(slow), 3)
                for rank, slow in zip(ranks, slow_R, strict=True)
                if not np.isnan(slow)
            },
        },
    )


def _beside_the_well(
    run: Run, over_A: NDArray[np.bool_], own_AR: NDArray[np.float64], well_AR: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Own time [R] in those steps against peers whose devices are well; NaN where those are few."""
    ratio_R = np.full(run.ranks_R.size, np.nan)
    steps_A = over_A & settled_steps(run)
    for bucket in run.peers.buckets:
        well = well_AR[:, bucket][steps_A]
        usual = median_over(lowest_mean(well, axis=-1), axis=0)
        enough = np.count_nonzero(~np.isnan(well).all(axis=0), axis=-1) * 4 >= bucket.shape[1]
        own = median_over(own_AR[:, bucket][steps_A], axis=0)
        ratio_R[bucket] = np.where(enough[:, None], own / usual[:, None], np.nan)
    return ratio_R


def _peers_low_too(run: Run, ranks: list[int], low_AR: NDArray[np.bool_]) -> bool:
    """Whether whoever does the same work as these ranks is throttled too, but not everybody."""
    low_R = np.any(low_AR, axis=0)
    labels = run.peers.label_R
    known = bool(np.all(labels[ranks] >= 0))
    return known and not bool(low_R.all()) and bool(low_R[np.isin(labels, labels[ranks])].all())


def _between_reports(low_A: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Steps [A] from the first report to the last: devices do not report in every step."""
    at = np.flatnonzero(low_A)
    over = np.zeros(low_A.size, dtype=bool)
    over[at[0] : at[-1] + 1] = True
    return over


def _slowness(
    run: Run, over_A: NDArray[np.bool_], own_AR: NDArray[np.float64], *, by_past: bool
) -> NDArray[np.float64]:
    """Own time [R] in those steps against peers', or against before where all are alike."""
    settled_A = settled_steps(run)
    if not by_past:
        ratio_R: NDArray[np.float64] = median_over(
            ratio_to_peers(run, own_AR)[over_A & settled_A], axis=0
        )
        if not np.isnan(ratio_R).all():
            return ratio_R
    before_A = settled_A & ~over_A
    if np.count_nonzero(before_A) < _FEW_STEPS:
        return np.full(run.ranks_R.size, np.nan)
    now_R, then_R = (median_over(own_AR[part], axis=0) for part in (over_A & settled_A, before_A))
    return now_R / then_R
