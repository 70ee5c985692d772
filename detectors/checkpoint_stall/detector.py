"""Checkpoints that hold the job up: one slow writer, too large a share of the time, or growing.

Shape legend: A = all steps, R = ranks, K = steps with a checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Params,
    Run,
    event_seconds,
    make_run_finding,
    median_over,
    name_run_ranks,
    usual_step_s,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def detect(run: Run, params: Params) -> Diagnosis:
    """Say who saves longest, and what that costs; nothing where saving is an ordinary part."""
    saves = [event for event in run.events if event.kind.startswith("checkpoint")]
    took_AR = event_seconds(run, saves)
    over_A = took_AR.max(axis=1, initial=0.0) > 0
    if not over_A.any():
        return Diagnosis()
    took_KR = took_AR[over_A]
    longest_K = took_KR.max(axis=1)
    # Ranks that save nothing wait all the same: the middle one of all is what saving need take.
    usual_K = median_over(took_KR, axis=1)
    excess_K = np.where(
        longest_K >= params["uneven_ratio"] * usual_K, longest_K - usual_K, 0.0
    )  # fmt: skip
    share, uneven_share, period_s = _shares(run, over_A, longest_K, excess_K)
    single_s = float(longest_K[0]) if longest_K.size == 1 else 0.0
    uneven_single_s = float(excess_K[0]) if longest_K.size == 1 else 0.0
    growth = _growth(longest_K, params)
    uneven = uneven_share >= params["uneven_share"] or uneven_single_s > 0.5 * single_s > 0
    level = params.severity(
        uneven_share=uneven_share,
        share=share,
        single_s=single_s,
        growing_share=share if growth else 0.0,
        any_share=0.0,
    ) or "info"  # fmt: skip
    if level == "info" and not uneven and share < params["share"]:
        return Diagnosis()
    if level == "info" and single_s and single_s < usual_step_s(run):
        return Diagnosis()  # one save, shorter than a step

    ranks = _slow_ranks(took_KR, excess_K) if uneven else []
    lost_K = excess_K if ranks else longest_K
    lost_s = float(lost_K.mean())
    longest_s = float(median_over(longest_K, axis=0))
    who = name_run_ranks(run, sorted(ranks)) if ranks else "All ranks"
    times = f"{longest_K.size} times" if longest_K.size > 1 else "once"
    text = f"{who} saved {times}, {longest_s:.2g} s each"
    if ranks:
        text += f"; the middle rank needs {float(np.median(usual_K)):.2g} s, and all wait"
    elif longest_K.size > 1:
        text += f", {share:.0%} of the time"
    if growth:
        text += f"; saving takes {growth:.1f} times as long as at first"
    return Diagnosis(
        findings=(
            make_run_finding(
                run,
                params,
                cause="checkpoint_stall",
                ranks=ranks,
                over_A=over_A,
                severity=level,
                slowdown=longest_s / max(float(np.median(usual_K)), 0.1 * longest_s),
                lost_s=lost_s,
                summary=text + ".",
                evidence={
                    "pattern": "intermittent",
                    "saves": int(longest_K.size),
                    "save_s": round(longest_s, 6),
                    "save_s_of_middle_rank": round(float(np.median(usual_K)), 6),
                    "save_share": round(share, 4),
                    "uneven_share": round(uneven_share, 4),
                    "save_period_s": round(period_s, 3),
                    "growth": round(growth, 2) if growth else None,
                },
            ),
        )
    )


def _shares(
    run: Run,
    over_A: NDArray[np.bool_],
    longest_K: NDArray[np.float64],
    excess_K: NDArray[np.float64],
) -> tuple[float, float, float]:
    """Shares of the time that saving takes, and that its slowest writers add; seconds a period.

    From the first save to the last, without the first: whole periods, whenever the run began.
    """
    at = np.flatnonzero(over_A)
    if at.size < 2:
        return 0.0, 0.0, 0.0
    inside = slice(int(at[0]) + 1, int(at[-1]) + 1)
    step_s = median_over(run.columns["step_s"][inside], axis=1)
    between_s = median_over(run.columns["between_s"][inside], axis=1)
    # The slow writer's peers wait in a collective of the step; one clock holds both parts.
    spent_s = max(float(np.nansum(step_s) + np.nansum(between_s)), float(longest_K[1:].sum()))
    total_s, uneven_s = float(longest_K[1:].sum()), float(excess_K[1:].sum())
    return total_s / spent_s, uneven_s / spent_s, spent_s / (at.size - 1)


def _growth(longest_K: NDArray[np.float64], params: Params) -> float | None:
    """How many times as long as at first the latest saves take; None where they do not grow."""
    if longest_K.size < params["growth_saves"]:
        return None
    third = longest_K.size // 3
    ends = [float(np.median(part)) for part in (longest_K[:third], longest_K[-third:])]
    growth = ends[1] / max(ends[0], 1e-6)
    middle = float(np.median(longest_K[third:-third]))
    return growth if growth >= params["growth"] and ends[0] <= middle <= ends[1] else None


def _slow_ranks(took_KR: NDArray[np.float64], excess_K: NDArray[np.float64]) -> list[int]:
    """Who is as late as the latest, in half of the saves that are uneven; the latest first."""
    uneven_KR = took_KR[excess_K > 0]
    late_KR = uneven_KR - median_over(uneven_KR, axis=1)[:, None]
    late_R = late_KR >= 0.5 * late_KR.max(axis=1, keepdims=True)
    often_R = np.flatnonzero(np.count_nonzero(late_R, axis=0) * 2 >= uneven_KR.shape[0])
    if not often_R.size:  # another one each time
        often_R = np.flatnonzero(late_R.any(axis=0))
    return often_R[np.argsort(-late_KR.sum(axis=0)[often_R], kind="stable")].tolist()  # type: ignore[no-any-return]
