"""A preallocated ring of events: one C call to append, no lock, no allocation kept.

Any thread may append. Each takes the next number from a counter (atomic under the GIL) and
writes its event, number included, into the slot that the number names. The one reader trusts a
slot only if it holds the number it expects: a smaller one means the writer has not got there
yet, a larger one that the ring has gone round and the event is lost, which is counted.
"""

from __future__ import annotations

import itertools
import struct
from operator import eq
from typing import TYPE_CHECKING

import numpy as np

from argus_otel.wire import events

if TYPE_CHECKING:
    from collections.abc import Callable

_PIECE = 1024  # events copied while holding the GIL: 64 KB, about 10 µs
_PACK_INTO = struct.Struct(f"<{events.WORDS}q").pack_into


class EventRing:
    """Bounded memory for events, ``capacity`` × 64 bytes, allocated once.

    Args:
        capacity: Events; rounded up to a power of two.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = 1 << max(4, (capacity - 1).bit_length())
        self._memory = bytearray(self.capacity * events.BYTES)
        self._bytes = memoryview(self._memory)
        np.frombuffer(self._memory, dtype="<i8")[:: events.WORDS] = -1
        self._numbers = itertools.count()
        self._next_read = 0
        self._waited_for = -1
        self.lost = 0
        """Events that were overwritten before the reader came."""
        self.append = self._make_append()
        """``append(kind, t0, t1, a, b, c, d)``; all integers of at most 63 bits and a sign."""

    def _make_append(self) -> Callable[[int, int, int, int, int, int, int], None]:
        take_number = self._numbers.__next__
        memory, mask, pack_into, size = self._memory, self.capacity - 1, _PACK_INTO, events.BYTES

        def append(kind: int, t0: int, t1: int, a: int, b: int, c: int, d: int) -> None:
            number = take_number()
            try:
                pack_into(memory, (number & mask) * size, number, kind, t0, t1, a, b, c, d)
            except BaseException:  # a value beyond 64 bits: the reader must not wait for this slot
                pack_into(memory, (number & mask) * size, number, events.VOID, 0, 0, 0, 0, 0, 0)
                raise

        return append

    @property
    def issued(self) -> int:
        """Events that writers have begun so far.

        A counter tells its value in its representation only; looking through the slots for the
        newest would read all of the ring's memory each time.
        """
        return int(repr(self._numbers).removeprefix("count(").removesuffix(")"))

    def drain(self) -> events.Events:
        """Copy out every event since the last call, oldest first.

        Cost:
            Background thread: a copy of what is new, in pieces.
        """
        pieces = []
        while piece := self._read_piece():
            pieces.append(piece)
        self._pass_over_a_slot_that_nobody_fills()
        return events.Events(b"".join(pieces))

    def _pass_over_a_slot_that_nobody_fills(self) -> None:
        """A writer that was interrupted between its number and its event never comes back.

        One that merely lost the GIL in between does, long before the next call but one.
        """
        if self.issued <= self._next_read:
            self._waited_for = -1  # read up to the newest
        elif self._waited_for == self._next_read:
            self._next_read += 1
            self.lost += 1
        else:
            self._waited_for = self._next_read

    def _read_piece(self) -> bytes:
        start = self._next_read & (self.capacity - 1)
        ahead = self.issued - self._next_read
        stop = min(start + min(ahead, _PIECE), self.capacity)
        # Slicing to bytes holds the GIL, so no writer can be half-way through a slot meanwhile.
        raw = bytes(self._bytes[start * events.BYTES : stop * events.BYTES])
        numbers = memoryview(raw).cast("q")[:: events.WORDS].tolist()
        expected = list(range(self._next_read, self._next_read + len(numbers)))
        good = len(numbers)
        if numbers != expected:
            good = list(map(eq, numbers, expected)).index(False)
        if good == 0 and numbers and numbers[0] > self._next_read:
            oldest_kept = self.issued - self.capacity
            # Leave room: the ring goes on filling while this reader catches up.
            resume = oldest_kept + self.capacity // 8
            self.lost += resume - self._next_read
            self._next_read = resume
            return self._read_piece()
        self._next_read += good  # what comes after is not written yet
        return raw[: good * events.BYTES]
