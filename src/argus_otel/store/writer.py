"""Received spans into a folder of datasets, one for each run."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from argus_otel._runtime.errors import StoreError
from argus_otel.store.compaction import FILES_PER_SIZE, compact
from argus_otel.store.dataset import Dataset, read_files
from argus_otel.store.digests import DamagedDigestError, is_digest, read_digest
from argus_otel.store.folders import lock_folder, new_run_folder
from argus_otel.store.groups import groups_table, read_group
from argus_otel.store.origins import merge_origins, origins_of
from argus_otel.store.seen import SeenSteps
from argus_otel.store.span_table import spans_table
from argus_otel.store.tables import (
    collectives_table,
    experts_table,
    kernels_table,
    ranks_table,
    steps_table,
)
from argus_otel.tables.schemas import RunSummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from typing import Self

    from argus_otel.store.digests import Received
    from argus_otel.store.spans import Origin, Span

_log = logging.getLogger(__name__)

OTHER: Final = "_other"
"""Folder of spans that name no run: a user's own tracer, set up before the ranks had agreed on a
nonce, or another application. Readers find those of a run by trace id."""


class ParquetWriter:
    """Writes spans of any number of runs into one store folder; one writer a folder.

    Not thread-safe: ``GroupCommit`` calls it from one thread.
    """

    def __init__(self, folder: Path, *, files_per_size: int = FILES_PER_SIZE) -> None:
        """Open or create the folder, and remove what a killed writer left in it.

        Raises:
            StoreError: Another process is writing there, or the folder cannot be written.
        """
        self._folder = folder
        self._files_per_size = files_per_size
        self._runs: dict[str | None, _RunWriter] = {}
        self._lock = lock_folder(folder)
        self._folders: dict[str | None, Path] = {}
        for path in sorted(folder.iterdir()):
            if path.is_dir() and (path.name == OTHER or path.name[:1] not in "._"):
                self._adopt(path)

    def write(self, spans: Sequence[Span]) -> None:
        """Store spans durably: when this returns they survive a kill and a power cut.

        A (step, rank) that is already stored is not stored again.

        Raises:
            OSError: The disk refused. Runs written before that are stored, the rest is not;
                writing the same spans again is safe.
        """
        by_run: dict[str | None, list[Span]] = {}
        for span in spans:
            by_run.setdefault(span.origin.run, []).append(span)
        for run, some in by_run.items():
            try:
                self._run_writer(run, some[0].origin).write(some)
            except BaseException:
                # Whether the new manifest is in place is not known: the disk shall say.
                self._runs.pop(run, None)
                raise

    def compact(self) -> None:
        """Merge small files where there are many.

        Raises:
            OSError: The disk refused; every dataset is as before.
        """
        for writer in self._runs.values():
            compact(writer.dataset, files_per_size=self._files_per_size)

    def close(self) -> None:
        """Leave one file a table behind, and let go of the folder."""
        if self._lock.closed:
            return
        try:
            for writer in self._runs.values():
                compact(writer.dataset, final=True)
        except OSError as error:
            _log.warning("the store stays as it is, in many small files: %s", error)
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _adopt(self, path: Path) -> None:
        try:
            dataset = Dataset(path)
        except StoreError as error:
            _log.warning("%s", error)
            return
        removed = dataset.remove_leftovers()
        if removed:
            _log.info("removed %d files in %s that were never committed", removed, path)
        if dataset.manifest.generation:
            summary = dataset.manifest.summary
            self._folders[None if summary is None else summary.run] = path

    def _run_writer(self, run: str | None, origin: Origin) -> _RunWriter:
        writer = self._runs.get(run)
        if writer is None:
            path = self._folders.get(run) or self._new_folder(origin)
            self._folders[run] = path
            writer = self._runs[run] = _RunWriter(Dataset(path))
        return writer

    def _new_folder(self, origin: Origin) -> Path:
        if origin.run is None:
            return self._folder / OTHER
        taken = self._folders.values()
        return new_run_folder(self._folder, origin.run_id, origin.run, taken)


class _RunWriter:
    """What is known of one run while it is written."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        folder, manifest = dataset.folder, dataset.manifest
        self._seen = SeenSteps()
        self._ordinals = SeenSteps()
        stored = read_files(folder, manifest, "steps", columns=["ordinal", "rank"])
        for ordinal, rank in zip(
            stored["ordinal"].to_pylist(), stored["rank"].to_pylist(), strict=True
        ):
            self._seen.add(ordinal, rank)
        for ordinal in stored["ordinal"].unique().to_pylist():
            self._ordinals.add(ordinal, 0)
        service = manifest.summary.service if manifest.summary else ""
        self._origins = origins_of(read_files(folder, manifest, "ranks"), service)
        groups = read_files(folder, manifest, "groups", columns=["group"])
        self._groups: set[int] = set(groups["group"].to_pylist())
        self._group_lines: set[str] = set()
        self._damaged: set[str] = set()

    def write(self, spans: Sequence[Span]) -> None:
        received, damaged = self._new_digests(spans)
        if spans[0].origin.run is None:
            rows = {"spans": spans_table(spans)}
            self.dataset.commit(rows, summary=None, damaged_digests=0)
            return
        origins = merge_origins(self._origins, (span.origin for span in spans))
        changed = [o for rank, o in origins.items() if self._origins.get(rank) != o]
        groups = self._new_groups(received)
        run, attempt = spans[0].origin.run, spans[0].origin.attempt
        ordinals = {item.digest.ordinal for item in received}
        steps = len(self._ordinals) + sum((o, 0) not in self._ordinals for o in ordinals)
        self.dataset.commit(
            {
                "steps": steps_table(received),
                "collectives": collectives_table(received),
                "kernels": kernels_table(received),
                "experts": experts_table(received),
                "ranks": ranks_table(changed),
                "groups": groups_table(run, attempt, groups),
                "spans": spans_table(spans, unpacked=self._unpacked(spans, damaged)),
            },
            summary=self._summary(spans, origins, steps),
            damaged_digests=self.dataset.manifest.damaged_digests + len(damaged - self._damaged),
        )
        # Only now: had the disk refused, the same spans must count as new when they come again.
        for item in received:
            self._seen.add(item.digest.ordinal, item.digest.rank)
            self._ordinals.add(item.digest.ordinal, 0)
        self._origins = origins
        self._groups.update(groups)
        self._group_lines.update(line for item in received for line in item.digest.group_info)
        self._damaged |= damaged

    def _new_digests(self, spans: Sequence[Span]) -> tuple[list[Received], set[str]]:
        found: dict[tuple[int, int], Received] = {}
        damaged: set[str] = set()
        for span in spans:
            if not is_digest(span):
                continue
            try:
                received = read_digest(span)
            except DamagedDigestError as error:
                if not self._damaged and not damaged:
                    _log.warning("%s (said once a run; all are counted)", error)
                damaged.add(span.span_id)
                continue
            key = (received.digest.ordinal, received.digest.rank)
            if key not in self._seen:
                found.setdefault(key, received)
        return [found[key] for key in sorted(found)], damaged

    def _new_groups(self, received: Iterable[Received]) -> dict[int, tuple[str, tuple[int, ...]]]:
        groups: dict[int, tuple[str, tuple[int, ...]]] = {}
        lines = {line for item in received for line in item.digest.group_info}
        for line in sorted(lines - self._group_lines):
            try:
                key, group = read_group(line)
            except ValueError as error:
                _log.warning("%s", error)
                continue
            if key not in self._groups:
                groups.setdefault(key, group)
        return groups

    def _unpacked(self, spans: Sequence[Span], damaged: set[str]) -> set[str]:
        return {span.span_id for span in spans if is_digest(span)} - damaged

    def _summary(self, spans: Sequence[Span], origins: dict[int, Origin], steps: int) -> RunSummary:
        last = spans[-1].origin
        first_ns = min(span.start_ns for span in spans)
        last_ns = max(span.end_ns for span in spans)
        sizes = [origin.world_size or rank + 1 for rank, origin in origins.items()]
        before = self.dataset.manifest.summary
        if before is None:
            before = RunSummary(
                run=last.run or "",
                run_id=last.run_id,
                attempt=last.attempt,
                role=last.role,
                service=last.service,
                world_size=0,
                ranks_seen=0,
                first_ns=first_ns,
                last_ns=last_ns,
                steps=0,
            )
        return replace(
            before,
            world_size=max(sizes, default=0),
            ranks_seen=len(origins),
            first_ns=min(before.first_ns, first_ns),
            last_ns=max(before.last_ns, last_ns),
            steps=steps,
        )
