"""What the hooks write to: the ring, and small tables for what does not fit in integers.

The tables grow with the number of process groups, phase names and identities of a job, never
with its steps.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.record.capture import CapturePlan
from argus_otel.record.ring import EventRing
from argus_otel.wire import events, ids
from argus_otel.wire.identity import Compilation, Group, Identity, UncaughtException

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from argus_otel._runtime.faults import FaultLog

_MAX_EXCEPTIONS = 16
_MAX_PHASE_NAMES = 256
_MAX_NAME_CHARACTERS = 100
_MAX_COMPILATIONS = 1024
_MAX_REASON_CHARACTERS = 300
_START_AGAIN_NS = 10_000_000_000


@dataclass(slots=True)
class Recorder:
    """One per process. ``append`` is the hot path; everything else is rare."""

    ring: EventRing
    faults: FaultLog
    plan: CapturePlan
    on_first_record: Callable[[], None]
    """Called when there is something to send for: starts the background thread. Once, unless it
    raises (no thread can be started): then again, some time later."""
    enabled: bool = True
    identities: list[Identity] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    phase_names: list[str] = field(default_factory=list)
    exceptions: list[UncaughtException] = field(default_factory=list)
    compilations: list[Compilation] = field(default_factory=list)
    _phase_indices: dict[str, int] = field(default_factory=dict)
    _members: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    _twins: Counter[tuple[str, tuple[int, ...], int]] = field(default_factory=Counter)
    _started: bool = False
    _start_from_ns: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def append(self) -> Callable[[int, int, int, int, int, int, int], None]:
        """The ring's ``append``; hooks bind it once."""
        return self.ring.append

    @property
    def held(self) -> deque[events.Event]:
        """What the ring holds, see ``ring.held``."""
        return self.ring.held

    @property
    def count_overflow(self) -> Callable[[], int]:
        """The ring's ``count_overflow``."""
        return self.ring.count_overflow

    @property
    def identity(self) -> Identity:
        """Who this process is now."""
        return self.identities[-1]

    def start(self) -> None:
        """Say that this process trains; the first call starts the background thread."""
        if self._started or monotonic_ns() < self._start_from_ns:
            return
        with self._lock:
            if self._started:
                return
            self._started = True
            try:
                self.on_first_record()
            except Exception as error:  # noqa: BLE001 - never into the user's training
                self._started = False
                self._start_from_ns = monotonic_ns() + _START_AGAIN_NS
                self.faults.report("worker_not_started", error)

    def reset_after_fork(self) -> None:
        """In a forked child: not started, and no lock that another thread held in the parent."""
        self._started = False
        self._start_from_ns = 0
        self._lock = threading.Lock()

    def set_identity(self, identity: Identity) -> None:
        """Begin a new identity: steps count from 0 again, in traces of their own."""
        self.identities.append(identity)
        self.plan.set_identity(identity)
        self.ring.append(events.IDENTITY, monotonic_ns(), 0, len(self.identities) - 1, 0, 0, 0)

    def add_group(self, description: str, ranks: Sequence[int], *, blocks_host: bool) -> int:
        """Register a process group.

        Returns:
            Its index in ``groups``, which events carry.
        """
        with self._lock:
            era = len(self.identities) - 1
            members = tuple(ranks)
            # Thousands of groups of thousands of ranks often have the same few lists of members.
            members = self._members.setdefault(members, members)
            key = (description, members, era)
            twins = self._twins[key]
            self._twins[key] += 1
            self.groups.append(
                Group(
                    key=ids.group_key(description, members, twins),
                    description=description,
                    ranks=members,
                    era=era,
                    blocks_host=blocks_host,
                )
            )
            return len(self.groups) - 1

    def phase_index(self, name: object) -> int:
        """Index of a user's phase name in ``phase_names``; -1 when there are too many.

        What is no name, or none that can be sent, is made one: see ``_clean_name``.
        """
        if type(name) is str and (index := self._phase_indices.get(name)) is not None:
            return index
        name = _clean_name(name)
        if (index := self._phase_indices.get(name)) is not None:
            return index
        with self._lock:
            if name in self._phase_indices:  # another thread was faster
                return self._phase_indices[name]
            if len(self.phase_names) >= _MAX_PHASE_NAMES:
                self.faults.report("phase_names_full")
                return -1
            self.phase_names.append(name)
            index = self._phase_indices[name] = len(self.phase_names) - 1
            return index

    def record_compilation(self, compiled: Compilation, began_ns: int, ended_ns: int) -> None:
        """Note that the training thread compiled."""
        with self._lock:
            if len(self.compilations) >= _MAX_COMPILATIONS:
                self.faults.report("compilations_full")
                return
            first_line = compiled.reason.partition("\n")[0]
            self.compilations.append(
                Compilation(
                    function=_clean_name(compiled.function),
                    reason=first_line and _clean_name(first_line, _MAX_REASON_CHARACTERS),
                )
            )
            index = len(self.compilations) - 1
        self.ring.append(events.COMPILATION, began_ns, ended_ns, index, 0, 0, 0)

    def record_exception(self, exception: UncaughtException) -> None:
        """Note an exception that nobody caught."""
        with self._lock:
            if len(self.exceptions) >= _MAX_EXCEPTIONS:
                self.faults.report("exceptions_full")
                return
            self.exceptions.append(exception)
            index = len(self.exceptions) - 1
        self.ring.append(events.EXCEPTION, monotonic_ns(), 0, index, 0, 0, 0)


def _clean_name(name: object, characters: int = _MAX_NAME_CHARACTERS) -> str:
    """Text that every exporter can encode, whatever the user has called a phase."""
    try:
        text = str(name)[:characters]
    except Exception:  # noqa: BLE001 - the user's own __str__
        text = type(name).__name__[:characters]
    # A lone surrogate is no character, and UTF-8 has no bytes for it.
    return text.encode("utf-8", "replace").decode("utf-8") or "phase"
