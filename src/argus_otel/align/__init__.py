"""One step count and one clock over the ranks, and marks where that could not be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from argus_otel.align.clocks import with_clock_offsets
from argus_otel.align.steps import with_one_step_count

if TYPE_CHECKING:
    from argus_otel.tables.schemas import RunTables

__all__ = ["align"]


def align(tables: RunTables) -> RunTables:
    """The same tables, with ``aligned`` and the clock columns of ``steps`` filled where known.

    Ordinals of a rank that counted a constant number of steps more or fewer than its peers are
    shifted, in all tables; trace ids stay what they were sent under.
    """
    return with_clock_offsets(with_one_step_count(tables))
