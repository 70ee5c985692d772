"""The step's trace context: current while the step runs, the same ids on every rank."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

from argus_otel.process.tracer import Tracer
from argus_otel.settings import Settings
from argus_otel.wire import ids


@pytest.fixture
def tracer():
    tracer = Tracer(Settings(), dormant=False)
    tracer.recorder.on_first_record = lambda: None
    return tracer


def contexts_of_steps(tracer, count):
    """What a span of the user's would have for a parent in each step."""

    def run():
        found = []
        for _ in range(count):
            tracer.instrumentation.steps.end_from_integration()
            found.append(trace.get_current_span().get_span_context())
        return found

    return contextvars.Context().run(run)


def test_each_step_has_the_context_that_its_telemetry_has(tracer):
    """Worked out when asked, and only once."""
    nonce = tracer.recorder.identity.nonce

    found = contexts_of_steps(tracer, 3)

    trace_ids = [ids.step_trace_id(nonce, 0, ordinal, 0) for ordinal in (1, 2, 3)]
    assert [each.trace_id.to_bytes(16, "big") for each in found] == trace_ids
    assert [each.span_id.to_bytes(8, "big") for each in found] == [
        ids.span_id(trace_id, ids.RANK_STEP, 0) for trace_id in trace_ids
    ]
    assert all(each.is_valid and each.trace_flags.sampled for each in found)


def test_a_span_of_the_users_own_stays_the_parent(tracer):
    """A loop inside a span: the step does not push itself in between."""
    own = trace.NonRecordingSpan(trace.SpanContext(trace_id=1, span_id=2, is_remote=False))

    def run():
        context.attach(trace.set_span_in_context(own))
        tracer.instrumentation.steps.end_from_integration()
        return trace.get_current_span()

    assert contextvars.Context().run(run) is own


def test_the_step_is_current_again_wherever_the_users_code_has_left_the_context(tracer):
    """Between two boundaries it may go into a span, out of it, or to a context from before."""
    end_step = tracer.instrumentation.steps.end_from_integration
    own = trace.NonRecordingSpan(trace.SpanContext(trace_id=1, span_id=2, is_remote=False))

    def run():
        with_ours = []
        context.attach(baggage.set_baggage("of", "the user"))
        before = context.get_current()
        end_step()
        with_ours.append(trace.get_current_span())
        token = context.attach(trace.set_span_in_context(own))
        end_step()
        assert trace.get_current_span() is own
        context.detach(token)
        with_ours.append(trace.get_current_span())
        context.attach(before)
        end_step()
        with_ours.append(trace.get_current_span())
        assert baggage.get_baggage("of") == "the user"
        return with_ours

    first, *others = contextvars.Context().run(run)

    assert first.get_span_context().is_valid
    assert all(each is first for each in others)


class EveryOther(Sampler):
    """Samples by turns."""

    def __init__(self):
        self.asked = 0

    def should_sample(self, parent_context, trace_id, name, *args, **kwargs):
        self.asked += 1
        sampler = ALWAYS_ON if self.asked % 2 else ALWAYS_OFF
        return sampler.should_sample(parent_context, trace_id, name)

    def get_description(self):
        return "every other"


def test_the_users_sampler_decides_about_each_step_on_its_own(tracer, monkeypatch):
    """As about a root: not by what it said of the step before."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    provider = SimpleNamespace(sampler=ParentBased(EveryOther()))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    found = contexts_of_steps(tracer, 4)

    assert [each.trace_flags.sampled for each in found] == [True, False, True, False]


def test_a_sampler_that_raises_costs_the_step_its_context_and_no_more(tracer, monkeypatch):
    """It is the user's, and runs inside the user's code."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setattr(
        trace, "get_tracer_provider", lambda: SimpleNamespace(sampler=SimpleNamespace())
    )

    (found,) = contexts_of_steps(tracer, 1)

    assert not found.is_valid
