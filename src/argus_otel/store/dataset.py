"""One run's folder: Parquet files by table, and the manifest that says which of them count.

    <run_id>-<nonce8>/
        manifest.json             schema, generation, summary, files by table
        steps/00000007.parquet    … collectives/ ranks/ groups/ spans/, and where there are any
                                  events/ micro_batches/ devices/ heartbeats/ kernels/ experts/

A data file is written beside its name, fsynced and renamed; then the manifest is switched by one
rename. So a file that the manifest does not list does not exist for a reader, a killed writer
leaves at most such files (removed when the next writer opens the folder), and a reader during
compaction sees either the files before it or the one after, never both and never neither.

Whoever reads ``steps/*.parquet`` directly sees the same rows, except within the instant between
two renames of a compaction, when rows can show twice.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from argus_otel._runtime.errors import StoreError
from argus_otel.tables.schemas import (
    COLLECTIVES,
    DEVICES,
    EVENTS,
    EXPERTS,
    GROUPS,
    HEARTBEATS,
    KERNELS,
    MICRO_BATCHES,
    RANKS,
    SPANS,
    STEPS,
    RunSummary,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

_T = TypeVar("_T")

SCHEMA: Final = "argus.store/1"
MANIFEST: Final = "manifest.json"
TABLES: Final[Mapping[str, pa.Schema]] = {
    "steps": STEPS,
    "collectives": COLLECTIVES,
    "ranks": RANKS,
    "groups": GROUPS,
    "spans": SPANS,
    "events": EVENTS,
    "micro_batches": MICRO_BATCHES,
    "devices": DEVICES,
    "heartbeats": HEARTBEATS,
    "kernels": KERNELS,
    "experts": EXPERTS,
}
"""``events`` holds those that came as rows; those that came as spans are read from ``spans``."""

_READ_TRIES: Final = 20
"""Each failed try means that a whole compaction ended meanwhile."""


@dataclass(slots=True, kw_only=True)
class DataFile:
    """One Parquet file of a table."""

    name: str
    rows: int


@dataclass(slots=True, kw_only=True)
class Manifest:
    """What a run's folder holds, at one generation."""

    generation: int = 0
    summary: RunSummary | None = None
    """None for spans that belong to no run."""
    damaged_digests: int = 0
    files: dict[str, list[DataFile]] = field(default_factory=dict)


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest; None where there is none (not a dataset, or nothing committed yet).

    Raises:
        StoreError: There is one, but of another layout, or not readable.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, str(error)) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise unreadable(path, "of another schema")
    try:
        summary = document["summary"]
        return Manifest(
            generation=document["generation"],
            summary=None if summary is None else RunSummary(**summary),
            damaged_digests=document["damaged_digests"],
            files={
                table: [DataFile(**entry) for entry in entries]
                for table, entries in document["files"].items()
            },
        )
    except (KeyError, TypeError) as error:
        raise unreadable(path, f"incomplete: {error}") from error


def read_consistently(folder: Path, read: Callable[[Manifest], _T]) -> _T:
    """What ``read`` makes of the folder as of one manifest, whatever is written meanwhile.

    Args:
        folder: A run's folder; one without a manifest reads as empty.
        read: Called with the manifest; again with a newer one when a compaction has removed
            files under its hands.

    Raises:
        StoreError: A listed file is missing for good, or damaged.
    """
    missing = None
    for _ in range(_READ_TRIES):
        try:
            return read(read_manifest(folder) or Manifest())
        except FileNotFoundError as error:
            missing = error
    raise unreadable(folder, f"missing a file that its manifest lists: {missing}")


def read_files(
    folder: Path,
    manifest: Manifest,
    table: str,
    *,
    columns: Sequence[str] | None = None,
    filters: object = None,
    only: Collection[str] | None = None,
    coded: Sequence[str] = (),
) -> pa.Table:
    """All rows of a table that the manifest lists, in the order they were committed.

    Args:
        folder: The run's folder.
        manifest: Of that folder.
        table: Name of the table.
        columns: Only these columns.
        filters: As in ``pyarrow.parquet.read_table``.
        only: Names of files, where not all are wanted.
        coded: Columns of strings that are spelt out for the rows that pass the filter alone: half of
            the time, where those are few and the strings differ little.

    Raises:
        FileNotFoundError: The manifest is out of date; see ``read_consistently``.
        StoreError: A file is damaged.
    """
    schema = TABLES[table]
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    parts = []
    for file in manifest.files.get(table, ()):
        if only is not None and file.name not in only:
            continue
        path = folder / table / file.name
        try:
            rows = pq.read_table(
                path,
                columns=wanted.names,
                filters=filters,
                partitioning=None,
                read_dictionary=list(coded) or None,
            )
            parts.append(rows.cast(wanted))
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise unreadable(path, str(error)) from error
    return pa.concat_tables(parts) if parts else wanted.empty_table()


