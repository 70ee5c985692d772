"""Puts the hooks in place when, and only if, the user's program imports what they hook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import wrapt

from argus_otel.instrument.framework.collectives import Collectives, instrument_waits
from argus_otel.instrument.framework.optimizers import (
    instrument_grad_scaler,
    instrument_optimizers,
)
from argus_otel.instrument.framework.phases import (
    BackwardTimer,
    ForwardHooks,
    instrument_ddp,
    instrument_fsdp,
)
from argus_otel.instrument.framework.process_groups import World
from argus_otel.instrument.framework.steps import StepTracker
from argus_otel.instrument.patches import Patches
from argus_otel.instrument.python.data_loading import instrument_data_loading
from argus_otel.instrument.python.exceptions import instrument_exceptions
from argus_otel.instrument.python.gc_pauses import instrument_gc

if TYPE_CHECKING:
    from collections.abc import Callable

    from argus_otel.instrument.sink import Sink


@dataclass(slots=True)
class Instrumentation:
    """The hooks of this process. Nothing is hooked before the user imports it."""

    sink: Sink
    steps: StepTracker
    collectives: Collectives
    exception_messages: bool = False
    patches: Patches = field(default_factory=Patches)
    found: dict[str, str] = field(default_factory=dict)
    """What each hook found, for ``argus doctor``: ``hooked``, or why not."""
    _removed: bool = False

    @classmethod
    def create(
        cls, sink: Sink, on_boundary: Callable[[int], None], *, exception_messages: bool
    ) -> Instrumentation:
        """Make the hooks; ``install`` puts them in place."""
        return cls(
            sink=sink,
            steps=StepTracker(sink, on_boundary),
            collectives=Collectives(sink),
            exception_messages=exception_messages,
        )

    def install(self) -> None:
        """Wait for the modules that are to be hooked; those imported already are hooked now."""
        sink, steps, patches = self.sink, self.steps, self.patches
        forward = ForwardHooks(sink, steps)
        world = World(sink, steps, self.collectives)
        timer = BackwardTimer(sink, steps)

        plan: tuple[tuple[str, str, Callable[[Any], None]], ...] = (
            (
                "optimizers",
                "torch.optim.optimizer",
                lambda _: instrument_optimizers(patches, sink, steps),
            ),
            (
                "grad_scaler",
                "torch.amp.grad_scaler",
                lambda _: instrument_grad_scaler(patches, sink, steps),
            ),
            (
                "backward",
                "torch.autograd",
                lambda module: patches.replace(module, "backward", timer.wrap),
            ),
            (
                "data_loading",
                "torch.utils.data.dataloader",
                lambda _: instrument_data_loading(patches, sink, steps),
            ),
            (
                "process_groups",
                "torch.distributed.distributed_c10d",
                lambda module: world.instrument(patches, module),
            ),
            ("waits", "torch.distributed", lambda _: instrument_waits(patches, sink)),
            (
                "ddp",
                "torch.nn.parallel.distributed",
                lambda _: instrument_ddp(patches, sink, timer, forward),
            ),
            (
                "fsdp",
                "torch.distributed.fsdp",
                lambda _: instrument_fsdp(patches, sink, forward),
            ),
        )
        for name, module, hook in plan:
            self.found[name] = f"waiting for the program to import {module}"
            wrapt.register_post_import_hook(self._guarded(name, hook), module)
        instrument_gc(patches, sink)
        instrument_exceptions(patches, sink, with_message=self.exception_messages)

    def _guarded(self, name: str, hook: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(module: Any) -> None:  # noqa: ANN401
            if self._removed or not self.sink.enabled:
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
