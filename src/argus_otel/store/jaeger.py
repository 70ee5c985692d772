"""Reads runs from Jaeger 2 by its query API."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from argus_otel.semconv import names
from argus_otel.store import naming
from argus_otel.store.compaction import sorted_rows
from argus_otel.store.digests import is_digest, read_digests
from argus_otel.store.events import KINDS, StepPlaces, events_table, read_nonce
from argus_otel.store.groups import groups_table, read_group
from argus_otel.store.jaeger_client import JaegerClient
from argus_otel.store.jaeger_pages import read_pages
from argus_otel.store.origins import merge_origins
from argus_otel.store.span_table import spans_table
from argus_otel.store.tables import (
    collectives_table,
    experts_table,
    kernels_table,
    ranks_table,
    steps_table,
)
from argus_otel.tables.schemas import RunSummary, RunTables
from argus_otel.wire import ids, scopes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import httpx
    import pyarrow as pa

    from argus_otel.store.digests import Received
    from argus_otel.store.protocol import Columns
    from argus_otel.store.spans import Span

_log = logging.getLogger(__name__)

LOOK_BACK_NS: Final = 7 * 24 * 3600 * 10**9
"""How far back to look where nothing is said: a week. A search without a start is refused by some
storages and slow in all."""

_AHEAD_NS: Final = 3600 * 10**9
"""Hosts whose clock is ahead of ours by up to an hour still show."""

_OPERATIONS: Final = (names.SPAN_RANK_STEP, names.SPAN_RANK_START)
"""What is searched for: a run has steps, or at least ranks that came up."""

_LATE: Final = {"kernels": kernels_table, "experts": experts_table}
"""How each table that is read for a finding alone is made."""

_MARGIN_NS: Final = 10**9
_MAX_BY_ID: Final = 512
"""Up to so many traces are asked for one by one, by computed id; beyond, the run is searched."""


class JaegerStore:
    """Satisfies ``protocol.Store``. Meant for people, and jobs up to about 500 ranks."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Name the server; it is asked when something is read. See ``JaegerClient``."""
        self._client = JaegerClient(url, headers, transport=transport, pause=pause)
        self._now_ns = now_ns
        self._listed: dict[RunSummary, list[Span]] = {}

    def runs(self, since_ns: int | None = None) -> list[RunSummary]:
        """See ``Store.runs``.

        Jaeger has no list of runs, so that this reads every step of the time asked for.
        """
        now_ns = self._now_ns()
        start_ns = now_ns - LOOK_BACK_NS if since_ns is None else since_ns
        by_run: dict[str, list[Span]] = {}
        for span in self._search(start_ns, now_ns + _AHEAD_NS):
            if span.origin.run is not None and _is_needed(span):
                by_run.setdefault(span.origin.run, []).append(span)
        found = {}
        for spans in by_run.values():
            summary = _summary(spans)
            if summary is not None:
                found[summary] = spans
        self._listed = found
        return naming.newest_first(list(found))

    def resolve(self, name: str, since_ns: int | None = None) -> RunSummary:
        """See ``Store.resolve``."""
        return naming.resolve(name, self.runs(since_ns), store=self._client.url)

    def read(self, run: RunSummary, steps: tuple[int, int] | None = None) -> RunTables:
        """See ``Store.read``.

        The first read of a run after listing it uses what the listing has fetched anyway.
        """
        spans = self._listed.pop(run, None)
        self._listed = {}
        if spans is None:
            spans = [span for span in self._spans_of(run, steps) if span.origin.run == run.run]
        return _tables(run, spans, steps)

    def blocks(
        self,
        run: RunSummary,
        columns: Columns | None = None,
        steps: tuple[int, int] | None = None,
    ) -> Iterator[RunTables]:
        """See ``Store.blocks``: one block, for a job that Jaeger's API suits fits in memory."""
        del columns  # a digest comes whole
        yield self.read(run, steps)

    def rows(
        self,
        run: RunSummary,
        table: str,
        steps: tuple[int, int],
        ranks: Sequence[int] | None = None,
    ) -> pa.Table:
        """See ``Store.rows``."""
        spans = (span for span in self._spans_of(run, steps) if span.origin.run == run.run)
        wanted = None if ranks is None else frozenset(ranks)
        received = [
            item
            for item in read_digests(spans, with_kernels=True).received
            if steps[0] <= item.digest.ordinal < steps[1]
            and (wanted is None or item.digest.rank in wanted)
        ]
        return _LATE[table](received)

    def spans(self, run: RunSummary, steps: tuple[int, int] | None = None) -> pa.Table:
        """See ``Store.spans``."""
        spans = {(span.trace_id, span.span_id): span for span in self._spans_of(run, steps)}
        digests = read_digests(span for span in spans.values() if span.origin.run == run.run)
        places = StepPlaces(steps_table(digests.received), run)
        if steps is not None:
            places.add_window(steps)
        unpacked = {span.span_id for span in spans.values() if is_digest(span)}
        traces = set(places.traces)
        own = [s for s in spans.values() if s.origin.run == run.run or s.trace_id in traces]
        rows = places.with_ordinals(spans_table(own, unpacked=unpacked))
        return sorted_rows("spans", _windowed(rows, steps))

    def _spans_of(self, run: RunSummary, steps: tuple[int, int] | None) -> Iterator[Span]:
        if steps is not None:
            shards = ids.shard_count(max(run.world_size, 1))
            first, after = max(steps[0], 0), steps[1]
            nonce = read_nonce(run)
            if (after - first) * shards <= _MAX_BY_ID and nonce is not None:
                for ordinal in range(first, after):
                    for shard in range(shards):
                        trace_id = ids.step_trace_id(nonce, run.attempt, ordinal, shard)
                        yield from self._client.trace(trace_id.hex())
                return
        yield from self._search(run.first_ns - _MARGIN_NS, run.last_ns + _MARGIN_NS)

    def _search(self, start_ns: int, end_ns: int) -> Iterator[Span]:
        for service in self._client.services():
            listed = self._client.operations(service)
            for operation in _OPERATIONS:
                if listed is None or operation in listed:
                    for page in read_pages(self._client, service, operation, start_ns, end_ns):
                        yield from page


