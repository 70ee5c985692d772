"""Phases of a step: backward by autograd's entry, forward by the data-parallel wrappers.

No global module hook: it would cost 1.6 µs for each of thousands of modules, make torch.compile
warn the user, and recompile when it goes. A plain module's forward needs none: it is what lies
between the batch's arrival and the backward (worked out in condense).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.instrument.framework.dynamo import never_compile
from argus_otel.instrument.framework.steps import StepTracker
from argus_otel.instrument.thread_times import ThreadTimes
from argus_otel.wire import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from argus_otel.instrument.patches import Patches
    from argus_otel.instrument.sink import Sink


class ForwardHooks:
    """Times the outermost forward among the modules that it is attached to."""

    def __init__(self, sink: Sink, steps: StepTracker) -> None:
        self._sink = sink
        self._append = sink.append
        self._steps = steps
        self._outermost = 0
        """``id`` of the module whose forward is timed, while it runs; those inside it are passed over.
        Not the module itself: Ctrl-C in its forward passes torch's hooks by, and it would be held."""
        self._ordinal = 0
        """Step in which that forward began: what a later step finds here was left in that way."""
        self._depth = 0
        """Of that module in itself: a block that is shared may call itself."""
        self._began_ns = 0
        self._times = (0, events.NONE)
        self._hooks: tuple[Callable[..., None], Callable[..., None]] | None = None

    def attach(self, module: Any) -> None:  # noqa: ANN401
        """Hook one module instance, ahead of its other hooks and always at its end."""
        if self._hooks is None:
            self._hooks = self._make_hooks()
        before, after = self._hooks
        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, always_call=True)

    def _make_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Forward pre-hook, and forward hook, called even where the forward raised.

        Cost:
            Training thread, 0.4 µs for a module inside another: FSDP2 has one a layer.
        """
        from torch.compiler import is_compiling

        enter, leave = self.enter, self.leave

        def before(module: Any, args: Any) -> None:  # noqa: ANN401, ARG001
            if is_compiling():
                return  # traced by Dynamo, which folds this: the graph holds nothing of ours
            enter(module)

        def after(module: Any, args: Any, output: Any) -> None:  # noqa: ANN401, ARG001
            if is_compiling():
                return
            leave(module)

        return before, after

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a class's ``forward``, which leaves the instances (and their pickles) alone."""

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            import torch

            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            self.enter(module)
            try:
                return original(module, *args, **kwargs)
            finally:
                self.leave(module)

        never_compile(forward)
        return forward

    def enter(self, module: Any) -> None:  # noqa: ANN401
        """A forward begins on this thread."""
        steps = self._steps
        if self._outermost and self._ordinal == steps.ordinal and self._outermost != id(module):
            return
        if not self._sink.enabled or not steps.is_here:
            return
        try:
            if self._ordinal != steps.ordinal:
                self._ordinal, self._depth = steps.ordinal, 0
            self._depth += 1
            if self._depth == 1:
                self._outermost = id(module)
                self._times = self._steps.read_times()
                self._began_ns = monotonic_ns()
        except Exception as error:  # noqa: BLE001 - never into the user's training
            self._sink.faults.report("forward_hook", error)

    def leave(self, module: Any) -> None:  # noqa: ANN401
        """The matching end."""
        if self._outermost != id(module) or not self._steps.is_here:
            return
        try:
            self._depth -= 1
            if self._depth:
                return
            self._outermost = 0
            if not self._sink.enabled:
                return
            flags = events.NESTED if self._steps.in_optimizer else 0
            # Not imported by name here: that takes as long as the rest.
            if not sys.modules["torch"].is_grad_enabled():
                flags |= events.NO_GRAD
            cpu_ns, delay_ns = self._times
            self._append(events.FORWARD, self._began_ns, monotonic_ns(), cpu_ns, delay_ns, flags, 0)
        except Exception as error:  # noqa: BLE001
            self._sink.faults.report("forward_hook", error)

    def __deepcopy__(self, memo: Any) -> ForwardHooks:  # noqa: ANN401 - copies of a model share it
        return self


