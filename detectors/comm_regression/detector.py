"""Whether all transfers became slower together.

Shape legend: A = all steps, G = link sets (groups, and pairs of ranks).
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    SUDDEN,
    Diagnosis,
    Params,
    Run,
    abstain_run,
    lasting,
    lasting_or_sudden,
    level_shift,
    make_run_finding,
    median_over,
    step_growth_s,
    transfers,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def detect(run: Run, params: Params) -> Diagnosis:
    """Say whether nearly all groups transfer more slowly than before."""
    seen = transfers(run)
    with_past_G = seen.known_G(seen.history_AG)
    # What stays on a host does not pass the fabric.
    leaving_G = with_past_G & seen.crosses_hosts_G
    judged = np.flatnonzero(leaving_G if leaving_G.any() else with_past_G)
    if not judged.size:
        return abstain_run(
            run,
            params,
            "missing_data",
            "transfers of 0.1 ms or more whose ends are known on all members",
        )
    level_AG = seen.history_AG[:, judged]
    floor, bar_G = log(params["ratio"]), seen.history_bar_G[judged]
    # One group's siblings that are not slow make it a link's fault, which slow_link names.
    over_A = _wide(level_AG, np.maximum(floor, bar_G), params, window=20)
    over_A |= _wide(level_AG, np.maximum(floor, SUDDEN * bar_G), params, window=5)
    # Step by step single pairs of ranks may hide the transfer: the groups' own verdicts count too.
    slow_AG = lasting_or_sudden(level_AG, floor, bar_G)
    small = not over_A.any() or slow_AG.any(axis=0).mean() < params["wide"]
    if small:
        slow_AG = _a_little_slower(run, params, level_AG)
        over_A = np.asarray(slow_AG.any(axis=1))
        if not over_A.any():
            return Diagnosis()
    ratio_G = np.exp(median_over(np.where(slow_AG, level_AG, np.nan), axis=0))
    ratio = float(median_over(ratio_G, axis=0))
    excess_s = float(np.max(seen.usual_s_G[judged] * (np.nan_to_num(ratio_G, nan=1.0) - 1)))
    step_s = float(median_over(median_over(run.columns["step_s"][over_A], axis=1), axis=0))
    growth_s = step_growth_s(run, over_A)
    lost_s = excess_s if growth_s is None else max(growth_s, 0.0)
    members = [set(seen.members_G[g].tolist()) for g in judged.tolist()]
    through = [{run.hosts_R[rank] for rank in ranks} - {""} for ranks in members]
    single = bool(set.intersection(*members) or (len(through) and set.intersection(*through)))
    doubt = (
        " They all share a rank or host, so one slow link would look the same." if single else ""
    )
    what = "All transfers between hosts" if leaving_G.any() else "All transfers"
    # Inside a host and without a GPU they are copies by cores that others use too: no link is in it.
    copies = not leaving_G.any() and not run.has_gpu_R.any()
    finding = make_run_finding(
        run,
        params,
        cause="comm_regression",
        ranks=(),
        over_A=over_A,
        severity=(
            None if small or copies else params.severity(slowdown=ratio, cost=lost_s / step_s)
        )
        or "info",
        slowdown=ratio,
        lost_s=lost_s,
        summary=f"{what} take {ratio:.2f} times as long as earlier in this run.{doubt}",
        evidence={
            "pattern": "all ranks",
            "transfer_ratio": round(ratio, 3),
            "slow_groups": int(slow_AG.any(axis=0).sum()),
            "groups_judged": int(judged.size),
            "may_be_one_link": single,
        },
    )
    return Diagnosis(findings=(finding,))


def _a_little_slower(run: Run, params: Params, level_AG: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Steps [A, G] since the middle group rose, by little or for a few steps only; all of them with it."""
    nothing = np.zeros(level_AG.shape, dtype=bool)
    if not run.has_gpu_R.all():
        # Without one, transfers are copies by cores that others use too.
        return nothing
    middle = level_shift(median_over(level_AG, axis=1)[:, None])
    size, z = float(middle.size_G[0]), float(middle.z_G[0])
    small = middle.after_G[0] >= params["small_steps"]
    floor = log(params["small"] if small else params["ratio"])
    if not (z >= middle.beyond_chance() and size >= floor):
        return nothing
    later_A = np.arange(level_AG.shape[0]) >= middle.start_G[0]
    rose_G = median_over(level_AG[later_A], axis=0) - median_over(level_AG[~later_A], axis=0)
    with_it_G = np.nan_to_num(rose_G) >= size / 2
    if with_it_G.mean() < params["wide"]:
        return nothing
    return np.asarray(middle.over_AG & with_it_G)


def _wide(
    level_AG: NDArray[np.float64], bar_G: NDArray[np.float64], params: Params, *, window: int
) -> NDArray[np.bool_]:
    """Steps [A] of a lasting time in which nearly all groups are over."""
    known_AG = ~np.isnan(level_AG)
    over_AG = np.nan_to_num(level_AG) >= bar_G
    share_A = over_AG.sum(axis=1) / np.maximum(known_AG.sum(axis=1), 1)
    return lasting(share_A >= params["wide"], np.asarray(known_AG.any(axis=1)), window=window)
