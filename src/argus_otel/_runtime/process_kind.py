"""What kind of process this is: one that may train, or a helper that must stay untouched.

Known from ``sys.orig_argv`` alone, because at ``sitecustomize`` time nothing else exists yet
(``multiprocessing.parent_process()`` is set later).
"""

from __future__ import annotations

from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class ProcessKind(Enum):
    """How much of argus a process gets at start."""

    MAIN = "main"
    """A program of the user's: everything."""
    DORMANT = "dormant"
    """May turn out to train (``mp.spawn`` starts ranks this way, DataLoader its workers):
    nothing but a hook that wakes argus on ``init_process_group``."""
    INERT = "inert"
    """Never trains: nothing at all."""


_LAUNCHERS = frozenset({"torchrun", "torchrun.py", "accelerate", "deepspeed", "argus"})
_LAUNCHER_MODULES = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "torch.distributed.elastic.multiprocessing.subprocess_handler",
        "argus_otel.cli",
        "torch._inductor.compile_worker",
    }
)


def process_kind(argv: Sequence[str]) -> ProcessKind:
    """Classify a process by its full command line (``sys.orig_argv``)."""
    text = " ".join(argv)
    if "multiprocessing.resource_tracker" in text or "_inductor/compile_worker" in text:
        return ProcessKind.INERT
    if "multiprocessing.spawn" in text or "multiprocessing.forkserver" in text:
        return ProcessKind.DORMANT
    if "--multiprocessing-fork" in argv:
        return ProcessKind.DORMANT
    words = list(argv[1:])
    if "-m" in words:
        module = words[words.index("-m") + 1] if words.index("-m") + 1 < len(words) else ""
        if module in _LAUNCHER_MODULES:
            return ProcessKind.INERT
        return ProcessKind.MAIN
    for word in words:  # the script is the first word that is no option of the interpreter's
        if not word.startswith("-"):
            return ProcessKind.INERT if PurePath(word).name in _LAUNCHERS else ProcessKind.MAIN
    return ProcessKind.MAIN
