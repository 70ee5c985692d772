"""A step replayed from what was measured, so that one can ask what it would have been otherwise.

The graph has two kinds of nodes. A *mark* of a rank (it comes to a collective, begins a pass, ends
the step) happens its own time after the mark before it and after the ends of the operations that
it waits for. A *lane* (a collective of a group, a transfer between two ranks) ends its transfer
time after the last member came to it and after the lane before it on the same group. Times are
sums along the longest path, so that all steps and all nodes of one level are worked out at once.

Own time includes what lay between the steps. Each step is replayed by itself, after one like it.

Shape legend: N = nodes, ascending by level, S = steps, E = edges, J = marks of a rank, R = ranks,
G = ranks of one kind, L = lanes.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.lines import lay_lines, read_pairs
from argus_otel.detect.statistics import median_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from argus_otel.detect.lines import Line, Pairs
    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_LARGEST: Final = 60_000_000
"""Numbers in one array of weights (nodes times steps), half a gigabyte; steps beyond are left out."""
_ENDS_KNOWN: Final = 0.8
"""Share of operations whose end is known, below which waiting cannot be told from work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Ranks that do the same things in the same order."""

    ranks_G: Ints
    """Rank indices."""
    nodes_GJ: Ints
    label_J: Ints
    """Whose compute ends at each mark: pass number * 2 + backward, or ``lines.OTHER``."""
    lanes_GK: Ints
    """Lanes of each rank's operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The usual step of a run: who waits for what, and how long everything took in each step."""

    steps_S: Ints
    """Indices of the steps among all."""
    weight_NS: Floats
    """Measured seconds: own time of marks, transfer time of lanes."""
    rank_N: Ints
    """Rank index of a mark; -1 for lanes."""
    lane_N: Ints
    """Lane; -1 for marks."""
    node_L: Ints
    """Node of each lane; -1 where it is not in the usual step."""
    kinds: tuple[Kind, ...]
    before_E: Ints
    """Nodes that must be over, node after node."""
    first_N: Ints
    """Where each node's part of ``before_E`` begins."""
    levels: Ints
    """First node of each level, and the number of nodes; the first level waits for nothing."""
    ends_R: Ints
    """Node of the end of the step of each rank that is in the graph."""
    begins_R: Ints
    """Node of the first mark of each of those ranks."""
    measured_S: Floats
    """Seconds of each step as its ranks measured it, from step to step: median over ranks."""

    @property
    def lane_nodes(self) -> Ints:
        """Nodes that are lanes."""
        return np.flatnonzero(self.lane_N >= 0)


def build_graph(run: Run, ordinals: Ints, *, gaps: bool | None = None) -> Graph | None:
    """The dependency graph of some steps.

    Args:
        run: From its builder.
        ordinals: Steps wanted; those that are not kept in ``run.operations.moments`` are left out,
            as are some where the graph would grow too large.
        gaps: Whether own time outside the passes of micro-batches counts (input, the host's work
            between passes). By default where ranks say how long they were busy: otherwise it
            cannot be told from waiting for something that nobody recorded.

    Returns:
        None where there is nothing to replay: no collectives, no step times, ends that are not
        known, or an order that contradicts itself.

    Cost:
        On one core 4 s for 512 ranks in 8 stages with 16 micro-batches and 30 steps (98,000 nodes), 1 s
        for 12,960 ranks and 16 steps (469,000 nodes); a replay of those takes 0.1 s.
    """
    # A flight recorder knows operations and no steps.
    kept = np.intersect1d(ordinals, run.operations.moments.ordinals())
    kept = np.intersect1d(kept, run.ordinals_A)
    steps_S = np.searchsorted(run.ordinals_A, kept)
    known = np.count_nonzero(~np.isnan(run.columns["step_s"][steps_S]), axis=1) > 0
    kept = _as_many_as_fit(run, kept[known])
    steps_S = np.searchsorted(run.ordinals_A, kept)
    pairs = read_pairs(run, kept)
    if pairs is None or _ends_known(pairs) < _ENDS_KNOWN:
        return None
    if gaps is None:
        busy = np.count_nonzero(~np.isnan(run.columns["busy_s"][steps_S]))
        gaps = busy * 2 > run.present_AR[steps_S].sum()
    lines = lay_lines(run, pairs, steps_S, gaps=gaps)
    before = _lane_before(run, pairs)
    return _join(run, pairs, lines, steps_S, before) or _join(
        run, pairs, lines, steps_S, np.full(run.operations.lanes, -1)
    )


def replay(graph: Graph, weight_NS: Floats | None = None, begin_RS: Floats | None = None) -> Floats:
    """When every node is over, in seconds since the start of its step [N, S].

    Args:
        graph: Who waits for what.
        weight_NS: What everything takes, of some steps or all; as measured by default.
        begin_RS: When each rank begins the step, in the order of ``graph.ends_R``; all at 0 by
            default.
    """
    weight = graph.weight_NS if weight_NS is None else weight_NS
    over = np.empty_like(weight)
    bounds = graph.levels.tolist()
    over[: bounds[1]] = weight[: bounds[1]]
    if begin_RS is not None:
        # A first mark waits for nothing: what a rank waits for, it has begun before.
        over[graph.begins_R] += begin_RS
    for low, high in pairwise(bounds[1:]):
        begin, end = graph.first_N[low], graph.first_N[high]
        before = over[graph.before_E[begin:end]]
        latest = np.maximum.reduceat(before, graph.first_N[low:high] - begin, axis=0)
        over[low:high] = latest + weight[low:high]
    return over


