"""Judges a run again and again while it is written: reads only what is new, forgets what is old.

Kept in memory are the first steps of the run, so that there is something to compare with, and the
latest ones. Of the newest steps some ranks' digests may be on their way: those are read once more
the next time.

Shape legend: S = steps, R = ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from argus_otel import service
from argus_otel._runtime.errors import StoreError
from argus_otel.align.steps import with_one_step_count
from argus_otel.detect.engine import diagnose_run
from argus_otel.detect.run import RunBuilder
from argus_otel.store.naming import LATEST
from argus_otel.tables.findings import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from argus_otel.detect.definition import Detector
    from argus_otel.detect.engine import Verdict
    from argus_otel.publish.ledger import Change, Ledger
    from argus_otel.store.protocol import Store
    from argus_otel.tables.findings import Finding
    from argus_otel.tables.schemas import RunSummary, RunTables

KEPT_STEPS: Final = 200
FIRST_STEPS: Final = 60
"""Of the run, kept for comparison: the warm-up and fifty more."""
_MOST_ROWS: Final = 600_000
"""Rows of the steps table held at most, whatever the size of the job; 40 steps at least."""
_ROWS_AT_ONCE: Final = 150_000
"""And read at a time, with all columns; what detectors do not need is let go of."""
_LATE_STEPS: Final = 20
"""A rank that lacks a step so far behind the newest will not send it any more."""
_AT_ONCE: Final = 64
"""Steps asked for in one reading, where the store is asked trace by trace."""
_NO_END: Final = 1 << 62
_QUIET_NS: Final = 120 * 10**9
"""A run that sent nothing for so long is left for a newer one."""
_TOLD: Final = ["ordinal", "rank", "start_ns", "step_s", "trace_id"]
_BY_ORDINAL: Final = ("steps", "collectives", "micro_batches", "events", "devices", "heartbeats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at the store brought."""

    run: RunSummary
    verdict: Verdict
    changes: tuple[Change, ...]
    open: tuple[Finding, ...]
    steps: pa.Table
    """Of what is held, the columns of ``tables.STEPS`` that tell when a step was, and in which trace."""
    newest_step: int
    fresh: bool
    """Whether anything had come since the look before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """Some steps that are held for good."""

    first: int
    last: int
    steps: pa.Table
    """See ``_told``."""
    heartbeats: int

    def until(self, after: int) -> _Held:
        """Those before a step."""
        steps = self.steps.filter(pc.field("ordinal") < after)
        return replace(self, last=min(self.last, after - 1), steps=steps)


@dataclass(slots=True, kw_only=True)
class Watcher:
    """Looks at one run at a time; ``latest`` may move on to another."""

    open_store: Callable[[], Store]
    run_name: str
    ledger: Ledger
    detectors: Sequence[Detector]
    since_ns: int | None = None
    """Look only at runs that sent something since then, Unix nanoseconds."""
    info: bool = False
    """Whether information is told too."""
    store: Store | None = None
    _run: RunSummary | None = None
    _builder: RunBuilder = field(default_factory=RunBuilder)
    """All steps that are held for good, laid out."""
    _held: list[_Held] = field(default_factory=list)
    _tail: RunTables | None = None
    _next: int = 0
    """First step that is not held for good."""
    _steps: int = 0
    """Of the run, when last read."""
    _seen: tuple[int, int, int] = (-1, 0, 0)
    _last: Look | None = None
    _left: list[Change] = field(default_factory=list)

    def look(self) -> Look:
        """Read what is new and judge.

        Raises:
            StoreError: The store cannot be read now; nothing is lost, look again.
        """
        if self.store is None:
            self.store = self.open_store()
        run = self._resolve(self.store)
        if self._run is None or run.run != self._run.run:
            self._begin(self.store, run)
        self._run = run
        self._read(self.store, run)
        tail = [] if self._tail is None else [self._tail]
        steps = pa.concat_tables([*(part.steps for part in self._held), *map(_told, tail)])
        newest = int(pc.max(steps["ordinal"]).as_py()) if steps.num_rows else -1
        beats = sum(part.heartbeats for part in self._held)
        beats += sum(part.heartbeats.num_rows for part in tail)
        seen = (newest, steps.num_rows, beats)
        if self._last is not None and seen == self._seen and self._last.run.run == run.run:
            return replace(self._last, changes=self._take_left(), fresh=False)
        self._seen = seen
        builder = self._builder
        builder.rows = partial(self.store.rows, run)
        # What is not whole is judged too, and taken anew the next time.
        mark = builder.mark()
        try:
            for part in tail:
                builder.add(with_one_step_count(part))
            built = builder.build()
        finally:
            builder.rewind(mark)
        verdict = diagnose_run(built, self.detectors)
        del built
        worth = [
            self._in_view(finding)
            for finding in verdict.diagnosis.findings
            if self.info or finding.severity != "info"
        ]
        changes = self.ledger.update(run.run, worth, newest)
        self._last = Look(
            run=run,
            verdict=verdict,
            changes=(*self._take_left(), *changes),
            open=tuple(self.ledger.open_in(run.run)),
            steps=steps,
            newest_step=newest,
            fresh=True,
        )
        return self._last

    def judged(self, look: Look, findings: Sequence[Finding] | None = None) -> service.Judged:
        """As ``service`` has it, with other findings where some are given."""
        verdict = look.verdict
        if findings is not None:
            verdict = replace(verdict, diagnosis=Diagnosis(findings=tuple(findings)))
        return service.Judged(
            run=look.run, read_steps=lambda: look.steps, damaged_digests=0, verdict=verdict
        )

    def _take_left(self) -> tuple[Change, ...]:
        left, self._left = tuple(self._left), []
        return left

    def _resolve(self, store: Store) -> RunSummary:
        """The run to look at: the same as long as it lives, also where another is newer."""
        before = self._run
        if before is None:
            return store.resolve(self.run_name, self.since_ns)
        # Only what is new: Jaeger has no list of runs, it searches all steps of the time asked for.
        try:
            found = store.resolve(self.run_name, before.last_ns - _QUIET_NS)
        except StoreError:
            # Nothing new; that, or the store is away, and then this one fails as well.
            found = store.resolve(self.run_name, before.first_ns)
        if found.run != before.run and self.run_name == LATEST:
            beside = found.first_ns < before.last_ns
            if beside and found.last_ns - before.last_ns < _QUIET_NS:
                return before
        if found.run != before.run:
            return found
        return replace(
            found,
            first_ns=min(before.first_ns, found.first_ns),
            ranks_seen=max(before.ranks_seen, found.ranks_seen),
            steps=max(before.steps, found.steps),
        )

    def _begin(self, store: Store, run: RunSummary) -> None:
        if self._run is not None:
            self._left += self.ledger.close_all(self._run.run, "another run began")
        self._held, self._tail, self._steps = [], None, 0
        self._builder = RunBuilder(rows=partial(store.rows, run))
        # How many steps there are, not which: of a run that was resumed or lost some, a guess.
        start = max(FIRST_STEPS, run.steps - self._kept(run))
        self._next = 0 if start == FIRST_STEPS else start
        if self._next:
            for block in store.blocks(run, service.READ_COLUMNS, (0, FIRST_STEPS)):
                self._hold(block)

    def _hold(self, whole: RunTables) -> None:
        """Keep steps for good: laid out, which is a fifth of their tables."""
        if whole.steps.num_rows:
            self._builder.add(with_one_step_count(whole))
            self._held.append(
                _Held(
                    first=_oldest(whole),
                    last=_newest(whole),
                    steps=_told(whole),
                    heartbeats=whole.heartbeats.num_rows,
                )
            )

    def _kept(self, run: RunSummary) -> int:
        return int(np.clip(_MOST_ROWS // max(run.world_size, 1), 40, KEPT_STEPS))

    def _read(self, store: Store, run: RunSummary) -> None:
        """Read from the first step that may not be whole, and keep for good what is whole."""
        at_once = int(np.clip(_ROWS_AT_ONCE // max(run.world_size, 1), _LATE_STEPS + 2, _AT_ONCE))
        tail = self._fetch(store, run, self._next, self._next + at_once)
        if not tail.steps.num_rows and run.steps > self._steps:
            # Steps were lost, more than are asked for at once: go on with what there is.
            tail = self._fetch(store, run, self._next, _NO_END)
            self._next = max(self._next, _oldest(tail))
        self._steps = run.steps
        while True:
            self._tail = tail
            whole = self._whole_before(tail, run)
            if whole <= self._next:
                break
            begin = self._next
            self._hold(_between(tail, begin, whole))
            self._next = whole
            full = _newest(tail) >= begin + at_once - 1
            self._tail = _between(tail, whole, None)
            if not full:
                break
            tail = self._fetch(store, run, self._next, self._next + at_once)
        self._forget(run)

    def _fetch(self, store: Store, run: RunSummary, first: int, after: int) -> RunTables:
        """Some steps, without the columns that only reports need."""
        parts = list(store.blocks(run, service.READ_COLUMNS, (first, after)))
        joined = {
            name: pa.concat_tables([getattr(part, name) for part in parts]) for name in _BY_ORDINAL
        }
        return parts[-1] if len(parts) == 1 else replace(parts[-1], **joined)

    def _whole_before(self, tail: RunTables, run: RunSummary) -> int:
        """The step before which nothing more will come."""
        if not tail.steps.num_rows:
            return self._next
        ordinals, counts = np.unique(tail.steps["ordinal"].to_numpy(), return_counts=True)
        lacking = ordinals[counts < run.world_size]
        newest = int(ordinals[-1])
        whole = newest + 1 if not lacking.size else int(lacking[0])
        return max(whole, newest - _LATE_STEPS, self._next)

    def _forget(self, run: RunSummary) -> None:
        oldest = self._next - self._kept(run)
        gone = [part for part in self._held if part.last < oldest and part.last >= FIRST_STEPS]
        if not gone:
            return
        # The first block of a run that was watched from its start is cut to what is compared with.
        self._builder.forget(FIRST_STEPS, max(part.last for part in gone) + 1)
        self._held = [
            part.until(FIRST_STEPS) if part in gone else part
            for part in self._held
            if part not in gone or part.first < FIRST_STEPS
        ]

    def _in_view(self, finding: Finding) -> Finding:
        """An onset right after a gap in what is held may lie in the gap."""
        before = -1
        for part in self._held:
            first = part.first
            if before >= 0 and first > before + 1 and 0 <= finding.onset.step - first <= 1:
                return replace(finding, onset=replace(finding.onset, exact=False))
            before = part.last
        return finding


def _told(tables: RunTables) -> pa.Table:
    """Of the steps, what it takes to say where a finding is."""
    return tables.steps.select(_TOLD)


def _newest(tables: RunTables) -> int:
    return int(pc.max(tables.steps["ordinal"]).as_py()) if tables.steps.num_rows else -1


def _oldest(tables: RunTables) -> int:
    return int(pc.min(tables.steps["ordinal"]).as_py()) if tables.steps.num_rows else -1


def _between(tables: RunTables, first: int, after: int | None) -> RunTables:
    """The tables of some steps."""
    wanted = pc.field("ordinal") >= first
    if after is not None:
        wanted &= pc.field("ordinal") < after
    return replace(tables, **{name: getattr(tables, name).filter(wanted) for name in _BY_ORDINAL})
