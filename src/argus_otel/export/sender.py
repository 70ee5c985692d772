"""Sends encoded requests from the owner's thread, and survives everything an endpoint may do.

The owner submits bodies and calls ``pump`` now and then; nothing here has a thread, a timer or an
exception of its own. What cannot be sent waits, within a bound; what is given up is counted by
cause, and each cause is logged once.
"""

from __future__ import annotations

import logging
import os
import random as random_module
import threading
import time
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from argus_otel.export import retry, stats
from argus_otel.export.connection import TargetConnection, UnreachableError
from argus_otel.export.queue import Request, RequestQueue
from argus_otel.export.requests import compress, decompress, read_partial_success, split_request
from argus_otel.export.stats import SenderStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from argus_otel.export.connection import Answer
    from argus_otel.export.targets import Signal, Target

_log = logging.getLogger("argus_otel")

QUEUE_LIMIT_BYTES: Final = 32 * 1024 * 1024
FIRST_POST_JITTER_S: Final = 1.0
"""Ranks that start in the same second spread their first posts over this, and with them the
handshakes; later posts follow each rank's own rhythm."""

# A request that no time is left for is not begun: it would only be cut off and sent again.
_SHORTEST_POST_S: Final = 0.01

_left_behind: Final[list[TargetConnection]] = []
"""Those that a forked child has from its parent; kept, since to finalise one might take a lock."""


@dataclass(slots=True)
class _Route:
    """One signal's way out and how it fares."""

    target: Target
    not_before_s: float
    connection: TargetConnection | None = None
    failures: int = 0