class Dataset:
    """The writing side of one run's folder. One writer at a time; see ``ParquetWriter``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder) or Manifest()

    def commit(
        self,
        tables: Mapping[str, pa.Table],
        *,
        summary: RunSummary | None,
        damaged_digests: int,
    ) -> None:
        """Add rows to some tables, all or none of them, durably.

        Raises:
            OSError: The disk refused; nothing was added.
        """
        generation = self.manifest.generation + 1
        files = {table: list(entries) for table, entries in self.manifest.files.items()}
        for table, rows in tables.items():
            if rows.num_rows:
                files.setdefault(table, []).append(self._write(table, rows, generation))
        self._switch(
            Manifest(
                generation=generation,
                summary=summary,
                damaged_digests=damaged_digests,
                files=files,
            )
        )

    def replace(self, table: str, old: Sequence[DataFile], rows: pa.Table) -> None:
        """Put one file with ``rows`` where the ``old`` files were.

        Raises:
            OSError: The disk refused; the old files still count.
        """
        generation = self.manifest.generation + 1
        merged = self._write(table, rows, generation)
        gone = {file.name for file in old}
        kept: list[DataFile] = []
        for file in self.manifest.files[table]:
            if file.name not in gone:
                kept.append(file)
            elif file is old[-1]:
                kept.append(merged)
        self._switch(
            Manifest(
                generation=generation,
                summary=self.manifest.summary,
                damaged_digests=self.manifest.damaged_digests,
                files={**self.manifest.files, table: kept},
            )
        )
        for name in gone:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / table / name).unlink()

    def replace_all(
        self, tables: Iterable[str], name: str, rows: Mapping[str, int], *, summary: RunSummary
    ) -> None:
        """Have these files, which lie beside their names, and no others.

        Args:
            tables: Which have a file ``<name>.tmp``, whole and fsynced.
            name: Of the files.
            rows: Of each of them.
            summary: Of the run.

        Raises:
            OSError: The disk refused; the dataset is as before.
        """
        before = self.manifest.files
        files = {table: [DataFile(name=name, rows=rows[table])] for table in tables}
        for table in files:
            (self.folder / table / f"{name}.tmp").replace(self.folder / table / name)
            sync_folder(self.folder / table)
        self._switch(
            Manifest(generation=self.manifest.generation + 1, summary=summary, files=files)
        )
        for table, old in before.items():
            for file in old:
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / table / file.name).unlink()

    def remove_leftovers(self) -> int:
        """Remove what a killed writer left: temporary files, and data files never committed."""
        removed = 0
        for table in TABLES:
            listed = {file.name for file in self.manifest.files.get(table, ())}
            for path in _entries(self.folder / table):
                if path.name not in listed and path.name.endswith((".parquet", ".tmp")):
                    path.unlink(missing_ok=True)
                    removed += 1
        for path in _entries(self.folder):
            if path.name == f"{MANIFEST}.tmp":
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def table_folder(self, table: str) -> Path:
        """The folder of a table's files, created where there is none."""
        folder = self.folder / table
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
        return folder

    def _write(self, table: str, rows: pa.Table, generation: int) -> DataFile:
        folder = self.table_folder(table)
        name = file_name(generation)
        temporary = folder / f"{name}.tmp"
        with temporary.open("wb") as file:
            pq.write_table(rows, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / name)
        sync_folder(folder)
        return DataFile(name=name, rows=rows.num_rows)

    def _switch(self, manifest: Manifest) -> None:
        document = {
            "schema": SCHEMA,
            "generation": manifest.generation,
            "summary": None if manifest.summary is None else asdict(manifest.summary),
            "damaged_digests": manifest.damaged_digests,
            "files": {
                table: [asdict(file) for file in files] for table, files in manifest.files.items()
            },
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / MANIFEST
        temporary = self.folder / f"{MANIFEST}.tmp"
        with temporary.open("wb") as file:
            file.write(json.dumps(document).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self.manifest = manifest
        sync_folder(self.folder)


def file_name(generation: int) -> str:
    """What data files of a generation are called."""
    return f"{generation:08d}.parquet"


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entries(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from folder.iterdir()


def unreadable(path: Path, why: str) -> StoreError:
    """The error for a file of a dataset that cannot be used."""
    return StoreError(
        f"the store at {path}",
        got=f"not readable: {why}",
        expected=f"a dataset of schema {SCHEMA}",
        fix="If it was copied while it was written, copy it again; else move the folder aside.",
    )
