"""How long each group of ranks transfers, against groups that do the same and against its own past.

A transfer begins when the last member has arrived, so that no straggler is in it, and needs no
clocks. A *link set* is what a transfer passes through: the members of a group, or a pair of ranks.

Shape legend: A = all steps, G = link sets, L = lanes (see ``operations``), n = siblings.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.frame import PEERS_PRESENT, WARM_UP_STEPS
from argus_otel.detect.statistics import (
    MAD_TO_SIGMA,
    MEDIAN_TO_MEAN_ERROR,
    levels,
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    median_over,
    scatter,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

HISTORY_STEPS: Final = 10
"""What was usual is the best median of so many steps in a row."""

_WINDOW: Final = 20
"""Steps whose median is judged (DESIGN, detection)."""

_LEAST_S: Final = 100e-6
"""A shorter transfer is latency and launch jitter: its ratios say nothing of a link."""

_AROUND: Final = 5
"""Steps around one in which a rank that is silent is told from a row that was lost."""

_ALREADY_THERE_S: Final = 2e-6
"""A receiver that waited less than the digest's resolution found its data there."""

_ALIKE: Final = 0.02
"""Sender and receiver that differ by less came at the same time."""

_BLOCK: Final = 5
_LEAST_BLOCKS: Final = 5
"""Steps in a row whose median shows a drift, and how many such medians say how large it is."""

_LANES_AT_ONCE: Final = 500


PAIR: Final = "p2p"
"""Label of a pair of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Log ratios of transfer times, by link set. NaN where nothing can be said."""

    members_G: tuple[Ints, ...]
    """Rank indices."""
    label_G: tuple[str, ...]
    """The group's description, or ``p2p``."""
    key_G: tuple[str, ...]
    """The group's key in hex; empty for a pair of ranks."""
    hosts_G: Ints
    """Hosts that it spans; 0 where those are not known."""
    usual_s_G: Floats
    """Seconds of healthy transfer in a step, all lanes together."""
    sibling_AG: Floats
    """Log ratio to the fastest quarter of the sets that do the same."""
    sibling_bar_G: Floats
    """Log ratio that the median of the unluckiest healthy set stays under."""
    history_AG: Floats
    """Log ratio to the best that the set itself has shown before."""
    history_bar_G: Floats

    @property
    def crosses_hosts_G(self) -> Bools:  # noqa: N802 - shape suffix
        """Sets that leave a host, or may."""
        crosses: Bools = self.hosts_G != 1
        return crosses

    @staticmethod
    def known_G(log_AG: Floats) -> Bools:  # noqa: N802 - shape suffix
        """Sets of which anything is known."""
        known: Bools = np.asarray((~np.isnan(log_AG)).any(axis=0))
        return known


@dataclass(slots=True)
class _Lanes:
    """Lanes of which siblings can be looked for."""

    transfer_AL: Floats
    set_L: Ints
    kind_L: list[tuple[object, ...]]


def transfers(run: Run) -> Transfers:
    """Compare every group's transfers with those of its siblings and with its own history.

    Siblings are groups of the same description, size, operation, payload, and span of hosts.

    Cost:
        1 s for 12,960 ranks and 100 steps (55,000 lanes), once a run.
    """
    found: Transfers | None = run.cached.get("transfers")
    if found is None:
        found = run.cached["transfers"] = _compared(run)
    return found


