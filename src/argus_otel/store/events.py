"""Events (GC pauses, compilation, exceptions) from timeline spans, placed in their steps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from argus_otel.semconv import names
from argus_otel.tables.schemas import EVENTS
from argus_otel.wire import ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from argus_otel.tables.schemas import RunSummary

KINDS: Final = (names.SPAN_GC, names.SPAN_COMPILATION, names.SPAN_EXCEPTION)
"""Timeline spans that are events; the others are phases and collectives, which digests hold."""

_STEPS_AHEAD: Final = 16
"""A step that an exception ended has no digest; its trace id is found among the next few."""


def events_table(spans: pa.Table, steps: pa.Table, run: RunSummary) -> pa.Table:
    """One row an event, sorted by step, rank and time; events of unknown steps are left out.

    Args:
        spans: Rows of ``SPANS``; those that are no events are passed over.
        steps: Rows of ``STEPS``, sorted.
        run: The run that both belong to.
    """
    places = StepPlaces(steps, run)
    rows = []
    for span in spans.to_pylist():
        if span["name"] not in KINDS or span["rank"] is None:
            continue
        ordinal = span["ordinal"]
        if ordinal is None:
            ordinal = places.ordinal(span["trace_id"], span["rank"])
        if ordinal is None:
            continue
        start_ns = places.start_ns(ordinal, span["rank"], span["start_ns"])
        attributes = json.loads(span["attributes"])
        rows.append(
            {
                "run": run.run,
                "attempt": run.attempt,
                "ordinal": ordinal,
                "rank": span["rank"],
                "kind": span["name"],
                "name": _name(span["name"], attributes),
                "start_s": (span["start_ns"] - start_ns) * 1e-9,
                "duration_s": _duration_s(span, attributes),
                "detail": _detail(span, attributes),
            }
        )
    rows.sort(key=lambda row: (row["ordinal"], row["rank"], row["start_s"], row["name"]))
    return pa.Table.from_pylist(rows, schema=EVENTS)


class StepPlaces:
    """Finds a span's step by its trace id, and a step's start."""

    COLUMNS: Final = ("ordinal", "rank", "start_ns", "trace_id")
    """What it needs of the steps."""

    def __init__(self, steps: pa.Table, run: RunSummary) -> None:
        self._run = run
        ordinals = steps["ordinal"].to_numpy()
        self._ordinals = ordinals
        self._ranks = steps["rank"].to_numpy()
        self._starts = steps["start_ns"].to_numpy()
        dictionary = steps["trace_id"].combine_chunks().dictionary_encode()
        codes = dictionary.indices.to_numpy()
        traces = dictionary.dictionary.to_pylist()
        first = np.full(len(traces), -1)
        first[codes[::-1]] = np.arange(codes.size)[::-1]
        self._by_trace = dict(zip(traces, ordinals[first].tolist(), strict=True))
        self._last = int(ordinals.max(initial=-1))
        self._ahead: dict[int, dict[str, int]] = {}

    def add_window(self, steps: tuple[int, int]) -> None:
        """Know the traces of these steps, whether or not a digest of them has come."""
        nonce = read_nonce(self._run)
        if nonce is None:
            return
        for ordinal in range(max(steps[0], 0), steps[1]):
            for shard in range(ids.shard_count(max(self._run.world_size, 1))):
                trace_id = ids.step_trace_id(nonce, self._run.attempt, ordinal, shard)
                self._by_trace.setdefault(trace_id.hex(), ordinal)

    @property
    def traces(self) -> Iterable[str]:
        """Trace ids of the steps that have a digest, or are in an added window."""
        return self._by_trace.keys()

    def ordinal(self, trace_id: str, rank: int | None) -> int | None:
        """The step that a trace is of; None where it is none of this run's."""
        known = self._by_trace.get(trace_id)
        if known is not None or rank is None:
            return known
        shard = ids.shard_of(rank)
        if shard not in self._ahead:
            self._ahead[shard] = self._next_traces(shard)
        return self._ahead[shard].get(trace_id)

    def with_ordinals(self, spans: pa.Table) -> pa.Table:
        """The same spans, ``ordinal`` filled in where the trace tells it."""
        ordinals = [
            self.ordinal(trace_id, rank) if ordinal is None else ordinal
            for trace_id, rank, ordinal in zip(
                spans["trace_id"].to_pylist(),
                spans["rank"].to_pylist(),
                spans["ordinal"].to_pylist(),
                strict=True,
            )
        ]
        field = spans.schema.field("ordinal")
        place = spans.schema.get_field_index("ordinal")
        return spans.set_column(place, field, pa.array(ordinals, field.type))

    def start_ns(self, ordinal: int, rank: int, fallback_ns: int) -> int:
        """When the rank's step began; without a digest, when its peers' did, or the fallback."""
        low, high = np.searchsorted(self._ordinals, [ordinal, ordinal + 1])
        if low == high:
            return fallback_ns
        place = low + int(np.searchsorted(self._ranks[low:high], rank))
        if place < high and self._ranks[place] == rank:
            return int(self._starts[place])
        return int(np.median(self._starts[low:high]))

    def _next_traces(self, shard: int) -> dict[str, int]:
        nonce = read_nonce(self._run)
        if nonce is None:
            return {}
        return {
            ids.step_trace_id(nonce, self._run.attempt, ordinal, shard).hex(): ordinal
            for ordinal in range(self._last + 1, self._last + 1 + _STEPS_AHEAD)
        }


def read_nonce(run: RunSummary) -> bytes | None:
    """The key of a run's trace ids; None where what it sent as its nonce is none."""
    try:
        return bytes.fromhex(run.run) or None
    except ValueError:
        return None


def _duration_s(span: dict[str, Any], attributes: dict[str, Any]) -> float:
    """Of several that are one span: their sum, and not the time from the first to the last."""
    folded = attributes.get(names.ARGUS_FOLD_DURATION)
    if isinstance(folded, (int, float)):  # a store's JSON may have dropped the ".0"
        return float(folded)
    return float(span["end_ns"] - span["start_ns"]) * 1e-9


def _name(kind: str, attributes: dict[str, Any]) -> str:
    if kind == names.SPAN_GC:
        generation = attributes.get(names.ARGUS_GC_GENERATION)
        return kind if generation is None else f"generation {generation}"
    if kind == names.SPAN_COMPILATION:
        return str(attributes.get("code.function.name") or kind)
    return str(attributes.get("exception.type") or attributes.get("error.type") or kind)


def _detail(span: dict[str, Any], attributes: dict[str, Any]) -> str | None:
    if span["name"] == names.SPAN_COMPILATION:
        reason = attributes.get(names.ARGUS_COMPILATION_REASON)
        return None if reason is None else str(reason)
    message = attributes.get("exception.message") or span["status_message"]
    stack = attributes.get("code.stacktrace") or attributes.get("exception.stacktrace")
    said = [str(part) for part in (message, stack) if part]
    if said:
        return "\n".join(said)
    return span["attributes"] if attributes else None
