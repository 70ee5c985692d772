"""Which steps get more than the always-on recording, within a budget that is kept by measuring.

Ends of asynchronous collectives cost a callback each on the backend's thread, which takes the
GIL from the trainer: 57-103 µs on two gloo ranks. So they are asked for only on the steps of the
healthy sample, which all ranks agree on without a word, and only while their measured cost stays
within ``ARGUS_OVERHEAD_BUDGET`` of the time that has passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from argus_otel.wire.ids import is_baseline

if TYPE_CHECKING:
    from argus_otel.wire.identity import Identity

END_COST_FLOOR_NS: Final = 60_000
"""Least that one end is charged: what a callback was measured to cost the trainer (two gloo
ranks, two cores). The callback's own run time, which is all that can be timed from inside, is
far below it; the rest is the trainer waiting for the GIL."""

_FIRST_STEPS = 2
"""Step 0 holds warm-up, and step 1 DDP's bucket rebuild: poor samples."""


_LOOKED_AT_ONCE = 32
"""Steps of which it is found out together whether they are of the sample: out of cold caches, one
hash takes as long as thirty in a row."""


class CapturePlan:
    """Read by the hooks: ``ends`` says whether this step's ends are wanted."""

    def __init__(self, *, baseline_ratio: float, overhead_budget: float) -> None:
        self.ends = False
        self._ratio = baseline_ratio
        self._budget = overhead_budget
        self._nonce = b""
        self._attempt = 0
        self._sample: set[int] = set()
        """Steps of the sample among those looked at."""
        self._looked_at = range(0)
        self._earned_ns = 0.0
        self._spent_ns = 0
        self.ends_asked = 0
        """Ends asked for since the start."""
        self.steps_refused = 0
        """Steps of the sample that the budget did not allow."""

    def set_identity(self, identity: Identity) -> None:
        """The sample follows the run's nonce."""
        self._nonce, self._attempt = identity.nonce, identity.attempt
        self._looked_at = range(0)
        self.ends = False

    def begin_step(self, ordinal: int, elapsed_ns: int) -> None:
        """Decide about the step that begins now.

        Args:
            ordinal: The step.
            elapsed_ns: Duration of the step that ended.

        Cost:
            Training thread, once a step: 0.5 µs; every 32 steps, 30 µs.
        """
        self._earned_ns += elapsed_ns * self._budget
        if ordinal not in self._looked_at:
            self._look_ahead(ordinal)
        wanted = ordinal in self._sample
        if wanted and self._spent_ns > self._earned_ns:
            self.steps_refused += 1
            wanted = False
        self.ends = wanted

    def _look_ahead(self, ordinal: int) -> None:
        self._looked_at = range(ordinal, ordinal + _LOOKED_AT_ONCE)
        self._sample = {
            one
            for one in self._looked_at
            if one >= _FIRST_STEPS and is_baseline(self._nonce, self._attempt, one, self._ratio)
        }

    def charge_end(self, measured_ns: int) -> None:
        """Account for one end that was asked for."""
        self.ends_asked += 1
        self._spent_ns += max(measured_ns, END_COST_FLOOR_NS)
