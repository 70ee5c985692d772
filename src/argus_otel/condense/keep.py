"""Which steps' timelines are worth keeping: each rank says it, the Collector does it for all.

In this order: ``event`` (an uncaught exception, a compilation, a long GC pause), ``slow`` (against
this rank's own recent steps), ``baseline`` (a sample that all ranks agree on).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from argus_otel.wire.ids import is_baseline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from argus_otel.wire.identity import Identity

EVENT: Final = "event"
SLOW: Final = "slow"
BASELINE: Final = "baseline"

MIN_GC_PAUSE_S: Final = 0.050
GC_SHARE_OF_STEP: Final = 0.10
HISTORY_STEPS: Final = 64
MIN_HISTORY_STEPS: Final = 16
SLOW_RATIO: Final = 1.25
SLOW_SPREADS: Final = 4.0
SLOW_FLOOR_S: Final = 0.005
MAX_SLOW_SHARE: Final = 0.05
MAD_TO_SIGMA: Final = 1.4826
"""All from DESIGN §3.2; 1.4826 makes the median absolute deviation a normal's sigma."""

_REFRESH_STEPS = 16
"""The limit is recomputed every few steps: medians of 64 values on every step would cost more
than the whole digest, and the limit hardly moves between."""


class KeepRule:
    """Decides step by step; holds the recent steps that were not themselves slow."""

    def __init__(self, baseline_ratio: float) -> None:
        self._ratio = baseline_ratio
        self._recent_s: deque[float] = deque(maxlen=HISTORY_STEPS)
        self._limit_s = float("inf")
        self._since_refresh = 0
        self._seen = 0
        self._slow = 0

    def decide(
        self,
        identity: Identity,
        ordinal: int,
        step_s: float,
        longest_gc_s: float,
        *,
        odd: bool,
    ) -> str | None:
        """Why to keep this step, or None.

        Args:
            identity: Whose step it is.
            ordinal: The step.
            step_s: Its duration in seconds.
            longest_gc_s: Its longest garbage collection in seconds.
            odd: Whether an exception went uncaught in it, or something was compiled.
        """
        self._seen += 1
        slow = self._is_slow(step_s)
        if not slow:
            self._recent_s.append(step_s)
        if odd or longest_gc_s >= max(MIN_GC_PAUSE_S, GC_SHARE_OF_STEP * step_s):
            return EVENT
        if slow and self._slow < max(1.0, MAX_SLOW_SHARE * self._seen):
            self._slow += 1
            return SLOW
        if is_baseline(identity.nonce, identity.attempt, ordinal, self._ratio):
            return BASELINE
        return None

    def _is_slow(self, step_s: float) -> bool:
        if len(self._recent_s) < MIN_HISTORY_STEPS:
            return False
        if self._since_refresh == 0:
            median = _median(self._recent_s)
            spread = MAD_TO_SIGMA * _median([abs(other_s - median) for other_s in self._recent_s])
            self._limit_s = max(
                SLOW_RATIO * median, median + SLOW_SPREADS * spread, median + SLOW_FLOOR_S
            )
        self._since_refresh = (self._since_refresh + 1) % _REFRESH_STEPS
        return step_s > self._limit_s


def _median(values: Iterable[float]) -> float:
    """Of a few values; ``statistics.median`` takes twice as long, ``np.median`` ten times."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