def _compared(run: Run) -> Transfers:
    sets, lanes = _lanes_of(run)
    steps = run.ordinals_A.size
    log_AL = np.log(lanes.transfer_AL)
    log_AL[run.ordinals_A < WARM_UP_STEPS] = np.nan
    usual_L = np.exp(lowest_mean(log_AL, axis=0)) if steps else np.empty(0)
    log_AL[:, ~(usual_L >= _LEAST_S)] = np.nan
    sibling_AL, rest_AL, sibling_bar_L, sigma_L = _against_siblings(log_AL, lanes.kind_L)
    history_AL, history_sigma_L = _against_history(log_AL)
    # The best of several medians is a lucky one, and the window's own median errs too.
    luck = luck_of_slowest(max(len(sets), 2))
    window_error = MEDIAN_TO_MEAN_ERROR * luck / sqrt(_WINDOW)
    best_error = MEDIAN_TO_MEAN_ERROR * 3 / sqrt(HISTORY_STEPS)
    history_sigma_L = np.nan_to_num(np.fmax(sigma_L, history_sigma_L))
    count = len(sets)
    shape = (steps, count)
    out = Transfers(
        members_G=tuple(members for members, _, _, _ in sets),
        label_G=tuple(label for _, label, _, _ in sets),
        key_G=tuple(key for _, _, key, _ in sets),
        hosts_G=np.array([hosts for _, _, _, hosts in sets], dtype=np.int64),
        usual_s_G=np.bincount(lanes.set_L, np.nan_to_num(usual_L), count).astype(np.float64),
        sibling_AG=np.full(shape, np.nan),
        sibling_bar_G=np.zeros(count),
        history_AG=np.full(shape, np.nan),
        history_bar_G=np.zeros(count),
    )
    for sets_G, lanes_GL in _by_lanes(lanes.set_L):
        # Of a pair's two directions the one whose receiver stood ready shows more.
        is_pair = np.array([out.label_G[g] == PAIR for g in sets_G.tolist()])
        for middle, these in ((_largest, is_pair), (median_over, ~is_pair)):
            at, mine = sets_G[these], lanes_GL[these]
            if at.size:
                out.sibling_AG[:, at] = middle(sibling_AL[:, mine], axis=-1)
                out.history_AG[:, at] = middle(history_AL[:, mine], axis=-1)
        sibling_bar = np.nan_to_num(sibling_bar_L)[lanes_GL]
        sigma = history_sigma_L[lanes_GL]
        out.sibling_bar_G[sets_G] = sibling_bar.max(axis=1)
        out.history_bar_G[sets_G] = (window_error + best_error) * sigma.max(axis=1)
        if lanes_GL.shape[1] > 1:
            # A group is judged by the median of its lanes, which scatters as it does, and not as
            # the most restless lane. That the best was a lucky one is each lane's own affair.
            at, mine = sets_G[~is_pair], lanes_GL[~is_pair]
            bar, sigma_G = _of_medians(rest_AL, mine, lanes.kind_L)
            known = ~np.isnan(bar)
            out.sibling_bar_G[at[known]] = bar[known]
            jumps_G = _jumps(log_AL, mine)
            sigma_G = np.nan_to_num(np.fmax(sigma_G, jumps_G))
            best = best_error * median_over(sigma[~is_pair], axis=1)
            out.history_bar_G[at] = window_error * sigma_G + best
    return out


def _of_medians(
    rest_AL: Floats, lanes_GL: Ints, kind_L: list[tuple[object, ...]]
) -> tuple[Floats, Floats]:
    """Bar [n] and scatter [n] of medians over lanes; NaN without siblings that have the same."""
    alike: dict[tuple[tuple[object, ...], ...], list[int]] = {}
    for place, mine in enumerate(lanes_GL.tolist()):
        alike.setdefault(tuple(kind_L[lane] for lane in mine), []).append(place)
    bar, sigma = np.full(len(lanes_GL), np.nan), np.full(len(lanes_GL), np.nan)
    for places in alike.values():
        n = len(places)
        if n < 2:
            continue
        rest = median_over(rest_AL[:, lanes_GL[places]], axis=-1)
        if np.isnan(rest).all():
            continue
        sigma[places] = np.fmax(scatter(rest), _drift(rest))
        bar[places] = _sibling_luck(n) * sigma[places]
    return bar, sigma


def _drift(rest_An: Floats) -> float:
    """Scatter of one step, as the medians of some steps in a row have it; NaN where there are few.

    A busy host is busy for a while: where steps in a row are alike, a window's median scatters
    more than so many independent steps would make it. One change of level is one of many
    differences between neighbours, and does not count.
    """
    blocks = rest_An.shape[0] // _BLOCK
    if blocks < _LEAST_BLOCKS:
        return float("nan")
    part = rest_An[rest_An.shape[0] - blocks * _BLOCK :].reshape(blocks, _BLOCK, -1)
    jumps = np.abs(np.diff(median_over(part, axis=1), axis=0)) / sqrt(2)
    n = rest_An.shape[1]
    # As ``scatter`` does: the step's own level swallows a part where siblings are few.
    sigma = MAD_TO_SIGMA * float(median_over(jumps.reshape(-1), axis=0)) * sqrt(n / (n - 1))
    return sigma * sqrt(_BLOCK) / MEDIAN_TO_MEAN_ERROR


def _jumps(log_AL: Floats, lanes_GL: Ints) -> Floats:
    """Scatter from step to step [n] of medians over lanes."""
    part = log_AL[:, lanes_GL]
    middle = median_over(part - median_over(part, axis=0), axis=-1)
    return 1.4826 * median_over(np.abs(np.diff(middle, axis=0)) / sqrt(2), axis=0)


