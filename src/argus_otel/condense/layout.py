"""Where in a stretch of events the numbers lie that a step needs; loops repeat their stretches."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from argus_otel.wire import events

_SKIPPED = f"{events.BYTES}x"
_WHOLE = f"8x{events.FIELDS}q"  # the sequence number is the ring's affair
# Of a COLLECTIVE, everything but its number, its kind and the t1 that it has not.
_FORMATS = [_SKIPPED] * events.KINDS
_FORMATS[events.COLLECTIVE] = "16xq8x4q"

_TOLD_ELSEWHERE = {events.VOID, events.COLLECTIVE, events.END, events.STEP_END, events.IDENTITY}


class Layout(NamedTuple):
    """How to read a stretch: its collectives as columns, the few others one by one."""

    collectives: struct.Struct
    """Arrival, packed operation, count, bytes and operation id of each COLLECTIVE."""
    collective_count: int
    others: struct.Struct
    """All fields of each event that tells of a phase or a wait and the like."""
    before: tuple[int, ...]
    """How many collectives came before each of these."""


@lru_cache(maxsize=32)
def layout_of(kinds: bytes) -> Layout:
    """Work out a layout; a few microseconds, or half of one where the stretch is a known one."""
    before = []
    collective_count = 0
    for kind in kinds:
        if kind == events.COLLECTIVE:
            collective_count += 1
        elif kind not in _TOLD_ELSEWHERE:
            before.append(collective_count)
    collectives = "".join([_FORMATS[kind] for kind in kinds])
    others = "".join([_SKIPPED if kind in _TOLD_ELSEWHERE else _WHOLE for kind in kinds])
    return Layout(
        struct.Struct(f"<{collectives}"),
        collective_count,
        struct.Struct(f"<{others}"),
        tuple(before),
    )
