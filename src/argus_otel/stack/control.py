"""``up``, ``status`` and ``down``: one stack per cache folder, seen from any shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from argus_otel.stack import processes
from argus_otel.stack.build import Binaries, build_stack
from argus_otel.stack.cache import cache_dir, exclusive
from argus_otel.stack.parts import responds
from argus_otel.stack.run import start_stack
from argus_otel.stack.state import PartRecord, StackRecord, read_record, write_record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from argus_otel.stack.parts import Stack

SCHEMA = "argus.stack/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """One process as it is now."""

    record: PartRecord
    alive: bool
    healthy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStatus:
    """The stack as it is now."""

    state: Literal["running", "degraded", "stopped"]
    """degraded: recorded, but a part has ended, does not answer, or was never started."""
    record: StackRecord | None
    parts: tuple[PartStatus, ...]
    state_file: Path

    def as_json(self) -> dict[str, Any]:
        """Give the document that ``argus stack status --json`` prints."""
        return {
            "schema": SCHEMA,
            "state": self.state,
            "config": self.record.config if self.record else None,
            "urls": self.record.urls if self.record else {},
            "parts": [
                {
                    "name": part.record.name,
                    "pid": part.record.pid,
                    "alive": part.alive,
                    "healthy": part.healthy,
                    "log": part.record.log,
                }
                for part in self.parts
            ],
            "state_file": str(self.state_file),
        }


def _silent(_message: str) -> None:
    pass


def bring_up(
    *,
    config: str | Path | Sequence[Path] = "local",
    decision_wait_s: float | None = None,
    jaeger: bool = True,
    binaries: Binaries | None = None,
    folder: Path | None = None,
    on_progress: Callable[[str], None] = _silent,
) -> StackStatus:
    """Start the stack unless it runs; what is left of a broken one is stopped first.

    Args:
        config: As in ``running_stack``. A stack that runs with another one is left as it is.
        decision_wait_s: Seconds; the configuration's default when None.
        jaeger: False starts the Collector alone.
        binaries: Executables; built when None.
        folder: The cache folder by default.
        on_progress: Called with one line at a time.
    """
    folder = folder or cache_dir()
    directory = folder / "run"

    def record(stack: Stack, *, complete: bool = False) -> None:
        write_record(_state_file(folder), _record_of(stack, complete=complete))

    with _one_at_a_time(folder, on_progress):
        now = read_status(folder=folder)
        if now.state == "running":
            return now
        if now.state == "degraded":
            on_progress("stopping what is left of an earlier stack")
            _stop_recorded(folder, now)
        binaries = binaries or build_stack(folder=folder, on_progress=on_progress)
        on_progress("starting")
        try:
            stack = start_stack(
                config=config,
                decision_wait_s=decision_wait_s,
                jaeger=jaeger,
                env=None,
                directory=directory,
                binaries=binaries,
                prefer_usual_ports=True,
                on_spawn=record,
            )
        except BaseException:
            _state_file(folder).unlink(missing_ok=True)  # start_stack has stopped its parts
            raise
        record(stack, complete=True)
        return read_status(folder=folder)


def take_down(
    *, folder: Path | None = None, on_progress: Callable[[str], None] = _silent
) -> list[str]:
    """Stop the recorded stack, from whichever shell started it.

    Returns:
        Names of the parts that were stopped; those that had already ended are not among them.
    """
    folder = folder or cache_dir()
    with _one_at_a_time(folder, on_progress):
        return _stop_recorded(folder, read_status(folder=folder))


def read_status(*, folder: Path | None = None) -> StackStatus:
    """Look at the recorded processes; changes nothing.

    Raises:
        StackError: The state file is not readable.
    """
    folder = folder or cache_dir()
    record = read_record(_state_file(folder))
    parts = tuple(_look_at(part) for part in record.parts) if record else ()
    if record is None:
        state: Literal["running", "degraded", "stopped"] = "stopped"
    elif record.complete and all(part.healthy for part in parts):
        state = "running"
    else:
        state = "degraded"
    return StackStatus(state=state, record=record, parts=parts, state_file=_state_file(folder))


def _look_at(part: PartRecord) -> PartStatus:
    alive = processes.is_alive(part.process)
    return PartStatus(record=part, alive=alive, healthy=alive and responds(part.health_url))


def _stop_recorded(folder: Path, status: StackStatus) -> list[str]:
    # The Collector was started last and is stopped first, so that Jaeger receives what it flushes.
    stopped = [
        part.record.name for part in reversed(status.parts) if processes.stop(part.record.process)
    ]
    _state_file(folder).unlink(missing_ok=True)
    return stopped


def _state_file(folder: Path) -> Path:
    return folder / "run" / "stack.json"


def _one_at_a_time(
    folder: Path, on_progress: Callable[[str], None]
) -> AbstractContextManager[None]:
    return exclusive(
        folder / "run" / "stack.lock", lambda: on_progress("waiting for another `argus stack`")
    )


def _record_of(stack: Stack, *, complete: bool) -> StackRecord:
    return StackRecord(
        config=stack.config,
        urls=stack.urls(),
        parts=tuple(
            PartRecord(
                name=part.name,
                pid=part.process.pid,
                start_mark=part.process.start_mark,
                log=str(part.log),
                health_url=part.health_url,
            )
            for part in stack.parts
            if part.process is not None
        ),
        complete=complete,
    )
