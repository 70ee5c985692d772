"""Replacing functions of other libraries, and putting them back.

Replacements are plain functions, not wrapt proxies: a call through a proxy costs about a
microsecond more, and TorchDynamo can look through a function but not through a proxy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Patches:
    """What has been replaced. ``undo`` restores what nobody else has replaced since."""

    _done: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    _cleanups: list[Callable[[], None]] = field(default_factory=list)

    def replace(
        self,
        owner: Any,  # noqa: ANN401 - a module or class of another library
        name: str,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> bool:
        """Replace ``owner.name`` by ``make(original)``.

        Returns:
            False where there is no such attribute, so that a hook for another version of the
            library is simply absent.
        """
        original = getattr(owner, name, None)
        if original is None:
            return False
        replacement = make(original)
        functools.update_wrapper(replacement, original)
        setattr(owner, name, replacement)
        self._done.append((owner, name, original, replacement))
        return True

    def on_undo(self, cleanup: Callable[[], None]) -> None:
        """Register what undoes a hook that is not a replacement."""
        self._cleanups.append(cleanup)

    def undo(self) -> None:
        """Put everything back, newest first."""
        for cleanup in reversed(self._cleanups):
            cleanup()
        for owner, name, original, replacement in reversed(self._done):
            if getattr(owner, name, None) is replacement:
                setattr(owner, name, original)
        self._cleanups.clear()
        self._done.clear()
