"""One step after another, over all ranks at once: who computes, arrives, waits and ends when.

Collectives begin when their last member has arrived and end together; those of one group run one
after another. The host runs ahead of the GPU by a fixed time, which swallows shorter pauses.

Shape legend: R = ranks, N = ranks of one stage, K = operations of a rank in a step, P = phases,
M = (chunk, micro-batch) passes of one direction.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from argus_otel.simulate.conditions import Weather
from argus_otel.simulate.schedule import dependency_order, source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from argus_otel.simulate.cluster import Cluster
    from argus_otel.simulate.conditions import Conditions
    from argus_otel.simulate.faults import Fault
    from argus_otel.simulate.schedule import Work

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

PHASES: Final = ("between", "data.wait", "forward", "backward", "optimizer.step")
_BETWEEN, _DATA, _FORWARD, _BACKWARD, _OPTIMIZER = range(len(PHASES))
_LINEAR_SHARE: Final = 0.7
"""Of a pass's compute, what grows with the tokens; the rest (attention) grows with their square."""
_EXPERTS_A_TOKEN: Final = 2
_ROUTING_NOISE: Final = 0.03
"""Log-normal sigma of one expert's tokens in one step, where the router balances them."""
_WARM_UP: Final = (3.0, 2.0, 1.5)
_TOLD_BEFORE_RESTART: Final = 0.5
"""Share of hosts whose last step is known when a job is stopped."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One operation in a stage's step: the same every step."""

    op: str
    axis: str
    phase: str
    payload_bytes: int
    peer_stages: int | None = None
    """Point-to-point: the partner's stage minus this one's."""


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """What happened in one step; seconds, on one clock that starts with the run."""

    ordinal: int
    start_R: Floats
    end_R: Floats
    between_R: Floats
    wait_R: Floats
    data_wait_R: Floats
    gc_R: Floats
    gc_count_R: Ints
    run_delay_R: Floats
    memory_bytes_R: Floats
    tokens_R: Floats
    sum_len2_R: Floats
    phase_start_PR: Floats
    phase_PR: Floats
    arrival_RK: Floats
    """NaN where the rank's stage has no such operation."""
    end_RK: Floats
    pass_start_RM2: Floats
    """Start of each pass: [R, M, 2], forward then backward."""
    pass_RM2: Floats
    """Its compute."""
    compute_PR: Floats
    """What kernels take in forward, backward and optimizer, [3, R]: without pauses of the host."""
    kernel_factors: Mapping[str, Floats]
    """Class of kernels → how much longer it takes than the other classes [R]; 1 where not named."""
    expert_tokens_RX: Ints | None
    """Tokens of each of a rank's experts; None where there are none, or nobody counts."""
    clock_ratio_R: Floats
    """GPU clock against its usual one."""
    reported_R: Bools
    events: list[dict[str, Any]] = field(default_factory=list)
    heartbeats: list[dict[str, Any]] = field(default_factory=list)
    devices: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank → what its device says beyond clocks."""
    stopped: bool = False
    """Nobody finishes this step."""


class _Groups:
    """Maxima over the groups along one axis, within some of the ranks."""

    def __init__(self, group_N: Ints) -> None:
        self.index_N = group_N
        self._order = np.argsort(group_N, kind="stable")
        ordered = group_N[self._order]
        self._starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        self.ids = ordered[self._starts]
        self._place_N = np.searchsorted(self.ids, group_N)

    def latest(self, values_N: Floats) -> Floats:
        """The largest value of each group [G], ascending by group."""
        return np.maximum.reduceat(values_N[self._order], self._starts)

    def spread(self, values_G: Floats) -> Floats:
        """A value of each group to its members [N]."""
        spread: Floats = values_G[self._place_N]
        return spread


class _Stream:
    """The communication streams of some groups: one operation after another."""

    def __init__(self, groups: _Groups) -> None:
        self._groups = groups
        self._free_G = np.full(groups.ids.size, -np.inf)

    def run(self, arrival_N: Floats, transfer_G: Floats) -> Floats:
        """When an operation ends for each rank, which began with its last member's arrival."""
        self._free_G = np.maximum(self._groups.latest(arrival_N), self._free_G) + transfer_G
        return self._groups.spread(self._free_G)


