"""Processes: stopped for good, and never somebody else's."""

from __future__ import annotations

import os
import sys
import time

import pytest

from argus_otel.stack import processes
from argus_otel.stack.processes import ProcessIdentity

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


@pytest.fixture
def start(tmp_path):
    """Start commands, and leave none behind."""
    started = []

    def begin(argv):
        log = tmp_path / f"{len(started)}.log"
        started.append(processes.spawn(argv, os.environ, log))
        deadline_s = time.monotonic() + 30
        while "up" not in log.read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return started[-1]

    yield begin
    for process in started:
        processes.kill(process)


def test_a_started_process_is_alive_and_a_stopped_one_is_not(start):
    """And stopping it again does nothing."""
    process = start(SLEEP)
    assert processes.is_alive(process)

    assert processes.stop(process)

    assert not processes.is_alive(process)
    assert not processes.stop(process)


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(start):
    """A Collector that waits for a dead backend must not keep `down` waiting for ever."""
    process = start(STUBBORN)

    assert processes.stop(process, grace_s=0.2)

    assert not processes.is_alive(process)


def test_a_pid_that_was_given_to_another_process_is_left_alone(start):
    """The recorded process is gone, its number is used again."""
    living = start(SLEEP)
    recorded = ProcessIdentity(pid=living.pid, start_mark="an earlier boot:1")

    assert not processes.is_alive(recorded)
    assert not processes.stop(recorded)
    assert not processes.kill(recorded)
    assert processes.is_alive(living)


def test_a_process_that_ended_by_itself_is_not_alive(start):
    """It is a zombie until somebody asks for it."""
    process = start([sys.executable, "-c", "print('up', flush=True)"])

    deadline_s = time.monotonic() + 30
    while processes.is_alive(process):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_log_is_appended_to(start, tmp_path):
    """What it said before it was started again stays readable."""
    log = tmp_path / "both.log"
    for word in ("first", "second"):
        process = processes.spawn([sys.executable, "-c", f"print('{word}')"], os.environ, log)
        while processes.is_alive(process):
            time.sleep(0.01)

    assert log.read_text().split() == ["first", "second"]
