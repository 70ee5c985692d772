"""Ranks, or all of them, that stand at the data loader for a good part of the step.

Shape legend: S = steps, R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Finding,
    Params,
    Window,
    abstain,
    lowest_mean,
    make_finding,
    median_over,
    name_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def detect(window: Window, params: Params) -> Diagnosis:
    """Name each rank whose input is late, or all of them as one."""
    wait_SR = window.column("data_wait_s")
    step_s = window.usual_step_s
    known_R = np.count_nonzero(~np.isnan(wait_SR), axis=0) * 2 >= wait_SR.shape[0]
    if not known_R.any():
        return abstain(window, params, "missing_data", "time spent waiting for input")
    share_SR = np.where(known_R & ~np.isnan(wait_SR), wait_SR, 0.0) / step_s
    lasting_R = _lasting(share_SR, params["info_share"], params)
    lasting_R |= _long_for_itself(window, params, share_SR)
    count_R = np.count_nonzero(share_SR >= params["burst_share"], axis=0)
    bursts_R = (count_R >= params["burst_steps"]) & ~lasting_R
    if not (lasting_R | bursts_R).any():
        return Diagnosis()
    known = int(np.count_nonzero(known_R))
    if np.count_nonzero(lasting_R) >= max(params["all_ranks"] * known, min(known, 2)):
        everybody = np.flatnonzero(known_R).tolist()
        return Diagnosis(findings=(_of_all(window, params, share_SR, everybody),))
    return Diagnosis(
        findings=tuple(
            _of_one(window, params, share_SR, int(rank), burst=bool(bursts_R[rank]))
            for rank in np.flatnonzero(lasting_R | bursts_R)
        )
    )


def _lasting(
    share_SR: NDArray[np.float64], at_least: NDArray[np.float64] | float, params: Params
) -> NDArray[np.bool_]:
    """Late in most of the latest steps: nobody waits for a sound loader, so three are no chance."""
    recent = share_SR[-int(params["recent_steps"]) :] >= at_least
    lasting_R: NDArray[np.bool_] = np.count_nonzero(recent, axis=0) >= params["recent_over"]
    return lasting_R


def _long_for_itself(
    window: Window, params: Params, share_SR: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Ranks whose wait is little of a step with much waiting in it (a bubble), and much of their own part.

    Beside a GPU alone: elsewhere the loader's workers and the training compete for cores.
    """
    longer_R = window.has_gpu_R & _lasting(share_SR, params["least_share"], params)
    ranks = np.flatnonzero(longer_R)
    own_share_R = median_over(window.column("busy_s")[:, ranks], axis=0) / window.usual_step_s
    least_R = np.fmax(params["info_share"] * own_share_R, params["least_share"])
    longer_R[ranks] = _lasting(share_SR[:, ranks], least_R, params)
    return longer_R


def _of_all(
    window: Window, params: Params, share_SR: NDArray[np.float64], ranks: Sequence[int]
) -> Finding:
    # The slowest input of each step is what the job waits for.
    worst_S = share_SR.max(axis=1)
    over_S = worst_S >= min(params["info_share"], float(median_over(worst_S[-5:], axis=0)))
    share = float(median_over(worst_S[over_S], axis=0))
    step_s = window.usual_step_s
    middle = float(median_over(median_over(share_SR[:, ranks], axis=1), axis=0))
    who = name_ranks(window, ranks) if len(ranks) == 1 else f"All {len(ranks)} ranks"
    return make_finding(
        window,
        params,
        cause="input_stall",
        ranks=ranks,
        over_S=over_S,
        lasting=True,
        severity=params.severity(share=share) or "info",
        slowdown=1 / max(1 - share, 0.01),
        lost_s=share * step_s,
        summary=f"{who} wait{'s' if len(ranks) == 1 else ''} for input for {share:.0%} of the "
        "step: the input cannot keep up.",
        evidence={
            "pattern": "all ranks",
            "data_wait_share": round(share, 3),
            "data_wait_share_of_middle_rank": round(middle, 3),
            "data_wait_s": round(share * step_s, 6),
            "steps_over": int(over_S.sum()),
            "steps_in_window": int(over_S.size),
        },
    )


def _of_one(
    window: Window, params: Params, share_SR: NDArray[np.float64], rank: int, *, burst: bool
) -> Finding:
    over_S = share_SR[:, rank] >= params["burst_share"]
    if not burst:
        # Half of the wait tells late steps from others; the latest steps know its size.
        recent = float(median_over(share_SR[-int(params["recent_steps"]) :, rank], axis=0))
        over_S = share_SR[:, rank] >= max(min(params["info_share"], 0.9 * recent), recent / 2)
    share = float(median_over(share_SR[over_S, rank], axis=0))
    step_s = window.usual_step_s
    others = float(median_over(lowest_mean(np.delete(share_SR, rank, axis=1), axis=1), axis=0))
    often = f" in {int(over_S.sum())} of {over_S.size} steps" if burst else ""
    # In a burst the step itself is longer than usual; the share is of the usual step.
    lost_s = (share - others) * step_s * (float(over_S.mean()) if burst else 1.0)
    return make_finding(
        window,
        params,
        cause="input_stall",
        ranks=[rank],
        over_S=over_S,
        lasting=not burst,
        severity=params.severity(share=min(lost_s / step_s, 1.0) if burst else share) or "info",
        slowdown=1 + share if burst else 1 / max(1 - share, 0.01),
        lost_s=lost_s,
        summary=f"{name_ranks(window, [rank])} waits for input for {share * step_s * 1e3:.0f} ms"
        f" a step ({share:.0%} of it){often}; its peers do not, and wait for it.",
        evidence={
            "pattern": "intermittent" if burst else "lasting",
            "data_wait_share": round(share, 3),
            "data_wait_share_of_others": round(others, 3),
            "data_wait_s": round(share * step_s, 6),
            "steps_over": int(over_S.sum()),
            "steps_in_window": int(over_S.size),
        },
    )
