"""Received spans as rows, one a span, for timelines and for whoever queries the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from argus_otel.semconv import names
from argus_otel.store.spans import json_text
from argus_otel.tables.schemas import SPANS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from argus_otel.store.spans import Span

_PACKED = (
    names.ARGUS_DIGEST_PHASES,
    names.ARGUS_DIGEST_SYNC,
    names.ARGUS_DIGEST_KERNELS,
    names.ARGUS_KERNEL_NAMES,
)


def spans_table(spans: Sequence[Span], *, unpacked: Collection[str] = ()) -> pa.Table:
    """One row a span, in the order given.

    Args:
        spans: Any spans.
        unpacked: Span ids of digests whose packed values are in other tables, and left out here.
    """
    columns = {
        "run": [span.origin.run for span in spans],
        "attempt": [None if span.origin.run is None else span.origin.attempt for span in spans],
        "trace_id": [span.trace_id for span in spans],
        "span_id": [span.span_id for span in spans],
        "parent_id": [span.parent_id for span in spans],
        "name": [span.name for span in spans],
        "scope": [span.scope for span in spans],
        "service": [span.origin.service for span in spans],
        "rank": [span.rank for span in spans],
        "ordinal": [span.ordinal for span in spans],
        "start_ns": [span.start_ns for span in spans],
        "end_ns": [span.end_ns for span in spans],
        "status": [span.status for span in spans],
        "status_message": [span.status_message for span in spans],
        "attributes": [
            json_text(_without_packed(span) if span.span_id in unpacked else span.attributes)
            for span in spans
        ],
        "span_events": [json_text(span.events) if span.events else None for span in spans],
        "links": [json_text(span.links) if span.links else None for span in spans],
    }
    return pa.Table.from_pydict(columns, schema=SPANS)


def _without_packed(span: Span) -> dict[str, object]:
    return {name: value for name, value in span.attributes.items() if not name.startswith(_PACKED)}
