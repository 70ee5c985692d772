"""Garbage collection that ranks do not do at the same time, so that each one's pause is everybody's.

Shape legend: S = steps, R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Params,
    Window,
    abstain,
    make_finding,
    name_ranks,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def detect(window: Window, params: Params) -> Diagnosis:
    """Name the ranks whose pauses the job waits for, if they cost it enough."""
    gc_SR = window.column("gc_s")
    known_R = ~np.isnan(gc_SR).all(axis=0)
    if not known_R.any():
        return abstain(window, params, "missing_data", "time spent in the garbage collector")
    step_s = window.usual_step_s
    if not (gc_SR >= params["pause_share"] * step_s).any():
        return Diagnosis()  # nobody waits for what is shorter than that
    pause_SR = _without_chance(
        np.nan_to_num(gc_SR), np.asarray(known_R), params["pause_share"] * step_s
    )
    longest_S = pause_SR.max(axis=1)
    together_S = _paused_together(pause_SR[:, known_R])
    lost_S = np.maximum(longest_S - together_S, 0.0)
    # What all pause makes the step longer that the jitter is a part of.
    over_S = lost_S >= params["pause_share"] * (step_s + together_S)
    lost_s = float(lost_S[over_S].sum()) / lost_S.size
    cost = lost_s / float(np.nanmean(window.job_step_s))
    if np.count_nonzero(over_S) < params["pauses"] or cost < params["cost"]:
        return Diagnosis()

    # Each step's loss is shared among the ranks that paused about as long as the longest in it.
    excess_SR = pause_SR[over_S] - together_S[over_S, None]
    guilty_SR = excess_SR >= 0.5 * lost_S[over_S, None]
    charged_R = (guilty_SR * (lost_S[over_S] / guilty_SR.sum(axis=1))[:, None]).sum(axis=0)
    by_share = np.argsort(-charged_R, kind="stable")
    enough = np.cumsum(charged_R[by_share]) >= params["main_part"] * charged_R.sum()
    named = by_share[: int(np.argmax(enough)) + 1]
    everybody = named.size * 2 > np.count_nonzero(known_R) and named.size > 1
    ranks = np.flatnonzero(known_R) if everybody else named
    longest_s = float(lost_S[over_S].mean())
    if everybody:
        who = f"All {ranks.size} ranks pause"
        how = "each at its own time, so that all wait for each"
    else:
        who = f"{name_ranks(window, sorted(ranks.tolist()))} pause{'s' if ranks.size == 1 else ''}"
        how = "while the others wait"
    return Diagnosis(
        findings=(
            make_finding(
                window,
                params,
                cause="gc_pause",
                ranks=[int(named[0]), *(int(r) for r in ranks if r != named[0])],
                over_S=over_S,
                lasting=False,
                severity=params.severity(cost=cost) or "info",
                slowdown=1 + longest_s / step_s,
                lost_s=lost_s,
                summary=f"{who} for garbage collection, {longest_s * 1e3:.0f} ms in "
                f"{int(over_S.sum())} of {over_S.size} steps, {how}: {cost:.1%} of the time.",
                evidence={
                    "pattern": "intermittent",
                    "gc_pause_s": round(longest_s, 6),
                    "pauses": int(over_S.sum()),
                    "cost_share": round(cost, 4),
                    "steps_in_window": int(over_S.size),
                },
            ),
        )
    )


def _without_chance(
    pause_SR: NDArray[np.float64], known_R: NDArray[np.bool_], least_s: float
) -> NDArray[np.float64]:
    """The pauses [S, R]; where most ranks pause in a step, without what a rank is longer by chance.

    Ranks that collect at the same step do not take equally long, and in each step somebody takes
    longest. Only who takes longer in three of four such steps keeps the others waiting, by so much
    as it does in all those.
    """
    middle_S = _paused_together(pause_SR[:, known_R])
    all_S = middle_S >= max(least_s, np.finfo(float).tiny)
    if not all_S.any():
        return pause_SR
    longer_R = np.quantile(pause_SR[all_S] - middle_S[all_S, None], 0.25, axis=0)
    steady = pause_SR.copy()
    steady[all_S] = middle_S[all_S, None] + np.maximum(longer_R, 0.0)
    return steady


def _paused_together(pause_SR: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the middle rank pauses in each step [S]; the lesser of two, and 0 for a single rank."""
    ranks = pause_SR.shape[1]
    if ranks == 1:
        return np.zeros(pause_SR.shape[0])
    return np.sort(pause_SR, axis=1)[:, (ranks - 1) // 2]