def _sibling_luck(n: int) -> float:
    """Standard deviations of one step that the median of a window of the unluckiest of n is off."""
    luck = luck_of_slowest(n) + luck_of_fastest_quarter(n)
    return luck * MEDIAN_TO_MEAN_ERROR / sqrt(_WINDOW)


def _by_lanes(set_L: Ints) -> Iterable[tuple[Ints, Ints]]:
    """Sets with equally many lanes [n], and the lanes of each [n, lanes]."""
    order = np.argsort(set_L, kind="stable")
    starts = np.flatnonzero(np.diff(set_L[order], prepend=-1))
    counts = np.diff(np.append(starts, order.size))
    for count in np.unique(counts).tolist():
        mine = starts[counts == count]
        yield set_L[order[mine]], order[mine[:, None] + np.arange(count)]


def _largest(values: Floats, axis: int) -> Floats:
    largest: Floats = np.fmax.reduce(values, axis=axis)
    return largest


def _lanes_of(run: Run) -> tuple[list[tuple[Ints, str, str, int]], _Lanes]:
    """Link sets (members, label, key, hosts), and the lanes on them."""
    operations = run.operations
    group_L = np.flatnonzero(operations.group_L >= 0)
    sizes = np.array([group.members.size for group in run.groups] or [0])
    size_L = sizes[operations.group_L[group_L]]
    # Of a member that is not seen nobody knows whether it came last.
    known = operations.members_AL.take(group_L, axis=1) >= np.maximum(PEERS_PRESENT * size_L, 2)
    used = np.unique(operations.group_L[group_L])
    gone_AR = _gone(~run.present_AR)
    if used.size:
        blind = [gone_AR[:, run.groups[g].members].any(axis=1) for g in used.tolist()]
        known &= ~np.stack(blind, axis=1)[:, np.searchsorted(used, operations.group_L[group_L])]
    spans = {g: _hosts(run, run.groups[g].members.tolist()) for g in used.tolist()}
    sets = [
        (run.groups[g].members, run.groups[g].description, f"{run.groups[g].key:016x}", spans[g])
        for g in used.tolist()
    ]
    transfer = operations.transfer_AL.take(group_L, axis=1).astype(np.float64)
    columns = [np.where(known & (transfer > 0), transfer, np.nan)]
    set_L = [np.searchsorted(used, operations.group_L[group_L])]
    kinds: list[tuple[object, ...]] = [
        (
            run.groups[g].description,
            int(sizes[g]),
            spans[g],
            operations.op_L[lane],
            operations.phase_L[lane],
            int(operations.payload_bytes_L[lane]),
            int(operations.nth_L[lane]),
        )
        for lane, g in zip(group_L.tolist(), operations.group_L[group_L].tolist(), strict=True)
    ]
    at: dict[tuple[int, int], tuple[int, int]] = {}
    for pairs, took, kind in _pairs(run):
        columns.append(took)
        links = [(min(pair), max(pair)) for pair in pairs]
        for link in links:
            if link not in at:
                at[link] = len(sets) + len(at), _hosts(run, link)
        set_L.append(np.array([at[link][0] for link in links]))
        kinds += [(*kind, at[link][1]) for link in links]
    ends = np.array(list(at), dtype=np.int64)
    sets += [(link, PAIR, "", hosts) for link, (_, hosts) in zip(ends, at.values(), strict=True)]
    lanes = _Lanes(
        transfer_AL=np.concatenate(columns, axis=1), set_L=np.concatenate(set_L), kind_L=kinds
    )
    return sets, lanes


def _gone(absent_AR: Bools) -> Bools:
    """Ranks [A, R] that are absent in more than one of the steps around: silent, and no lost row.

    Were it the last to come, the wait for it would pass for transfer.
    """
    half = _AROUND // 2
    total = np.cumsum(np.pad(absent_AR, ((half + 1, half), (0, 0))), axis=0, dtype=np.int32)
    gone: Bools = total[_AROUND:] - total[:-_AROUND] > 1
    return gone


