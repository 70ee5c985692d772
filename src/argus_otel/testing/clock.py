"""A clock that stands still until a test moves it."""

from __future__ import annotations


class CounterClock:
    """Monotonic and wall clock in one; passes wherever code takes a clock or a sleep.

    Args:
        start_ns: First wall time, Unix nanoseconds.
        tick_ns: How far each reading moves the clock by itself, nanoseconds. With 1, two events
            never have the same time, and order shows in the numbers.
    """

    def __init__(self, *, start_ns: int = 1_000_000_000, tick_ns: int = 0) -> None:
        self._now_ns = start_ns
        self._start_ns = start_ns
        self._tick_ns = tick_ns
        self.slept_s: list[float] = []
        """Every ``sleep`` asked for, seconds, in order."""

    def __call__(self) -> float:
        """Same as ``monotonic``, so that the clock itself can be handed over."""
        return self.monotonic()

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        return (self.time_ns() - self._start_ns) * 1e-9

    def monotonic_ns(self) -> int:
        """Nanoseconds since the clock was made."""
        return self.time_ns() - self._start_ns

    def time_ns(self) -> int:
        """Wall time, Unix nanoseconds."""
        now_ns = self._now_ns
        self._now_ns += self._tick_ns
        return now_ns

    def advance(self, seconds: float) -> None:
        """Move the clock on."""
        self._now_ns += round(seconds * 1e9)

    def sleep(self, seconds: float) -> None:
        """Move the clock on by as much, without waiting; the wish is kept in ``slept_s``."""
        self.slept_s.append(seconds)
        self.advance(max(seconds, 0.0))