class Sender:
    """A bounded queue of requests and the posts that empty it.

    All methods may be called from any thread and raise nothing for what a network does. In a
    forked child they do nothing until ``reset_after_fork``.

    Args:
        targets: Where each signal goes; records of a signal that is missing are counted as drops.
        queue_limit_bytes: Most that may wait, compressed; the oldest give way.
        clock: Monotonic seconds.
        random: 0 to 1, for jitter. Not Python's global one, which the user may have seeded alike
            on all ranks.
        sleep: Waits between the retries of a ``flush``.
        first_post_jitter_s: Seconds over which first posts are spread.
    """

    def __init__(
        self,
        targets: Mapping[Signal, Target],
        *,
        queue_limit_bytes: int = QUEUE_LIMIT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        first_post_jitter_s: float = FIRST_POST_JITTER_S,
    ) -> None:
        self._targets = dict(targets)
        self._queue_limit_bytes = queue_limit_bytes
        self._clock = clock
        self._given_random = random
        self._sleep = sleep
        self._first_post_jitter_s = first_post_jitter_s
        self._user_agent = _user_agent()
        self._arm()

    def _arm(self) -> None:
        """Everything that belongs to one process."""
        self._pid = os.getpid()
        self._random = self._given_random or random_module.SystemRandom().random
        self._queue = RequestQueue(self._queue_limit_bytes)
        self._pumping = threading.Lock()
        self._counting = threading.Lock()
        self._stats = SenderStats()
        self._warned: set[str] = set()
        self._closed = False
        first_s = self._clock() + self._random() * self._first_post_jitter_s
        self._routes = {signal: _Route(target, first_s) for signal, target in self._targets.items()}

    def _headers(self, target: Target) -> dict[str, str]:
        headers = {"user-agent": self._user_agent, **target.headers}
        headers["content-type"] = "application/x-protobuf"
        if target.compression != "none":
            headers["content-encoding"] = target.compression
        return headers

    # --- What the owner calls -------------------------------------------------------------------

    def submit(self, signal: Signal, body: bytes, records: int) -> None:
        """Queue one request.

        Args:
            signal: What it carries.
            body: Uncompressed OTLP request; empty is ignored.
            records: Spans or data points in it, for the counts.

        Cost:
            Compression: about 7 ms for 1 MB, the GIL released.
        """
        if not body or os.getpid() != self._pid:
            return
        route = self._routes.get(signal)
        if route is None or self._closed:
            self._drop(
                stats.NO_TARGET if route is None else stats.CLOSED,
                records,
                f"no place for {signal}",
            )
            return
        packed = compress(body, route.target.compression)
        dropped = self._queue.append(Request(signal=signal, body=packed, records=records))
        if dropped:
            self._drop_for_room(dropped)

    def pump(self, budget_s: float) -> None:
        """Post what is due, then return; at the latest after ``budget_s``.

        A request that the budget cuts off is tried again later, and may then arrive twice: give
        a second or more where there is no hurry.
        """
        if os.getpid() != self._pid or self._closed:
            return
        end_s = self._clock() + budget_s
        if not self._pumping.acquire(timeout=max(budget_s, 0.0)):
            return
        try:
            while (left_s := end_s - self._clock()) >= _SHORTEST_POST_S:
                if not self._post_one(left_s):
                    return
        finally:
            self._pumping.release()

    def next_due_s(self) -> float | None:
        """Seconds until ``pump`` has something to do; 0 for now, None for nothing queued."""
        if os.getpid() != self._pid or self._closed:
            return None
        now_s = self._clock()
        waits_s = [self._routes[signal].not_before_s - now_s for signal in self._queue.waiting()]
        return max(min(waits_s), 0.0) if waits_s else None

    def flush(self, deadline_s: float) -> bool:
        """Send everything that waits, whatever was agreed about when; for the end of a process.

        Each signal is tried at once, even where the endpoint asked for patience; after a failure,
        again when its backoff ends, as long as the deadline allows.

        Args:
            deadline_s: Seconds from now.

        Returns:
            Whether nothing is left.
        """
        if os.getpid() != self._pid or self._closed:
            return True
        end_s = self._clock() + deadline_s
        if not self._pumping.acquire(timeout=max(deadline_s, 0.0)):
            return False
        try:
            for route in self._routes.values():
                route.not_before_s = self._clock()
            while (wait_s := self.next_due_s()) is not None:
                left_s = end_s - self._clock()
                if left_s < max(wait_s, _SHORTEST_POST_S):
                    return False
                if wait_s:
                    self._sleep(wait_s)
                else:
                    self._post_one(left_s)
            return True
        finally:
            self._pumping.release()

    def close(self) -> None:
        """Give up what still waits (``flush`` first), and close the connections."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        if left := self._queue.clear():
            self._drop(stats.CLOSED, left, "the process ended before they could be sent")
        for route in self._routes.values():
            if route.connection is not None:
                route.connection.close()

    def reset_after_fork(self) -> None:
        """Make a child's copy usable: empty queue, counts at zero, connections of its own.

        What waits was the parent's to send, and a shared connection would mix two processes'
        bytes. The parent's locks may have been held in the moment of the fork, so none is taken.
        """
        for route in self._routes.values():
            if route.connection is not None:
                route.connection.abandon()
                _left_behind.append(route.connection)
        self._arm()

    @property
    def drops(self) -> dict[str, int]:
        """Of ``stats`` the drops alone, for whoever asks often."""
        with self._counting:
            return dict(self._stats.drops)

    @property
    def stats(self) -> SenderStats:
        """A copy of the totals."""
        with self._counting:
            return replace(
                self._stats,
                drops=dict(self._stats.drops),
                queue_bytes=self._queue.bytes,
                queue_records=self._queue.records,
            )

    # --- One post (under self._pumping) -----------------------------------------------------------

    def _post_one(self, left_s: float) -> bool:
        """Post the oldest request that is due; False where none is."""
        now_s = self._clock()
        due = {s for s, route in self._routes.items() if route.not_before_s <= now_s}
        request = self._queue.take(due)
        if request is None:
            return False
        route = self._routes[request.signal]
        self._count(requests=1)
        try:
            if route.connection is None:
                headers = self._headers(route.target)
                route.connection = TargetConnection(route.target, headers)
            answer = route.connection.post(request.body, min(route.target.timeout_s, left_s))
        except UnreachableError as error:
            self._retry(request, route, cause=error.cause, problem=str(error))
        except Exception as error:  # noqa: BLE001  # a bug here, or in a library, is not the job's
            self._retry(request, route, cause="internal", problem=repr(error))
        else:
            self._settle(request, route, answer)
        return True

    def _settle(self, request: Request, route: _Route, answer: Answer) -> None:
        if 200 <= answer.status < 300:
            self._accept(request, route, answer)
        elif answer.status in retry.RETRYABLE_STATUS:
            self._retry(
                request,
                route,
                cause=f"http_{answer.status}",
                problem=f"HTTP {answer.status}",
                asked_s=retry.retry_after_s(answer.headers),
            )
        elif answer.status == 413:
            self._halve(request, route)
        else:
            self._answered(route, f"HTTP {answer.status}")
            excerpt = answer.body[:200].decode("utf-8", "replace")
            why = f"{route.target.url} answered HTTP {answer.status}: {excerpt!r}"
            self._drop(stats.REFUSED, request.records, why, log_cause=f"http_{answer.status}")

    def _accept(self, request: Request, route: _Route, answer: Answer) -> None:
        if self._stats.last_error is not None and route.failures:
            _log.info("sending %s to %s again", request.signal, route.target.url)
        self._answered(route, None)
        rejected, message = read_partial_success(answer.body)
        rejected = min(rejected, request.records)
        self._count(sent_bytes=len(request.body), sent_records=request.records - rejected)
        if rejected:
            why = f"{route.target.url} took in the rest: {message[:200]!r}"
            self._drop(stats.PARTIAL, rejected, why)
        elif message:  # a warning of the endpoint's, with everything taken in
            self._warn(f"{request.signal} accepted", route.target.url, message[:200])

    def _retry(
        self,
        request: Request,
        route: _Route,
        *,
        cause: str,
        problem: str,
        asked_s: float | None = None,
    ) -> None:
        """Put the request back to the front, and let its signal rest."""
        route.failures += 1
        delay_s = retry.backoff_s(route.failures, self._random)
        if asked_s is not None:
            # At least what was asked, and spread, since all ranks were asked the same.
            delay_s = asked_s + min(delay_s, max(0.1 * asked_s, retry.FIRST_DELAY_S))
        route.not_before_s = self._clock() + delay_s
        with self._counting:
            self._stats.last_error = problem
        hint = ""
        if cause == "connection_lost" and ":4317/" in route.target.url:
            hint = " (4317 is gRPC's port, OTLP/HTTP has 4318)"
        self._warn(
            f"{request.signal} {cause}",
            route.target.url,
            f"{problem}{hint}; up to {self._queue_limit_bytes >> 20} MiB wait, training goes on",
        )
        if dropped := self._queue.put_back(request):
            self._drop_for_room(dropped)

    def _halve(self, request: Request, route: _Route) -> None:
        """Put both halves of a request that is too large in its place."""
        self._answered(route, "HTTP 413")
        compression = route.target.compression
        try:
            halves = split_request(decompress(request.body, compression))
        except ValueError:
            halves = None
        if halves is None:
            why = f"{route.target.url} refuses even one of this size (HTTP 413)"
            self._drop(stats.TOO_LARGE, request.records, why)
            return
        self._warn(
            f"{request.signal} http_413",
            route.target.url,
            "requests are too large for it and go in halves; raise its max_request_body_size",
        )
        first, second = halves
        share = round(request.records * first.items / (first.items + second.items))
        counts = (share, request.records - share)
        requests = [
            replace(request, body=compress(half.body, compression), records=records)
            for half, records in zip(halves, counts, strict=True)
        ]
        if dropped := self._queue.put_back(*requests):
            self._drop_for_room(dropped)

    def _answered(self, route: _Route, problem: str | None) -> None:
        """The endpoint is there; no reason to wait with the next request."""
        route.failures = 0
        route.not_before_s = self._clock()
        with self._counting:
            self._stats.last_error = problem

    # --- Counting and saying --------------------------------------------------------------------

    def _count(self, *, requests: int = 0, sent_bytes: int = 0, sent_records: int = 0) -> None:
        with self._counting:
            self._stats.requests += requests
            self._stats.sent_bytes += sent_bytes
            self._stats.sent_records += sent_records

    def _drop_for_room(self, records: int) -> None:
        limit = f"{self._queue_limit_bytes >> 20} MiB"
        self._drop(stats.QUEUE_FULL, records, f"{limit} were waiting, the oldest gave way")

    def _drop(self, cause: str, records: int, why: str, *, log_cause: str | None = None) -> None:
        with self._counting:
            self._stats.drops[cause] = self._stats.drops.get(cause, 0) + records
        self._warn(f"drop {log_cause or cause}", f"{records} records dropped", why)

    def _warn(self, cause: str, what: str, why: str) -> None:
        """One warning for each cause, then debug: a job runs for weeks."""
        level = logging.DEBUG if cause in self._warned else logging.WARNING
        self._warned.add(cause)
        _log.log(level, "%s: %s: %s", cause, what, why)


def _user_agent() -> str:
    try:
        return f"argus-otel/{version('argus-otel')}"
    except PackageNotFoundError:  # run from a source tree
        return "argus-otel"
