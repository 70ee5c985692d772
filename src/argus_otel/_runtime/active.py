"""The one tracer of this process, for the public functions; None where argus is off.

The only state of the package at module level: ``argus_otel.phase()`` has no other way to find
what the launcher started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Tracer(Protocol):
    """What the public functions need."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a block under a name."""

    def set_step(self, iteration: int) -> None:
        """Number the step that begins."""

    def annotate(self, work: dict[str, float]) -> None:
        """Add to the step's amounts of work."""

    def flush(self, timeout_s: float) -> bool:
        """Send what is there."""

    def disable(self) -> None:
        """Stop for good."""


_tracer: Tracer | None = None


def get() -> Tracer | None:
    """The tracer, if any."""
    return _tracer


def put(tracer: Tracer | None) -> None:
    """Install or remove the tracer."""
    global _tracer
    _tracer = tracer
