"""Many small files to few large ones, so that a long run stays quick to read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from argus_otel.store.dataset import TABLES, read_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.store.dataset import DataFile, Dataset

FILES_PER_SIZE: Final = 16
"""So many files of about one size are merged: each row is rewritten a logarithmic number of times."""

_SIZE_STEP: Final = 8.0
_MAX_ROWS: Final = 4_000_000
"""A file never grows beyond this by merging: about 200 MB in memory, the most it may cost."""

_SMALL_TABLES: Final = ("ranks", "groups")
"""Later rows supersede earlier ones there, so that only neighbours may be merged: all of them."""


_BY_STEP: Final = (
    "steps",
    "collectives",
    "events",
    "micro_batches",
    "devices",
    "heartbeats",
    "kernels",
    "experts",
)


def compact(dataset: Dataset, *, files_per_size: int = FILES_PER_SIZE, final: bool = False) -> None:
    """Merge files where there are many of about one size; at a run's end (``final``) all.

    Raises:
        OSError: The disk refused; the dataset is as before.
    """
    for table in TABLES:
        files = dataset.manifest.files.get(table, [])
        if table in _SMALL_TABLES or final:
            enough = 2 if final else files_per_size
            chosen = [[file for file in files if file.rows < _MAX_ROWS]]
        else:
            enough = files_per_size
            chosen = _by_size(files)
        for alike in chosen:
            for some in _within_rows(alike):
                if len(some) >= enough:
                    dataset.replace(table, some, _merged(dataset, table, some))


def sorted_rows(table: str, rows: pa.Table) -> pa.Table:
    """Rows in the order that the table promises; spans each once.

    The sort is stable, so a digest's collectives stay in order of arrival.
    """
    if table in _BY_STEP:
        return _by_step_and_rank(rows)
    if table == "spans":
        return unique_spans(rows).sort_by([("start_ns", "ascending"), ("span_id", "ascending")])
    return rows


def unique_spans(rows: pa.Table) -> pa.Table:
    """The first of each (trace, span): a batch whose answer got lost was sent again."""
    if rows.num_rows < 2:
        return rows
    numbered = rows.select(["trace_id", "span_id"]).append_column(
        "row", pa.array(np.arange(rows.num_rows))
    )
    first = numbered.group_by(["trace_id", "span_id"]).aggregate([("row", "min")])["row_min"]
    if len(first) == rows.num_rows:
        return rows
    return rows.take(np.sort(first.to_numpy()))


def _by_step_and_rank(rows: pa.Table) -> pa.Table:
    ordinal, rank = rows["ordinal"].to_numpy(), rows["rank"].to_numpy()
    key = ordinal * (int(rank.max(initial=0)) + 1) + rank
    if (key[1:] >= key[:-1]).all():
        return (
            rows  # one file, or files that follow each other: moving rows costs more than all else
        )
    return rows.take(np.argsort(key, kind="stable"))


def _by_size(files: Sequence[DataFile]) -> list[list[DataFile]]:
    sizes: dict[int, list[DataFile]] = {}
    for file in files:
        if file.rows < _MAX_ROWS:
            sizes.setdefault(int(math.log(max(file.rows, 1), _SIZE_STEP)), []).append(file)
    return list(sizes.values())


def _within_rows(files: Sequence[DataFile]) -> list[list[DataFile]]:
    parts: list[list[DataFile]] = [[]]
    rows = 0
    for file in files:
        if parts[-1] and rows + file.rows > _MAX_ROWS:
            parts.append([])
            rows = 0
        parts[-1].append(file)
        rows += file.rows
    return parts


def _merged(dataset: Dataset, table: str, files: Sequence[DataFile]) -> pa.Table:
    names = {file.name for file in files}
    return sorted_rows(table, read_files(dataset.folder, dataset.manifest, table, only=names))
