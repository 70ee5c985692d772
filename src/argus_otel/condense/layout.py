"""Where in a stretch of events the numbers lie that a step needs; loops repeat their stretches."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from argus_otel.wire import events

_SKIPPED = f"{events.BYTES}x"
# Of a COLLECTIVE, everything but its number, its kind and the t1 that it has not.
_FORMATS = [_SKIPPED] * events.KINDS
_FORMATS[events.COLLECTIVE] = "16xq8x4q"

_TOLD_ELSEWHERE = {events.VOID, events.COLLECTIVE, events.END, events.STEP_END, events.IDENTITY}


class Layout(NamedTuple):
    """How to read a stretch: its collectives as columns, the few others one by one."""

    collectives: struct.Struct
    """Arrival, packed operation, count, bytes and operation id of each COLLECTIVE."""
    collective_count: int
    others: tuple[tuple[int, int], ...]
    """Where each event begins that tells of a phase or a wait and the like, and how many
    collectives came before it."""


@lru_cache(maxsize=32)
def layout_of(kinds: bytes) -> Layout:
    """Work out a layout; a few microseconds, or half of one where the stretch is a known one."""
    others = []
    before = 0
    for place, kind in enumerate(kinds):
        if kind == events.COLLECTIVE:
            before += 1
        elif kind not in _TOLD_ELSEWHERE:
            others.append((place * events.BYTES, before))
    formats = "".join([_FORMATS[kind] for kind in kinds])
    return Layout(struct.Struct(f"<{formats}"), before, tuple(others))