class Model:
    """A job under way. Iterate over ``steps``.

    Args:
        cluster: The job.
        faults: What is planted.
        seed: Of all noise; the same seed and cluster give the same healthy run.
    """

    def __init__(self, cluster: Cluster, faults: Sequence[Fault], seed: int) -> None:
        self.cluster, self.faults, self.seed = cluster, tuple(faults), seed
        self._random = np.random.default_rng(seed)
        self._routing = np.random.default_rng((seed, 3))
        self._n = cluster.ranks // cluster.pp
        self.order = dependency_order(cluster.pp, cluster.micro_batches, cluster.chunks)
        self._slot_of_pass: dict[tuple[int, Work, str], int] = {}
        self._slot_of_unit: dict[tuple[str, str, int], int] = {}
        self.slots: list[list[Slot]] = [self._slots_of(stage) for stage in range(cluster.pp)]
        self.operations = max(len(slots) for slots in self.slots)
        self._by_axis: dict[tuple[str, int | None], _Groups] = {}
        lasting = self._random.normal(0.0, 1.0, cluster.ranks) * cluster.between_rank_noise
        self._lasting_R = np.exp(lasting)
        host_offset = self._random.normal(0.0, 1.0, cluster.hosts) * cluster.clock_offset_s
        host_drift = self._random.normal(0.0, 1.0, cluster.hosts) * cluster.clock_drift
        self.clock_offset_R, self.clock_drift_R = (
            host_offset[cluster.host],
            host_drift[cluster.host],
        )
        self._weather = Weather(
            cluster, self.faults, self._random, np.random.default_rng((seed, 1))
        )
        self._free_R = np.zeros(cluster.ranks)
        """When each rank may begin its next step's ``between``."""
        self._memory_R = np.full(cluster.ranks, float(cluster.model_bytes))

    # -- what a stage issues in a step --------------------------------------------------------

    def _slots_of(self, stage: int) -> list[Slot]:
        c = self.cluster
        slots: list[Slot] = []

        def add(work: Work, what: str, slot: Slot) -> None:
            self._slot_of_pass[stage, work, what] = len(slots)
            slots.append(slot)

        consumers = {
            needs: work
            for work in self.order
            if (needs := source(work, c.pp, c.chunks)) is not None
        }
        if c.sharding in ("fsdp", "hsdp"):
            self._sharded_slots(slots)
        for work in (work for work in self.order if work.stage == stage):
            phase = "backward" if work.backward else "forward"
            came_from = source(work, c.pp, c.chunks)
            if came_from is not None and came_from.stage != stage:
                shift = came_from.stage - stage
                add(work, "recv", Slot("recv", "pp", phase, c.activation_bytes, shift))
            if c.tp > 1:
                add(work, "tp", Slot("all_reduce", "tp", phase, c.activation_bytes))
            if c.cp > 1:
                add(work, "cp", Slot("all_gather", "cp", phase, c.activation_bytes))
            if c.ep > 1:
                add(work, "ep", Slot("all_to_all", "ep", phase, c.activation_bytes))
            goes_to = consumers.get(work)
            if goes_to is not None and goes_to.stage != stage:
                shift = goes_to.stage - stage
                add(work, "send", Slot("send", "pp", phase, c.activation_bytes, shift))
        self._tail_slots(slots)
        return slots

    def _sharded_slots(self, slots: list[Slot]) -> None:
        """In the order in which they are issued, which is the order of the communication stream."""
        c = self.cluster
        axis = "dp" if c.sharding == "fsdp" else "shard"
        for phase in ("forward", "backward"):
            for unit in range(c.buckets + 1):
                if unit < c.buckets:
                    self._slot_of_unit[phase, "gather", unit] = len(slots)
                    slots.append(Slot("all_gather", axis, phase, c.bucket_bytes))
                if phase == "backward" and unit:
                    self._slot_of_unit[phase, "scatter", unit - 1] = len(slots)
                    slots.append(Slot("reduce_scatter", axis, phase, c.bucket_bytes))
                    if c.sharding == "hsdp":
                        self._slot_of_unit[phase, "reduce", unit - 1] = len(slots)
                        slots.append(Slot("all_reduce", "replica", phase, c.bucket_bytes))

    def _tail_slots(self, slots: list[Slot]) -> None:
        c = self.cluster
        if c.sharding == "ddp":
            slots += [Slot("all_reduce", "dp", "backward", c.bucket_bytes)] * c.buckets
            if c.ep > 1:
                slots.append(Slot("all_reduce", "edp", "backward", c.bucket_bytes))
        if c.sharding == "zero1":
            whole = c.bucket_bytes * c.buckets
            slots.append(Slot("reduce_scatter", "dp", "optimizer.step", whole))
            if c.ep > 1:
                slots.append(Slot("reduce_scatter", "edp", "optimizer.step", whole))
        if c.clip_gradients:
            slots.append(Slot("all_reduce", "world", "optimizer.step", 4))
        if c.sharding == "zero1":
            slots.append(Slot("all_gather", "dp", "optimizer.step", whole))
            if c.ep > 1:
                slots.append(Slot("all_gather", "edp", "optimizer.step", whole))

    def groups(self, axis: str, stage: int | None = None) -> _Groups:
        """Groups along an axis, over all ranks or those of a stage."""
        key = (axis, stage)
        if key not in self._by_axis:
            group_R = self.cluster.group_of(axis)
            self._by_axis[key] = _Groups(group_R if stage is None else group_R[self._of(stage)])
        return self._by_axis[key]

    def _of(self, stage: int) -> slice:
        return slice(stage * self._n, (stage + 1) * self._n)

    # -- steps --------------------------------------------------------------------------------

    def steps(self, count: int) -> Iterator[StepArrays]:
        """Simulate ``count`` steps, or fewer where the job hangs."""
        for ordinal in range(count):
            arrays = self._step(ordinal)
            if self.cluster.restart_s and ordinal == count - 1:
                arrays.reported_R &= self._told_before_restart()
            yield arrays
            if arrays.stopped:
                return

    def _told_before_restart(self) -> Bools:
        """Ranks [R] whose last step has left when the job is stopped: a host's together."""
        c = self.cluster
        random = np.random.default_rng((self.seed, 4))
        place_R = c.host if c.hosts > 1 else np.arange(c.ranks)
        told: Bools = random.random(int(place_R.max()) + 1)[place_R] < _TOLD_BEFORE_RESTART
        return told

    def _step(self, ordinal: int) -> StepArrays:
        c = self.cluster
        now = self._weather.of(ordinal)
        r = c.ranks
        between_R = c.between_s + now.between_R
        start_R = self._free_R + between_R
        run = _Running(
            t_R=start_R.copy(), wait_R=np.zeros(r), phase_PR=np.zeros((len(PHASES), r)),
            phase_start_PR=np.full((len(PHASES), r), np.inf),
            arrival_RK=np.full((r, self.operations), np.nan),
            end_RK=np.full((r, self.operations), np.nan),
            pass_start_RM2=np.full((r, c.micro_batches * c.chunks, 2), np.nan),
            pass_RM2=np.full((r, c.micro_batches * c.chunks, 2), np.nan),
        )  # fmt: skip
        run.phase_PR[_BETWEEN], run.phase_start_PR[_BETWEEN] = between_R, self._free_R
        data_R = c.data_wait_s * np.exp(self._random.normal(0, 0.2, r)) + now.data_R
        run.spend(_DATA, slice(None), data_R)
        length_DM, tokens_R, len2_R = self._lengths(now)
        factor_R = self._compute_factor(ordinal, now)
        host_R = np.maximum(now.run_delay_R + now.gc_R - c.launch_ahead_s, 0.0)
        stall_R = host_R + now.stall_R
        if c.sharding in ("fsdp", "hsdp"):
            self._sharded_passes(run, now, factor_R, length_DM, stall_R)
        else:
            self._pipeline_passes(run, now, factor_R, length_DM, stall_R)
        self._tail(run, now, factor_R)
        self._memory_R += now.memory_bytes_R
        stopped = now.stopper is not None
        self._free_R = run.t_R
        return StepArrays(
            ordinal=ordinal, start_R=start_R, end_R=run.t_R, between_R=between_R,
            wait_R=run.wait_R, data_wait_R=data_R, gc_R=now.gc_R,
            gc_count_R=(now.gc_R > 0).astype(np.int64), run_delay_R=now.run_delay_R,
            memory_bytes_R=self._memory_R.copy(), tokens_R=tokens_R, sum_len2_R=len2_R,
            phase_start_PR=run.phase_start_PR, phase_PR=run.phase_PR,
            arrival_RK=run.arrival_RK, end_RK=run.end_RK, pass_start_RM2=run.pass_start_RM2,
            pass_RM2=run.pass_RM2, clock_ratio_R=now.clock_R,
            compute_PR=self._compute(now, factor_R, length_DM), kernel_factors=now.kernel_factors,
            expert_tokens_RX=self._expert_tokens(now, tokens_R),
            reported_R=now.reported_R & (not stopped), events=now.events,
            heartbeats=self._heartbeats(now), devices=now.devices, stopped=stopped,
        )  # fmt: skip

    def _compute(self, now: Conditions, factor_R: Floats, length_DM: Floats) -> Floats:
        """Seconds of compute in forward, backward and optimizer [3, R]."""
        c = self.cluster
        sharded = c.sharding in ("fsdp", "hsdp")
        work_D = length_DM.mean(1) if sharded else length_DM.sum(1) * c.chunks
        work_R = work_D[c.places["dp"]]
        of_phase = (c.forward_s * work_R, c.backward_s * work_R, c.optimizer_s * now.optimizer_R)
        compute_PR: Floats = np.stack(of_phase) * factor_R
        return compute_PR

    def _compute_factor(self, ordinal: int, now: Conditions) -> Floats:
        c = self.cluster
        common = np.exp(self._random.normal(0, c.common_noise))
        if ordinal < min(c.warm_up_steps, len(_WARM_UP)):
            common *= _WARM_UP[ordinal]
        own_R = np.exp(self._random.normal(0, 1.0, c.ranks) * c.noise)
        factor_R: Floats = common * own_R * self._lasting_R * now.compute_R
        return factor_R

    def _lengths(self, now: Conditions) -> tuple[Floats, Floats, Floats]:
        """Compute factor [D, M] of each data-parallel rank's micro-batches; tokens and Σ length²."""
        c = self.cluster
        normal = self._random.normal(0, 1.0, (c.dp, c.micro_batches))
        length_DM = np.exp(normal * now.variation - now.variation**2 / 2)
        work_DM = _LINEAR_SHARE * length_DM + (1 - _LINEAR_SHARE) * length_DM**2
        if not c.tokens:
            unknown = np.full(c.ranks, np.nan)
            return work_DM, unknown, unknown
        dp_R = c.places["dp"]
        tokens_DM = c.tokens * length_DM
        return work_DM, tokens_DM.sum(1)[dp_R], (tokens_DM**2).sum(1)[dp_R]

    def _expert_tokens(self, now: Conditions, tokens_R: Floats) -> Ints | None:
        """Each token goes to ``_EXPERTS_A_TOKEN`` of the experts, nearly evenly."""
        c = self.cluster
        if c.ep == 1 or not c.tokens:
            return None
        usual_R = tokens_R * _EXPERTS_A_TOKEN / c.local_experts
        noise_RX = self._routing.normal(0, _ROUTING_NOISE, (c.ranks, c.local_experts))
        tokens_RX = usual_R[:, None] * np.exp(noise_RX)
        for hit, factor, index in now.busy_experts:
            tokens_RX[hit, index] += usual_R[hit] * c.local_experts * (factor - 1)
        return np.rint(np.maximum(tokens_RX, 0)).astype(np.int64)

    def _transfer(self, axis: str, stage: int | None, base_s: float, now: Conditions) -> Floats:
        """How long an operation of each group along an axis transfers now [G]."""
        groups = self.groups(axis, stage)
        where = slice(None) if stage is None else self._of(stage)
        slow_G = groups.latest(self._through_links(axis, now)[where])
        for (of_axis, group), factor in now.group_transfer.items():
            if of_axis == axis:
                slow_G = np.where(groups.ids == group, slow_G * factor, slow_G)
        noise_G = np.exp(self._random.normal(0, self.cluster.transfer_noise, slow_G.size))
        took_G: Floats = base_s * slow_G * noise_G
        return took_G

    def _through_links(self, axis: str, now: Conditions) -> Floats:
        # What stays on a host (tensor, sharding on the host) does not pass its NIC.
        on_host = axis in ("shard", "host") or (
            axis == "tp" and self.cluster.tp <= self.cluster.ranks_per_host
        )
        return np.ones_like(now.transfer_R) if on_host else now.transfer_R

    def _meet(
        self, run: _Running, slot: int, axis: str, stage: int | None, base_s: float,
        now: Conditions, *, phase: int,
    ) -> None:  # fmt: skip
        """A blocking collective: everybody arrives, waits for the last, and transfers."""
        groups = self.groups(axis, stage)
        where = slice(None) if stage is None else self._of(stage)
        arrival = run.t_R[where].copy()
        end = groups.spread(groups.latest(arrival) + self._transfer(axis, stage, base_s, now))
        run.block(where, slot, arrival, end, phase)

    def _pipeline_passes(
        self, run: _Running, now: Conditions, factor_R: Floats, length_DM: Floats, stall_R: Floats
    ) -> None:
        c = self.cluster
        dp_N = c.places["dp"][: self._n]
        out: dict[Work, Floats] = {}
        last = {work.stage: work for work in self.order}
        first_of = {work.stage: work for work in reversed(self.order)}
        for work in self.order:
            where = self._of(work.stage)
            phase = _BACKWARD if work.backward else _FORWARD
            came_from = source(work, c.pp, c.chunks)
            if came_from is not None:
                self._receive(run, work, came_from, out[came_from], now, phase)
            base_s = c.backward_s if work.backward else c.forward_s
            took = base_s * factor_R[where] * length_DM[dp_N, work.micro_batch]
            late = now.late_passes.get((work.stage, work.micro_batch))
            if late is not None and not work.backward:
                took = took + np.where(late[0][where], late[1], 0.0)
            if work is first_of[work.stage]:
                took = took + stall_R[where]
            began = run.t_R[where].copy()
            run.spend(phase, where, took)
            at = work.chunk * c.micro_batches + work.micro_batch
            run.pass_start_RM2[where, at, int(work.backward)] = began
            run.pass_RM2[where, at, int(work.backward)] = took
            for what, axis, base in (("tp", "tp", c.tensor_s), ("cp", "cp", c.context_s),
                                     ("ep", "ep", c.expert_s)):  # fmt: skip
                slot = self._slot_of_pass.get((work.stage, work, what))
                if slot is not None:
                    self._meet(run, slot, axis, work.stage, base, now, phase=phase)
            out[work] = run.t_R[where].copy()
            slot = self._slot_of_pass.get((work.stage, work, "send"))
            if slot is not None:
                goes_to = self._of(self._partner(work.stage, slot))
                run.arrival_RK[where, slot] = run.t_R[where]
                run.end_RK[where, slot] = run.t_R[where] + self._direct_s(where, goes_to, now)
            if c.sharding == "ddp" and work is last[work.stage]:
                self._reduce_buckets(run, work.stage, began, now)

    def _partner(self, stage: int, slot: int) -> int:
        shift = self.slots[stage][slot].peer_stages
        return stage + (shift or 0)

    def _direct_s(self, source: slice, target: slice, now: Conditions) -> Floats:
        """Transfer of one activation: the slower end's link decides."""
        slow = np.maximum(now.transfer_R[source], now.transfer_R[target])
        took: Floats = self.cluster.activation_s * slow
        return took

    def _receive(
        self, run: _Running, work: Work, came_from: Work, sent: Floats, now: Conditions, phase: int
    ) -> None:
        where = self._of(work.stage)
        slot = self._slot_of_pass.get((work.stage, work, "recv"))
        if slot is None:  # the pass before ran on the same rank
            return
        arrival = run.t_R[where].copy()
        took = self._direct_s(self._of(came_from.stage), where, now)
        end = np.maximum(arrival, sent + took)
        run.block(where, slot, arrival, end, phase)

    def _reduce_buckets(self, run: _Running, stage: int, began: Floats, now: Conditions) -> None:
        """DDP: each bucket is reduced while the rest of the backward runs; then wait for the last."""
        c = self.cluster
        where = self._of(stage)
        first = next(k for k, s in enumerate(self.slots[stage])
                     if s.axis == "dp" and s.op == "all_reduce")  # fmt: skip
        scale = run.t_R[where] - began  # with what the pass waited for inside
        stream = _Stream(self.groups("dp", stage))
        end = run.t_R[where]
        for bucket in range(c.buckets):
            arrival = began + scale * (bucket + 1) / c.buckets
            end = stream.run(arrival, self._transfer("dp", stage, c.bucket_s, now))
            run.arrival_RK[where, first + bucket] = arrival
            run.end_RK[where, first + bucket] = end
        if c.ep > 1:
            # The experts' gradients, among the ranks that hold the same ones.
            arrival = began + scale / 2
            replicas = self.groups("edp", stage)
            took_G = self._transfer("edp", stage, c.bucket_s, now)
            experts = replicas.spread(replicas.latest(arrival) + took_G)
            run.arrival_RK[where, first + c.buckets] = arrival
            run.end_RK[where, first + c.buckets] = experts
            end = np.maximum(end, experts)
        run.wait_for(where, end, _BACKWARD)

    def _sharded_passes(
        self, run: _Running, now: Conditions, factor_R: Floats, length_DM: Floats, stall_R: Floats
    ) -> None:
        """FSDP and HSDP: units gathered one ahead, gradients scattered behind the backward."""
        c = self.cluster
        everybody = slice(None)
        work_R = length_DM.mean(1)[c.places["dp"]]
        shards = _Stream(self.groups("dp" if c.sharding == "fsdp" else "shard"))
        replicas = _Stream(self.groups("replica"))
        axis = "dp" if c.sharding == "fsdp" else "shard"

        def issue(what: str, phase: str, unit: int, arrival_R: Floats) -> Floats:
            stream, of = (replicas, "replica") if what == "reduce" else (shards, axis)
            end_R = stream.run(arrival_R, self._transfer(of, None, c.bucket_s, now))
            slot = self._slot_of_unit[phase, what, unit]
            run.arrival_RK[:, slot], run.end_RK[:, slot] = arrival_R, end_R
            return end_R

        run.spend(_FORWARD, everybody, stall_R)
        last_R = run.t_R
        for direction, base_s in ((0, c.forward_s), (1, c.backward_s)):
            phase = _BACKWARD if direction else _FORWARD
            began, waited = run.t_R.copy(), run.wait_R.copy()
            gathered_R = issue("gather", PHASES[phase], 0, run.t_R.copy())
            for unit in range(c.buckets):
                run.wait_for(everybody, gathered_R, phase)
                if unit + 1 < c.buckets:  # gathered while this unit computes
                    gathered_R = issue("gather", PHASES[phase], unit + 1, run.t_R.copy())
                run.spend(phase, everybody, base_s / c.buckets * factor_R * work_R)
                if direction:
                    last_R = issue("scatter", PHASES[phase], unit, run.t_R.copy())
                    if c.sharding == "hsdp":
                        last_R = issue("reduce", PHASES[phase], unit, last_R)
            run.pass_start_RM2[:, 0, direction] = began
            run.pass_RM2[:, 0, direction] = run.t_R - began - (run.wait_R - waited)
        run.wait_for(everybody, last_R, _BACKWARD)

    def _tail(self, run: _Running, now: Conditions, factor_R: Floats) -> None:
        """Reduce what is not reduced yet, clip, step, and gather the parameters."""
        c = self.cluster
        if c.sharding == "zero1":
            self._meet_stages(run, "reduce_scatter", now)
        if c.clip_gradients:
            slot = [next(k for k, s in enumerate(slots) if s.axis == "world")
                    for slots in self.slots]  # fmt: skip
            arrival = run.t_R.copy()
            end = np.full(c.ranks, arrival.max() + 20e-6 * now.transfer_R.max())
            for stage, at in enumerate(slot):
                where = self._of(stage)
                run.block(where, at, arrival[where], end[where], _OPTIMIZER)
        run.spend(_OPTIMIZER, slice(None), c.optimizer_s * factor_R * now.optimizer_R)
        if c.sharding == "zero1":
            self._meet_stages(run, "all_gather", now)

    def _meet_stages(self, run: _Running, op: str, now: Conditions) -> None:
        c = self.cluster
        for stage, slots in enumerate(self.slots):
            for axis in ("dp", "edp"):
                at = next((k for k, s in enumerate(slots) if s.op == op and s.axis == axis), None)
                if at is not None:
                    whole_s = c.bucket_s * c.buckets
                    self._meet(run, at, axis, stage, whole_s, now, phase=_OPTIMIZER)

    def _heartbeats(self, now: Conditions) -> list[dict[str, Any]]:
        """What each rank says while nobody gets further: where it is, and what it waits in."""
        fault = now.stopper
        if fault is None:
            return []
        culprit = np.isin(np.arange(self.cluster.ranks), fault.ranks)
        beats = []
        for rank in range(self.cluster.ranks):
            stage = int(self.cluster.places["pp"][rank])
            slot = len(self.slots[stage]) - 1
            at = self.slots[stage][slot]
            if culprit[rank] and fault.kind == "hang":
                beats.append({"rank": rank, "phase": "forward", "slot": None, "op": None,
                              "stack": "train.py:88 train_step > loader.py:31 __next__"})  # fmt: skip
                continue
            op = "broadcast" if culprit[rank] else at.op
            beats.append({"rank": rank, "phase": at.phase, "slot": slot, "op": op,
                          "stack": f"train.py:97 train_step > optim.py:12 {op}"})  # fmt: skip
        return beats


