"""Exceptions that nobody caught: their type and frames, never their message unless asked."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from argus_otel.wire.identity import UncaughtException

if TYPE_CHECKING:
    from types import TracebackType

    from argus_otel.instrument.patches import Patches
    from argus_otel.instrument.sink import Sink

_MAX_FRAMES = 20
_MAX_MESSAGE = 500


def instrument_exceptions(patches: Patches, sink: Sink, *, with_message: bool) -> None:
    """Note what ends the program or a thread; whoever handled it before still does."""

    def note(error: BaseException, frames: TracebackType | None) -> None:
        if not sink.enabled or not isinstance(error, Exception):
            return  # KeyboardInterrupt and SystemExit are not faults
        try:
            summary = traceback.extract_tb(frames)[-_MAX_FRAMES:]
            kind = type(error)
            sink.record_exception(
                UncaughtException(
                    type_name=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
                    frames=tuple(f"{f.filename}:{f.lineno} {f.name}" for f in summary),
                    message=str(error)[:_MAX_MESSAGE] if with_message else None,
                )
            )
        except Exception as fault:  # noqa: BLE001
            sink.faults.report("exception_hook", fault)

    previous = sys.excepthook
    previous_thread = threading.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        note(error, frames)
        previous(kind, error, frames)

    def thread_excepthook(args: Any) -> None:  # noqa: ANN401
        if args.exc_value is not None:
            note(args.exc_value, args.exc_traceback)
        previous_thread(args)

    sys.excepthook = excepthook
    threading.excepthook = thread_excepthook

    def undo() -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = previous
        if threading.excepthook is thread_excepthook:
            threading.excepthook = previous_thread

    patches.on_undo(undo)
