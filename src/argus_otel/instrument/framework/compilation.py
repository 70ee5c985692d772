"""Compilation by torch.compile: how long the training thread stood still for it, of what, and why.

Hooked only once the user's program has imported Dynamo by itself. torch tells of the outermost
compilation alone, so that one of a graph is one event, whatever it contains (Inductor, Triton).
Between compilations nothing of this runs.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Final

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.instrument.framework.dynamo import never_compile
from argus_otel.wire.identity import Compilation

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from argus_otel.instrument.framework.steps import StepTracker
    from argus_otel.instrument.patches import Patches
    from argus_otel.instrument.sink import Sink

_FRAMES_LOOKED_AT: Final = 30
_GRAPHS_REMEMBERED: Final = 512
_TEXT: Final = re.compile(r"""([!=]=\s*)('[^']*'|"[^"]*")""")
"""A guard on a string of the user's, which may be private."""
_UNNAMED: Final = Compilation(function="torch.compile", reason="")


def instrument_compilation(
    module: Any,  # noqa: ANN401 - torch._dynamo.callback
    patches: Patches,
    sink: Sink,
    steps: StepTracker,
) -> None:
    """Record what ``torch._dynamo`` says of each compilation's start and end.

    Its methods are wrapped, and no callback registered: ``torch._dynamo.reset`` drops those.

    Cost:
        Training thread, once a compilation: some tens of microseconds beside its milliseconds.
    """
    began_ns = 0
    compiled = _UNNAMED
    by_graph: dict[str, Compilation] = {}

    def wrap_start(original: Callable[..., Any]) -> Callable[..., Any]:
        def run_start_callbacks(self: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
            nonlocal began_ns, compiled
            result = original(self, *args, **named)
            began_ns = 0
            # A backward that is compiled late runs on autograd's thread where there is a GPU.
            if sink.enabled and (steps.is_here or steps.backward_depth):
                try:
                    graph = _graph_of(*args, *named.values())
                    # The backward of a graph belongs to the function that its forward is of.
                    compiled = _of_caller() or by_graph.get(graph, _UNNAMED)
                    # A graph that torch does not number would lend its name to the next.
                    if graph and (graph in by_graph or len(by_graph) < _GRAPHS_REMEMBERED):
                        by_graph[graph] = compiled
                    began_ns = monotonic_ns()
                except Exception as error:  # noqa: BLE001 - never into the user's training
                    sink.faults.report("compilation_hook", error)
            return result

        never_compile(run_start_callbacks)
        return run_start_callbacks

    def wrap_end(original: Callable[..., Any]) -> Callable[..., Any]:
        def run_end_callbacks(self: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
            nonlocal began_ns
            if began_ns and sink.enabled:
                try:
                    sink.record_compilation(compiled, began_ns, monotonic_ns())
                except Exception as error:  # noqa: BLE001
                    sink.faults.report("compilation_hook", error)
            began_ns = 0
            return original(self, *args, **named)

        never_compile(run_end_callbacks)
        return run_end_callbacks

    handler = module.CompilationCallbackHandler
    patches.replace(handler, "run_start_callbacks", wrap_start)
    patches.replace(handler, "run_end_callbacks", wrap_end)


def _graph_of(*given: object) -> str:
    """The number of the graph, of what torch hands to its callbacks; empty where it tells none."""
    return str(getattr(given[0], "compile_id", "")) if given else ""


def _of_caller() -> Compilation | None:
    """What Dynamo's own frame says of the function that it compiles; None where it says nothing.

    torch hands its callbacks a number and no name. A torch whose frame looks otherwise loses the
    name, and nothing else.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - torch offers no other way
    for _ in range(_FRAMES_LOOKED_AT):
        if frame is None:
            break
        if frame.f_code.co_name == "_compile" and "recompile_reason" in frame.f_code.co_cellvars + (
            frame.f_code.co_varnames
        ):
            seen = frame.f_locals
            name = _name_of(seen.get("code"), seen.get("closure"))
            if not name:
                return None
            reason = str(seen.get("recompile_reason") or "")
            return Compilation(function=name, reason=_TEXT.sub(r"\1…", reason))
        frame = frame.f_back
    return None


def _name_of(code: Any, closure: Any) -> str:  # noqa: ANN401 - torch's
    """The function's name with its class; a module of torch's own is compiled inside a wrapper."""
    name = str(getattr(code, "co_qualname", ""))
    if name == "wrap_inline.<locals>.inner":
        for cell in closure or ():
            if hasattr(type(cell.cell_contents), "forward"):
                return f"{type(cell.cell_contents).__qualname__}.forward"
    return name
