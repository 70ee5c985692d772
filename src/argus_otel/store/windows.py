"""A dataset cut into runs of whole steps, each small enough to be held in memory.

What the cut goes by are the statistics of Parquet's row groups, so that nothing is read for it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from argus_otel.store.bulk import STEP_TABLES
from argus_otel.store.dataset import TABLES, unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from argus_otel.store.dataset import Manifest

BLOCK_ROWS: Final = 1_500_000
"""Rows of all tables in a block, if it has more than one step: 200 to 400 MB in memory."""

_CODED: Final = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True, slots=True)
class _Span:
    """A row group: its number, its first step, the one after its last, and its rows."""

    number: int
    first: int
    after: int
    rows: int

    def meets(self, first: int | None, after: int | None) -> bool:
        """Whether there may be rows of these steps in it."""
        return (first is None or self.after > first) and (after is None or self.first < after)

    def within(self, first: int | None, after: int | None) -> bool:
        """Whether all its rows are of these steps."""
        return (first is None or self.first >= first) and (after is None or self.after <= after)


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
        self._folder = folder
        self._files = {
            table: {file.name: _spans(folder / table / file.name)
                    for file in manifest.files.get(table, ())}
            for table in STEP_TABLES
        }  # fmt: skip

    def read(
        self,
        table: str,
        window: tuple[int | None, int | None],
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """A table's rows of some steps, in the order they were committed.

        Args:
            table: Name of the table.
            window: First step, and the one after the last; None is an open end.
            columns: Only these, ``ordinal`` among them; those of strings come as dictionaries, as
                they lie in the file: to spell out every row costs ten times as much as to read it.

        Raises:
            FileNotFoundError: The manifest is out of date; see ``read_consistently``.
            StoreError: A file is damaged.
        """
        schema = TABLES[table]
        fields = [schema.field(name) for name in columns or schema.names]
        strings = [field.name for field in fields if columns and field.type == pa.string()]
        wanted = pa.schema(
            [field.with_type(_CODED) if field.name in strings else field for field in fields]
        )
        parts = []
        for name, spans in self._files[table].items():
            found = [span for span in spans if span.meets(*window)]
            if not found:
                continue
            path = self._folder / table / name
            try:
                with pq.ParquetFile(path, read_dictionary=strings) as file:
                    numbers = [span.number for span in found]
                    rows = file.read_row_groups(numbers, columns=wanted.names).cast(wanted)
            except FileNotFoundError:
                raise
            except (OSError, pa.ArrowException) as error:
                raise unreadable(path, str(error)) from error
            if not all(span.within(*window) for span in found):
                rows = rows.filter(in_window(*window))
            parts.append(rows)
        if not parts:
            return wanted.empty_table()
        rows = pa.concat_tables(parts)
        return rows.unify_dictionaries() if strings else rows

    def windows(
        self, block_rows: int = BLOCK_ROWS, *, within: tuple[int, int] | None = None
    ) -> list[tuple[int | None, int | None]]:
        """Consecutive windows of steps (first, one after the last), the outer ends open.

        Each holds at most ``block_rows``, or one step. None for no rows at all. Of some steps
        (``within``) no end is open.
        """
        spans = [
            s
            for files in self._files.values()
            for some in files.values()
            for s in some
            if within is None or s.meets(*within)
        ]
        if not spans:
            return []
        cuts: list[int | None] = []
        held = 0.0
        for first, rows in _pieces(spans, block_rows):
            if held and held + rows > block_rows:
                cuts.append(first)
                held = 0.0
            held += rows
        if within is None:
            return list(zip([None, *cuts], [*cuts, None], strict=True))
        inside = [cut for cut in cuts if cut is not None and within[0] < cut < within[1]]
        return list(zip([within[0], *inside], [*inside, within[1]], strict=True))


def in_window(first: int | None, after: int | None) -> Any:  # noqa: ANN401 - pyarrow has no stubs
    """Rows of these steps, as a filter; None is an open end, and of two open ends the filter."""
    bounds = []
    if first is not None:
        bounds.append(pc.field("ordinal") >= first)
    if after is not None:
        bounds.append(pc.field("ordinal") < after)
    return functools.reduce(operator.and_, bounds) if bounds else None


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
    for number, group in enumerate(groups):
        statistics = group.column(column).statistics
        if group.num_rows:
            if statistics is None or not statistics.has_min_max:
                raise unreadable(path, "without statistics of the column ordinal")
            spans.append(_Span(number, statistics.min, statistics.max + 1, group.num_rows))
    return spans
