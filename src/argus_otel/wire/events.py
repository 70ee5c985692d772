"""What the training thread records: eight 64-bit integers an event.

The recorder writes them, condense reads them; the meaning of each field is agreed here.

============ ================== ================== =============================================
kind         t0, t1 (ns)        a                  b, c, d
============ ================== ================== =============================================
COLLECTIVE   arrival, 0         packed, see below  own count in group or channel; bytes; op id
END          end, 0             group              -; -; op id
WAIT         begin, end         -                  -
DATA         begin, end         CPU ns at begin    run delay ns at begin; both at end
FORWARD      begin, end         CPU ns at begin    run delay ns at begin; flags
BACKWARD     begin, end         -                  -; flags
OPTIMIZER    begin, end         -                  -; flags
PHASE        begin, end         index of name      -; flags
GC           begin, end         generation         objects collected
STEP_END     end, rule | flags  ordinal            iteration or NONE; CPU ns; run delay ns
EXCEPTION    time, 0            index in a table
IDENTITY     time, 0            index of identity
WORK         time, 0            kind of work       amount
COMPILATION  begin, end         index in a table
============ ================== ================== =============================================
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    Event = tuple[int, int, int, int, int, int, int]
    """Kind, t0, t1, a, b, c, d."""

WORDS: Final = 8
BYTES: Final = WORDS * 8

VOID: Final = 0
"""A slot that was taken and could not be filled; means nothing."""
COLLECTIVE: Final = 1
END: Final = 2
WAIT: Final = 3
DATA: Final = 4
FORWARD: Final = 5
BACKWARD: Final = 6
OPTIMIZER: Final = 7
PHASE: Final = 8
GC: Final = 9
STEP_END: Final = 10
EXCEPTION: Final = 11
IDENTITY: Final = 12
WORK: Final = 13
COMPILATION: Final = 14

NONE: Final = -(1 << 62)
"""Not known, where 0 could be a value."""

NESTED: Final = 1
"""Flag: inside another phase (a backward inside LBFGS's step); not a phase of its own."""
NO_GRAD: Final = 2
"""Flag: a forward pass without gradients."""
DDP_WAITS: Final = 4
"""Flag: a backward at whose end DDP's reducer waits for the last bucket in C++."""
ENDS_CAPTURED: Final = 1 << 8
"""Flag of STEP_END: ends of asynchronous collectives were asked for in this step."""
DEVICE: Final = 2 << 8
"""Flag of STEP_END: an accelerator was in use, so host times say nothing of who waits."""
RULE_MASK: Final = 0xFF
"""The rule, an index into ``RULES``, in ``t1`` of STEP_END; flags above it."""

RULES: Final = ("optimizer", "backward", "scaler", "set_step", "integration", "exit")
WORK_KINDS: Final = ("tokens", "samples", "sum_len2")

KINDS: Final = 16
"""More than there are."""

_KIND_AT = 8  # the byte of an event that tells its kind: little-endian, and below 256
_EVENT = struct.Struct("<8x7q")  # the sequence number is the ring's affair

unpack_from = _EVENT.unpack_from
"""``unpack_from(raw, at)``: the event that begins at byte ``at``."""

_GROUP_BITS = 20
_OP_BITS = 6


class Events:
    """Events in the order they were recorded, as they lie in the ring's memory.

    Kept packed until their step has ended: as Python objects they would take four times the
    memory, and the collector of garbage would walk them.
    """

    __slots__ = ("raw",)

    def __init__(self, raw: bytes = b"") -> None:
        self.raw = raw

    def __len__(self) -> int:
        """How many there are."""
        return len(self.raw) // BYTES

    def __add__(self, later: Events) -> Events:
        """These, then the others."""
        return Events(self.raw + later.raw) if self.raw else later

    @property
    def kinds(self) -> bytes:
        """The kind of each, as one byte, to count and to search at memchr's speed."""
        return self.raw[_KIND_AT::BYTES]

    def part(self, begin: int, end: int | None = None) -> Events:
        """Those from ``begin`` up to ``end``."""
        return Events(self.raw[begin * BYTES : None if end is None else end * BYTES])

    def unpacked(self) -> Iterator[Event]:
        """Each as integers."""
        return _EVENT.iter_unpack(self.raw)

    def at(self, place: int) -> Event:
        """One of them; a negative place counts from the end."""
        return _EVENT.unpack_from(self.raw, place * BYTES)

    def places(self, kind: int) -> list[int]:
        """Where those of one kind are, of which there are few."""
        kinds, found, place = self.kinds, [], -1
        while (place := kinds.find(kind, place + 1)) >= 0:
            found.append(place)
        return found

    def of_kind(self, kind: int) -> list[Event]:
        """Those of one kind, of which there are few."""
        return [self.at(place) for place in self.places(kind)]

    def without(self, kind: int) -> Events:
        """All but those of one kind, of which there are few."""
        kept, begin = [], 0
        for place in self.places(kind):
            kept.append(self.part(begin, place).raw)
            begin = place + 1
        return Events(b"".join((*kept, self.part(begin).raw)))


def kind_counts(drained: Events) -> list[int]:
    """How many events there are of each kind, for kinds 0 to ``KINDS - 1``.

    Cost:
        Background thread. 2 µs, and some nanoseconds an event.
    """
    kinds = drained.kinds
    return [kinds.count(kind) for kind in range(KINDS)]


def pack_collective(group: int, op: int, *, is_async: bool, peer: int) -> int:
    """Field ``a`` of COLLECTIVE. ``peer`` is a global rank, -1 where there is none."""
    return group | op << _GROUP_BITS | is_async << (_GROUP_BITS + _OP_BITS) | (peer + 1) << 32


def unpack_collective(a: int) -> tuple[int, int, bool, int]:
    """Group, operation, asynchronous, peer."""
    group = a & ((1 << _GROUP_BITS) - 1)
    op = (a >> _GROUP_BITS) & ((1 << _OP_BITS) - 1)
    is_async = (a >> (_GROUP_BITS + _OP_BITS)) & 1 == 1
    return group, op, is_async, (a >> 32) - 1


def operation_key(group: int, op_id: int) -> int:
    """What tells an operation from all others: ids count per group."""
    return op_id << _GROUP_BITS | group