def step_times(graph: Graph, weight_NS: Floats | None = None) -> Floats:
    """Seconds that each step takes [S], from all ranks' start to the last rank's end."""
    longest: Floats = replay(graph, weight_NS)[graph.ends_R].max(axis=0)
    return longest


def periods(graph: Graph, weight_NS: Floats | None = None, over_NS: Floats | None = None) -> Floats:
    """Seconds from one step to the next [S], were every step like this one.

    Ranks need not end a step together: whoever is done goes on, so that what is late at the end of
    one rank's step may be made good while others fill the pipeline of the next. It is the step that
    follows that shows it.

    Args:
        graph: Who waits for what.
        weight_NS: What everything takes, of some steps or all; as measured by default.
        over_NS: The ``replay`` of that, where it is at hand.
    """
    first = (replay(graph, weight_NS) if over_NS is None else over_NS)[graph.ends_R]
    second = replay(graph, weight_NS, first)[graph.ends_R]
    period: Floats = second.max(axis=0) - first.max(axis=0)
    return period


def critical_time(
    graph: Graph, weight_NS: Floats, over_NS: Floats | None = None
) -> tuple[Floats, Floats]:
    """What the longest path of each step is made of.

    Args:
        graph: Who waits for what.
        weight_NS: What everything takes, of some steps or all.
        over_NS: The ``replay`` of that, where it is at hand.

    Returns:
        Seconds of own time by rank [S, R] and of transfers by lane [S, L], along the path that
        nobody could be late on without the step being late.
    """
    over = replay(graph, weight_NS) if over_NS is None else over_NS
    steps = over.shape[1]
    own = np.zeros((steps, int(graph.rank_N.max()) + 1))
    moved = np.zeros((steps, graph.node_L.size))
    for s in range(steps):
        node = int(graph.ends_R[np.argmax(over[graph.ends_R, s])])
        while node >= 0:
            if graph.rank_N[node] >= 0:
                own[s, graph.rank_N[node]] += weight_NS[node, s]
            else:
                moved[s, graph.lane_N[node]] += weight_NS[node, s]
            before = graph.before_E[graph.first_N[node] : graph.first_N[node + 1]]
            node = int(before[np.argmax(over[before, s])]) if before.size else -1
    return own, moved


# -- building ---------------------------------------------------------------------------------


