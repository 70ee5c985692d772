"""What runs at the end of a process does not hold it up."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

from argus_otel._runtime.bounded import run_bounded

PATIENCE_S = 60
AGES_S = 30.0


def test_what_ends_in_time_has_run():
    """And the answer says so."""
    ran = []

    assert run_bounded(lambda: ran.append(1), AGES_S)
    assert ran == [1]


def test_what_does_not_end_is_left_behind():
    """The caller goes on."""
    never = threading.Event()

    assert not run_bounded(never.wait, 0.01)
    never.set()


def test_what_fails_has_ended():
    """Nobody is left to be told."""
    assert run_bounded(lambda: 1 / 0, AGES_S)


def test_the_bound_holds_while_the_interpreter_ends():
    """When no thread can be started any more: one stands by."""
    script = """
        import atexit, time
        from argus_otel._runtime.bounded import prepare, run_bounded
        prepare()
        atexit.register(lambda: print(run_bounded(lambda: time.sleep(600), 0.1), flush=True))
    """

    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (0, "False\n")


def test_without_a_thread_it_runs_here():
    """Sent late is better than not at all."""
    script = """
        import atexit
        from argus_otel._runtime.bounded import run_bounded
        atexit.register(lambda: run_bounded(lambda: print("ran", flush=True), 10))
    """

    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (0, "ran\n")
