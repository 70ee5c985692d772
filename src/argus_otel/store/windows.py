"""A dataset cut into runs of whole steps, each small enough to be held in memory.

What the cut goes by are the statistics of Parquet's row groups, so that nothing is read for it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from argus_otel.store.bulk import STEP_TABLES
from argus_otel.store.dataset import TABLES, unreadable
from argus_otel.store.row_groups import RowGroups

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
        self._footers = {
            table: {file.name: _footer(folder / table / file.name)
                    for file in manifest.files.get(table, ())}
            for table in STEP_TABLES
        }  # fmt: skip
        self._files = {
            table: {name: _spans(folder / table / name, footer)
                    for name, footer in footers.items()}
            for table, footers in self._footers.items()
        }  # fmt: skip
        self._readers: dict[tuple[str, str, tuple[str, ...]], RowGroups] = {}
        self._begun: dict[tuple[str, str, tuple[str, ...]], dict[int, pa.Table]] = {}
        """Row groups of which a later window has the rest."""

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
        self._let_go(table, window[0])
        for name, spans in self._files[table].items():
            found = [span for span in spans if span.meets(*window)]
            if not found:
                continue
            try:
                parts += self._rows(table, name, found, window, wanted)
            except FileNotFoundError:
                raise
            except (OSError, pa.ArrowException) as error:
                raise unreadable(self._folder / table / name, str(error)) from error
        if not parts:
            return wanted.empty_table()
        rows = pa.concat_tables(parts)
        return rows.unify_dictionaries() if strings else rows

    def _let_go(self, table: str, first: int | None) -> None:
        """Forget what is held of files that end before this step: windows go forward."""
        for key in [key for key in self._readers if key[0] == table]:
            spans = self._files[table][key[1]]
            if first is not None and all(span.after <= first for span in spans):
                del self._readers[key]
                self._begun.pop(key, None)

    def _rows(
        self,
        table: str,
        name: str,
        spans: Sequence[_Span],
        window: tuple[int | None, int | None],
        wanted: pa.Schema,
    ) -> list[pa.Table]:
        """The rows of some steps in each of these row groups of a file.

        Windows go by the table with most rows, so that a row group of another may reach into the
        next one: it is decoded once, and held for that.
        """
        key = (table, name, tuple(wanted.names))
        if key not in self._readers:
            self._readers[key] = RowGroups(
                self._folder / table / name, self._footers[table][name], wanted
            )
        begun = self._begun.pop(key, {})
        fresh = [span.number for span in spans if span.number not in begun]
        whole = begun | dict(zip(fresh, self._readers[key].read(fresh), strict=True))
        after = window[1]
        self._begun[key] = {
            span.number: whole[span.number]
            for span in spans
            if after is not None and span.after > after
        }
        return [
            whole[span.number] if span.within(*window) else _cut(whole[span.number], window)
            for span in spans
        ]

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


def _cut(rows: pa.Table, window: tuple[int | None, int | None]) -> pa.Table:
    """The rows of some steps; where steps ascend, which they mostly do, nothing is copied for it."""
    ordinal = rows["ordinal"].to_numpy()
    if (ordinal[1:] < ordinal[:-1]).any():
        return rows.filter(in_window(*window))
    first, after = window
    begin = 0 if first is None else int(np.searchsorted(ordinal, first))
    end = ordinal.size if after is None else int(np.searchsorted(ordinal, after))
    return rows.slice(begin, max(end - begin, 0))


def _footer(path: Path) -> pq.FileMetaData:
    try:
        return pq.read_metadata(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise unreadable(path, str(error)) from error


def _spans(path: Path, metadata: pq.FileMetaData) -> list[_Span]:
    try:
        column = metadata.schema.names.index("ordinal")
    except ValueError as error:
        raise unreadable(path, str(error)) from error
    spans = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        statistics = group.column(column).statistics
        if group.num_rows:
            if statistics is None or not statistics.has_min_max:
                raise unreadable(path, "without statistics of the column ordinal")
            spans.append(_Span(number, statistics.min, statistics.max + 1, group.num_rows))
    return spans
