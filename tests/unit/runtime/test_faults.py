"""Argus's own errors: counted, told once, never the user's."""

from __future__ import annotations

import logging

import pytest

from argus_otel._runtime.faults import FaultLog


def test_each_cause_is_told_once_and_counted_always(caplog):
    """A job runs for weeks."""
    faults = FaultLog()
    for _ in range(3):
        faults.report("collective_hook", ValueError("bad group"))
    faults.report("ring_overflow", records=100)

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "collective_hook: ValueError: bad group" in warnings[0]
    assert faults.counts == {"collective_hook": 3, "ring_overflow": 100}


def test_tests_turn_the_same_faults_into_failures():
    """They ask for it."""
    with pytest.raises(ValueError, match="bad group"):
        FaultLog(reraise=True).report("collective_hook", ValueError("bad group"))
