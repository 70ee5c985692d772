"""Work at the end of a process that must not hold it up, whatever that work waits for.

A resolver that does not answer cannot be interrupted, so the work runs on a daemon thread and is
left behind when its time is over. From Python 3.12 on no thread starts once the interpreter ends;
hence one that stands by from before.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_THREADS_AT_EXIT = sys.version_info >= (3, 12)

_standing_by: list[_Standby] = []


class _Standby:
    """A daemon thread that does one thing when told to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._told: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._done = threading.Event()
        threading.Thread(target=self._serve, name="argus-standby", daemon=True).start()

    def run(self, function: Callable[[], object], seconds: float) -> bool:
        self._told.put(function)
        return self._done.wait(max(seconds, 0.0))

    def _serve(self) -> None:
        function = self._told.get()
        with contextlib.suppress(Exception):
            function()
        self._done.set()


def prepare() -> None:
    """Have a thread stand by, for a ``run_bounded`` when none can be started any more."""
    if not _NO_THREADS_AT_EXIT:
        return
    if not any(standby.pid == os.getpid() for standby in _standing_by):
        _standing_by.append(_Standby())


def dismiss() -> None:
    """Let the thread that stands by end: there will be nothing to do."""
    while _standing_by:
        with contextlib.suppress(IndexError):
            _standing_by.pop().run(lambda: None, 0.0)


def run_bounded(function: Callable[[], object], seconds: float) -> bool:
    """Run something, and go on without it when it takes too long.

    Where no thread stands by and none can be started, it runs here and takes as long as it takes.

    Args:
        function: Its exceptions are dropped: the process is ending.
        seconds: How long to wait.

    Returns:
        Whether it came to its end in time.
    """
    while _standing_by:
        with contextlib.suppress(IndexError):  # another thread took the last one
            standby = _standing_by.pop()
            if standby.pid == os.getpid():  # else it stayed behind in the parent
                return standby.run(function, seconds)
    try:
        standby = _Standby()
    except RuntimeError:
        with contextlib.suppress(Exception):
            function()
        return True
    return standby.run(function, seconds)
