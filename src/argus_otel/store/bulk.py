"""Whole runs into a store at once, as tables: what a simulator or a converter makes.

Beside ``ParquetWriter``, which gathers spans as they arrive, this takes tables block by block and
never holds more than one. One file a table; a row group holds whole steps of one block, so that a
reader of some steps reads little else.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from argus_otel._runtime.errors import StoreError
from argus_otel.store.dataset import TABLES, Dataset, file_name, read_manifest
from argus_otel.store.folders import lock_folder, new_run_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from argus_otel.tables.schemas import RunSummary, RunTables

_log = logging.getLogger(__name__)

STEP_TABLES: Final = ("steps", "collectives", "micro_batches", "devices", "events", "heartbeats")
"""Tables whose rows belong to a step: each block brings its own."""
LATE_TABLES: Final = ("kernels", "experts")
"""As those; of interest only when something has been found, so that no block that is read has them."""

_GROUP_ROWS: Final = 1_000_000
"""A row group holds about so many rows, and a step at the least: 100 MB in memory."""

_PLAIN: Final = frozenset(
    {"step_s", "between_s", "busy_s", "cpu_s", "start_ns", "arrival_s", "duration_s"}
    | {"last_arrival_s", "min_duration_s", "start_s", "time_ns", "memory_bytes", "sketch"}
)
"""Columns with as many values as rows: a dictionary would be built, and given up at its limit."""
_NESTED: Final = ("phases.list.element.name", "boundary_counts.list.element.group")


def write_run(folder: Path, summary: RunSummary, blocks: Iterable[RunTables]) -> RunSummary:
    """Write a run into a store, replacing what the store has of it; all or nothing.

    Args:
        folder: The store's folder; created where there is none.
        summary: Who the run is. Times and counts are taken from the rows instead, where there
            are steps; ``world_size`` is the least that it can be.
        blocks: The run in order of steps, each step in one block. Ranks and groups may grow: the
            last row of a rank counts, and the first of a group. String columns may be
            dictionaries, if they are in every block.

    Returns:
        The summary as written.

    Raises:
        StoreError: The folder is being written by somebody else, or cannot be written.
        ValueError: No blocks.

    Cost:
        Memory for one block; 31 million collectives of 12,960 ranks take about a minute.
    """
    with contextlib.closing(lock_folder(folder)):
        path = _run_folder(folder, summary)
        dataset = Dataset(path)
        name = file_name(dataset.manifest.generation + 1)
        try:
            with contextlib.ExitStack() as stack:
                writer = _Writer(dataset, name, stack)
                for block in blocks:
                    writer.add(block)
                written = writer.finish(summary)
            dataset.replace_all(writer.rows, name, writer.rows, summary=written)
        except OSError as error:
            raise StoreError(
                f"the store folder {path}",
                got=f"not writable: {error}",
                expected="room for the run",
                fix="Make room, or give another folder.",
            ) from error
        finally:
            dataset.remove_leftovers()
            _remove_if_empty(dataset)
        return written


def _run_folder(store: Path, summary: RunSummary) -> Path:
    for path in sorted(store.iterdir()):
        if path.is_dir() and path.name[:1] not in "._":
            try:
                manifest = read_manifest(path)
            except StoreError as error:
                _log.warning("%s", error)  # another run's, which is none of ours
                continue
            if manifest and manifest.summary and manifest.summary.run == summary.run:
                return path
    return new_run_folder(store, summary.run_id, summary.run)


def _remove_if_empty(dataset: Dataset) -> None:
    """Leave nothing behind of a run of which nothing was written."""
    if dataset.manifest.generation == 0:
        with contextlib.suppress(OSError):
            for folder in dataset.folder.iterdir():
                folder.rmdir()
            dataset.folder.rmdir()


class _Writer:
    """One open file a table, beside its name."""

    def __init__(self, dataset: Dataset, name: str, stack: contextlib.ExitStack) -> None:
        self._dataset, self._name, self._stack = dataset, name, stack
        self._files: dict[str, BinaryIO] = {}
        self._tables: dict[str, pq.ParquetWriter] = {}
        self.rows: dict[str, int] = {}
        self._kept: dict[str, list[pa.Table]] = {"ranks": [], "groups": []}
        self._first_ns: int | None = None
        self._last_ns = 0
        self._ordinals: list[np.ndarray] = []
        self._ranks = np.empty(0, np.int64)
        self._blocks = 0

    def add(self, block: RunTables) -> None:
        """Write a block's rows, and remember its ranks and groups."""
        self._blocks += 1
        for table, kept in self._kept.items():
            rows = getattr(block, table)
            # Mostly each block repeats what the one before it said.
            if not kept or not (rows is kept[-1] or rows.equals(kept[-1])):
                kept.append(rows)
        self._count(block.steps)
        for table in (*STEP_TABLES, *LATE_TABLES):
            rows = getattr(block, table)
            if rows.num_rows:
                self._write(table, rows)

    def finish(self, summary: RunSummary) -> RunSummary:
        """Write ranks and groups, make all files durable, and sum the run up."""
        if not self._blocks:
            msg = "a run needs at least one block of tables"
            raise ValueError(msg)
        ranks = _last_of("rank", self._kept["ranks"])
        for table, rows in (("ranks", ranks), ("groups", _first_of("group", self._kept["groups"]))):
            if rows.num_rows:
                self._write(table, rows)
        for table, writer in self._tables.items():
            writer.close()
            self._files[table].flush()
            os.fsync(self._files[table].fileno())
        sizes = ranks["world_size"].to_numpy()
        seen = np.union1d(self._ranks, ranks["rank"].to_numpy())
        steps = np.unique(np.concatenate([np.empty(0, np.int64), *self._ordinals])).size
        return replace(
            summary,
            world_size=max(summary.world_size, int(sizes.max(initial=0)), seen.size),
            ranks_seen=int(seen.size),
            first_ns=summary.first_ns if self._first_ns is None else self._first_ns,
            last_ns=summary.last_ns if self._first_ns is None else self._last_ns,
            steps=int(steps),
        )

    def _count(self, steps: pa.Table) -> None:
        if not steps.num_rows:
            return
        start = steps["start_ns"].to_numpy()
        end = start + np.rint(steps["step_s"].to_numpy() * 1e9).astype(np.int64)
        first = int(start.min())
        self._first_ns = first if self._first_ns is None else min(self._first_ns, first)
        self._last_ns = max(self._last_ns, int(end.max()))
        self._ordinals.append(np.unique(steps["ordinal"].to_numpy()))
        self._ranks = np.union1d(self._ranks, steps["rank"].to_numpy())

    def _write(self, table: str, rows: pa.Table) -> None:
        writer = self._tables.get(table)
        if writer is None:
            writer = self._tables[table] = self._open(table, rows)
        rows = rows.select(writer.schema.names).cast(writer.schema)
        for begin, end in _row_groups(rows):
            writer.write_table(rows.slice(begin, end - begin), row_group_size=end - begin)
        self.rows[table] = self.rows.get(table, 0) + rows.num_rows

    def _open(self, table: str, rows: pa.Table) -> pq.ParquetWriter:
        path = self._dataset.table_folder(table) / f"{self._name}.tmp"
        file = self._files[table] = self._stack.enter_context(path.open("wb"))
        schema = pa.schema(
            [
                field.with_type(rows.schema.field(field.name).type)
                if pa.types.is_dictionary(rows.schema.field(field.name).type)
                else field
                for field in TABLES[table]
            ]
        )
        writer = pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=[*(name for name in schema.names if name not in _PLAIN), *_NESTED],
            write_statistics=["ordinal"] if "ordinal" in schema.names else False,
        )
        # Closing twice does nothing; after an error it lets go of the file.
        self._stack.callback(writer.close)
        return writer


def _row_groups(rows: pa.Table) -> list[tuple[int, int]]:
    """Begin and end of pieces of about ``_GROUP_ROWS``, cut between steps."""
    if rows.num_rows <= _GROUP_ROWS or "ordinal" not in rows.schema.names:
        return [(0, rows.num_rows)]
    cuts = np.flatnonzero(np.diff(rows["ordinal"].to_numpy())) + 1
    ends = [*cuts.tolist(), rows.num_rows]
    groups: list[tuple[int, int]] = []
    begin = last = 0
    for end in ends:
        if last > begin and end - begin > _GROUP_ROWS:
            groups.append((begin, last))
            begin = last
        last = end
    groups.append((begin, rows.num_rows))
    return groups


def _last_of(key: str, parts: list[pa.Table]) -> pa.Table:
    """One row for each key: the last that was said."""
    rows = pa.concat_tables(parts, promote_options="permissive")
    keys = rows[key].to_numpy()
    _, at = np.unique(keys[::-1], return_index=True)
    return rows.take(pa.array(keys.size - 1 - at))


def _first_of(key: str, parts: list[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(parts, promote_options="permissive")
    _, at = np.unique(rows[key].to_numpy(), return_index=True)
    return rows.take(pa.array(at))
