"""Whether all transfers became slower together.

Shape legend: A = all steps, G = link sets (groups, and pairs of ranks).
"""

from __future__ import annotations

from math import log

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Params,
    Run,
    abstain_run,
    lasting,
    make_run_finding,
    median_over,
    step_growth_s,
    transfers,
)


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
    bar_G = np.maximum(log(params["ratio"]), seen.history_bar_G[judged])
    known_AG = ~np.isnan(level_AG)
    over_AG = np.nan_to_num(level_AG) >= bar_G
    known_A = np.asarray(known_AG.any(axis=1))
    share_A = over_AG.sum(axis=1) / np.maximum(known_AG.sum(axis=1), 1)
    # One group's siblings that are not slow make it a link's fault, which slow_link names.
    over_A = lasting(share_A >= params["wide"], known_A)
    # Step by step single pairs of ranks may hide the transfer: the groups' own verdicts count too.
    slow_AG = lasting(over_AG, known_AG)
    if not over_A.any() or slow_AG.any(axis=0).mean() < params["wide"]:
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
    finding = make_run_finding(
        run,
        params,
        cause="comm_regression",
        ranks=(),
        over_A=over_A,
        severity=params.severity(slowdown=ratio, cost=lost_s / step_s) or "info",
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