def _is_start(span: Span) -> bool:
    return span.name == names.SPAN_RANK_START and span.scope == scopes.DIGEST


def _is_needed(span: Span) -> bool:
    if is_digest(span) or _is_start(span):
        return True
    return span.scope == scopes.TIMELINE and span.name in KINDS


def _summary(spans: Sequence[Span]) -> RunSummary | None:
    """What ``argus runs`` shows of a run; None where it has no step and no start that can be read."""
    received = read_digests(spans).received
    starts = sorted((s.origin for s in spans if _is_start(s)), key=lambda origin: origin.rank or 0)
    said = [item.origin for item in received] + starts
    if not said:
        return None
    first = said[0]
    origins = merge_origins({}, said)
    sizes = [origin.world_size or rank + 1 for rank, origin in origins.items()]
    return RunSummary(
        run=first.run or "",
        run_id=first.run_id,
        attempt=first.attempt,
        role=first.role,
        service=first.service,
        world_size=max(sizes, default=0),
        ranks_seen=len(origins),
        first_ns=min(span.start_ns for span in spans),
        last_ns=max(span.end_ns for span in spans),
        steps=len({item.digest.ordinal for item in received}),
    )


def _tables(run: RunSummary, spans: Sequence[Span], steps: tuple[int, int] | None) -> RunTables:
    digests = read_digests(spans)
    in_time = sorted(spans, key=lambda span: span.start_ns)  # pages come newest first
    origins = merge_origins({}, (span.origin for span in in_time))
    step_rows = _windowed(steps_table(digests.received), steps)
    events = [span for span in spans if span.scope == scopes.TIMELINE and span.name in KINDS]
    unique = {(span.trace_id, span.span_id): span for span in events}
    event_rows = events_table(spans_table(list(unique.values())), step_rows, run)
    return RunTables(
        ranks=ranks_table(origins.values()),
        steps=step_rows,
        collectives=_windowed(collectives_table(digests.received), steps),
        groups=groups_table(run.run, run.attempt, _groups(digests.received)),
        events=_windowed(event_rows, steps),
        damaged_digests=digests.damaged,
    )


def _groups(received: Iterable[Received]) -> dict[int, tuple[str, tuple[int, ...]]]:
    groups: dict[int, tuple[str, tuple[int, ...]]] = {}
    for line in dict.fromkeys(line for item in received for line in item.digest.group_info):
        try:
            key, group = read_group(line)
        except ValueError as error:
            _log.warning("%s", error)
            continue
        groups.setdefault(key, group)
    return groups


def _windowed(rows: pa.Table, steps: tuple[int, int] | None) -> pa.Table:
    if steps is None:
        return rows
    first, after = steps
    return rows.filter((pc.field("ordinal") >= first) & (pc.field("ordinal") < after))
