"""Which rank, host or group the slow transfers go through.

Shape legend: A = all steps, G = link sets (groups, and pairs of ranks).
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Finding,
    Params,
    Run,
    abstain_run,
    join_numbers,
    lasting_or_sudden,
    level_shift,
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    make_run_finding,
    median_over,
    name_run_ranks,
    spread_of_faster_half,
    step_growth_s,
    step_scatter,
    transfers,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.api import Transfers


class _Place(NamedTuple):
    """What explains some slow sets."""

    ranks: tuple[int, ...]
    sets: frozenset[int]
    host: str = ""


def detect(run: Run, params: Params) -> Diagnosis:
    """Name the smallest places that explain the slow transfers."""
    seen = transfers(run)
    compared_G = seen.known_G(seen.sibling_AG)
    with_past_G = seen.known_G(seen.history_AG)
    if not (compared_G | with_past_G).any():
        return abstain_run(
            run,
            params,
            "missing_data",
            "transfers of 0.1 ms or more whose ends are known on all members",
        )
    floor = log(params["ratio"])
    beside_AG = lasting_or_sudden(seen.sibling_AG, floor, seen.sibling_bar_G)
    before_AG = lasting_or_sudden(seen.history_AG, floor, seen.history_bar_G)
    # Without siblings there is only the past, and where all are slower than in it, no link is.
    alone_G = with_past_G & ~compared_G
    past_slow_G = np.asarray(before_AG.any(axis=0))
    if past_slow_G[with_past_G].mean() >= params["wide"]:
        past_slow_G[:] = False
    slow_G: NDArray[np.bool_] = beside_AG.any(axis=0) | (past_slow_G & alone_G)
    shows_AG = np.where(compared_G, beside_AG, before_AG)
    level_AG = np.where(compared_G, seen.sibling_AG, seen.history_AG)
    if not slow_G.any() and not compared_G.any():
        return abstain_run(
            run, params, "no_siblings", "a second group that transfers the same, to compare with"
        )
    # A set that has no siblings and did not change may have been slow from the start.
    judged_G = compared_G | slow_G
    likely_G = slow_G
    small = not slow_G.any()
    if small:
        slow_G, likely_G, shows_AG = _a_little_slower(run, params, seen)
    return Diagnosis(
        findings=tuple(
            _finding(run, params, seen, place, shows_AG, level_AG, small=small)
            for place in _places(run, params, seen, slow_G, likely_G, judged_G)
        )
    )


def _a_little_slower(
    run: Run, params: Params, seen: Transfers
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Sets that are surely slower than their siblings, by little or for a few steps only.

    Returns:
        Sets that are beyond chance [G]; those and sets that are likely to have changed with them [G];
        steps that show it [A, G].
    """
    nothing = np.zeros(seen.sibling_AG.shape[1], dtype=bool)
    if not run.has_gpu_R.all():
        # Without one, transfers are copies by cores that others use too.
        return nothing, nothing, np.zeros(seen.sibling_AG.shape, dtype=bool)
    shift = level_shift(seen.sibling_AG)
    later_AG = np.arange(seen.sibling_AG.shape[0])[:, None] >= shift.start_G
    # Slower than before too, or it is the siblings that became faster.
    own_G = median_over(np.where(later_AG, seen.history_AG, np.nan), axis=0)
    own_G -= median_over(np.where(later_AG, np.nan, seen.history_AG), axis=0)
    changed_G = np.nan_to_num(own_G) >= shift.size_G / 2
    floor_G = np.log(
        np.where(shift.after_G >= params["small_steps"], params["small"], params["ratio"])
    )
    sure_G = changed_G & (shift.z_G >= shift.beyond_chance()) & (shift.size_G >= floor_G)
    if sure_G.any():
        since = np.median(shift.start_G[sure_G])
        together_G = np.abs(shift.start_G - since) <= params["small_together"]
        likely_G = changed_G & together_G & (shift.z_G >= params["small_likely"])
        likely_G &= shift.size_G >= np.median(shift.size_G[sure_G]) / 2
        return sure_G, sure_G | likely_G, shift.over_AG
    always_G, likely_G = _slow_from_the_start(params, seen)
    shows_AG = np.nan_to_num(seen.sibling_AG) >= log(params["small"]) / 2
    return always_G, likely_G, likely_G & shows_AG


