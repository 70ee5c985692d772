"""Who a process is before ``init_process_group`` says so, or without one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from argus_otel.wire.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from argus_otel.settings import Settings

_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SCHEDULER_RUN_IDS: Final = (
    "SLURM_JOB_ID",
    "RAY_JOB_ID",
    "KUBERNETES_JOB_NAME",
    "JOB_NAME",
    "TORCHELASTIC_RUN_ID",
)


def first_identity(settings: Settings, environ: Mapping[str, str]) -> Identity:
    """Rank and attempt from the launcher's variables; a run id from the scheduler's, or the start."""
    return Identity(
        nonce=os.urandom(8),
        nonce_local=False,  # alone, and nobody to share it with
        run_id=settings.run_id or _scheduler_run_id(environ),
        attempt=_whole(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        role=settings.role,
        rank=_whole(environ.get("RANK", "0")),
        world_size=1,
        local_rank=_whole(environ.get("LOCAL_RANK", "0")),
    )


def _scheduler_run_id(environ: Mapping[str, str]) -> str:
    for name in _SCHEDULER_RUN_IDS:
        value = environ.get(name, "")
        # torchrun's own default is the word "none", or with --standalone a random UUID, which
        # no person would search by.
        if value and value.lower() != "none" and not _UUID.fullmatch(value):
            return value
    started = time.strftime("run-%Y%m%d-%H%M%S", time.gmtime(_job_start_s(environ)))
    # Two jobs may start in one second; their ranks meet at different places.
    port = environ.get("MASTER_PORT")
    place = f"{environ.get('MASTER_ADDR', '')}:{port}" if port else f"parent {os.getppid()}"
    return f"{started}-{hashlib.blake2b(place.encode(), digest_size=2).hexdigest()}"


def _job_start_s(environ: Mapping[str, str]) -> float:
    """When the job started: the launcher's mark, so that all ranks of a host say the same."""
    with contextlib.suppress(ValueError):
        return float(environ.get("ARGUS_LAUNCHED", ""))
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The parent (torchrun's agent) is common to all ranks of a host.
        boot_ticks = int(
            Path(f"/proc/{os.getppid()}/stat").read_text("ascii").rpartition(")")[2].split()[19]
        )
        uptime_s = float(Path("/proc/uptime").read_text("ascii").split()[0])
        return time.time_ns() * 1e-9 - uptime_s + boot_ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() * 1e-9


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 0
