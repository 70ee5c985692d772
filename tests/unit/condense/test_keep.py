"""Which steps are kept, at each threshold and just beside it."""

from __future__ import annotations

import pytest

from argus_otel.condense.keep import KeepRule
from argus_otel.wire import ids

STEP_S = 0.100


def decide(rule, identity, ordinal=0, step_s=STEP_S, gc_s=0.0, *, odd=False):
    return rule.decide(identity, ordinal, step_s, gc_s, odd=odd)


@pytest.fixture
def identity(make_identity):
    return make_identity()


@pytest.fixture
def rule(identity):
    """With sixteen ordinary steps behind it, and no sample."""
    rule = KeepRule(0.0)
    for ordinal in range(16):
        assert decide(rule, identity, ordinal) is None
    return rule


def test_an_uncaught_exception_keeps_its_step(rule, identity):
    """Whatever its duration."""
    assert decide(rule, identity, odd=True) == "event"


@pytest.mark.parametrize(
    ("step_s", "gc_s", "keep"),
    [(0.1, 0.050, "event"), (0.1, 0.049, None), (0.11, 0.05, "event")],
)
def test_a_pause_of_50_ms_keeps_its_step(rule, identity, step_s, gc_s, keep):
    """And no shorter one, however short the step."""
    assert decide(rule, identity, step_s=step_s, gc_s=gc_s) == keep


def test_in_a_long_step_a_pause_must_be_a_tenth_of_it(identity):
    """Of two seconds, 200 ms."""
    rule = KeepRule(0.0)

    assert decide(rule, identity, step_s=2.0, gc_s=0.199) is None
    assert decide(rule, identity, step_s=2.0, gc_s=0.200) == "event"


@pytest.mark.parametrize(("step_s", "keep"), [(0.1251, "slow"), (0.1249, None)])
def test_a_step_a_quarter_longer_than_usual_is_slow(rule, identity, step_s, keep):
    """Where the spread is small."""
    assert decide(rule, identity, step_s=step_s) == keep


@pytest.mark.parametrize(("step_s", "keep"), [(0.0061, "slow"), (0.0059, None)])
def test_a_short_step_must_be_slow_by_5_ms(identity, step_s, keep):
    """A quarter of a millisecond is noise."""
    rule = KeepRule(0.0)
    for ordinal in range(16):
        decide(rule, identity, ordinal, step_s=0.001)

    assert decide(rule, identity, step_s=step_s) == keep


def test_the_usual_spread_is_allowed_for(identity):
    """Steps of 80 to 120 ms: 4 spreads above the median is 159 ms."""
    rule = KeepRule(0.0)
    for ordinal in range(16):
        decide(rule, identity, ordinal, step_s=0.08 if ordinal % 2 else 0.12)

    assert decide(rule, identity, step_s=0.200) is None
    assert decide(rule, identity, step_s=0.230) == "slow"


def test_nothing_is_slow_before_sixteen_steps(identity):
    """There is nothing to compare with."""
    rule = KeepRule(0.0)

    assert [decide(rule, identity, n, step_s=10.0**n) for n in range(16)] == [None] * 16


def test_at_most_a_twentieth_of_the_steps_are_slow(rule, identity):
    """A job that turns slow for good is not kept whole."""
    keeps = [decide(rule, identity, n, step_s=1.0) for n in range(1000)]

    assert 45 <= keeps.count("slow") <= 51


def test_all_ranks_keep_the_same_healthy_sample(make_identity):
    """A hash of the run and the step, of the size that was asked for."""
    kept = []
    for rank in (0, 5):
        rule, identity = KeepRule(0.1), make_identity(rank=rank)
        kept.append([n for n in range(2000) if decide(rule, identity, n) == "baseline"])

    assert kept[0] == kept[1]
    assert 150 <= len(kept[0]) <= 250
    assert all(ids.is_baseline(make_identity().nonce, 0, n, 0.1) for n in kept[0])
