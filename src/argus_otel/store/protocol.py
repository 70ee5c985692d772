"""What every store offers, whatever is behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from argus_otel.tables.schemas import RunSummary, RunTables

Columns: TypeAlias = Mapping[str, Sequence[str]]
"""Table → names of the columns wanted of it; a table that is not named comes whole."""


class Store(Protocol):
    """A place that traces of training runs can be read from."""

    def runs(self, since_ns: int | None = None) -> list[RunSummary]:
        """The runs that sent anything since then, newest first.

        Args:
            since_ns: Unix nanoseconds; None for all that the store holds (Jaeger: a week).

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    def resolve(self, name: str, since_ns: int | None = None) -> RunSummary:
        """The run that a person means.

        Args:
            name: ``latest``, a run id (of several attempts the newest), or the start of a nonce.
            since_ns: As in ``runs``.

        Raises:
            StoreError: There is no such run, or there are several.
        """
        ...

    def read(self, run: RunSummary, steps: tuple[int, int] | None = None) -> RunTables:
        """The tables of a run.

        Args:
            run: From ``runs`` or ``resolve``.
            steps: First ordinal, and the one after the last; None for all. Large jobs are read in
                blocks: 12,960 ranks times 100 steps are 1.3 million digests.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    def blocks(
        self,
        run: RunSummary,
        columns: Columns | None = None,
        steps: tuple[int, int] | None = None,
    ) -> Iterator[RunTables]:
        """The tables of a run in consecutive blocks of whole steps; ranks and groups in each.

        Where a store knows those from the steps alone, a block has what its own steps tell of them.

        At least one block, however little there is. Where the store can, a block is of a size that
        a large job's fits in memory too.

        Args:
            run: From ``runs`` or ``resolve``.
            columns: What is needed, where that is not all: the tables then have fewer columns than
                their schemas, and strings may come as dictionaries. Where steps and ranks are
                placed by a column, it comes anyway.
            steps: First ordinal, and the one after the last; None for all.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    def rows(
        self,
        run: RunSummary,
        table: str,
        steps: tuple[int, int],
        ranks: Sequence[int] | None = None,
    ) -> pa.Table:
        """Some rows of a table, sorted, for what a finding is about.

        Args:
            run: From ``runs`` or ``resolve``.
            table: ``kernels`` or ``experts``, which no other call here reads.
            steps: First ordinal, and the one after the last.
            ranks: Of these; None for all.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    def spans(self, run: RunSummary, steps: tuple[int, int] | None = None) -> pa.Table:
        """Every stored span of some steps, as ``tables.SPANS``, to draw timelines from.

        ``ordinal`` is filled in by trace id; the user's own spans in a step's trace are there.

        Raises:
            StoreError: The store cannot be read.
        """
        ...
