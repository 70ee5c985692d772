"""What the hooks need of whoever records; ``record.Recorder`` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from argus_otel._runtime.faults import FaultLog
    from argus_otel.wire.events import Event
    from argus_otel.wire.identity import Compilation, Identity, UncaughtException


class Plan(Protocol):
    """Says which steps get more."""

    ends: bool

    def begin_step(self, ordinal: int, elapsed_ns: int) -> None:
        """Decide about the step that begins now."""

    def charge_end(self, measured_ns: int) -> None:
        """Account for one end that was asked for."""


class Sink(Protocol):
    """Where events go."""

    enabled: bool

    @property
    def plan(self) -> Plan:
        """The capture plan."""

    @property
    def faults(self) -> FaultLog:
        """Where argus's own errors go."""

    @property
    def append(self) -> Callable[[int, int, int, int, int, int, int], None]:
        """``append(kind, t0, t1, a, b, c, d)``, see ``wire.events``."""

    @property
    def held(self) -> deque[Event]:
        """Bounded; for the hooks that run most, which append to it without a call between."""

    @property
    def count_overflow(self) -> Callable[[], int]:
        """What they call first where it is full."""

    @property
    def identity(self) -> Identity:
        """Who this process is now."""

    def start(self) -> None:
        """There is something to record."""

    def set_identity(self, identity: Identity) -> None:
        """Begin a new identity."""

    def add_group(self, description: str, ranks: Sequence[int], *, blocks_host: bool) -> int:
        """Register a process group; its index."""

    def phase_index(self, name: str) -> int:
        """Index of a user's phase name; -1 when there are too many."""

    def record_compilation(self, compiled: Compilation, began_ns: int, ended_ns: int) -> None:
        """Note that the training thread compiled."""

    def record_exception(self, exception: UncaughtException) -> None:
        """Note an uncaught exception."""
