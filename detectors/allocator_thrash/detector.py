"""Ranks whose CUDA allocator retries step after step, and the busy time that it adds.

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
    device_values,
    join_by_onset,
    lowest_mean,
    make_run_finding,
    median_over,
    name_run_ranks,
    own_time,
    settled_steps,
    usual_step_s,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def detect(run: Run, params: Params) -> Diagnosis:
    """Name the ranks that retry; all of them as one."""
    retries_AR = device_values(run, "allocator_retries")
    told_AR = ~np.isnan(retries_AR)
    if not told_AR.any():
        if run.has_gpu_R.any():
            return abstain_run(run, params, "missing_data", "allocator retries, which no rank sent")
        return Diagnosis()
    retries_AR = np.where(settled_steps(run)[:, None], np.nan_to_num(retries_AR), 0.0)
    over_AR = retries_AR > 0
    first_R = np.argmax(over_AR, axis=0)
    since_AR = told_AR & (np.arange(told_AR.shape[0])[:, None] >= first_R)
    held_R = np.count_nonzero(over_AR, axis=0)
    enough_R = held_R >= params["held_share"] * np.count_nonzero(since_AR, axis=0)
    suspects = np.flatnonzero((held_R >= params["held_rows"]) & enough_R)
    if not suspects.size:
        return Diagnosis()
    if suspects.size >= params["all_ranks"] * np.count_nonzero(told_AR.any(axis=0)):
        joined = [suspects.tolist()]
    else:
        joined = join_by_onset({int(rank): int(first_R[rank]) for rank in suspects})
    extra_R = _extra_seconds(run, params, over_AR, first_R)
    return Diagnosis(
        findings=tuple(
            _finding(run, params, ranks, retries_AR, extra_R, everybody=len(joined[0]) == len(ranks)
                     and suspects.size >= params["all_ranks"] * run.ranks_R.size)
            for ranks in joined
        )
    )  # fmt: skip


def _extra_seconds(
    run: Run, params: Params, over_AR: NDArray[np.bool_], first_R: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Seconds [R] that steps with retries take more than others; NaN where nothing compares."""
    own_AR = own_time(run)
    settled_AR = settled_steps(run)[:, None] & ~np.isnan(own_AR)
    before_AR = settled_AR & (np.arange(over_AR.shape[0])[:, None] < first_R)
    with_R = median_over(np.where(over_AR, own_AR, np.nan), axis=0)
    without_R = median_over(np.where(before_AR, own_AR, np.nan), axis=0)
    few_R = np.count_nonzero(before_AR, axis=0) < params["reference_steps"]
    without_R = np.where(few_R, np.nan, without_R)
    # Who retried from the start is held against peers that do not.
    thrifty_R = ~np.any(over_AR, axis=0)
    for bucket in run.peers.buckets:
        healthy = np.where(thrifty_R[bucket], median_over(own_AR, axis=0)[bucket], np.nan)
        peers = np.broadcast_to(lowest_mean(healthy, axis=-1)[:, None], bucket.shape)
        without_R[bucket] = np.where(np.isnan(without_R[bucket]), peers, without_R[bucket])
    extra_R: NDArray[np.float64] = np.maximum(with_R - without_R, 0.0)
    return extra_R


def _finding(
    run: Run, params: Params, ranks: list[int], retries_AR: NDArray[np.float64],
    extra_R: NDArray[np.float64], *, everybody: bool,
) -> Finding:  # fmt: skip
    over_A = np.any(retries_AR[:, ranks] > 0, axis=1)
    worst_A = retries_AR[over_A][:, ranks].max(axis=1)
    retries = float(np.median(worst_A))
    extra = extra_R[ranks]
    known = bool((~np.isnan(extra)).any())
    lost_s = float(np.nanmax(extra)) if known else 0.0
    step_s = usual_step_s(run)
    share = min(lost_s / max(step_s, lost_s, 1e-9), 0.99)
    who = "Every rank's allocator" if everybody else f"{name_run_ranks(run, sorted(ranks))}"
    cost = (
        f"about {lost_s * 1e3:.0f} ms a step"
        if known
        else "at a cost that cannot be told: there are no steps without retries to compare with"
    )
    return make_run_finding(
        run,
        params,
        cause="allocator_thrash",
        ranks=[] if everybody else ranks,
        over_A=over_A,
        severity=params.severity(
            share=share, unknown_retries=0.0 if known else retries, retries=retries
        ) or "info",
        slowdown=1 / (1 - share),
        lost_s=lost_s,
        summary=f"{who} retr{'ies' if everybody or len(ranks) == 1 else 'y'} "
        f"cudaMalloc {retries:.0f} times a step, {cost}.",
        evidence={
            "pattern": "all ranks" if everybody else "lasting",
            "allocator_retries_per_step": retries,
            "extra_s": round(lost_s, 6) if known else None,
            "extra_share": round(share, 3) if known else None,
        },
    )  # fmt: skip
