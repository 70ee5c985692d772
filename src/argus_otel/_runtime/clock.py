"""Host time: monotonic while recording, Unix nanoseconds on the wire.

Events carry the monotonic clock, which never steps. Its distance to ``CLOCK_REALTIME`` is taken
when a batch is condensed, once for all steps in it, so that a clock adjustment moves whole steps
and never stretches one.
"""

from __future__ import annotations

import time

monotonic_ns = time.perf_counter_ns  # CLOCK_MONOTONIC on Linux
"""What every event is stamped with."""

thread_cpu_ns = time.thread_time_ns


def wall_offset_ns() -> int:
    """Unix time minus monotonic time, from the tightest of three readings."""
    best_width, best_offset = None, 0
    for _ in range(3):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        if best_width is None or after - before < best_width:
            best_width, best_offset = after - before, wall - (before + after) // 2
    return best_offset
