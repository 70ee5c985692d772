"""All traces of a time window out of a search that returns a limited number, none cut silently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from argus_otel._runtime.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from argus_otel.store.jaeger_client import JaegerClient
    from argus_otel.store.spans import Span

_FIRST_LIMIT: Final = 20
_MAX_LIMIT: Final = 200
"""Traces a page. Storages refuse more than they are configured for; the least known is 1,500."""
_SMALL_BYTES: Final = 4 * 2**20
_LARGE_BYTES: Final = 32 * 2**20
"""A page of a job with hundreds of ranks is large; parsed it takes about six times its size."""
_MIN_WINDOW_NS: Final = 1_000_000
"""Shards of one step start together, so that no window parts them; below this the limit grows."""
_MAX_LIMIT_IN_MIN_WINDOW: Final = 1_500


def read_pages(
    client: JaegerClient, service: str, operation: str, start_ns: int, end_ns: int
) -> Iterator[list[Span]]:
    """Yield spans of traces with such a span in the window, newest window first.

    A full page may have been cut, so its window is split and asked again; a trace whose ranks
    start on both sides of a split comes twice.

    Raises:
        StoreError: Jaeger cannot be read, or has more in a millisecond than it returns.
    """
    limit = _FIRST_LIMIT
    windows = [(start_ns, end_ns)]
    while windows:
        low_ns, high_ns = windows.pop()
        spans, size_bytes = client.search(service, operation, low_ns, high_ns, limit)
        asked = limit
        if size_bytes > _LARGE_BYTES:
            limit = max(1, limit // 2)
        elif size_bytes < _SMALL_BYTES and limit < _MAX_LIMIT:
            limit = min(_MAX_LIMIT, limit * 2)
        if len({span.trace_id for span in spans}) < asked:
            yield spans
        elif high_ns - low_ns > _MIN_WINDOW_NS:
            middle_ns = _middle(spans, operation, low_ns, high_ns)
            windows += [(low_ns, middle_ns), (middle_ns, high_ns)]
        else:
            yield _small_window(client, service, operation, low_ns, high_ns)


def _middle(spans: list[Span], operation: str, low_ns: int, high_ns: int) -> int:
    """Where to split: amid what came, so that one half is surely smaller; else in the middle.

    Storages return the newest first, and most of a week is empty: halving the time alone would
    fetch a full page many times over before it got near a short run.
    """
    starts = sorted(
        span.start_ns
        for span in spans
        if span.name == operation and low_ns < span.start_ns < high_ns
    )
    if not starts:
        return (low_ns + high_ns) // 2
    middle_ns = starts[len(starts) // 2]
    if starts[0] != starts[-1]:
        return middle_ns
    before_ns = middle_ns - _MIN_WINDOW_NS // 2  # all in one instant: cut that out
    return before_ns if before_ns > low_ns else min(middle_ns + _MIN_WINDOW_NS // 2, high_ns - 1)


def _small_window(
    client: JaegerClient, service: str, operation: str, low_ns: int, high_ns: int
) -> list[Span]:
    limit = _MAX_LIMIT
    while limit <= _MAX_LIMIT_IN_MIN_WINDOW:
        spans, _ = client.search(service, operation, low_ns, high_ns, limit)
        if len({span.trace_id for span in spans}) < limit:
            return spans
        limit *= 2
    raise StoreError(
        f"Jaeger at {client.url}",
        got=f"holding more than {limit // 2} traces whose {operation} starts within a millisecond",
        expected="fewer, so that a search can return all of them",
        fix="Read a shorter time with --since, or keep columns: `argus serve` in front of Jaeger.",
    )
