"""Optimizer and GradScaler hooks: where most steps end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from argus_otel.instrument.framework.dynamo import never_compile

if TYPE_CHECKING:
    from collections.abc import Callable

    from argus_otel.instrument.framework.steps import StepTracker
    from argus_otel.instrument.patches import Patches
    from argus_otel.instrument.sink import Sink


def instrument_optimizers(
    module: Any,  # noqa: ANN401 - torch.optim.optimizer
    patches: Patches,
    sink: Sink,
    steps: StepTracker,
) -> None:
    """Hook every optimizer, by torch's public global hooks."""
    report = sink.faults.report

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401, ARG001
        if sink.enabled:
            try:
                steps.optimizer_begins(optimizer)
            except Exception as error:  # noqa: BLE001 - never into the user's training
                report("optimizer_hook", error)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401, ARG001
        if sink.enabled:
            try:
                steps.optimizer_ends(optimizer)
            except Exception as error:  # noqa: BLE001
                report("optimizer_hook", error)

    for hook in (before, after):
        never_compile(hook, callees=True)
    # What torch puts around ``step``, and calls the hooks from.
    steps.know_optimizer_frame(module.Optimizer.profile_hook_step(len).__code__)
    handles = (
        module.register_optimizer_step_pre_hook(before),
        module.register_optimizer_step_post_hook(after),
    )
    for handle in handles:
        patches.on_undo(handle.remove)

    def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807
            original(self, *args, **kwargs)
            try:
                steps.add_optimizer(self)
            except Exception as error:  # noqa: BLE001
                report("optimizer_hook", error)

        return __init__

    patches.replace(module.Optimizer, "__init__", wrap_init)


def instrument_grad_scaler(
    module: Any,  # noqa: ANN401 - torch.amp.grad_scaler
    patches: Patches,
    sink: Sink,
    steps: StepTracker,
) -> None:
    """See the iterations that a GradScaler skips: no optimizer hook fires in them."""
    report = sink.faults.report

    def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if sink.enabled:
                try:
                    steps.scaler_steps(optimizer)
                except Exception as error:  # noqa: BLE001
                    report("scaler_hook", error)
            return original(self, optimizer, *args, **kwargs)

        return step

    def wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = original(self, *args, **kwargs)
            if sink.enabled:
                try:
                    steps.scaler_updates()
                except Exception as error:  # noqa: BLE001
                    report("scaler_hook", error)
            return result

        return update

    patches.replace(module.GradScaler, "step", wrap_step)
    patches.replace(module.GradScaler, "update", wrap_update)
