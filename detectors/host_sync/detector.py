"""Ranks whose host reads device values many times a step, and so takes the launch-ahead away.

Shape legend: A = all steps, R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Event,
    Finding,
    Params,
    Run,
    event_seconds,
    join_by_onset,
    make_run_finding,
    median_over,
    name_run_ranks,
    settled_steps,
    usual_step_s,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def detect(run: Run, params: Params) -> Diagnosis:
    """Name the ranks that read often and long; all of them as one."""
    syncs = [event for event in run.events if event.kind == "host_sync"]
    if not syncs:
        return Diagnosis()
    took_AR = event_seconds(run, syncs)
    count_AR = event_seconds(run, syncs, [_reads(sync) for sync in syncs])
    usual_s = usual_step_s(run)
    settled_A = settled_steps(run)
    over_AR = (count_AR >= params["syncs"]) & (took_AR >= params["share"] * usual_s)
    over_AR &= settled_A[:, None]
    held_R = np.count_nonzero(over_AR, axis=0)
    first_R = np.argmax(over_AR, axis=0)
    since_R = np.cumsum(settled_A[::-1])[::-1][first_R]
    held = (held_R >= params["held_steps"]) & (held_R * 2 >= since_R)
    suspects = np.flatnonzero(held | _just_begun(params, over_AR[settled_A]))
    if not suspects.size:
        return Diagnosis()
    if suspects.size >= params["all_ranks"] * run.ranks_R.size and run.ranks_R.size > 1:
        joined = [suspects.tolist()]
    else:
        joined = join_by_onset({int(rank): int(first_R[rank]) for rank in suspects})
    findings = [_finding(run, params, ranks, took_AR, count_AR, over_AR) for ranks in joined]
    return Diagnosis(findings=tuple(finding for finding in findings if finding))


def _just_begun(params: Params, over_SR: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Ranks that read so in most of the latest steps: information until it is a habit."""
    recent_SR = over_SR[-int(params["recent_steps"]) :]
    begun_R: NDArray[np.bool_] = np.count_nonzero(recent_SR, axis=0) >= params["recent_over"]
    return begun_R


def _reads(event: Event) -> float:
    """How many reads an event stands for."""
    detail = event.detail or ""
    return float(detail) if detail.isdigit() else 1.0


def _finding(
    run: Run, params: Params, ranks: list[int], took_AR: NDArray[np.float64],
    count_AR: NDArray[np.float64], over_AR: NDArray[np.bool_],
) -> Finding | None:  # fmt: skip
    over_A = np.any(over_AR[:, ranks], axis=1)
    lost_s = float(median_over(took_AR[over_A][:, ranks].max(axis=1), axis=0))
    reads = int(np.median(count_AR[over_A][:, ranks].max(axis=1)))
    step_s = float(median_over(median_over(run.columns["step_s"][over_A], axis=1), axis=0))
    share = min(lost_s / step_s, 0.99)
    level = params.severity(share=share)
    if level is None:
        return None
    if np.count_nonzero(over_A) < params["held_steps"]:
        level = "info"
    everybody = len(ranks) >= params["all_ranks"] * run.ranks_R.size and run.ranks_R.size > 1
    who = "Every rank" if everybody else name_run_ranks(run, sorted(ranks))
    verb = "read" if len(ranks) > 1 and not everybody else "reads"
    return make_run_finding(
        run,
        params,
        cause="host_sync",
        ranks=[] if everybody else ranks,
        over_A=over_A,
        severity=level,
        slowdown=1 / (1 - share),
        lost_s=lost_s,
        summary=f"{who} {verb} device values {reads} times a step and wait"
        f"{'' if verb == 'read' else 's'} {lost_s * 1e3:.0f} ms for them, up to {share:.0%} of the step.",
        evidence={
            "pattern": "all ranks" if everybody else "lasting",
            "syncs_per_step": reads,
            "sync_s": round(lost_s, 6),
            "sync_share_at_most": round(share, 3),
        },
    )
