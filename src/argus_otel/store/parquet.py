"""Reads runs from a folder that ``ParquetWriter`` writes, also while it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from argus_otel._runtime.errors import StoreError
from argus_otel.store import naming
from argus_otel.store.compaction import sorted_rows, unique_spans
from argus_otel.store.dataset import TABLES, read_consistently, read_files, read_manifest
from argus_otel.store.events import KINDS, StepPlaces, events_table
from argus_otel.store.origins import origins_of
from argus_otel.store.tables import ranks_table
from argus_otel.store.windows import StepIndex, in_window
from argus_otel.store.writer import OTHER
from argus_otel.tables.schemas import RunTables
from argus_otel.wire import scopes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from argus_otel.store.dataset import Manifest
    from argus_otel.store.protocol import Columns
    from argus_otel.tables.schemas import RunSummary

    Window: TypeAlias = tuple[int | None, int | None]


class ParquetStore:
    """The embedded store. Satisfies ``protocol.Store``."""

    def __init__(self, folder: Path) -> None:
        """Name the folder; it is looked at when something is read.

        Raises:
            StoreError: There is no such folder.
        """
        if folder.exists() and not folder.is_dir():
            raise StoreError(
                f"the store folder {folder}",
                got="a file",
                expected="a folder that `argus serve` or `argus run --local` has written",
                fix="Give the folder with --store, not a file in it.",
            )
        if not folder.is_dir():
            raise StoreError(
                f"the store folder {folder}",
                got="not there",
                expected="a folder that `argus serve` or `argus run --local` has written",
                fix="Give the right one with --store, or start with `argus serve`.",
            )
        self._folder = folder
        self._about: tuple[object, tuple[pa.Table, pa.Table]] | None = None
        """The last ranks and groups, and the files that they were read from."""

    def runs(self, since_ns: int | None = None) -> list[RunSummary]:
        """See ``Store.runs``."""
        return naming.newest_first(
            [run for run in self._folders() if since_ns is None or run.last_ns >= since_ns]
        )

    def resolve(self, name: str, since_ns: int | None = None) -> RunSummary:
        """See ``Store.resolve``."""
        return naming.resolve(name, self.runs(since_ns), store=str(self._folder))

    def read(self, run: RunSummary, steps: tuple[int, int] | None = None) -> RunTables:
        """See ``Store.read``."""
        folder = self._folder_of(run)
        return read_consistently(folder, lambda manifest: self._read(folder, manifest, run, steps))

    def blocks(
        self,
        run: RunSummary,
        columns: Columns | None = None,
        steps: tuple[int, int] | None = None,
    ) -> Iterator[RunTables]:
        """See ``Store.blocks``."""
        folder = self._folder_of(run)
        first = read_consistently(folder, lambda manifest: self._reading(folder, manifest, run))
        windows = first.index.windows(within=steps) or [steps or (None, None)]
        reading = [first]
        for window in windows:

            def read(manifest: Manifest, window: Window = window) -> RunTables:
                if manifest.generation != reading[0].index.generation:
                    reading[0] = self._reading(folder, manifest, run)
                return reading[0].block(window, columns)

            yield read_consistently(folder, read)

    def rows(
        self,
        run: RunSummary,
        table: str,
        steps: tuple[int, int],
        ranks: Sequence[int] | None = None,
    ) -> pa.Table:
        """See ``Store.rows``."""
        folder = self._folder_of(run)
        wanted = in_window(*steps)
        if ranks is not None:
            wanted &= pc.field("rank").isin(pa.array(ranks, pa.int32()))
        found = read_consistently(
            folder,
            lambda manifest: read_files(
                folder, manifest, table, filters=wanted, coded=_strings_of(table)
            ),
        )
        return sorted_rows(table, found)

    def spans(self, run: RunSummary, steps: tuple[int, int] | None = None) -> pa.Table:
        """See ``Store.spans``."""
        folder = self._folder_of(run)
        window = None if steps is None else in_window(*steps)
        step_rows = read_consistently(
            folder,
            lambda manifest: read_files(
                folder, manifest, "steps", columns=StepPlaces.COLUMNS, filters=window
            ),
        )
        places = StepPlaces(sorted_rows("steps", step_rows), run)
        if steps is not None:
            places.add_window(steps)
        of_traces = pc.field("trace_id").isin(pa.array(list(places.traces), pa.string()))
        wanted = None if window is None else of_traces | window
        own = _read_spans(folder, wanted)
        others = _read_spans(self._folder / OTHER, of_traces)
        found = places.with_ordinals(unique_spans(pa.concat_tables([own, others])))
        return sorted_rows("spans", found if window is None else found.filter(window))

    def _read(
        self, folder: Path, manifest: Manifest, run: RunSummary, steps: tuple[int, int] | None
    ) -> RunTables:
        window = None if steps is None else in_window(*steps)

        def rows(table: str) -> pa.Table:
            return sorted_rows(table, read_files(folder, manifest, table, filters=window))

        step_rows = rows("steps")
        ranks, groups = self._ranks_and_groups(folder, manifest, run)
        event_spans = _event_spans(folder, manifest)
        return RunTables(
            ranks=ranks,
            steps=step_rows,
            collectives=rows("collectives"),
            groups=groups,
            events=_events(event_spans, step_rows, run, window, rows("events")),
            micro_batches=rows("micro_batches"),
            devices=rows("devices"),
            heartbeats=rows("heartbeats"),
            damaged_digests=manifest.damaged_digests,
        )

    def _reading(self, folder: Path, manifest: Manifest, run: RunSummary) -> _Reading:
        about = self._ranks_and_groups(folder, manifest, run)
        return _Reading(folder, manifest, run, about)

    def _ranks_and_groups(
        self, folder: Path, manifest: Manifest, run: RunSummary
    ) -> tuple[pa.Table, pa.Table]:
        """Read once, while the files are the same: of 12,960 ranks it takes half a second."""
        names = [[file.name for file in manifest.files.get(t, ())] for t in ("ranks", "groups")]
        of = (folder, run.service, names)
        if self._about is None or self._about[0] != of:
            self._about = (of, _ranks_and_groups(folder, manifest, run))
        return self._about[1]

    def _folders(self) -> dict[RunSummary, Path]:
        found = {}
        for path in self._folder.iterdir():
            manifest = read_manifest(path)
            if manifest is not None and manifest.summary is not None:
                found[manifest.summary] = path
        return found

    def _folder_of(self, run: RunSummary) -> Path:
        for summary, path in self._folders().items():
            if summary.run == run.run:
                return path
        raise StoreError(
            f"the run {run.run} in {self._folder}",
            got="gone",
            expected="the folder that was there when runs were listed",
            fix="List the runs again with `argus runs`.",
        )


def _strings_of(table: str) -> list[str]:
    return [field.name for field in TABLES[table] if field.type == pa.string()]


def _read_spans(folder: Path, rows: object) -> pa.Table:
    return read_consistently(
        folder, lambda manifest: read_files(folder, manifest, "spans", filters=rows)
    )


class _Reading:
    """A run as of one manifest: what does not change from block to block is read once."""

    def __init__(
        self, folder: Path, manifest: Manifest, run: RunSummary, about: tuple[pa.Table, pa.Table]
    ) -> None:
        self.index = StepIndex(folder, manifest)
        self._run = run
        self._ranks, self._groups = about
        self._event_spans = _event_spans(folder, manifest)
        self._damaged = manifest.damaged_digests

    def block(self, window: Window, columns: Columns | None) -> RunTables:
        """The tables of some steps."""

        def rows(table: str) -> pa.Table:
            return sorted_rows(table, self.index.read(table, window, _wanted(table, columns)))

        steps = rows("steps")
        return RunTables(
            ranks=self._ranks,
            steps=steps,
            collectives=rows("collectives"),
            groups=self._groups,
            events=_events(self._event_spans, steps, self._run, in_window(*window), rows("events")),
            micro_batches=rows("micro_batches"),
            devices=rows("devices"),
            heartbeats=rows("heartbeats"),
            damaged_digests=self._damaged,
        )


def _ranks_and_groups(
    folder: Path, manifest: Manifest, run: RunSummary
) -> tuple[pa.Table, pa.Table]:
    origins = origins_of(read_files(folder, manifest, "ranks"), run.service)
    groups = read_files(folder, manifest, "groups").sort_by("group")
    return ranks_table(origins.values()), groups


def _event_spans(folder: Path, manifest: Manifest) -> pa.Table:
    is_event = (pc.field("scope") == scopes.TIMELINE) & pc.field("name").isin(KINDS)
    return unique_spans(read_files(folder, manifest, "spans", filters=is_event))


def _events(
    spans: pa.Table,
    steps: pa.Table,
    run: RunSummary,
    window: Any,  # noqa: ANN401 - pyarrow has no stubs
    events: pa.Table,
) -> pa.Table:
    """Events that came as spans, and those that came as rows."""
    if not spans.num_rows:
        return events
    found = events_table(spans, steps, run)
    if window is not None:
        found = found.filter(window)
    return sorted_rows("events", pa.concat_tables([found, events])) if events.num_rows else found


def _wanted(table: str, columns: Columns | None) -> list[str] | None:
    """The columns asked for, and those that rows are placed by; None for all."""
    if columns is None or table not in columns:
        return None
    asked = {*columns[table], "ordinal", "rank"}
    if table == "steps":
        asked |= {*StepPlaces.COLUMNS}
    return [name for name in TABLES[table].names if name in asked]