def _pairs(
    run: Run,
) -> Iterable[tuple[list[tuple[int, int]], Floats, tuple[object, ...]]]:
    """Pairs of ranks with the longest transfer of each step, by payload and direction.

    Only those in which the receiver stood ready: where it comes late it waits for less than the
    transfer, or for nothing.
    """
    operations = run.operations
    direct = np.flatnonzero((operations.source_L >= 0) & (operations.members_AL.max(0) == 2))
    up = operations.target_L > operations.source_L
    for payload in np.unique(operations.payload_bytes_L[direct]).tolist():
        for rising in (True, False):
            mine = direct[(operations.payload_bytes_L[direct] == payload) & (up[direct] == rising)]
            if not mine.size:
                continue
            code = operations.source_L[mine] * run.ranks_R.size + operations.target_L[mine]
            order = np.argsort(code, kind="stable")
            starts = np.flatnonzero(np.append(True, np.diff(code[order]) != 0))
            at = mine[order]
            seen = operations.transfer_AL.take(at, axis=1).astype(np.float64)
            ready = operations.last_AL.take(at, axis=1) == operations.source_L[at]
            ready |= (
                operations.longest_AL.take(at, axis=1) - seen <= _ALREADY_THERE_S + _ALIKE * seen
            )
            ready &= seen > _ALREADY_THERE_S
            ready &= operations.members_AL.take(at, axis=1) == 2
            seen[~ready] = np.nan
            took = np.fmax.reduceat(seen, starts, axis=1)
            first = at[starts]
            ends = operations.source_L[first].tolist(), operations.target_L[first].tolist()
            yield list(zip(*ends, strict=True)), took, (PAIR, payload, rising)


def _hosts(run: Run, ranks: Sequence[int]) -> int:
    hosts = {run.hosts_R[rank] for rank in ranks}
    return 0 if "" in hosts else len(hosts)


def _against_siblings(
    log_AL: Floats, kind_L: list[tuple[object, ...]]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Log ratio [A, L] to the fastest quarter of each lane's siblings, its rest, bar [L], scatter [L].

    The rest [A, L] is what is left of a value without its lane's level and its step's.
    """
    ratio, rest_AL = np.full(log_AL.shape, np.nan), np.full(log_AL.shape, np.nan)
    bar, sigma = np.full(log_AL.shape[1], np.nan), np.full(log_AL.shape[1], np.nan)
    alike: dict[tuple[object, ...], list[int]] = {}
    for lane, kind in enumerate(kind_L):
        alike.setdefault(kind, []).append(lane)
    for members in alike.values():
        part = log_AL[:, members]
        n = len(members)
        if n < 2 or np.isnan(part).all():
            continue
        part[np.count_nonzero(~np.isnan(part), axis=1) < 2] = np.nan
        _, rest = levels(part)
        rest_AL[:, members] = rest
        sigma[members] = scatter(rest)
        above = part - lowest_mean(part, axis=1)[:, None]
        # In a single step somebody is always lucky; the reference is who is fastest as a rule.
        ratio[:, members] = above - lowest_mean(median_over(above, axis=0), axis=0)
        bar[members] = _sibling_luck(n) * sigma[members]
    return ratio, rest_AL, bar, sigma


def _against_history(log_AL: Floats) -> tuple[Floats, Floats]:
    """Log ratio [A, L] to the best median so far, and scatter from step to step [L]."""
    ratio = np.full(log_AL.shape, np.nan)
    if log_AL.shape[0] < HISTORY_STEPS or not log_AL.shape[1]:
        return ratio, np.full(log_AL.shape[1], np.nan)
    # Some lanes at a time: the windows of all would be ten times what they are made from.
    for first in range(0, log_AL.shape[1], _LANES_AT_ONCE):
        some = np.s_[:, first : first + _LANES_AT_ONCE]
        rows = np.lib.stride_tricks.sliding_window_view(log_AL[some], HISTORY_STEPS, axis=0)
        usual = median_over(rows, axis=-1)
        known = np.cumsum(np.pad(~np.isnan(log_AL[some]), ((1, 0), (0, 0))), axis=0, dtype=np.int32)
        usual[known[HISTORY_STEPS:] - known[:-HISTORY_STEPS] < HISTORY_STEPS - 2] = np.nan
        best = np.fmin.accumulate(usual, axis=0)
        ratio[HISTORY_STEPS - 1 :, first : first + _LANES_AT_ONCE] = (
            log_AL[HISTORY_STEPS - 1 :, first : first + _LANES_AT_ONCE] - best
        )
    # Neighbouring steps differ by their scatter alone, also where a level changes once.
    jump = np.abs(np.diff(log_AL, axis=0)) / sqrt(2)
    return ratio, 1.4826 * median_over(jump, axis=0)
