"""A bounded queue of events: one C call to append, no lock; packed where nobody waits.

Any thread may append, and each append is atomic under the GIL. To pack an event into bytes takes
several times as long, most of all in a training thread, whose caches hold the model and not the
code of ``struct``. So events stay tuples until the one reader takes them: of integers only, which
Python's collector of garbage looks at once.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from typing import TYPE_CHECKING

from argus_otel.wire import events

if TYPE_CHECKING:
    from collections.abc import Callable

_PIECE = 512  # events taken and packed in one go: about 0.1 ms
_PACK = struct.Struct("<8x7q").pack
_VOID = _PACK(events.VOID, 0, 0, 0, 0, 0, 0)


class EventRing:
    """Bounded memory for events: about 270 bytes for each that it holds, 321 at most.

    Args:
        capacity: Events held at most; beyond, the oldest go.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(16, capacity)
        self.held: deque[events.Event] = deque(maxlen=self.capacity)
        """For the hooks that run most: ``held.append(event)``, after ``count_overflow()`` where it
        is full."""
        self._overflows = itertools.count()
        self.count_overflow: Callable[[], int] = self._overflows.__next__
        """The oldest event is about to go, for a newer one."""
        self._known_overflows = 0
        self.taken = 0
        """Events that the reader has had so far."""
        self.lost = 0
        """Events that went before the reader came."""
        self.unfit = 0
        """Events that the reader has as ``VOID``, because 64 bits do not hold their values."""
        self.append = self._make_append()
        """``append(kind, t0, t1, a, b, c, d)``; all integers of at most 63 bits and a sign."""

    def _make_append(self) -> Callable[[int, int, int, int, int, int, int], None]:
        held, capacity, push, overflows = (
            self.held,
            self.capacity,
            self.held.append,
            self.count_overflow,
        )

        def append(kind: int, t0: int, t1: int, a: int, b: int, c: int, d: int) -> None:
            if len(held) == capacity:
                overflows()
            push((kind, t0, t1, a, b, c, d))

        return append

    def drain(self, pause: Callable[[], None] = lambda: None) -> events.Events:
        """Take out every event since the last call, oldest first.

        Args:
            pause: Gives the GIL away; called between pieces.

        Cost:
            Background thread, 0.2 µs an event.
        """
        pieces = []
        take = self.held.popleft
        left = len(self.held)  # not what comes meanwhile: it might never end
        while left > 0:
            piece = [take() for _ in range(min(left, _PIECE))]
            left -= len(piece)
            self.taken += len(piece)
            pieces.append(self._packed(piece))
            pause()
        # A counter tells its value in its representation only.
        overflows = int(repr(self._overflows).removeprefix("count(").removesuffix(")"))
        self.lost += overflows - self._known_overflows
        self._known_overflows = overflows
        return events.Events(b"".join(pieces))

    def _packed(self, piece: list[events.Event]) -> bytes:
        try:
            return b"".join(itertools.starmap(_PACK, piece))
        except Exception:  # noqa: BLE001 - one of them; which, the loop below finds out
            packed = []
            for event in piece:
                try:
                    packed.append(_PACK(*event))
                except Exception:  # noqa: BLE001 - whatever the user's own ``__index__`` raises
                    packed.append(_VOID)
                    self.unfit += 1
            return b"".join(packed)
