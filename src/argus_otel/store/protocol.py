"""What every store offers, whatever is behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from argus_otel.tables.schemas import RunSummary, RunTables


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
                windows: 12,960 ranks times 100 steps are 1.3 million digests.

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
