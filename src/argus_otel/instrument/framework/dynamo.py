"""Keeping TorchDynamo away from our functions: they read clocks, which it cannot trace.

A frame that Dynamo starts on would be compiled, and recompiled; marking the code object makes
it run as it is. Only the C extension is touched: importing ``torch._dynamo`` costs seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def never_compile(function: Callable[..., Any], *, callees: bool = False) -> None:
    """Mark a function's code to be left alone; does nothing where torch cannot be told.

    Args:
        function: One of ours.
        callees: Also what it calls; for functions that call nothing of the user's.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return
    try:
        from torch._C._dynamo import eval_frame  # private, no public equivalent without dynamo
    except ImportError:
        return
    if hasattr(eval_frame, "skip_code"):  # until torch 2.6
        eval_frame.skip_code(code)
    elif hasattr(eval_frame, "set_code_exec_strategy"):
        strategy = getattr(eval_frame, "_FrameExecStrategy", None)
        action = getattr(eval_frame, "_FrameAction", None)
        if strategy is not None and action is not None:
            inside = action.SKIP if callees else action.DEFAULT
            eval_frame.set_code_exec_strategy(code, strategy(action.SKIP, inside))
