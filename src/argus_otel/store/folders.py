"""Whose folder is whose in a store: one writer at a time, one sub-folder a run."""

from __future__ import annotations

import fcntl
import re
from typing import TYPE_CHECKING

from argus_otel._runtime.errors import StoreError
from argus_otel.store.dataset import read_manifest

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path
    from typing import TextIO


def lock_folder(folder: Path) -> TextIO:
    """Become the one writer of a store, creating it where there is none; closing lets go.

    Raises:
        StoreError: Somebody else is, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".writer.lock").open("a")
    except OSError as error:
        raise StoreError(
            f"the store folder {folder}",
            got=f"not writable: {error}",
            expected="a folder to write to",
            fix="Give another folder, or make this one writable.",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go when we die
    except OSError as error:
        lock.close()
        raise StoreError(
            f"the store folder {folder}",
            got="in use by another `argus serve`",
            expected="one writer a folder",
            fix="Stop the other one, or give another folder.",
        ) from error
    return lock


def new_run_folder(store: Path, run_id: str, run: str, taken: Collection[Path] = ()) -> Path:
    """A sub-folder that a run can have for itself; it is not created.

    Args:
        store: Folder of the store.
        run_id: What people call the run.
        run: Its nonce in hex.
        taken: Folders of other runs that may not be on disk yet.
    """
    stem = _safe(run_id) or "run"
    path = store / f"{stem}-{_safe(run)[:8]}"
    if path in taken or read_manifest(path) is not None:
        path = store / f"{stem}-{_safe(run)[:64]}"  # one in 2**32
    return path


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("._-")[:80]
