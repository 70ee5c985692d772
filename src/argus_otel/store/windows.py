"""A dataset cut into runs of whole steps, each small enough to be held in memory.

What the cut goes by are the statistics of Parquet's row groups, so that nothing is read for it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from argus_otel.store.bulk import STEP_TABLES
from argus_otel.store.dataset import unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from argus_otel.store.dataset import Manifest

BLOCK_ROWS: Final = 1_500_000
"""Rows of all tables in a block, if it has more than one step: 200 to 400 MB in memory."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A row group: its first step, the one after its last, and its rows."""

    first: int
    after: int
    rows: int


class StepIndex:
    """Which files of a dataset hold which steps.

    Args:
        folder: The run's folder.
        manifest: Of that folder.

    Raises:
        FileNotFoundError: The manifest is out of date; see ``read_consistently``.
        StoreError: A file is damaged.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.generation = manifest.generation
        self._files = {
            table: {file.name: _spans(folder / table / file.name)
                    for file in manifest.files.get(table, ())}
            for table in STEP_TABLES
        }  # fmt: skip

    def files(self, table: str, first: int | None, after: int | None) -> set[str]:
        """Names of a table's files with rows of these steps; None is an open end."""
        return {
            name
            for name, spans in self._files.get(table, {}).items()
            if any(
                (first is None or span.after > first) and (after is None or span.first < after)
                for span in spans
            )
        }

    def windows(self, block_rows: int = BLOCK_ROWS) -> list[tuple[int | None, int | None]]:
        """Consecutive windows of steps (first, one after the last), the outer ends open.

        Each holds at most ``block_rows``, or one step. None for no rows at all.
        """
        spans = [s for files in self._files.values() for some in files.values() for s in some]
        if not spans:
            return []
        cuts: list[int | None] = []
        held = 0.0
        for first, rows in _pieces(spans, block_rows):
            if held and held + rows > block_rows:
                cuts.append(first)
                held = 0.0
            held += rows
        return list(zip([None, *cuts], [*cuts, None], strict=True))


def _pieces(spans: Iterable[_Span], block_rows: int) -> Iterable[tuple[int, float]]:
    """First step and rows of pieces that no row group begins or ends within, if that will do."""
    # A row group's rows are taken to be spread evenly over its steps.
    change: dict[int, float] = {}
    for span in spans:
        density = span.rows / (span.after - span.first)
        change[span.first] = change.get(span.first, 0.0) + density
        change[span.after] = change.get(span.after, 0.0) - density
    bounds = sorted(change)
    density = 0.0
    for first, after in itertools.pairwise(bounds):
        density += change[first]
        steps = after - first
        stride = max(min(steps, int(block_rows / density) if density > 0 else steps), 1)
        for begin in range(first, after, stride):
            yield begin, density * min(stride, after - begin)


def _spans(path: Path) -> list[_Span]:
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            column = metadata.schema.names.index("ordinal")
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise unreadable(path, str(error)) from error
    spans = []
    for group in groups:
        statistics = group.column(column).statistics
        if group.num_rows:
            if statistics is None or not statistics.has_min_max:
                raise unreadable(path, "without statistics of the column ordinal")
            spans.append(_Span(statistics.min, statistics.max + 1, group.num_rows))
    return spans
