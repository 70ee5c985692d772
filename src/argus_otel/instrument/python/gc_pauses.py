"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, Final

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.wire import events

if TYPE_CHECKING:
    from argus_otel.instrument.patches import Patches
    from argus_otel.instrument.sink import Sink

MIN_PAUSE_NS: Final = 100_000
"""Young collections take microseconds and come by the hundred; shorter ones are not recorded."""


def instrument_gc(patches: Patches, sink: Sink) -> None:
    """Record collections that last."""
    append, now = sink.append, monotonic_ns
    began_ns = 0

    def on_gc(phase: str, info: dict[str, Any]) -> None:
        nonlocal began_ns
        if phase == "start":
            began_ns = now()
            return
        ended_ns = now()
        if began_ns and ended_ns - began_ns >= MIN_PAUSE_NS and sink.enabled:
            append(events.GC, began_ns, ended_ns, info["generation"], info["collected"], 0, 0)

    gc.callbacks.append(on_gc)
    patches.on_undo(lambda: gc.callbacks.remove(on_gc) if on_gc in gc.callbacks else None)
