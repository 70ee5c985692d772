"""Functions that are compiled while training is under way, and who waits for whom meanwhile.

Shape legend: A = all steps, R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    WARM_UP_STEPS,
    Diagnosis,
    Event,
    Finding,
    Params,
    Run,
    event_seconds,
    join_numbers,
    make_run_finding,
    name_run_ranks,
    usual_step_s,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def detect(run: Run, params: Params) -> Diagnosis:
    """Say of each function when it was compiled, by whom, and what the job lost."""
    by_function: dict[str, list[Event]] = {}
    for event in run.events:
        if event.kind.startswith("compil"):
            by_function.setdefault(event.name, []).append(event)
    findings = [_judge(run, params, name, events) for name, events in by_function.items()]
    return Diagnosis(findings=tuple(finding for finding in findings if finding))


def _judge(run: Run, params: Params, function: str, events: list[Event]) -> Finding | None:
    took_AR = event_seconds(run, events)
    # The job stands as long as its slowest compiler.
    stall_A = took_AR.max(axis=1)
    later_A = (run.ordinals_A >= WARM_UP_STEPS) & (stall_A > 0)
    if later_A.any():
        return _during_training(run, params, function, events, took_AR, later_A)
    early_s = float(stall_A.sum())
    if early_s < params["warm_up_s"]:
        return None
    return _finding(
        run, params, function, events, took_AR, stall_A > 0, "info",
        f"was compiled for {early_s:.0f} s before training got going",
    )  # fmt: skip


def _during_training(
    run: Run, params: Params, function: str, events: list[Event],
    took_AR: NDArray[np.float64], over_A: NDArray[np.bool_],
) -> Finding:  # fmt: skip
    stall_A = np.where(over_A, took_AR.max(axis=1), 0.0)
    total_s, longest_s = float(stall_A.sum()), float(stall_A.max())
    count = int(over_A.sum())
    # Of the time since the first of them: a job that ran well for a day is none the better for it.
    since = int(np.argmax(over_A))
    usual_s = usual_step_s(run)
    spent_s = max(total_s, total_s + usual_s * (run.ordinals_A.size - since))
    cost = total_s / spent_s
    storm = count >= params["storm_steps"]
    level = params.severity(
        storm_cost=cost if storm else 0.0, stall_s=longest_s, total_s=total_s
    ) or "info"  # fmt: skip
    again = f"in {count} steps" if count > 1 else f"in step {int(run.ordinals_A[since])}"
    return _finding(
        run, params, function, events, took_AR, over_A, level,
        f"was compiled again {again} after warm-up, {longest_s:.2g} s at most",
    )  # fmt: skip


def _finding(
    run: Run, params: Params, function: str, events: list[Event],
    took_AR: NDArray[np.float64], over_A: NDArray[np.bool_], level: str, what: str,
) -> Finding:  # fmt: skip
    total_R = took_AR[over_A].sum(axis=0)
    compiling = np.flatnonzero(total_R >= params["waits_ratio"] * total_R.max())
    everybody = compiling.size == run.ranks_R.size
    by_time = compiling[np.argsort(-total_R[compiling], kind="stable")]
    ranks = [] if everybody else by_time.tolist()
    stall_s = float(took_AR[over_A].max(axis=1).mean())
    ordinals = set(run.ordinals_A[over_A].tolist())
    reasons = list(dict.fromkeys(e.detail for e in events if e.detail and e.ordinal in ordinals))
    why = f" Reason: {reasons[0]}." if reasons else ""
    who = "all ranks" if everybody else name_run_ranks(run, sorted(ranks)).lower()
    waits = "" if everybody else "; the others wait for it meanwhile"
    usual_s = usual_step_s(run)
    mostly = int(over_A.sum()) * 2 > over_A.size - int(np.argmax(over_A))
    return make_run_finding(
        run,
        params,
        cause="jit_compile",
        ranks=ranks,
        over_A=over_A,
        severity=level,  # type: ignore[arg-type]  # from the rules, or info
        slowdown=1 + stall_s / usual_s if usual_s > 0 else 1.0,
        lost_s=stall_s,
        summary=f"{function} {what}, on {who}{waits}.{why}",
        evidence={
            "pattern": "lasting" if mostly else "intermittent",
            "function": function,
            "reasons": reasons[:3],
            "compile_steps": join_numbers(run.ordinals_A[over_A].tolist()),
            "compile_s": round(stall_s, 6),
            "compiling_ranks": int(compiling.size),
        },
    )
