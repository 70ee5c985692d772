"""Where argus's own errors go: counted, logged once per cause, never into the user's training.

Code on the training thread is wrapped in a plain ``try``/``except`` (a context manager would
cost three times as much) that ends in ``faults.report``. Tests hand in a log that re-raises.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter

logger = logging.getLogger("argus_otel")


class FaultLog:
    """Counts argus's own faults and drops by cause; warns the first time each is seen."""

    def __init__(self, *, reraise: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        """For reading one cause; ``snapshot`` is for going through all."""
        self._reraise = reraise

    def report(self, cause: str, error: BaseException | None = None, *, records: int = 1) -> None:
        """Count a fault. Called from ``except`` blocks, so it does not fail itself."""
        first = cause not in self.counts
        self.counts[cause] += records
        if self._reraise and error is not None:
            raise error
        if first:
            # The user's filters and handlers run in here.
            with contextlib.suppress(Exception):
                detail = f": {type(error).__name__}: {error}" if error is not None else ""
                logger.warning(
                    "argus: %s%s (training goes on; further ones are only counted)", cause, detail
                )
                logger.debug("argus: traceback of the first %r", cause, exc_info=error)

    def snapshot(self) -> dict[str, int]:
        """Give a copy of the counts, also while other threads add causes."""
        return dict(self.counts)
