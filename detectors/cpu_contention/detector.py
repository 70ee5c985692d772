"""Ranks, or hosts, whose training threads wait for a core more than others do.

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
    compare,
    lowest_mean,
    make_finding,
    median_over,
    name_ranks,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def detect(window: Window, params: Params) -> Diagnosis:
    """Name each host or rank that waits more than the others; all of them where all wait."""
    step_s = window.usual_step_s
    share_SR = window.column("run_delay_s") / step_s
    known_R = np.count_nonzero(~np.isnan(share_SR), axis=0) * 2 >= share_SR.shape[0]
    if not known_R.any():
        return abstain(window, params, "missing_data", "time spent waiting for a core")
    share_SR[:, ~known_R] = np.nan
    # Of each rank first: in a single step somebody is always lucky.
    middle_R = median_over(share_SR, axis=0)
    others = float(lowest_mean(middle_R, axis=0))
    if others >= params["crowded_share"]:
        return Diagnosis(findings=(_of_all(window, share_SR, params),))
    ever = float(lowest_mean(window.frame.usual_share_R("run_delay_s"), axis=0))
    busy_host = max(others, float(np.nan_to_num(ever))) >= params["shared_share"]
    recent_SR = share_SR[-int(params["recent_steps"]) :] - others
    fresh_R = _often(recent_SR, params["info_share"], params)
    lasting_R = fresh_R & (middle_R - others >= params["info_share"])
    begun_R = np.zeros_like(lasting_R)
    if window.is_latest and not busy_host:
        # Training threads beside a GPU have cores to themselves as a rule: information so far,
        # whatever was before. Elsewhere such waits come and go.
        begun_R = window.has_gpu_R & _often(recent_SR, params["begun_share"], params) & ~lasting_R
    if not (lasting_R | begun_R).any():
        return Diagnosis()
    excess_SR = share_SR - others
    return Diagnosis(
        findings=tuple(
            _of_some(
                window, params, excess_SR, ranks, busy_host=busy_host,
                begun=bool(begun_R[ranks].any()),
            )
            for ranks in _places(window, lasting_R | begun_R, known_R)
        )
    )  # fmt: skip


def _often(
    recent_SR: NDArray[np.float64], at_least: float, params: Params
) -> NDArray[np.bool_]:  # fmt: skip
    """Ranks that are over in most of the latest steps."""
    often_R: NDArray[np.bool_] = (
        np.count_nonzero(recent_SR >= at_least, axis=0) >= params["recent_over"]
    )
    return often_R


def _places(
    window: Window, lasting_R: NDArray[np.bool_], known_R: NDArray[np.bool_]
) -> list[list[int]]:
    """Whole hosts where all of their ranks suffer and another host does not; else ranks."""
    hosts_R, known = window.hosts_R, np.flatnonzero(known_R).tolist()
    concerned = {hosts_R[rank] for rank in np.flatnonzero(lasting_R & known_R).tolist()}
    if not concerned:
        return []
    by_host: dict[str, list[int]] = {}
    for rank in known:
        if hosts_R[rank] in concerned:
            by_host.setdefault(hosts_R[rank], []).append(rank)
    several = any(hosts_R[rank] != hosts_R[known[0]] for rank in known)
    places: list[list[int]] = []
    for host, ranks in by_host.items():
        suffering = [rank for rank in ranks if lasting_R[rank]]
        whole = bool(host) and several and len(suffering) == len(ranks) > 1
        places += [suffering] if whole else [[rank] for rank in suffering]
    return places


def _of_some(
    window: Window, params: Params, excess_SR: NDArray[np.float64],
    ranks: list[int], *, busy_host: bool, begun: bool,
) -> Finding:  # fmt: skip
    over_SR = excess_SR[:, ranks] >= params["info_share"]
    over_S = np.count_nonzero(over_SR, axis=1) * 2 >= len(ranks)
    share = min(float(median_over(excess_SR[over_S][:, ranks].max(axis=1), axis=0)), 0.99)
    has_gpu = bool(window.has_gpu_R[ranks].any())
    busy = compare(window, "busy_s").ratio_R[ranks]
    hidden = has_gpu and float(np.nanmax(np.append(busy, 0.0))) < params["busy_ratio"]
    hidden &= bool((~np.isnan(busy)).any())
    step_s = window.usual_step_s
    who = name_ranks(window, ranks)
    if len(ranks) > 1:
        who = f"All {len(ranks)} ranks of {window.host(ranks[0])}"
    verb = "waits" if len(ranks) == 1 else "wait"
    late = f" The GPU's queue swallows it so far: {'it is' if len(ranks) == 1 else 'they are'} no later than others."
    return make_finding(
        window,
        params,
        cause="cpu_contention",
        ranks=ranks,
        over_S=over_S,
        lasting=True,
        severity=params.severity(
            gpu_share=share if has_gpu and not hidden and not begun else 0.0,
            cpu_share=0.0 if has_gpu or busy_host else share,
        ) or "info",
        slowdown=1 / max(1 - share, 0.01),
        lost_s=0.0 if hidden else share * step_s,
        summary=f"{who} {verb} {share * step_s * 1e3:.0f} ms a step ({share:.0%} of it) for a core "
        f"that something else uses.{late if hidden else ''}",
        evidence={
            "pattern": "lasting",
            "run_delay_share_over_others": round(share, 3),
            "run_delay_s": round(share * step_s, 6),
            "whole_host": len(ranks) > 1,
            "steps_over": int(over_S.sum()),
            "steps_in_window": int(over_S.size),
        },
    )  # fmt: skip


def _of_all(window: Window, share_SR: NDArray[np.float64], params: Params) -> Finding:
    """Fewer cores than threads: true, worth a line, and nobody's fault."""
    middle_S = median_over(share_SR, axis=1)
    over_S = np.nan_to_num(middle_S) >= params["crowded_share"]
    share = min(float(median_over(middle_S, axis=0)), 0.99)
    has_gpu = bool(window.has_gpu_R.any())
    everybody = list(range(window.ranks_R.size))
    step_s = window.usual_step_s
    return make_finding(
        window,
        params,
        cause="cpu_contention",
        ranks=everybody,
        over_S=over_S,
        lasting=True,
        severity=params.severity(gpu_share=share if has_gpu else 0.0) or "info",
        slowdown=1 / max(1 - share, 0.01),
        lost_s=share * step_s,
        summary=f"All {len(everybody)} ranks wait for cores, {share:.0%} of the step: their hosts "
        "have fewer free cores than training threads.",
        evidence={
            "pattern": "all ranks",
            "run_delay_share": round(share, 3),
            "run_delay_s": round(share * step_s, 6),
            "steps_over": int(over_S.sum()),
            "steps_in_window": int(over_S.size),
        },
    )
