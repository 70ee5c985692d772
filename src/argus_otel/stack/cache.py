"""Folders for what is built and what is running, and the locks that keep two callers apart."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def cache_dir() -> Path:
    """Give the folder for binaries, logs and state: ``ARGUS_CACHE_DIR``, else the XDG one."""
    own = os.environ.get("ARGUS_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg else Path.home() / ".cache"
    return base / "argus-otel" / "stack"


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a file lock, which the kernel frees even if this process is killed.

    Args:
        path: The lock file; made when absent, never removed (removing it would split the lock).
        on_wait: Called once if somebody else holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
