"""Puts the hooks in place when, and only if, the user's program imports what they hook."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import wrapt

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.instrument.framework.collectives import Collectives, instrument_waits
from argus_otel.instrument.framework.compilation import instrument_compilation
from argus_otel.instrument.framework.optimizers import (
    instrument_grad_scaler,
    instrument_optimizers,
)
from argus_otel.instrument.framework.phases import (
    BackwardTimer,
    ForwardHooks,
    instrument_backward,
    instrument_ddp,
    instrument_fsdp,
)
from argus_otel.instrument.framework.process_groups import World
from argus_otel.instrument.framework.steps import StepTracker
from argus_otel.instrument.patches import Patches
from argus_otel.instrument.python.data_loading import instrument_data_loading
from argus_otel.instrument.python.exceptions import instrument_exceptions
from argus_otel.instrument.python.gc_pauses import instrument_gc
from argus_otel.wire import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from argus_otel.instrument.sink import Sink

_MOST_BITS = 62
"""Of an amount of work: events hold 64-bit integers."""


@dataclass(slots=True)
class Instrumentation:
    """The hooks of this process. Nothing is hooked before the user imports it."""

    sink: Sink
    steps: StepTracker
    collectives: Collectives
    on_world: Callable[[], None]
    """Called when ``init_process_group`` returns, before anything else is done about it."""
    exception_messages: bool = False
    patches: Patches = field(default_factory=Patches)
    found: dict[str, str] = field(default_factory=dict)
    """What each hook found, for ``argus doctor``: ``hooked``, or why not."""
    _removed: bool = False
    _installed: bool = False

    @classmethod
    def create(
        cls,
        sink: Sink,
        on_boundary: Callable[[int], None],
        *,
        exception_messages: bool,
        on_world: Callable[[], None] = lambda: None,
    ) -> Instrumentation:
        """Make the hooks; ``install`` puts them in place."""
        collectives = Collectives(sink)
        return cls(
            sink=sink,
            steps=StepTracker(sink, on_boundary, _device_in_use, collectives.begin_step),
            collectives=collectives,
            on_world=on_world,
            exception_messages=exception_messages,
        )

    def install_wake_up(self) -> None:
        """Hook ``init_process_group`` alone: what tells a rank from a DataLoader worker."""
        self._when_imported(
            "process_groups", "torch.distributed.distributed_c10d", self._hook_world
        )

    def install(self) -> None:
        """Wait for the modules that are to be hooked; those imported already are hooked now."""
        if self._installed:
            return
        self._installed = True
        sink, steps, patches = self.sink, self.steps, self.patches
        forward = ForwardHooks(sink, steps)
        timer = BackwardTimer(sink, steps)
        hooks: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
            (
                "optimizers",
                "torch.optim.optimizer",
                lambda module: instrument_optimizers(module, patches, sink, steps),
            ),
            (
                "grad_scaler",
                "torch.amp.grad_scaler",
                lambda module: instrument_grad_scaler(module, patches, sink, steps),
            ),
            (
                "backward",
                "torch.autograd",
                lambda module: instrument_backward(module, patches, timer),
            ),
            (
                "data_loading",
                "torch.utils.data.dataloader",
                lambda module: instrument_data_loading(module, patches, sink, steps),
            ),
            ("process_groups", "torch.distributed.distributed_c10d", self._hook_world),
            (
                "waits",
                "torch.distributed",
                lambda module: instrument_waits(module, patches, sink, steps),
            ),
            (
                "ddp",
                "torch.nn.parallel.distributed",
                lambda module: instrument_ddp(module, patches, sink, steps, timer, forward),
            ),
            (
                "compilation",
                "torch._dynamo.callback",
                lambda module: instrument_compilation(module, patches, sink, steps),
            ),
            (
                "fsdp",
                "torch.distributed.fsdp",
                lambda module: instrument_fsdp(module, patches, sink, forward),
            ),
        )
        for name, module, hook in hooks:
            if self.found.get(name) != "hooked":
                self._when_imported(name, module, hook)
        instrument_gc(patches, sink)
        instrument_exceptions(patches, sink, with_message=self.exception_messages)

    def annotate(self, work: dict[str, float]) -> None:
        """Add amounts of work to the step under way."""
        for kind, name in enumerate(events.WORK_KINDS):
            if amount := int(work.get(name, 0)):
                if amount.bit_length() > _MOST_BITS:
                    msg = f"annotate({name}={amount}): an amount of work has at most {_MOST_BITS} bits"
                    raise ValueError(msg)
                self.sink.append(events.WORK, monotonic_ns(), 0, kind, amount, 0, 0)

    def _hook_world(self, module: Any) -> None:  # noqa: ANN401
        World(self.sink, self.steps, self.collectives, self.on_world).instrument(
            self.patches, module
        )

    def _when_imported(self, name: str, module: str, hook: Callable[[Any], Any]) -> None:
        self.found[name] = f"waiting for the program to import {module}"
        wrapt.register_post_import_hook(self._guarded(name, hook), module)

    def _guarded(self, name: str, hook: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(module: Any) -> None:  # noqa: ANN401
            if self._removed:
                return
            try:
                hook(module)
                self.found[name] = "hooked"
            except Exception as error:  # noqa: BLE001 - it would break the user's import
                self.found[name] = f"failed: {type(error).__name__}: {error}"
                self.sink.faults.report(f"install_{name}", error)

        return run

    def remove(self) -> None:
        """Take every hook off; those still waiting for an import never come."""
        self._removed = True
        self.patches.undo()


def _device_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
