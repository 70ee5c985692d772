"""What the job would take without any straggling, and which part of it gives how much of that back.

In the *ideal* step every pass takes the mean of its direction over all ranks, stages, micro-batches
and steps, every other own time the mean of its place in the step, and every transfer the median of
its type. The slowdown is the replay of what was measured over the replay of the ideal. A part's share
is what is gained by making that part ideal and nothing else, over what making all ideal gains; it may
be above 1 (the rest gets in nobody's way then) or below 0 (a part that is faster than the mean).

Source:
    Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis (OSDI 2025,
    arXiv 2505.05713), equations 1, 2, 4 and 5: S, M_W and M_S.

Shape legend: N = nodes of a graph, S = its steps, R = ranks, P = passes * 2.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from argus_otel.detect.lines import OTHER
from argus_otel.detect.replay import build_graph, step_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from argus_otel.detect.replay import Graph
    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

SLOWEST_PERCENT: Final = 3
"""Of the workers, rounded up: what M_W heals (equation 5)."""

_STEPS: Final = 24
"""Steps that a table is made from, spread over the run."""

_MOST_WORKERS_ALONE: Final = 64
"""Up to so many workers are tried one by one where there are no two axes to find them by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What making a part of the job ideal gains."""

    label: str
    """For the reader: ``slowest 3 % of workers (rank 0)``, ``stage 3``, …"""
    ranks: tuple[int, ...]
    """Rank numbers that were healed; empty for a part that is not a set of ranks."""
    recovered_s: float
    """Seconds a step; negative where the job would be slower."""
    recovered_share: float
    """Of the lost time (original less ideal); NaN where nothing is lost."""
    step_share: float
    """Of the step: what is worth acting on, however little is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """A graph with what it takes as measured and at its ideal."""

    graph: Graph
    measured_NS: Floats
    ideal_NS: Floats
    original_s: float
    """Mean step of the replay of what was measured."""
    ideal_s: float

    @property
    def slowdown(self) -> float:
        """Original over ideal: S."""
        return self.original_s / self.ideal_s

    def heal(self, healed_N: Bools, label: str, ranks: Sequence[int] = ()) -> WhatIf:
        """What is gained with some nodes at their ideal."""
        weight = np.where(healed_N[:, None], self.ideal_NS, self.measured_NS)
        gained = self.original_s - float(step_times(self.graph, weight).mean())
        lost = self.original_s - self.ideal_s
        return WhatIf(
            label=label,
            ranks=tuple(ranks),
            recovered_s=gained,
            recovered_share=gained / lost if abs(lost) > 1e-9 else float("nan"),
            step_share=gained / self.original_s,
        )

    def slowdown_of(self, kept_N: Bools) -> float:
        """How much some nodes alone slow the ideal step down: S of a worker or stage (equation 4)."""
        weight = np.where(kept_N[:, None], self.measured_NS, self.ideal_NS)
        return float(step_times(self.graph, weight).mean()) / self.ideal_s


def find_ideal(run: Run, graph: Graph) -> Ideal:
    """The ideal of a graph.

    Args:
        run: Where the graph is from.
        graph: See ``replay.build_graph``.
    """
    measured = graph.weight_NS
    ideal = measured.copy()
    for kind in graph.kinds:
        other = np.flatnonzero(kind.label_J == OTHER)
        inside = kind.nodes_GJ[:, other[other < kind.label_J.size - 1]]
        ideal[inside] = measured[inside].mean(axis=(0, 2))[:, None]
    ideal[graph.ends_R] = measured[graph.ends_R].mean()
    _level_passes(graph, measured, ideal)
    _level_transfers(run, graph, ideal)
    return Ideal(
        graph=graph,
        measured_NS=measured,
        ideal_NS=ideal,
        original_s=float(step_times(graph, measured).mean()),
        ideal_s=float(step_times(graph, ideal).mean()),
    )


def pass_totals(graph: Graph, weight_NS: Floats) -> list[tuple[Ints, Floats]]:
    """Compute of each pass, which operations inside may cut into pieces.

    Returns:
        For each kind of the graph its pass labels [P], ascending, and seconds [G, P, S].
    """
    totals = []
    for kind in graph.kinds:
        labels = np.unique(kind.label_J[kind.label_J != OTHER])
        parts = [
            weight_NS[kind.nodes_GJ[:, kind.label_J == label]].sum(axis=1)
            for label in labels.tolist()
        ]
        shape = (kind.ranks_G.size, 0, weight_NS.shape[1])
        totals.append((labels, np.stack(parts, axis=1) if parts else np.empty(shape)))
    return totals


def _level_passes(graph: Graph, measured: Floats, ideal: Floats) -> None:
    """Give each pass the mean of its direction, in place."""
    totals = pass_totals(graph, measured)
    for backward in (0, 1):
        every = [took[:, labels % 2 == backward].reshape(-1) for labels, took in totals]
        values = np.concatenate(every) if every else np.empty(0)
        if not values.size:
            continue
        mean = float(values.mean())
        for kind, (labels, took) in zip(graph.kinds, totals, strict=True):
            for at in np.flatnonzero(labels % 2 == backward).tolist():
                nodes = kind.nodes_GJ[:, kind.label_J == labels[at]]
                factor = mean / np.maximum(took[:, at], 1e-9)
                ideal[nodes] = measured[nodes] * factor[:, None]


def lane_types(run: Run, lanes: Ints) -> Ints:
    """A number for each lane that is the same for those that move the same: one type [len(lanes)]."""
    operations = run.operations
    numbers: dict[tuple[Any, ...], int] = {}
    found = np.empty(lanes.size, dtype=np.int64)
    for at, lane in enumerate(lanes.tolist()):
        group = int(operations.group_L[lane])
        about = (
            run.groups[group].description if group >= 0 else None,
            operations.op_L[lane],
            operations.phase_L[lane],
            int(operations.payload_bytes_L[lane]),
        )
        found[at] = numbers.setdefault(about, len(numbers))
    return found


