"""What runs, written down, so that another shell can see and stop it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from argus_otel.stack.errors import StackError
from argus_otel.stack.processes import ProcessIdentity

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """One process of the stack."""

    name: str
    pid: int
    start_mark: str
    log: str
    health_url: str

    @property
    def process(self) -> ProcessIdentity:
        """The process to ask for, or to stop."""
        return ProcessIdentity(pid=self.pid, start_mark=self.start_mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """A stack that somebody started with ``argus stack up``."""

    config: str
    urls: dict[str, str] = field(default_factory=dict)
    parts: tuple[PartRecord, ...] = ()
    """In the order in which they were started; stopped in the opposite one."""
    complete: bool = False
    """False while it is being started: whoever finds it so finds a start that was cut short."""


def write_record(path: Path, record: StackRecord) -> None:
    """Write the record whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(
        json.dumps({"version": _VERSION, **asdict(record)}, indent=2), encoding="utf-8"
    )
    draft.replace(path)


def read_record(path: Path) -> StackRecord | None:
    """Give what was written, or None when nothing was.

    Raises:
        StackError: The file is not one of ours, so which processes to stop is not known.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        raw: dict[str, Any] = json.loads(text)
        if raw.pop("version") != _VERSION:
            raise ValueError("version")
        parts = tuple(PartRecord(**part) for part in raw.pop("parts"))
        return StackRecord(parts=parts, **raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StackError(
            f"the state file {path}",
            got=f"unreadable ({error})",
            expected=f"a record of version {_VERSION}",
            fix="See `ps` for argus-collector and jaeger, stop them by pid, and remove the file.",
        ) from error
