"""Argus's hooks in the test's own process, on real torch, and what condense makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.parallel
import torch.utils.data

from argus_otel._runtime.faults import FaultLog
from argus_otel.condense.condenser import Condenser, Costs
from argus_otel.instrument.install import Instrumentation
from argus_otel.record.capture import CapturePlan
from argus_otel.record.recorder import Recorder
from argus_otel.record.ring import EventRing
from argus_otel.wire.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from argus_otel.condense import Condensed
    from argus_otel.wire.digest import StepDigest


@dataclass
class Traced:
    """One process's recorder and hooks; argus's own faults fail the test."""

    recorder: Recorder
    instrumentation: Instrumentation
    condenser: Condenser
    boundaries: list[int]
    """Ordinal of the step that began, at each boundary."""
    parts: list[Condensed] = field(default_factory=list)

    def digests(self) -> list[StepDigest]:
        """Every whole step so far."""
        self.parts += self.condenser.take(
            self.recorder.ring.drain(),
            wall_offset_ns=0,
            lost=0,
            costs=Costs(self_cpu_s=0.0, drops=0, memory_bytes=None),
        )
        return [digest for part in self.parts for digest in part.digests]


def phases_of(digest: StepDigest) -> list[str]:
    """Names of a digest's phases, in order; without gaps that only a slow machine shows."""
    names = [digest.phases.names[index] for index in digest.phases.name]
    return [name for name in names if name not in {"prepare", "loss"}]


@pytest.fixture
def names_of():
    """``phases_of``, as tests get it."""
    return phases_of


@pytest.fixture
def traced() -> Iterator[Traced]:
    """Hooks in place for the length of one test."""
    recorder = Recorder(
        ring=EventRing(1 << 14),
        faults=FaultLog(reraise=True),
        plan=CapturePlan(baseline_ratio=0.0, overhead_budget=0.005),
        on_first_record=lambda: None,
    )
    boundaries: list[int] = []
    instrumentation = Instrumentation.create(recorder, boundaries.append, exception_messages=False)
    recorder.set_identity(
        Identity(
            nonce=b"12345678",
            nonce_local=False,
            run_id="test",
            attempt=0,
            role="trainer",
            rank=0,
            world_size=1,
            local_rank=0,
        )
    )
    instrumentation.install()
    condenser = Condenser(
        recorder,
        baseline_ratio=0.0,
        detail_spans=900,
        capacity=1 << 14,
        faults=recorder.faults,
    )
    yield Traced(recorder, instrumentation, condenser, boundaries)
    instrumentation.remove()


@pytest.fixture
def alone(traced: Traced, tmp_path: Path) -> Iterator[Traced]:
    """A process group world of one rank, with the hooks on it."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield traced
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def model() -> torch.nn.Module:
    """Small enough for a step of a millisecond."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