def _level_transfers(run: Run, graph: Graph, ideal: Floats) -> None:
    nodes = graph.lane_nodes
    types = lane_types(run, graph.lane_N[nodes])
    for number in range(int(types.max()) + 1):
        of_type = nodes[types == number]
        ideal[of_type] = np.median(ideal[of_type])


def nodes_of(run: Run, graph: Graph, in_R: Bools) -> Bools:
    """What belongs to some ranks [N]: their own time, transfers to or from one, and groups of theirs only."""
    lanes = graph.node_L.size
    inside, all_members = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    for kind in graph.kinds:
        all_members += np.bincount(kind.lanes_GK.reshape(-1), minlength=lanes)
        ours = kind.lanes_GK[in_R[kind.ranks_G]].reshape(-1)
        inside += np.bincount(ours, minlength=lanes)
    direct = run.operations.source_L >= 0
    of_lane = np.where(direct, inside > 0, (inside == all_members) & (inside > 0))
    belongs: Bools = np.where(
        graph.rank_N >= 0, in_R[np.maximum(graph.rank_N, 0)], of_lane[np.maximum(graph.lane_N, 0)]
    )
    return belongs


# -- the table ----------------------------------------------------------------------------------


def what_if_table(
    run: Run, ordinals: Ints | None = None, *, gaps: bool | None = None
) -> list[WhatIf]:
    """What each part of the job costs: its slowest workers, each stage, communication, compute.

    Args:
        run: From its builder.
        ordinals: Steps to look at; by default some of all after the warm-up.
        gaps: See ``replay.build_graph``.

    Returns:
        The parts in the order of the list above, overlapping: shares do not add up to 1. Empty
        where nothing can be replayed.

    Cost:
        On one core 7 s for 512 ranks in 8 stages with 16 micro-batches, 4 s for 12,960 ranks.
    """
    ideal = ideal_of(run, ordinals, gaps=gaps)
    return [] if ideal is None else parts_of(run, ideal)


def parts_of(run: Run, ideal: Ideal) -> list[WhatIf]:
    """The table of an ideal that is at hand."""
    graph = ideal.graph
    worst = slowest_workers(run, ideal)
    numbers = run.ranks_R[worst].tolist()
    in_R = np.isin(np.arange(run.ranks_R.size), worst)
    who = f"rank {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} ranks"
    rows = [
        ideal.heal(
            nodes_of(run, graph, in_R), f"slowest {SLOWEST_PERCENT} % of workers ({who})", numbers
        )
    ]
    stage_R = None if run.places is None else run.places.get("pp")
    stages = [] if stage_R is None else np.unique(stage_R).tolist()
    for stage in stages if len(stages) > 1 else []:
        of_stage = stage_R == stage
        name = f"stage {stage}" + (" (the last)" if stage == stages[-1] else "")
        members = run.ranks_R[of_stage].tolist()
        rows.append(ideal.heal(nodes_of(run, graph, of_stage), name, members))
    is_lane = graph.lane_N >= 0
    rows.append(ideal.heal(is_lane, "all communication at its median"))
    rows.append(ideal.heal(~is_lane, "all compute at its mean"))
    return rows


def ideal_of(run: Run, ordinals: Ints | None = None, *, gaps: bool | None = None) -> Ideal | None:
    """The ideal of some steps; None where they cannot be replayed."""
    if ordinals is None:
        kept = run.operations.moments.ordinals()
        settled = kept[kept >= min(10, int(kept[-1]) // 2)] if kept.size else kept
        ordinals = settled[np.unique(np.linspace(0, settled.size - 1, _STEPS).astype(int))] \
            if settled.size else settled  # fmt: skip
    graph = build_graph(run, ordinals, gaps=gaps)
    return None if graph is None else find_ideal(run, graph)


def slowest_workers(run: Run, ideal: Ideal) -> Ints:
    """The slowest 3 % of workers, one at least, as rank indices; the slowest first.

    A worker is as slow as the less slow of the two sets that it is in, its pipeline stage and its
    data-parallel rank: one replay for each of those, not one for each worker.
    """
    ranks = run.ranks_R.size
    count = -(-ranks * SLOWEST_PERCENT // 100)
    places = run.places or {}

    def slowdown_of(in_R: Bools) -> float:
        return ideal.slowdown_of(nodes_of(run, ideal.graph, in_R))

    varied = [places[axis] for axis in ("pp", "dp") if axis in places and np.ptp(places[axis]) > 0]
    if len(varied) == 2 and sum(np.unique(place).size for place in varied) <= _MOST_WORKERS_ALONE:
        score_R = np.full(ranks, np.inf)
        for place in varied:
            for value in np.unique(place).tolist():
                score_R[place == value] = np.minimum(
                    score_R[place == value], slowdown_of(place == value)
                )
    elif ranks <= _MOST_WORKERS_ALONE:
        score_R = np.array([slowdown_of(np.arange(ranks) == rank) for rank in range(ranks)])
    else:
        score_R = _own_excess(run, ideal)
    return np.argsort(-score_R, kind="stable")[:count]


def _own_excess(run: Run, ideal: Ideal) -> Floats:
    """Own time of each rank over its ideal [R]: for jobs too wide to try the workers one by one."""
    graph = ideal.graph
    excess_R = np.zeros(run.ranks_R.size)
    for kind in graph.kinds:
        over = ideal.measured_NS[kind.nodes_GJ] - ideal.ideal_NS[kind.nodes_GJ]
        excess_R[kind.ranks_G] = over.sum(axis=(1, 2))
    return excess_R
