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


@pytest.mark.parametrize("place", ["filter", "handler"])
def test_logging_that_raises_does_not_reach_the_training(place):
    """Filters and handlers are the user's, and raise what they like."""

    def refuse(record):
        raise RuntimeError(record.getMessage())

    logger = logging.getLogger("argus_otel")
    handler = logging.Handler()
    handler.emit = refuse
    faults = FaultLog()
    if place == "filter":
        logger.addFilter(refuse)
    else:
        logger.addHandler(handler)

    try:
        faults.report("collective_hook", ValueError("bad group"))
    finally:
        logger.removeFilter(refuse)
        logger.removeHandler(handler)

    assert faults.counts == {"collective_hook": 1}


def test_an_error_that_cannot_be_printed_is_counted():
    """Its ``__str__`` is foreign code too."""

    class UnprintableError(Exception):
        def __str__(self):
            raise RuntimeError

    faults = FaultLog()

    faults.report("collective_hook", UnprintableError())

    assert faults.counts == {"collective_hook": 1}


def test_a_snapshot_can_be_gone_through_while_faults_come():
    """The counts themselves cannot."""
    faults = FaultLog()
    faults.report("first", records=2)

    for cause in faults.snapshot():
        faults.report(f"{cause}, again")

    assert faults.snapshot() == {"first": 2, "first, again": 1}
