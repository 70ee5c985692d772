"""The current span of a training loop: whichever step is under way."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace

from argus_otel.wire import ids

if sys.version_info >= (3, 12):
    from typing import override
else:
    from typing_extensions import override

if TYPE_CHECKING:
    from argus_otel._runtime.faults import FaultLog
    from argus_otel.wire.identity import Identity


class StepSpan(trace.NonRecordingSpan):
    """Stands for whichever step is under way, wherever it is the current span.

    One object for all steps, so that it need not be replaced at a boundary: a loop whose own
    span wraps ``optimizer.step()`` comes back to this one and finds it in the next step.
    """

    def __init__(self, faults: FaultLog) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self._faults = faults
        self._step: tuple[Identity, int] | None = None
        self._known: tuple[tuple[Identity, int] | None, trace.SpanContext] = (
            None,
            trace.INVALID_SPAN_CONTEXT,
        )

    def follow(self, identity: Identity, ordinal: int) -> None:
        """Be this step from here on. What its ids are is worked out when somebody asks."""
        self._step = (identity, ordinal)

    def follow_none(self) -> None:
        """Be no step: what starts now has no parent of ours."""
        self._step = None

    @override
    def get_span_context(self) -> trace.SpanContext:
        step = self._step
        known_step, context = self._known  # one read: other threads ask too
        if known_step is not step:
            context = trace.INVALID_SPAN_CONTEXT
            try:
                if step is not None:
                    context = _step_context(*step)
            except Exception as error:  # noqa: BLE001 - the user's sampler, inside user's code
                self._faults.report("step_context", error)
            self._known = (step, context)
        return context

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_span_context()!r})"


def _step_context(identity: Identity, ordinal: int) -> trace.SpanContext:
    trace_id = ids.step_trace_id(
        identity.nonce, identity.attempt, ordinal, ids.shard_of(identity.rank)
    )
    number = int.from_bytes(trace_id, "big")
    flags = trace.TraceFlags.SAMPLED if _user_samples(number) else trace.TraceFlags.DEFAULT
    return trace.SpanContext(
        trace_id=number,
        span_id=int.from_bytes(ids.span_id(trace_id, ids.RANK_STEP, identity.rank), "big"),
        is_remote=False,
        trace_flags=trace.TraceFlags(flags),
    )


def _user_samples(trace_id: int) -> bool:
    """Whether the user's own spans in this step are to be recorded.

    A parent-based sampler asks the parent, which is our step: so the step asks the sampler, as
    if it were a root. Ratios go by the trace id, and all ranks agree. Argus's own spans are not
    concerned: the Collector samples those.
    """
    if not os.environ.get("OTEL_TRACES_SAMPLER"):
        return True
    sampler = getattr(trace.get_tracer_provider(), "sampler", None)
    if sampler is None:
        return True
    root = otel_context.Context()  # None would mean the current one, and that is the step itself
    return bool(sampler.should_sample(root, trace_id, "rank.step").decision.is_sampled())
