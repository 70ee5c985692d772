"""When to try again: backoff with jitter, and what the endpoint asks for."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RETRYABLE_STATUS: Final = frozenset({429, 502, 503, 504})
"""https://opentelemetry.io/docs/specs/otlp/#retryable-response-codes"""

FIRST_DELAY_S: Final = 1.0
MAX_DELAY_S: Final = 30.0
"""The Collector's exporters retry within the same bound (exporterhelper, max_interval)."""

MAX_RETRY_AFTER_S: Final = 600.0
"""Longer waits are taken for a misconfigured proxy: the queue would lose more than it helps."""


def backoff_s(failures: int, random: Callable[[], float]) -> float:
    """Delay after so many failures in a row: doubling, of which half is left to chance.

    Ten thousand ranks lose their Collector in the same second; without the jitter they would all
    come back in the same second too.
    """
    longest_s = min(FIRST_DELAY_S * 2.0 ** min(failures - 1, 10), MAX_DELAY_S)
    return longest_s * (0.5 + 0.5 * random())


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a ``Retry-After`` asks for, as a number or a date; None without a valid one.

    A date is compared with the answer's own ``Date`` where there is one, so that it does not
    matter how wrong this host's clock is.

    Args:
        headers: Names in lower case.

    Source:
        RFC 9110, 10.2.3
    """
    value = (headers.get("retry-after") or "").strip()
    if value.isascii() and value.isdigit():
        return min(float(value), MAX_RETRY_AFTER_S)
    until = _date(value)
    if until is None:
        return None
    now = _date(headers.get("date") or "") or datetime.now(UTC)
    return min(max((until - now).total_seconds(), 0.0), MAX_RETRY_AFTER_S)


def _date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)
