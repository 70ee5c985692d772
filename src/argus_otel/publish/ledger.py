"""Which findings have been raised and which are over: each is told once, however often one looks.

What detectors say of a run changes a little from look to look: a rank joins those that are slow
together, a finding rests for some steps, a symptom gets its cause. The ledger takes what is the same
fault for the same, waits before it calls one over, and survives a restart as a small file.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from argus_otel._runtime.errors import ConfigError
from argus_otel.tables.findings import Finding, Onset, Suppressed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SCHEMA: Final = "argus.watch/1"
_RUNS: Final = 20
"""Runs that the file remembers, the latest."""
REST_STEPS: Final = 20
"""A finding is over when it has not shown for so many steps: the detectors' window, so that what
comes and goes is not told anew each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something to tell: a finding was raised, or is over."""

    kind: Literal["raised", "closed"]
    finding: Finding
    why: str = ""
    """Of one that is over: how that is known."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """A fault that was raised."""

    finding: Finding
    """As last seen, under the id it was raised with."""
    closed: bool = False
    seen_step: int
    """The run's newest step when detectors last spoke of it."""

    def same_fault(self, finding: Finding) -> bool:
        """Whether detectors speak of this fault, though its ranks may vary a little."""
        mine = self.finding
        if finding.id == mine.id:
            return True
        if finding.cause != mine.cause or finding.groups != mine.groups:
            return False
        ours, theirs = set(mine.ranks), set(finding.ranks)
        return bool(ours & theirs) or not (ours or theirs)


@dataclass(slots=True)
class Ledger:
    """The faults of each run that was watched, by nonce."""

    path: Path | None = None
    runs: dict[str, list[Entry]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """From its file; empty where there is none.

        Raises:
            ConfigError: The file is there, and is not one of ours.
        """
        try:
            document = json.loads(path.read_bytes())
            if document["schema"] != SCHEMA:
                raise ValueError(document["schema"])
            runs = {
                run: [_entry(about) for about in entries]
                for run, entries in document["runs"].items()
            }
        except FileNotFoundError:
            return cls(path=path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the state file {path}",
                got=f"not readable ({error!r})",
                expected=f"what argus watch wrote ({SCHEMA})",
                fix="Remove it, and open findings are raised once more; or give another with --state.",
            ) from error
        return cls(path=path, runs=runs)

    def write(self) -> None:
        """Into its file, whole or not at all.

        Raises:
            ConfigError: It cannot be written.
        """
        if self.path is None:
            return
        runs = dict(list(self.runs.items())[-_RUNS:])
        document = {
            "schema": SCHEMA,
            "runs": {run: [asdict(entry) for entry in entries] for run, entries in runs.items()},
        }
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(document, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"the state file {self.path}",
                got=f"not writable ({error.strerror})",
                expected="a file that argus watch can write, to know after a restart what it raised",
                fix="Give another with --state.",
            ) from error

    def open_in(self, run: str) -> list[Finding]:
        """What is open in a run."""
        return [entry.finding for entry in self.runs.get(run, ()) if not entry.closed]

    def update(self, run: str, findings: Sequence[Finding], newest_step: int) -> list[Change]:
        """Take what detectors say now; return what is news.

        Args:
            run: Nonce.
            findings: Those worth telling.
            newest_step: The newest step that they had.
        """
        entries = self.runs.setdefault(run, [])
        changes: list[Change] = []
        for finding in findings:
            changes += self._take(entries, finding, newest_step)
        for entry in entries:
            if entry.closed:
                continue
            why = _explained(entry.finding, findings)
            if (
                not why
                and newest_step - max(entry.seen_step, entry.finding.last_step) >= REST_STEPS
            ):
                why = f"not seen since step {entry.finding.last_step}"
            if why:
                changes.append(self._close(entry, why))
        return changes

    def close_all(self, run: str, why: str) -> list[Change]:
        """A run is over, and with it what was open in it."""
        return [self._close(entry, why) for entry in self.runs.get(run, ()) if not entry.closed]

    def _take(self, entries: list[Entry], finding: Finding, newest_step: int) -> list[Change]:
        entry = next((entry for entry in entries if entry.same_fault(finding)), None)
        rested = newest_step - finding.last_step
        if entry is None:
            if finding.state == "ended" and rested >= REST_STEPS:
                # Over before anybody looked: told as both, so that it is told at all.
                entry = Entry(finding=finding, seen_step=newest_step)
                entries.append(entry)
                raised = Change(kind="raised", finding=replace(finding, state="open"))
                return [raised, self._close(entry, f"over since step {finding.last_step}")]
            entries.append(Entry(finding=replace(finding, state="open"), seen_step=newest_step))
            return [Change(kind="raised", finding=replace(finding, state="open"))]
        before = entry.finding
        onset = min(before.onset, finding.onset, key=lambda onset: onset.step)
        known = replace(
            finding,
            id=before.id,
            first_step=min(before.first_step, finding.first_step),
            last_step=max(before.last_step, finding.last_step),
            onset=onset,
            state="open",
        )
        if entry.closed:
            if finding.state == "ended" or finding.last_step - before.last_step < REST_STEPS:
                return []
            entry.closed = False
            entry.finding = known
            entry.seen_step = newest_step
            return [Change(kind="raised", finding=known, why="it is back")]
        entry.finding = known
        if finding.state == "open":
            entry.seen_step = newest_step
        return []

    @staticmethod
    def _close(entry: Entry, why: str) -> Change:
        entry.closed = True
        entry.finding = replace(entry.finding, state="ended")
        return Change(kind="closed", finding=entry.finding, why=why)


def _explained(finding: Finding, findings: Sequence[Finding]) -> str:
    """Under what a finding is listed by now, if it is."""
    for other in findings:
        for symptom in other.suppressed:
            same = set(symptom.ranks) & set(finding.ranks) or symptom.ranks == finding.ranks
            if symptom.cause == finding.cause and same:
                return f"explained by {other.cause.replace('_', ' ')}"
    return ""


def _entry(about: Mapping[str, Any]) -> Entry:
    data = dict(about["finding"])
    for name in ("ranks", "hosts", "groups"):
        data[name] = tuple(data[name])
    data["onset"] = Onset(**data["onset"])
    data["suppressed"] = tuple(
        Suppressed(cause=symptom["cause"], ranks=tuple(symptom["ranks"]))
        for symptom in data["suppressed"]
    )
    return Entry(finding=Finding(**data), closed=about["closed"], seen_step=about["seen_step"])
