"""Replays a finding's steps with its cause healed, and says how much shorter they are.

Healing never invents a speed: a rank's own time falls to what its peers need at the same place of
the step, or to what it needed itself before; a transfer to what its siblings take, or took before.

Shape legend: N = nodes of a graph, S = its steps, R = ranks, G = ranks of one kind, J = marks of a
rank, L = lanes.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.ideal import lane_types, pass_totals
from argus_otel.detect.replay import build_graph, critical_time, periods, replay
from argus_otel.detect.shifts import level_shift
from argus_otel.detect.statistics import (
    MAD_TO_SIGMA,
    MEDIAN_TO_MEAN_ERROR,
    luck_of_slowest,
    median_over,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from argus_otel.detect.frame import Frame
    from argus_otel.detect.replay import Graph
    from argus_otel.detect.run import Run
    from argus_otel.tables.findings import Finding

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_UNKNOWN_S: Final = 1e9
"""Longer than any step, where own time is not known: no bound."""
_MOST_STEPS: Final = 48
"""Steps of a finding that are replayed; spread over it where there are more."""
_PAST_STEPS: Final = 12
"""Steps before it that say what was usual."""
_NUMBERS: Final = 8_000_000
"""Marks and transfers over all replayed steps, for a large job: some seconds."""
_FAITHFUL: Final = 0.05
"""How far the replay of what was measured may lie from the measured step; past that the graph has
missed something, and says nothing."""

_MISTAKEN: Final = 0.01
"""Chance that the lengths of some rank pass for its slowness: what it costs is said too small then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What healing one cause gains."""

    share: float
    """Of the step's time, over all steps of the finding; 0 to 1."""
    latest_rank: int | None
    """Who is the latest in most steps after healing; None where it is one of the healed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A finding on its graph."""

    finding: Finding
    frame: Frame
    graph: Graph
    in_S: Bools
    """Steps of the graph that are of the finding; the others were before it."""
    sick_R: Bools
    """Ranks to heal: the finding's, or all where it names none."""

    def column(self, name: str) -> Floats:
        """A column of the run, at the steps of the graph [S, R]."""
        return self.frame.whole.columns[name][self.graph.steps_S]


def meets_only_at_the_end(run: Run) -> bool:
    """Whether this is plain data parallelism: every operation is a reduction over all ranks."""
    operations = run.operations
    if run.passes is not None and run.passes.chunk_M.size > 1:
        return False
    if (operations.group_L < 0).any():
        return False
    whole = np.array([group.members.size == run.ranks_R.size for group in run.groups], dtype=bool)
    gathers = {
        op
        for op, phase in zip(operations.op_L, operations.phase_L, strict=True)
        if op == "all_gather" and phase in ("forward", "backward")
    }
    return bool(whole[operations.group_L].all()) and not gathers


def replayed_gain(finding: Finding, frame: Frame) -> Gain | None:
    """What healing the finding's cause gains by a replay; None where that cannot be said."""
    heal = _HEALERS.get(finding.cause)
    if heal is None:
        return None
    case = _case_of(finding, frame)
    if case is None:
        return None
    graph = case.graph
    # Steps are replayed each by itself: those from before the finding need not be.
    before = periods(graph, graph.weight_NS[:, case.in_S])
    measured = graph.measured_S[case.in_S]
    if abs(float(median_over(before / measured, axis=0)) - 1) > _FAITHFUL:
        return None
    healed = heal(case)
    if healed is None:
        return None
    healed = healed[:, case.in_S]
    over = replay(graph, healed)
    after = periods(graph, healed, over)
    lasting = finding.evidence.get("pattern") in ("lasting", "all ranks")
    # A cause that comes and goes is in some steps only: its gain is a part of the mean.
    usual: Callable[[Floats], np.float64] = np.median if lasting else np.mean
    share = max(0.0, float(usual(before - after))) / float(usual(before))
    return Gain(share=share, latest_rank=_latest(case, healed, over))