def _slow_from_the_start(
    params: Params, seen: Transfers
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Sets [G] that stand out from siblings which differ among each other by much less.

    Returns:
        Those, and those with others that are slower than their fastest siblings by as much.
    """
    level_G = median_over(seen.sibling_AG, axis=0)
    kinds: dict[tuple[str, int, int], list[int]] = {}
    for g in np.flatnonzero(~np.isnan(level_G)).tolist():
        kind = (seen.label_G[g], int(seen.members_G[g].size), int(seen.hosts_G[g]))
        kinds.setdefault(kind, []).append(g)
    out_G = np.zeros(level_G.size, dtype=bool)
    noise_G = np.full(level_G.size, np.inf)
    for alike in kinds.values():
        part_AG = seen.sibling_AG[:, alike]
        level = level_G[alike]
        known = max(int(np.median(np.count_nonzero(~np.isnan(part_AG), axis=0))), 1)
        noise = 1.25 * step_scatter(part_AG) / np.sqrt(known)
        noise_G[alike] = noise
        if len(alike) < params["small_siblings"]:
            continue
        spread = max(noise, float(spread_of_faster_half(level)))
        luck = luck_of_slowest(len(alike)) + luck_of_fastest_quarter(len(alike))
        out = level - lowest_mean(level, axis=0) >= max(log(params["small"]), luck * spread)
        # Where many are, the fabric is built so.
        if out.mean() <= params["small_share"]:
            out_G[np.array(alike)[out]] = True
    if not out_G.any():
        return out_G, out_G
    as_much = float(np.median(level_G[out_G])) / 2
    likely_G = np.nan_to_num(level_G) >= np.maximum(as_much, params["small_likely"] * noise_G)
    return out_G, out_G | likely_G


def _places(
    run: Run,
    params: Params,
    seen: Transfers,
    slow_G: NDArray[np.bool_],
    likely_G: NDArray[np.bool_],
    judged_G: NDArray[np.bool_],
) -> list[_Place]:
    """Cover the slow sets, the place that explains most of them first; likely ones count for it."""
    if not slow_G.any():
        return []
    of_rank: dict[int, list[int]] = {}
    of_host: dict[str, list[int]] = {}
    for g in np.flatnonzero(judged_G).tolist():
        for rank in seen.members_G[g].tolist():
            of_rank.setdefault(rank, []).append(g)
        for host in {run.hosts_R[rank] for rank in seen.members_G[g].tolist()} - {""}:
            of_host.setdefault(host, []).append(g)

    likely = frozenset(np.flatnonzero(likely_G).tolist())
    leaves = frozenset(np.flatnonzero(seen.crosses_hosts_G).tolist())

    def explains(sets: list[int]) -> frozenset[int]:
        # What stays on a host need not pass the link that is slow, but may.
        leaving = leaves.intersection(sets) or frozenset(sets)
        enough = len(leaving & likely) / len(leaving) >= params["explained"]
        return likely.intersection(sets) if enough else frozenset()

    ranks = {rank: explains(sets) for rank, sets in of_rank.items()}
    # A job on one host has no link between hosts.
    hosts = {host: explains(sets) for host, sets in of_host.items() if len(of_host) > 1}
    left = set(np.flatnonzero(slow_G).tolist())
    places: list[_Place] = []
    while left:
        best_rank = max((len(sets & left) for sets in ranks.values()), default=0)
        best_host = max((len(sets & left) for sets in hosts.values()), default=0)
        alike = [h for h, sets in hosts.items() if len(sets & left) == best_host]
        if best_host > best_rank and len(alike) == 1:
            mine = tuple(r for r, host in enumerate(run.hosts_R) if host == alike[0])
            place = _Place(ranks=mine, host=alike[0], sets=hosts[alike[0]])
        elif best_rank:
            # Ranks that explain the same sets cannot be told apart; other ties are other faults.
            tied = [rank for rank, sets in ranks.items() if len(sets & left) == best_rank]
            sets = ranks[tied[0]] & left
            same = tuple(sorted(rank for rank in tied if ranks[rank] & left == sets))
            place = _Place(ranks=same, sets=ranks[tied[0]])
        else:
            g = min(left, key=lambda g: seen.members_G[g].size)
            place = _Place(ranks=tuple(seen.members_G[g].tolist()), sets=frozenset((g,)))
        places.append(place)
        left -= place.sets
    return places


def _finding(
    run: Run,
    params: Params,
    seen: Transfers,
    place: _Place,
    shows_AG: NDArray[np.bool_],
    level_AG: NDArray[np.float64],
    *,
    small: bool,
) -> Finding:
    sets = sorted(place.sets)
    shows = shows_AG[:, sets]
    over_A = shows.sum(axis=1) * 2 >= shows.any(axis=0).sum()
    if not over_A.any():
        over_A = shows.any(axis=1)
    ratio_G = np.exp(median_over(np.where(shows, level_AG[:, sets], np.nan), axis=0))
    ratio = float(median_over(ratio_G, axis=0))
    usual_s = seen.usual_s_G[sets]
    worst = sets[int(np.argmax(usual_s * (ratio_G - 1)))]
    # One rank's groups transfer one after another at worst; pairs of a host do so side by side.
    excess_s = max(
        sum(
            float(usual_s[k] * (ratio_G[k] - 1))
            for k, g in enumerate(sets)
            if rank in seen.members_G[g]
        )
        for rank in place.ranks
    )
    step_s = float(median_over(median_over(run.columns["step_s"][over_A], axis=1), axis=0))
    growth_s = step_growth_s(run, over_A)
    lost_s = excess_s if growth_s is None else min(max(growth_s, 0.0), excess_s)
    share = lost_s / step_s
    if growth_s is None:
        # How much of it is hidden is not known: no reason to wake somebody up.
        share = min(share, params["unsure_share"])
    flat = growth_s is not None and lost_s < params["hidden_share"] * step_s
    keys = tuple(seen.key_G[g] for g in sets if seen.key_G[g])
    if place.host:
        where = f"through host {place.host}"
    elif len(place.ranks) == 1:
        where = f"through {name_run_ranks(run, place.ranks).replace('Rank', 'rank', 1)}"
    else:
        numbers = join_numbers(sorted(int(run.ranks_R[rank]) for rank in place.ranks))
        where = f"among ranks {numbers}, where the link cannot be told more closely,"
    kinds = ", ".join(sorted({seen.label_G[g] for g in sets}))
    than = "the same elsewhere" if np.isfinite(seen.sibling_AG[:, worst]).any() else "before"
    if flat:
        cost = " Step time is flat: the transfers overlap with compute, and cost once they no longer fit."
    elif growth_s is None:
        cost = f" It costs at most {excess_s * 1e3:.1f} ms of a step of {step_s * 1e3:.0f} ms."
    else:
        cost = f" A step takes {lost_s * 1e3:.1f} ms longer for it."
    return make_run_finding(
        run,
        params,
        cause="slow_link",
        ranks=place.ranks,
        over_A=over_A,
        severity=(None if small else params.severity(slowdown=ratio, cost=0 if flat else share))
        or "info",
        slowdown=ratio,
        lost_s=lost_s,
        summary=f"Transfers {where} take {ratio:.2f} times as long as {than} ({kinds}).{cost}",
        groups=keys,
        evidence={
            "pattern": "lasting",
            "transfer_ratio": round(ratio, 3),
            "transfer_s": round(float(seen.usual_s_G[worst]) * ratio, 6),
            "reference_transfer_s": round(float(seen.usual_s_G[worst]), 6),
            "worst_group": seen.label_G[worst],
            "worst_group_ranks": [int(run.ranks_R[rank]) for rank in seen.members_G[worst]][:64],
            "slow_groups": len(sets),
            "place": "host" if place.host else "rank" if len(place.ranks) == 1 else "group",
            "step_time_flat": flat,
        },
    )
