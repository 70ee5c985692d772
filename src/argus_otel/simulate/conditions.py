"""What background disturbances and planted faults make of one step, rank by rank.

Shape legend: R = ranks.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from argus_otel.simulate.faults import KERNEL_CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from argus_otel.simulate.cluster import Cluster
    from argus_otel.simulate.faults import Fault

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

_UNSYNCHRONISED_GC_STEPS: Final = 10
"""Where every rank collects in its own time, each does so once in so many steps."""


@dataclass(slots=True, kw_only=True)
class Conditions:
    """Factors (1 is healthy) and extra seconds of one step."""

    compute_R: Floats
    kernel_factors: dict[str, Floats] = field(default_factory=dict)
    """Class of kernels → factor on it alone, of which ``compute_R`` has its share already."""
    optimizer_R: Floats
    """Factor on the optimizer beside ``compute_R``: its kernels are elementwise."""
    transfer_R: Floats
    """Factor on transfers through a rank's links."""
    group_transfer: dict[tuple[str, int], float] = field(default_factory=dict)
    """(axis, group) → factor on that group's transfers alone."""
    data_R: Floats
    stall_R: Floats
    """Pauses that nothing swallows."""
    gc_R: Floats
    """Pauses of the host, like waiting for a core: the launch-ahead swallows a part of them."""
    run_delay_R: Floats
    between_R: Floats
    memory_bytes_R: Floats
    """Growth in this step."""
    clock_R: Floats
    """GPU clock against its usual one."""
    variation: float
    """Log-normal sigma of the tokens of a micro-batch."""
    busy_experts: list[tuple[Bools, float, int]] = field(default_factory=list)
    """Ranks that get so many times their tokens, all that is more of it for one of their experts."""
    late_passes: dict[tuple[int, int], tuple[Bools, float]] = field(default_factory=dict)
    """(stage, micro-batch) → ranks whose forward pass is late, and by how many seconds."""
    reported_R: Bools
    events: list[dict[str, Any]] = field(default_factory=list)
    devices: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank → what its device says beyond clocks."""
    stopper: Fault | None = None
    """What keeps this step from ever ending."""

    def note(
        self, hit: Bools, kind: str, name: str, duration_s: float, detail: str | None = None
    ) -> None:
        """An event on some ranks."""
        self.events.append(
            {"ranks": np.flatnonzero(hit), "kind": kind, "name": name, "duration_s": duration_s,
             "detail": detail}
        )  # fmt: skip

    def device(self, hit: Bools, **says: object) -> None:
        """Something that the devices of some ranks say."""
        for rank in np.flatnonzero(hit).tolist():
            self.devices.setdefault(rank, {}).update(says)


class Weather:
    """Makes the conditions of each step.

    Args:
        cluster: The job.
        faults: What is planted.
        random: For what a healthy job has: collection phases, lost rows.
        fault_random: For the faults' own noise, so that they leave the healthy job as it is.
    """

    def __init__(
        self,
        cluster: Cluster,
        faults: tuple[Fault, ...],
        random: np.random.Generator,
        fault_random: np.random.Generator,
    ) -> None:
        self._cluster, self._faults = cluster, faults
        self._random, self._fault_random = random, fault_random
        every = max(cluster.collection_every, 1)
        self._gc_phase_R: Ints = random.integers(0, every, cluster.ranks)

    def of(self, ordinal: int) -> Conditions:
        """The conditions of a step; call once a step, in order."""
        c = self._cluster
        r = c.ranks
        now = Conditions(
            compute_R=np.ones(r), optimizer_R=np.ones(r), transfer_R=np.ones(r),
            data_R=np.zeros(r), stall_R=np.zeros(r), gc_R=np.zeros(r), run_delay_R=np.zeros(r), between_R=np.zeros(r),
            memory_bytes_R=np.zeros(r), clock_R=np.ones(r), variation=c.length_variation,
            reported_R=np.ones(r, dtype=bool),
        )  # fmt: skip
        if c.collection_every:
            hit = (ordinal + self._gc_phase_R) % c.collection_every == 0
            now.gc_R += np.where(hit, c.collection_s, 0.0)
        if c.restart_s and not ordinal:
            now.between_R += c.restart_s
        if c.evaluation_every and ordinal and ordinal % c.evaluation_every == 0:
            now.between_R += c.evaluation_s
        if c.checkpoint_every and ordinal and ordinal % c.checkpoint_every == 0:
            now.between_R += c.checkpoint_s
            now.note(np.ones(r, dtype=bool), "checkpoint", "save", c.checkpoint_s)
        if c.lost_rows:
            now.reported_R &= self._random.random(r) >= c.lost_rows
        for fault in self._faults:
            if fault.is_on(ordinal):
                hit = fault.mask(r)
                _EFFECTS[fault.kind](
                    _Effect(fault, c, ordinal, hit, now, self._fault_random), fault.sizes
                )
        return now


@dataclass(frozen=True, slots=True)
class _Effect:
    """One fault at work in one step."""

    fault: Fault
    cluster: Cluster
    ordinal: int
    hit: Bools
    now: Conditions
    random: np.random.Generator


def _compute(e: _Effect, size: Mapping[str, float]) -> None:
    kernel = e.fault.texts.get("kernel", "")
    factor = 1 + KERNEL_CLASSES.get(kernel, 1.0) * (size["factor"] - 1)
    e.now.compute_R[e.hit] *= factor
    if kernel:
        of_optimizer = size["factor"] if kernel == "elementwise" else 1.0
        e.now.optimizer_R[e.hit] *= of_optimizer / factor
        of_class = e.now.kernel_factors.setdefault(kernel, np.ones(e.hit.size))
        of_class[e.hit] *= size["factor"]


def _expert(e: _Effect, size: Mapping[str, float]) -> None:
    e.now.compute_R[e.hit] *= size["factor"]
    e.now.busy_experts.append((e.hit, size["factor"], int(size["index"])))


def _link(e: _Effect, size: Mapping[str, float]) -> None:
    if e.fault.axis is not None and e.fault.group is not None:
        e.now.group_transfer[e.fault.axis, e.fault.group] = size["factor"]
    else:
        e.now.transfer_R[e.hit] *= size["factor"]


def _micro_batch(e: _Effect, size: Mapping[str, float]) -> None:
    stage = int(e.cluster.places["pp"][e.fault.ranks[0]])
    e.now.late_passes[stage, int(size["index"])] = (e.hit, size["extra_s"])


def _jit(e: _Effect, size: Mapping[str, float]) -> None:
    texts = e.fault.texts
    e.now.stall_R[e.hit] += size["stall_s"]
    e.now.note(e.hit, "compilation", texts["function"], size["stall_s"], texts["reason"])


def _sequence(e: _Effect, size: Mapping[str, float]) -> None:
    e.now.variation = max(e.now.variation, size["variation"])


def _input(e: _Effect, size: Mapping[str, float]) -> None:
    e.now.data_R[e.hit] += size["extra_s"]


def _gc(e: _Effect, size: Mapping[str, float]) -> None:
    hit = e.hit.copy()
    if not size["synchronised"] and e.fault.every == 1:
        place = (e.ordinal + np.arange(hit.size) * 7) % _UNSYNCHRONISED_GC_STEPS
        hit &= place == 0
    e.now.gc_R[hit] += size["pause_s"]
    e.now.note(hit, "gc", "gc", size["pause_s"])


def _checkpoint(e: _Effect, size: Mapping[str, float]) -> None:
    e.now.between_R[e.hit] += size["extra_s"]
    e.now.note(e.hit, "checkpoint", "save", size["extra_s"])


def _host_sync(e: _Effect, size: Mapping[str, float]) -> None:
    lost_s = size["count"] * size["gap_s"]
    e.now.stall_R[e.hit] += lost_s
    e.now.note(e.hit, "host_sync", "item", lost_s, str(int(size["count"])))


def _contention(e: _Effect, size: Mapping[str, float]) -> None:
    noise_R = np.exp(e.random.normal(0, 0.3, e.hit.size))
    e.now.run_delay_R[e.hit] += (size["delay_s"] * noise_R)[e.hit]


def _throttle(e: _Effect, size: Mapping[str, float]) -> None:
    ramp = min(1.0, (e.ordinal - e.fault.first + 1) / max(size["ramp_steps"], 1))
    factor = 1 + (size["factor"] - 1) * ramp
    e.now.compute_R[e.hit] *= factor
    e.now.clock_R[e.hit] /= factor
    e.now.device(e.hit, throttle_reasons=e.fault.texts["reason"])


def _xid(e: _Effect, size: Mapping[str, float]) -> None:
    e.now.compute_R[e.hit] *= size["factor"]
    e.now.device(e.hit, xid=int(size["code"]))


def _allocator(e: _Effect, size: Mapping[str, float]) -> None:
    e.now.stall_R[e.hit] += size["retries"] * size["stall_s"]
    e.now.device(e.hit, allocator_retries=int(size["retries"]))


def _leak(e: _Effect, size: Mapping[str, float]) -> None:
    e.now.memory_bytes_R[e.hit] += size["bytes"]


def _silent(e: _Effect, _: Mapping[str, float]) -> None:
    e.now.reported_R &= ~e.hit


def _stop(e: _Effect, _: Mapping[str, float]) -> None:
    e.now.stopper = e.fault


_EFFECTS: Final[Mapping[str, Callable[[_Effect, Mapping[str, float]], None]]] = {
    "compute": _compute,
    "stage": _compute,
    "expert": _expert,
    "link": _link,
    "comm": _link,
    "micro_batch": _micro_batch,
    "jit": _jit,
    "sequence": _sequence,
    "input": _input,
    "gc": _gc,
    "checkpoint": _checkpoint,
    "host_sync": _host_sync,
    "contention": _contention,
    "throttle": _throttle,
    "xid": _xid,
    "allocator": _allocator,
    "leak": _leak,
    "silent": _silent,
    "hang": _stop,
    "mismatch": _stop,
}
