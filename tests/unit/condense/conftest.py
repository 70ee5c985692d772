"""Events as the hooks would record them, in milliseconds that a reader can add up."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import pytest

from argus_otel._runtime.faults import FaultLog
from argus_otel.condense.condenser import Condenser, Costs
from argus_otel.wire import events
from argus_otel.wire.codes import OPS
from argus_otel.wire.identity import Group, Identity

MS = 1_000_000
START_MS = 1_000
"""When the process began, on the monotonic clock."""


def identity_of(**changes):
    fields = {
        "nonce": b"12345678",
        "nonce_local": False,
        "run_id": "test",
        "attempt": 0,
        "role": "trainer",
        "rank": 0,
        "world_size": 2,
        "local_rank": 0,
    }
    return Identity(**(fields | changes))


@dataclass
class Job:
    """Writes events of one process and condenses them."""

    baseline_ratio: float = 0.0
    detail_spans: int = 900
    capacity: int = 1 << 14
    identities: list[Identity] = field(default_factory=lambda: [identity_of()])
    groups: list[Group] = field(
        default_factory=lambda: [
            Group(key=0xC0FFEE, description="default_pg", ranks=(0, 1), era=0, blocks_host=True)
        ]
    )
    phase_names: list[str] = field(default_factory=list)
    exceptions: list = field(default_factory=list)
    compilations: list = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    ordinal: int = 0
    counts: int = 0
    faults: FaultLog = field(default_factory=lambda: FaultLog(reraise=True))
    pauses: int = 0
    """How often the GIL was given away."""

    def __post_init__(self):
        self.condenser = Condenser(
            self,
            baseline_ratio=self.baseline_ratio,
            detail_spans=self.detail_spans,
            capacity=self.capacity,
            faults=self.faults,
        )
        self.event(events.IDENTITY, START_MS, 0, a=0)

    def event(self, kind, t0_ms, t1_ms, a=0, b=0, c=0, d=0):
        ns = [round(t * MS) for t in (t0_ms, t1_ms)]
        self.rows.append((len(self.rows), kind, *ns, a, b, c, d))
        return self

    def data(self, t0, t1, cpu_ms=0):
        return self.event(events.DATA, t0, t1, cpu_ms * MS, events.NONE)

    def forward(self, t0, t1, flags=0, cpu_ms=0):
        return self.event(events.FORWARD, t0, t1, cpu_ms * MS, events.NONE, flags)

    def backward(self, t0, t1, flags=0):
        return self.event(events.BACKWARD, t0, t1, 0, events.NONE, flags)

    def optimizer(self, t0, t1):
        return self.event(events.OPTIMIZER, t0, t1)

    def collective(self, t0, *, op="all_reduce", is_async=False, group=0, op_id=0, peer=-1):
        packed = events.pack_collective(group, OPS.index(op), is_async=is_async, peer=peer)
        self.event(events.COLLECTIVE, t0, 0, packed, self.counts, 1024, op_id)
        self.counts += 1
        return self

    def wait(self, t0, t1, *, by_module=False):
        return self.event(events.WAIT, t0, t1, int(by_module))

    def end(self, t0, *, rule="optimizer", flags=0, cpu_ms=0):
        mark = events.RULES.index(rule) | flags
        self.rows.append(
            (
                len(self.rows), events.STEP_END, round(t0 * MS), mark,
                self.ordinal, events.NONE, cpu_ms * MS, events.NONE,
            )
        )  # fmt: skip
        self.ordinal += 1
        return self

    def take(self, *, lost=0):
        drained = events.Events(b"".join(struct.pack("<8q", *row) for row in self.rows))
        self.rows.clear()
        return self.condenser.take(
            drained,
            wall_offset_ns=0,
            lost=lost,
            costs=Costs(self_cpu_s=0.002, drops=0, memory_bytes=1 << 20),
            pause=self._count_pause,
        )

    def _count_pause(self):
        self.pauses += 1

    def digests(self, **kwargs):
        return [digest for part in self.take(**kwargs) for digest in part.digests]


@pytest.fixture
def job():
    """A process of rank 0 of 2 that has begun at 1,000 ms."""
    return Job()


@pytest.fixture(scope="session")
def make_job():
    """The same with other settings."""
    return Job


@pytest.fixture(scope="session")
def make_identity():
    """Rank 0 of 2, unless told otherwise."""
    return identity_of
