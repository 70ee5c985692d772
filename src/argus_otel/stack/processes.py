"""Starts a process that outlives its parent, and stops it later without ever hitting another one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_POLL_S = 0.05
# Field 22 of /proc/<pid>/stat, counted from field 3: the name in field 2 may hold spaces.
_STATE_FIELD, _START_FIELD = 0, 19


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, not merely a number: pids are used again."""

    pid: int
    start_mark: str
    """Boot and start time, as the kernel tells them."""


def spawn(argv: Sequence[str], env: Mapping[str, str], log: Path) -> ProcessIdentity:
    """Start ``argv`` in a session of its own (Ctrl-C in a terminal does not reach it).

    Args:
        argv: The command; its first item is a path.
        env: The whole environment.
        log: Standard output and error are appended here.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # Not subprocess.Popen: its object wants to be waited for, and this process is meant to be left.
    pid = os.posix_spawn(
        argv[0],
        list(argv),
        dict(env),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    # A process that ended at once leaves a zombie, so the mark can still be read.
    return ProcessIdentity(pid=pid, start_mark=_start_mark(pid) or "gone")


def is_alive(process: ProcessIdentity) -> bool:
    """Say whether this very process still runs; a zombie does not."""
    _reap(process.pid)
    return _start_mark(process.pid, zombie_counts=False) == process.start_mark


def stop(process: ProcessIdentity, *, grace_s: float = 15.0) -> bool:
    """End the process: SIGTERM, then SIGKILL when the grace is over.

    Returns:
        False when it had already ended, or the pid is somebody else's now (then nothing is sent).
    """
    if not _send(process, signal.SIGTERM):
        return False
    deadline_s = time.monotonic() + grace_s
    while is_alive(process):
        if time.monotonic() > deadline_s:
            kill(process)
            break
        time.sleep(_POLL_S)
    return True


def kill(process: ProcessIdentity) -> bool:
    """End the process with SIGKILL and wait until it is gone; as ``stop`` otherwise."""
    if not _send(process, signal.SIGKILL):
        return False
    while is_alive(process):  # SIGKILL cannot be refused
        time.sleep(_POLL_S)
    return True


def _send(process: ProcessIdentity, signal_number: signal.Signals) -> bool:
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, signal_number)
    except ProcessLookupError:  # ended between the two lines
        return False
    return True


def _reap(pid: int) -> None:
    """Collect a child that ended, so that it does not stay as a zombie; harmless for others."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _start_mark(pid: int, *, zombie_counts: bool = True) -> str | None:
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        return _start_mark_from_ps(pid)
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[_STATE_FIELD] in "ZX" and not zombie_counts:
        return None
    boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{fields[_START_FIELD]}"


def _start_mark_from_ps(pid: int) -> str | None:
    """Where there is no /proc (macOS)."""
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()  # noqa: S603
    if not said or said[0].startswith("Z"):
        return None
    return " ".join(said[1:])
