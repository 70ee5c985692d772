"""Requests that wait to be sent: bounded in bytes, the oldest given up first."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from argus_otel.export.targets import Signal

if TYPE_CHECKING:
    from collections.abc import Container


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, ready for the wire."""

    signal: Signal
    body: bytes
    """Compressed."""
    records: int
    """Spans or data points inside."""
    order: int = 0
    """Place in the order of submission, given by the queue."""


class RequestQueue:
    """First in, first out for each signal, one limit for all; safe to use from several threads.

    New telemetry is worth more than old: who looks at a running job asks about now.

    Args:
        limit_bytes: Most that may wait, summed over all signals.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._waiting: dict[Signal, deque[Request]] = {signal: deque() for signal in Signal}
        self._bytes = 0
        self._records = 0
        self._next_order = 0

    @property
    def bytes(self) -> int:
        """Bytes waiting."""
        return self._bytes

    @property
    def records(self) -> int:
        """Records waiting."""
        return self._records

    def append(self, request: Request) -> int:
        """Add the newest request.

        Returns:
            Records given up to make room; the request's own if it is above the limit by itself.
        """
        with self._lock:
            request.order = self._next_order
            self._next_order += 1
            if len(request.body) > self._limit_bytes:
                return request.records
            self._add(request)
            self._waiting[request.signal].append(request)
            dropped = 0
            while self._bytes > self._limit_bytes:
                dropped += self._remove(self._oldest(tuple(Signal))).records
            return dropped

    def take(self, signals: Container[Signal]) -> Request | None:
        """Remove and return the oldest request of these signals."""
        with self._lock:
            if not any(self._waiting[signal] for signal in Signal if signal in signals):
                return None
            return self._remove(self._oldest(signals))

    def put_back(self, *requests: Request) -> int:
        """Return what was taken, oldest first, to the front.

        Returns:
            Records given up because newer ones have filled the queue meanwhile.
        """
        dropped = 0
        with self._lock:
            for request in reversed(requests):
                if self._bytes + len(request.body) > self._limit_bytes:
                    dropped += request.records
                    continue
                self._add(request)
                self._waiting[request.signal].appendleft(request)
        return dropped

    def waiting(self) -> list[Signal]:
        """Signals that have something to send."""
        return [signal for signal, requests in self._waiting.items() if requests]

    def clear(self) -> int:
        """Give everything up; returns the number of records."""
        with self._lock:
            records = self._records
            for requests in self._waiting.values():
                requests.clear()
            self._bytes = self._records = 0
            return records

    def _oldest(self, signals: Container[Signal]) -> Signal:
        candidates = [
            (requests[0].order, signal)
            for signal, requests in self._waiting.items()
            if requests and signal in signals
        ]
        return min(candidates)[1]

    def _add(self, request: Request) -> None:
        self._bytes += len(request.body)
        self._records += request.records

    def _remove(self, signal: Signal) -> Request:
        request = self._waiting[signal].popleft()
        self._bytes -= len(request.body)
        self._records -= request.records
        return request