@dataclass(slots=True, kw_only=True)
class _Running:
    """The step under way: each rank's time, and what it has spent."""

    t_R: Floats
    wait_R: Floats
    phase_PR: Floats
    phase_start_PR: Floats
    arrival_RK: Floats
    end_RK: Floats
    pass_start_RM2: Floats
    pass_RM2: Floats

    def spend(self, phase: int, where: slice, took: Floats) -> None:
        """Work in a phase."""
        began = self.t_R[where].copy()
        self.phase_start_PR[phase, where] = np.minimum(self.phase_start_PR[phase, where], began)
        self.t_R[where] += took
        self.phase_PR[phase, where] += took

    def block(self, where: slice, slot: int, arrival: Floats, end: Floats, phase: int) -> None:
        """A blocking operation from arrival to end."""
        self.arrival_RK[where, slot], self.end_RK[where, slot] = arrival, end
        self.wait_for(where, end, phase)

    def wait_for(self, where: slice, end: Floats, phase: int) -> None:
        """Wait until ``end``, where that lies ahead."""
        waited = np.maximum(end - self.t_R[where], 0.0)
        self.t_R[where] += waited
        self.wait_R[where] += waited
        self.phase_PR[phase, where] += waited
        first = self.phase_start_PR[phase, where]
        self.phase_start_PR[phase, where] = np.minimum(first, self.t_R[where] - waited)