def _as_many_as_fit(run: Run, kept: Ints) -> Ints:
    moments = run.operations.moments
    if not kept.size:
        return kept
    most = max(moments.arrival_s[step].size for step in kept.tolist())
    if run.passes is not None:
        most += 2 * run.ranks_R.size * run.passes.chunk_M.size * 2
    fit = max(1, int(_LARGEST // max(2 * most, 1)))
    if kept.size <= fit:
        return kept
    some: Ints = kept[np.unique(np.linspace(0, kept.size - 1, fit).astype(int))]
    return some


def _ends_known(pairs: Pairs) -> float:
    begun = ~np.isnan(pairs.arrival_SC)
    return float((~np.isnan(pairs.duration_SC) & begun).sum() / max(begun.sum(), 1))


def _lane_before(run: Run, pairs: Pairs) -> Ints:
    """The lane that each lane follows on the same group or between the same ranks [L]; -1: none.

    Operations of one communicator run one after another, in the order in which they are begun.
    """
    operations = run.operations
    before = np.full(operations.lanes, -1, dtype=np.int64)
    usual_C = median_over(pairs.arrival_SC, axis=0)
    count = np.bincount(pairs.lane_C, minlength=operations.lanes)
    total = np.bincount(pairs.lane_C, weights=np.nan_to_num(usual_C), minlength=operations.lanes)
    here = np.flatnonzero(count)
    mean = total[here] / count[here]
    world = run.ranks_R.size
    channel = np.where(
        operations.group_L[here] >= 0,
        operations.group_L[here],
        len(run.groups) + operations.source_L[here] * world + operations.target_L[here],
    )
    order = np.lexsort((mean, channel))
    follows = channel[order][1:] == channel[order][:-1]
    before[here[order][1:][follows]] = here[order][:-1][follows]
    return before


def _transfers(run: Run, pairs: Pairs, before_L: Ints) -> tuple[Ints, Floats]:
    """Lanes of the usual step, and the transfer time of each [L', S].

    Whoever came last waited least: its time in the operation is the transfer. What is not known
    of a lane in a step is what it usually takes.
    """
    lanes_total = run.operations.lanes
    code_C = pairs.rank_C * lanes_total + pairs.lane_C
    before_C = before_L[pairs.lane_C]
    wanted = pairs.rank_C * lanes_total + before_C
    # Pairs ascend by rank and lane, as they were laid out.
    place = np.minimum(np.searchsorted(code_C, wanted), code_C.size - 1)
    has = (before_C >= 0) & (code_C[place] == wanted)
    end_SC = pairs.arrival_SC + pairs.duration_SC
    busy_SC = np.where(has, end_SC[:, place], -np.inf)
    took_SC = np.maximum(end_SC - np.fmax(pairs.arrival_SC, busy_SC), 0.0)
    order = np.argsort(pairs.lane_C, kind="stable")
    lanes, first, members = np.unique(pairs.lane_C[order], return_index=True, return_counts=True)
    ordered = took_SC[:, order]
    known = np.add.reduceat(~np.isnan(ordered), first, axis=1)
    least = np.minimum.reduceat(np.where(np.isnan(ordered), np.inf, ordered), first, axis=1)
    least = np.where(known == members, least, np.nan)
    usual = median_over(least, axis=0)
    usual = np.where(np.isnan(usual), 0.0, usual)
    return lanes, np.where(np.isnan(least), usual, least).T


def _join(
    run: Run, pairs: Pairs, lines: Sequence[Line], steps_S: Ints, before_L: Ints
) -> Graph | None:
    lanes, transfer_LS = _transfers(run, pairs, before_L)
    sizes = [line.ranks_N.size * line.label_J.size for line in lines]
    marks = sum(sizes)
    nodes = marks + lanes.size
    node_L = np.full(run.operations.lanes, -1, dtype=np.int64)
    node_L[lanes] = marks + np.arange(lanes.size)
    weight = np.empty((nodes, steps_S.size))
    weight[marks:] = transfer_LS
    rank_N = np.full(nodes, -1, dtype=np.int64)
    earlier: list[Ints] = []
    afters: list[Ints] = []
    laid: list[Ints] = []
    offset = 0
    for line, size in zip(lines, sizes, strict=True):
        ids = offset + np.arange(size).reshape(line.ranks_N.size, -1)
        weight[offset : offset + size].reshape(*ids.shape, -1)[:] = line.own_SJN.transpose(2, 1, 0)
        rank_N[ids] = line.ranks_N[:, None]
        lane_node = node_L[pairs.lane_C[line.pair_NK]]
        gated = line.gate_K >= 0
        earlier += [ids[:, :-1], ids[:, line.at_K], lane_node[:, gated]]
        afters += [ids[:, 1:], lane_node, ids[:, line.gate_K[gated]]]
        laid.append(ids)
        offset += size
    follows = lanes[before_L[lanes] >= 0]
    earlier.append(node_L[before_L[follows]])
    afters.append(node_L[follows])
    before = np.concatenate([part.reshape(-1) for part in earlier])
    after = np.concatenate([part.reshape(-1) for part in afters])
    level_N = _levels(before, after, nodes)
    if level_N is None:
        return None
    order = np.argsort(level_N, kind="stable")
    new = np.empty(nodes, dtype=np.int64)
    new[order] = np.arange(nodes)
    by_after = np.argsort(new[after], kind="stable")
    count = np.bincount(new[after], minlength=nodes)
    step_s = run.columns["step_s"][steps_S] + np.nan_to_num(run.columns["between_s"][steps_S])
    lane_N = np.full(nodes, -1, dtype=np.int64)
    lane_N[marks:] = lanes
    node_L[lanes] = new[marks:]
    kinds = tuple(
        Kind(
            ranks_G=line.ranks_N,
            nodes_GJ=new[ids],
            label_J=line.label_J,
            lanes_GK=pairs.lane_C[line.pair_NK],
        )
        for line, ids in zip(lines, laid, strict=True)
    )
    return Graph(
        steps_S=steps_S,
        weight_NS=weight[order],
        rank_N=rank_N[order],
        lane_N=lane_N[order],
        node_L=node_L,
        kinds=kinds,
        before_E=new[before[by_after]],
        first_N=np.concatenate([[0], np.cumsum(count)]),
        levels=np.concatenate([[0], np.cumsum(np.bincount(level_N))]),
        ends_R=np.concatenate([kind.nodes_GJ[:, -1] for kind in kinds]),
        begins_R=np.concatenate([kind.nodes_GJ[:, 0] for kind in kinds]),
        measured_S=median_over(step_s, axis=1),
    )


def _levels(before: Ints, after: Ints, nodes: int) -> Ints | None:
    """Level of each node, above all that it waits for; None where they wait in a circle."""
    order = np.argsort(before, kind="stable")
    after_E = after[order]
    first = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=nodes))])
    waiting = np.bincount(after, minlength=nodes)
    level = np.zeros(nodes, dtype=np.int64)
    frontier = np.flatnonzero(waiting == 0)
    done, depth = frontier.size, 0
    while frontier.size:
        depth += 1
        count = first[frontier + 1] - first[frontier]
        skip = np.repeat(first[frontier] - np.concatenate([[0], np.cumsum(count)[:-1]]), count)
        reached, times = np.unique(after_E[np.arange(skip.size) + skip], return_counts=True)
        waiting[reached] -= times
        frontier = reached[waiting[reached] == 0]
        level[frontier] = depth
        done += frontier.size
    return level if done == nodes else None
