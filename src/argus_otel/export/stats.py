"""What became of everything that was submitted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# Causes of drops; the `cause` of argus.self.drops. A closed list, so that people can chart it.
QUEUE_FULL: Final = "queue_full"
REFUSED: Final = "refused"
TOO_LARGE: Final = "too_large"
PARTIAL: Final = "partial_success"
CLOSED: Final = "closed"
NO_TARGET: Final = "no_target"


@dataclass(slots=True, kw_only=True)
class SenderStats:
    """Totals since the sender was made (or re-armed after a fork)."""

    sent_bytes: int = 0
    """Compressed bytes of accepted requests."""
    sent_records: int = 0
    """Records that the endpoint accepted."""
    requests: int = 0
    """Posts tried, failed ones too."""
    drops: dict[str, int] = field(default_factory=dict)
    """Cause to records given up."""
    queue_bytes: int = 0
    """Compressed bytes waiting."""
    queue_records: int = 0
    last_error: str | None = None
    """Most recent trouble; None after a request was accepted."""