def _case_of(finding: Finding, frame: Frame) -> _Case | None:
    whole = frame.whole
    kept = whole.operations.moments.ordinals()
    if not kept.size:
        return None
    size = max(whole.operations.moments.arrival_s[int(kept[-1])].size, 1)
    most = int(np.clip(_NUMBERS // (4 * size), 3, _MOST_STEPS))
    of_finding = kept[(kept >= finding.first_step) & (kept <= finding.last_step)]
    # Compiling steps are not settled: they are looked at only where compiling is the matter.
    settled = frame.ordinals_S
    if finding.cause != "jit_compile":
        of_finding = np.intersect1d(of_finding, settled)
    past = np.intersect1d(kept[kept < finding.onset.step], settled)[-min(most, _PAST_STEPS) :]
    if not of_finding.size:
        return None
    spread = np.linspace(0, of_finding.size - 1, min(most, of_finding.size)).astype(int)
    wanted = np.concatenate([past, of_finding[spread]])
    key = tuple(wanted.tolist())
    # One at a time: detectors are asked side by side, and may have found something in the same steps.
    with frame.building:
        if key not in frame.graphs:
            frame.graphs[key] = build_graph(whole, wanted)
        graph = frame.graphs[key]
    if graph is None:
        return None
    in_S = whole.ordinals_A[graph.steps_S] >= finding.first_step
    if not in_S.any():
        return None
    sick_R = np.isin(whole.ranks_R, finding.ranks)
    if not sick_R.any():
        sick_R = np.ones(whole.ranks_R.size, dtype=bool)
    return _Case(finding=finding, frame=frame, graph=graph, in_S=in_S, sick_R=sick_R)


def _latest(case: _Case, healed_NS: Floats, over_NS: Floats) -> int | None:
    """Whose own time makes up most of the way through the healed steps."""
    own_SR, _ = critical_time(case.graph, healed_NS, over_NS)
    latest = int(np.argmax(own_SR.sum(axis=0)))
    return None if case.sick_R[latest] else int(case.frame.ranks_R[latest])


# -- own time -----------------------------------------------------------------------------------


def _heal_own(case: _Case, most_SR: Floats | None = None) -> Floats | None:
    """Own time of the sick ranks without what is more than usual.

    Args:
        case: The finding.
        most_SR: Seconds that may be taken out at most, by step of the graph and rank; None for all.
    """
    graph, weight = case.graph, case.graph.weight_NS
    healed = weight.copy()
    known = False
    comes_and_goes = case.finding.evidence.get("pattern") == "intermittent"
    for kind in graph.kinds:
        sick = case.sick_R[kind.ranks_G]
        if not sick.any():
            continue
        own_GJS = weight[kind.nodes_GJ]
        if not sick.all():
            usual_GJS = median_over(own_GJS[~sick], axis=0)[None]
        elif comes_and_goes:
            usual_GJS = median_over(own_GJS, axis=2)[:, :, None]
        elif not case.in_S.all():
            usual_GJS = median_over(own_GJS[:, :, ~case.in_S], axis=2)[:, :, None]
        elif most_SR is not None:
            # Nobody to compare with, but what the cause took was measured: the longest parts had it.
            usual_GJS = np.zeros((1, own_GJS.shape[1], 1))
        else:
            continue
        known = True
        excess = np.maximum(own_GJS - usual_GJS, 0.0)
        if most_SR is not None:
            most_GS = np.nan_to_num(most_SR[:, kind.ranks_G].T)
            total_GS = excess.sum(axis=1)
            excess *= np.minimum(1.0, most_GS / np.maximum(total_GS, 1e-12))[:, None]
        of_sick = kind.nodes_GJ[sick]
        healed[of_sick] = own_GJS[sick] - excess[sick]
    return healed if known else None


def _heal_compute(case: _Case) -> Floats | None:
    """A slow rank at its peers' speed: no more comes off than its slowness adds to its work."""
    factors = case.finding.evidence.get("slowdown_by_rank", {})
    factor_R = np.ones(case.sick_R.size)
    for rank in np.flatnonzero(case.sick_R).tolist():
        name = str(int(case.frame.ranks_R[rank]))
        factor_R[rank] = max(float(factors.get(name, case.finding.slowdown)), 1.0)
    own_SR = case.column("busy_s")
    own_SR = np.where(np.isnan(own_SR), _UNKNOWN_S, own_SR)
    # Half as much again: the factor is a usual step's, and some steps are slower.
    return _heal_own(case, own_SR * (1 - 1 / factor_R) * 1.5)


def _heal_column(name: str) -> Callable[[_Case], Floats | None]:
    """Healing of a cause that has a column of its own, for what is more than before in it."""

    def heal(case: _Case) -> Floats | None:
        return _heal_own(case, np.nan_to_num(case.column(name)))

    return heal


def _heal_compiling(case: _Case) -> Floats | None:
    """Without the compilations that were reported."""
    whole, graph = case.frame.whole, case.graph
    at = {int(whole.ordinals_A[step]): place for place, step in enumerate(graph.steps_S.tolist())}
    stall_SR = np.zeros((graph.steps_S.size, whole.ranks_R.size))
    for event in whole.events:
        if event.kind.startswith("compil") and event.ordinal in at:
            stall_SR[at[event.ordinal], event.rank] += event.duration_s
    return _heal_own(case, stall_SR) if stall_SR.any() else None


# -- transfers ----------------------------------------------------------------------------------


def _heal_links(case: _Case) -> Floats | None:
    """Transfers of the slow place as fast as the same elsewhere, or as they were before."""
    graph, run = case.graph, case.frame.whole
    nodes = graph.lane_nodes
    lanes = graph.lane_N[nodes]
    sick_L = _sick_lanes(case, lanes)
    if not sick_L.any():
        return None
    types = lane_types(run, lanes)
    healed = graph.weight_NS.copy()
    known = False
    for number in np.unique(types[sick_L]).tolist():
        sick = nodes[sick_L & (types == number)]
        sound = nodes[~sick_L & (types == number)]
        if sound.size:
            usual = median_over(healed[sound], axis=0)[None]
        elif not case.in_S.all():
            usual = median_over(graph.weight_NS[sick][:, ~case.in_S], axis=1)[:, None]
        else:
            continue
        healed[sick] = np.minimum(graph.weight_NS[sick], usual)
        known = True
    return healed if known else None


def _sick_lanes(case: _Case, lanes: Ints) -> Bools:
    run, finding = case.frame.whole, case.finding
    if not finding.ranks and not finding.groups:
        return np.ones(lanes.size, dtype=bool)
    sick = np.zeros(run.operations.lanes, dtype=bool)
    named = [k for k, group in enumerate(run.groups) if str(group.key) in finding.groups]
    if named:
        sick |= np.isin(run.operations.group_L, named)
    else:
        for kind in case.graph.kinds:
            sick[kind.lanes_GK[case.sick_R[kind.ranks_G]]] = True
    return sick[lanes]


# -- passes -------------------------------------------------------------------------------------


def _heal_passes(case: _Case) -> Floats | None:
    """A heavy stage at the mean of all stages; a late micro-batch as its stage's others."""
    graph = case.graph
    totals = pass_totals(graph, graph.weight_NS)
    healed = graph.weight_NS.copy()
    known = False
    for backward in (0, 1):
        means = [
            took[:, labels % 2 == backward].mean(axis=(0, 1))
            for labels, took in totals
            if (labels % 2 == backward).any()
        ]
        if not means:
            continue
        level_S = np.mean(means, axis=0)
        for kind, (labels, took) in zip(graph.kinds, totals, strict=True):
            sick = case.sick_R[kind.ranks_G]
            mine = np.flatnonzero(labels % 2 == backward)
            if not sick.any() or not mine.size:
                continue
            known = True
            usual_GS = np.minimum(median_over(took[:, mine], axis=1), level_S)
            for at in mine.tolist():
                nodes = kind.nodes_GJ[sick][:, kind.label_J == labels[at]]
                factor = np.minimum(usual_GS / np.maximum(took[:, at], 1e-9), 1.0)[sick]
                healed[nodes] *= factor[:, None]
    return healed if known else None


def _heal_imbalance(case: _Case) -> Floats | None:
    """The same work for all ranks of a stage in each step: passes at their mean over the ranks."""
    graph = case.graph
    healed = graph.weight_NS.copy()
    totals = pass_totals(graph, graph.weight_NS)
    for kind, (labels, took) in zip(graph.kinds, totals, strict=True):
        for at, label in enumerate(labels.tolist()):
            nodes = kind.nodes_GJ[:, kind.label_J == label]
            mean_S = took[:, at].mean(axis=0)
            healed[nodes] *= (mean_S / np.maximum(took[:, at], 1e-9))[:, None]
    return healed if any(labels.size for labels, _ in totals) else None


def _heal_lengths(case: _Case) -> Floats | None:
    """The same work for all ranks of a stage in each step, done at each rank's own speed."""
    graph = case.graph
    healed = graph.weight_NS.copy()
    totals = pass_totals(graph, graph.weight_NS)
    for kind, (labels, took) in zip(graph.kinds, totals, strict=True):
        slow_GS = _lasting_slowness(took.sum(axis=1))
        for at, label in enumerate(labels.tolist()):
            nodes = kind.nodes_GJ[:, kind.label_J == label]
            even_GS = (took[:, at] / slow_GS).mean(axis=0) * slow_GS
            healed[nodes] *= (even_GS / np.maximum(took[:, at], 1e-9))[:, None]
    return healed if any(labels.size for labels, _ in totals) else None


def _lasting_slowness(took_GS: Floats) -> Floats:
    """How many times as long as the middle rank each one takes [G, S], whatever its work of the step.

    Lengths change from step to step, and a slow rank stays slow: its level beyond chance, or both of
    its levels where it changed once, is no length.
    """
    log_SG = np.log(np.maximum(took_GS, 1e-9)).T
    log_SG -= median_over(log_SG, axis=1)[:, None]
    shift = level_shift(log_SG)
    later_SG = np.arange(log_SG.shape[0])[:, None] >= shift.start_G
    later_SG &= shift.z_G >= shift.beyond_chance()
    before_G = median_over(np.where(later_SG, np.nan, log_SG), axis=0)
    after_G = median_over(np.where(later_SG, log_SG, np.nan), axis=0)
    level_SG = np.where(later_SG, after_G, before_G)
    steps_SG = np.where(later_SG, later_SG.sum(axis=0), (~later_SG).sum(axis=0))
    # Lengths are dealt out alike: ranks scatter alike, and few steps of one would say too little.
    sigma = MAD_TO_SIGMA * float(median_over(np.abs(log_SG - level_SG).reshape(-1), axis=0))
    luck = luck_of_slowest(max(log_SG.shape[1], 2), _MISTAKEN)
    chance_SG = luck * MEDIAN_TO_MEAN_ERROR * sigma / np.sqrt(steps_SG)
    slowness: Floats = np.exp(np.where(np.abs(level_SG) >= chance_SG, level_SG, 0.0)).T
    return slowness


_HEALERS: Final[dict[str, Callable[[_Case], Floats | None]]] = {
    "compute_straggler": _heal_compute,
    "gpu_throttled": _heal_compute,
    "host_sync": _heal_own,
    "allocator_thrash": _heal_own,
    "input_stall": _heal_column("data_wait_s"),
    "gc_pause": _heal_column("gc_s"),
    "cpu_contention": _heal_column("run_delay_s"),
    "jit_compile": _heal_compiling,
    "slow_link": _heal_links,
    "comm_regression": _heal_links,
    "pipeline_imbalance": _heal_passes,
    "sequence_imbalance": _heal_lengths,
    "expert_imbalance": _heal_imbalance,
}
