"""SIGTERM: what is left is sent, and the process dies of it, whatever it is doing."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

PATIENCE_S = 60

PROLOGUE = """
    import os, signal, sys, threading, time
    from argus_otel._runtime.termination import SigtermFlush
    flush = SigtermFlush(lambda bound_s: print("flushed", bound_s, flush=True))
"""


def run(script):
    """Start a script, send SIGTERM once it says "ready", and wait for its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROLOGUE + script)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line == "ready\n":
                process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
    return code, lines


@pytest.mark.parametrize(
    "stuck",
    [
        "time.sleep(600)",
        # A C call that never comes back to the interpreter, as a collective does.
        "import ctypes; ctypes.CDLL(None).pause()\n    ctypes.CDLL(None).sleep(600)",
        "threading.Lock().acquire() and os.read(os.pipe()[0], 1)",
    ],
    ids=["python", "c", "read"],
)
def test_the_process_flushes_and_dies_of_the_signal(stuck):
    """Also where the main thread cannot run a handler."""
    code, lines = run(f"""
    flush.install()
    print("ready", flush=True)
    {stuck}
    """)

    assert code == -signal.SIGTERM
    assert lines == ["ready", "flushed 1.0"]


def test_a_handler_of_the_users_own_is_kept():
    """Set before: it is never replaced."""
    code, lines = run("""
    def own(number, frame):
        print("own", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, own)
    flush.install()
    print("ready", flush=True)
    time.sleep(600)
    """)

    assert (code, lines) == (7, ["ready", "own"])


def test_a_handler_that_the_user_sets_later_is_in_charge():
    """And the flush leaves the signal to it."""
    code, lines = run("""
    flush.install()
    def own(number, frame):
        print("own", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, own)
    print("ready", flush=True)
    time.sleep(600)
    """)

    assert (code, lines) == (7, ["ready", "own"])


def test_a_handler_that_calls_the_one_before_it_stays_in_charge():
    """As Lightning does, which then ends the training in its own time."""
    code, lines = run("""
    flush.install()
    before = signal.getsignal(signal.SIGTERM)
    done = []
    def own(number, frame):
        before(number, frame)
        done.append(1)
    signal.signal(signal.SIGTERM, own)
    print("ready", flush=True)
    while not done:
        time.sleep(0.01)
    print("saved a checkpoint", flush=True)
    """)

    assert (code, lines) == (0, ["ready", "saved a checkpoint"])


def test_a_forked_child_dies_of_the_signal_and_its_parent_does_not():
    """At once, while it still shares its parent's descriptors."""
    code, lines = run("""
    flush.install()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            time.sleep(600)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    print("children died", flush=True)
    print("ready", flush=True)
    time.sleep(600)
    """)

    assert code == -signal.SIGTERM
    assert lines == ["children died", "ready", "flushed 1.0"]


def test_what_is_undone_leaves_no_trace():
    """``disable()``: the default again, the descriptor free, the thread gone."""
    code, lines = run("""
    flush.install()
    flush.undo()
    for thread in threading.enumerate():
        if thread.name == "argus-sigterm":
            thread.join()
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1), flush=True)
    print("ready", flush=True)
    time.sleep(600)
    """)

    assert code == -signal.SIGTERM
    assert lines == ["True -1", "ready"]


def test_an_event_loop_that_uses_the_wake_up_descriptor_is_left_alone():
    """One process has one such descriptor."""
    code, lines = run("""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    flush.install()
    print(flush.installed, signal.set_wakeup_fd(-1) == write_end, flush=True)
    print("ready", flush=True)
    time.sleep(600)
    """)

    assert code == -signal.SIGTERM
    assert lines == ["False True", "ready"]


def test_an_event_loop_that_came_and_went_does_not_make_the_process_deaf():
    """A loop that handles signals takes the wake-up descriptor, and on closing leaves none."""
    code, lines = run("""
    import asyncio
    flush.install()
    async def main():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    asyncio.run(main())
    print(signal.set_wakeup_fd(-1), flush=True)
    print("ready", flush=True)
    time.sleep(600)
    """)

    assert code == -signal.SIGTERM
    assert lines == ["-1", "ready", "flushed 1.0"]


def test_a_running_event_loop_that_handles_another_signal_does_not_keep_the_process():
    """The loop has the wake-up descriptor all the while."""
    code, lines = run("""
    import asyncio
    flush.install()
    async def main():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
        print("ready", flush=True)
        await asyncio.sleep(600)
    asyncio.run(main())
    """)

    assert code == -signal.SIGTERM
    assert lines == ["ready", "flushed 1.0"]


def test_a_flush_that_hangs_does_not_keep_the_process():
    """As in a resolver that does not answer, which keeps to no bound."""
    code, lines = run("""
    flush = SigtermFlush(lambda bound_s: time.sleep(600))
    flush.install()
    print("ready", flush=True)
    time.sleep(600)
    """)

    assert code == -signal.SIGTERM
    assert lines == ["ready"]
