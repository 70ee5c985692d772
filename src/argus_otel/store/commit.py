"""Group commit: many requests, one durable write, then all are answered."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.store.spans import Span

_log = logging.getLogger(__name__)

GATHER_S: Final = 0.2
"""How long the first request of a group waits for company. Senders post about once a second from
a background thread, so they do not notice; the disk and the number of files do."""

MAX_PENDING_BYTES: Final = 64 * 2**20
"""Decoded bytes waiting to be written; beyond that senders are asked to come back later."""

_ENOUGH: Final = 4
"""A group is written early once it holds this fraction (1/n) of what may wait."""


class OverloadedError(Exception):
    """Too much is waiting to be written, or the receiver is stopping."""


class Sink(Protocol):
    """Where spans rest. Called from one thread at a time."""

    def write(self, spans: Sequence[Span]) -> None:
        """Store durably, or raise; OSError means that it is worth trying again."""
        ...

    def compact(self) -> None:
        """Tidy up; called now and then between writes."""
        ...

    def close(self) -> None:
        """Finish; nothing is written after."""
        ...


class GroupCommit:
    """One thread that writes what others submit, and tells each how it went."""

    def __init__(
        self,
        sink: Sink,
        *,
        gather_s: float = GATHER_S,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self._sink = sink
        self._gather_s = gather_s
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        self._pending: list[tuple[list[Span], Future[None]]] = []
        self._pending_bytes = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="argus-store-commit", daemon=True)
        self._thread.start()

    def submit(self, spans: list[Span], size_bytes: int) -> None:
        """Return once the spans are durable.

        Args:
            spans: What to store.
            size_bytes: What they count for, roughly.

        Raises:
            OverloadedError: Nothing was taken; try again later.
            Exception: What the sink said of these spans.
        """
        done: Future[None] = Future()
        with self._changed:
            # A request larger than the limit still passes when nothing else waits.
            full = self._pending and self._pending_bytes + size_bytes > self._max_pending_bytes
            if self._closing or full:
                raise OverloadedError
            self._pending.append((spans, done))
            self._pending_bytes += size_bytes
            self._changed.notify_all()
        done.result()

    def close(self) -> None:
        """Write what was submitted, refuse what comes after, and close the sink."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while group := self._take():
            self._write(group)
            self._tidy()
        self._sink.close()

    def _take(self) -> list[tuple[list[Span], Future[None]]]:
        """Wait for a group; empty when closing and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            deadline = time.monotonic() + self._gather_s
            enough = self._max_pending_bytes // _ENOUGH
            self._changed.wait_for(
                lambda: self._closing or self._pending_bytes >= enough,
                timeout=max(0.0, deadline - time.monotonic()),
            )
            group, self._pending = self._pending, []
            self._pending_bytes = 0
            return group

    def _write(self, group: list[tuple[list[Span], Future[None]]]) -> None:
        try:
            self._sink.write([span for spans, _ in group for span in spans])
        except OSError as error:
            for _, done in group:
                done.set_exception(error)
        except Exception as error:  # noqa: BLE001 - one request must not take the others with it
            if len(group) == 1:
                group[0][1].set_exception(error)
                return
            for one in group:
                self._write([one])
        else:
            for _, done in group:
                done.set_result(None)

    def _tidy(self) -> None:
        try:
            self._sink.compact()
        except Exception:  # noqa: BLE001 - everything was stored; only the tidying failed
            _log.warning("compaction failed; the data is complete, in more files", exc_info=True)