class BackwardTimer:
    """Times autograd passes, and knows whether DDP's reducer waits at their end."""

    def __init__(self, sink: Sink, steps: StepTracker) -> None:
        self._sink = sink
        self._steps = steps
        self.append = sink.append
        self.ddp_models = 0

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.autograd.backward``, through which ``Tensor.backward`` goes too."""
        sink, steps = self._sink, self._steps

        def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not sink.enabled or not steps.is_here:
                return original(*args, **kwargs)
            try:
                began_ns = steps.backward_begins()
            except Exception as error:  # noqa: BLE001
                sink.faults.report("backward_hook", error)
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                try:
                    steps.backward_ends(began_ns, ddp_waits=self.ddp_models > 0)
                except Exception as error:  # noqa: BLE001
                    sink.faults.report("backward_hook", error)

        never_compile(backward)
        return backward


def instrument_backward(
    module: Any,  # noqa: ANN401 - torch.autograd
    patches: Patches,
    timer: BackwardTimer,
) -> None:
    """Time every autograd pass."""
    patches.replace(module, "backward", timer.wrap)
    # What the wrappers call beside the functions that they wrap, which may be compiled.
    for function in (ThreadTimes.read, vars(StepTracker)["is_here"].fget, timer.append):
        never_compile(function, callees=True)
    for name in ("backward_begins", "backward_ends"):
        never_compile(getattr(StepTracker, name), callees=True)
    for name in ("enter", "leave"):
        never_compile(getattr(ForwardHooks, name), callees=True)


def instrument_ddp(
    module: Any,  # noqa: ANN401 - torch.nn.parallel.distributed
    patches: Patches,
    sink: Sink,
    steps: StepTracker,
    timer: BackwardTimer,
    hooks: ForwardHooks,
) -> None:
    """Forward phases of DistributedDataParallel, and its waits for buffer broadcasts."""
    ddp = module.DistributedDataParallel

    def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807
            original(self, *args, **kwargs)
            timer.ddp_models += 1

        return __init__

    def wrap_sync(original: Callable[..., Any]) -> Callable[..., Any]:
        # Broadcasts rank 0's buffers before a forward and waits for them in C++: a wait that no
        # other hook sees.
        append = sink.append

        def _sync_buffers(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            began_ns = monotonic_ns()
            try:
                return original(self, *args, **kwargs)
            finally:
                if sink.enabled and steps.is_here:
                    append(events.WAIT, began_ns, monotonic_ns(), 1, 0, 0, 0)

        never_compile(_sync_buffers)
        return _sync_buffers

    patches.replace(ddp, "__init__", wrap_init)
    patches.replace(ddp, "forward", hooks.wrap)
    patches.replace(ddp, "_sync_buffers", wrap_sync)


def instrument_fsdp(
    package: Any,  # noqa: ANN401 - torch.distributed.fsdp
    patches: Patches,
    sink: Sink,
    hooks: ForwardHooks,
) -> None:
    """Forward phases of FSDP2: hooks on each ``fully_shard`` module, the outermost counts."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = original(module, *args, **kwargs)
            if sink.enabled:
                try:
                    for each in module if isinstance(module, (list, tuple)) else (module,):
                        hooks.attach(each)
                except Exception as error:  # noqa: BLE001
                    sink.faults.report("fsdp_hook", error)
            return result

        return fully_shard

    # Replaced in the package only: its own modules reach the attributes that FSDP hangs on the
    # function (fully_shard.state) through their own name.
    patches.replace(package, "fully_shard", wrap)


class user_phase:  # noqa: N801 - read as the function that it stands in for
    """Time a part of the user's loop under a name of its own.

    A class, because a generator's context manager costs as much again.
    """

    __slots__ = ("_began_ns", "_name", "_sink")

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._name = name
        self._began_ns = 0

    def __enter__(self) -> None:
        self._began_ns = monotonic_ns()

    def __exit__(self, *error: object) -> None:
        ended_ns = monotonic_ns()
        sink = self._sink
        if sink.enabled:
            try:
                index = sink.phase_index(self._name)
                if index >= 0:
                    sink.append(events.PHASE, self._began_ns, ended_ns, index, 0, 0, 0)
            except Exception as fault:  # noqa: BLE001
                sink.faults.report("user_phase", fault)
