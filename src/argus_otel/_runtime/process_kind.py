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
_TAKES_A_VALUE = "WX"
_LAUNCHER_MODULES = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "torch.distributed.elastic.multiprocessing.subprocess_handler",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
        "deepspeed.launcher.launch",
        "deepspeed.launcher.runner",
        "argus_otel.cli",
        "torch._inductor.compile_worker",
    }
)


def process_kind(argv: Sequence[str]) -> ProcessKind:
    """Classify a process by its full command line (``sys.orig_argv``)."""
    words = iter(argv[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, None)
        elif not word.startswith("-") or word == "-":  # the script
            name = PurePath(word).name
            helper = name in _LAUNCHERS or "/_inductor/compile_worker/" in word
            return ProcessKind.INERT if helper else ProcessKind.MAIN
        elif not word.startswith("--"):
            for at, letter in enumerate(word[1:], start=2):
                if letter in _TAKES_A_VALUE:
                    if not word[at:]:
                        next(words, None)
                    break
                if letter == "c":
                    return _kind_of_code(word[at:] or next(words, ""), argv)
                if letter == "m":
                    module = word[at:] or next(words, "")
                    return ProcessKind.INERT if module in _LAUNCHER_MODULES else ProcessKind.MAIN
    return ProcessKind.MAIN


def _kind_of_code(code: str, argv: Sequence[str]) -> ProcessKind:
    """What ``python -c`` runs; ``multiprocessing`` starts all of its helpers that way."""
    if "multiprocessing.resource_tracker import" in code:
        return ProcessKind.INERT
    if "multiprocessing.spawn import" in code or "multiprocessing.forkserver import" in code:
        return ProcessKind.DORMANT
    return ProcessKind.DORMANT if "--multiprocessing-fork" in argv else ProcessKind.MAIN
