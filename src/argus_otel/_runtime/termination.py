"""SIGTERM: send what is left, then die of it, even where the main thread is stuck in C++.

A Python signal handler does not run while the main thread is blocked in a collective, and a job
that then does not die is worse than a lost second of telemetry. So where, and only where, nobody
handles SIGTERM, a handler is set together with the wake-up descriptor: the interpreter's C code
writes the signal's number there at once, and a thread of ours reads it, flushes within a bound,
restores the default and sends the signal again. An asyncio loop takes the descriptor away when it
handles signals, and gives none back; hence the handler writes the number too, for when it can run.

The thread needs the GIL: while C code holds it without end, SIGTERM waits. SIGKILL does not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

from argus_otel._runtime import bounded

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

FLUSH_BOUND_S = 1.0
_GRACE_S = 0.25
"""For a flush that has used its time to come back by itself."""


class SigtermFlush:
    """Flushes on SIGTERM where its disposition is the default; touches no other signal."""

    def __init__(self, flush: Callable[[float], None]) -> None:
        self._flush = flush
        self._read_end = -1
        self._write_end = -1
        self.installed = False
        self._follows_forks = False
        self._forking = threading.local()
        self._handler = self._tell_the_thread  # one object, to know it again

    def install(self) -> None:
        """Put it in place, if this is the main thread and nobody else handles the signal."""
        if self.installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        previous = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if previous != -1:  # an event loop uses it: leave both alone
            signal.set_wakeup_fd(previous)
            self._close()
            return
        signal.signal(signal.SIGTERM, self._handler)
        self.installed = True
        if not self._follows_forks:
            self._follows_forks = True
            os.register_at_fork(
                before=self._hold, after_in_parent=self._release, after_in_child=self._be_a_child
            )
        bounded.prepare()
        threading.Thread(target=self._wait, name="argus-sigterm", daemon=True).start()

    def _tell_the_thread(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The handler. Usually the wake-up descriptor was quicker; a number too many is no harm."""
        with contextlib.suppress(OSError):
            os.write(self._write_end, bytes((number,)))

    def _wait(self) -> None:
        read_end = self._read_end
        while True:
            try:
                numbers = os.read(read_end, 64)
            except OSError:
                return
            if not numbers:
                return
            # The user may have set a handler of their own since: then it is theirs to act.
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is self._handler:
                break
        # The flush keeps to its bound itself, but for a resolver that does not answer.
        bounded.run_bounded(lambda: self._flush(FLUSH_BOUND_S), FLUSH_BOUND_S + _GRACE_S)
        # signal.signal() works in the main thread only, and that one may be stuck for good.
        _restore_default()
        os.kill(os.getpid(), signal.SIGTERM)

    # A child shares the descriptor for a moment, and a SIGTERM that it gets then would be its
    # parent's. So the signal waits until the child is on its own.

    def _hold(self) -> None:
        if self.installed:
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _release(self) -> None:
        mask = self._forking.__dict__.pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _be_a_child(self) -> None:
        self.undo()
        self._release()

    def undo(self) -> None:
        """Let SIGTERM do what it did before; in a forked child, or where tracing is over."""
        if not self.installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mine = self._write_end
        if (current := signal.set_wakeup_fd(-1)) not in (-1, mine):
            signal.set_wakeup_fd(current)  # someone else's by now
        self.installed = False
        self._close()

    def _close(self) -> None:
        for end in (self._write_end, self._read_end):  # the thread reads the end of file
            with contextlib.suppress(OSError):
                os.close(end)
        self._read_end = self._write_end = -1


def _restore_default() -> None:
    """Set SIGTERM's disposition from a thread that is not the main one."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGTERM), None)
