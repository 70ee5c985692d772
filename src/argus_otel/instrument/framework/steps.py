"""Where a step ends, for any loop.

In this order: ``set_step()`` or a framework's own callback, where a loop uses one; else the
outermost end of the primary optimizer's step, the primary being the one with most parameters (a
GAN's other optimizer is a phase of the step); inside an active backward (optimizer in backward),
the end of that backward; ``GradScaler.update()`` where the scaler skipped the primary
optimizer. Nothing else ends a step: a loop without any of these has no steps, never wrong ones.

This runs on the training thread because the step's trace context has to be current while the
step runs. What belongs to the step and what came before it is worked out later, in condense.
"""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.instrument.thread_times import ThreadTimes
from argus_otel.wire import events

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from argus_otel.instrument.sink import Sink

_STALE_AFTER = 128
"""Steps of other optimizers without one of the primary, after which it is taken to be out of use
(a frozen part of a model). GANs take up to 100 critic steps a generator step."""

_RULE = {name: code for code, name in enumerate(events.RULES)}


class StepTracker:
    """The state of the training loop, as the hooks report it."""

    def __init__(
        self,
        sink: Sink,
        on_boundary: Callable[[int], None],
        device_in_use: Callable[[], bool] = lambda: False,
        on_plan: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Track steps.

        Args:
            sink: Where events go.
            on_boundary: Called with the ordinal of the step that begins, at each boundary.
            device_in_use: Whether an accelerator runs this process's kernels.
            on_plan: Called at each boundary with whether the ends of the step's operations are
                wanted.
        """
        self._device_in_use = device_in_use
        self._sink = sink
        self._append = sink.append
        self._on_boundary = on_boundary
        self._on_plan = on_plan
        self.times = ThreadTimes()
        """Of the thread that trains; ``times.thread`` says which, for hooks that cannot afford
        ``is_here``."""
        self.read_times = self.times.read
        """CPU ns and run delay ns of the training thread, where a step may turn out to begin."""
        self.ordinal = 0
        self._began_ns = monotonic_ns()
        self._iteration = events.NONE
        self._set_step_calls = 0
        self._parameter_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._primary: Callable[[], Any] = lambda: None
        self._without_primary = 0
        self._optimizer_code: Any = None
        self._in_flight: list[int] = []
        self._optimizer_began_ns = 0
        self._primary_stepped = False
        self._primary_skipped = False
        self._end_after_backward = False
        self.backward_depth = 0
        self.worked = False
        """A backward or an optimizer has run since the last boundary."""

    # -- boundaries ---------------------------------------------------------------------------

    def begin_identity(self) -> None:
        """Count from 0 again: a new process group world began."""
        self.ordinal = 0
        self._began_ns = monotonic_ns()
        self._forget_step()
        self._on_boundary(0)

    def set_step(self, iteration: int) -> None:
        """The user's loop is at its step ``iteration`` from here on.

        The first call only numbers the steps, because a resumed run calls it once; from the
        second on it is what ends them.
        """
        iteration = _that_fits(iteration)
        self._set_step_calls += 1
        if self._set_step_calls > 1 and self.worked:
            self._end("set_step")
        self._iteration = iteration

    def end_from_integration(self, iteration: int | None = None) -> None:
        """A framework's own callback says that the step is over."""
        self._set_step_calls = max(self._set_step_calls, 2)
        if iteration is not None:
            self._iteration = _that_fits(iteration)
        self._end("integration")

    def _end(self, rule: str) -> None:
        now = monotonic_ns()
        self.times.adopt()
        cpu_ns, delay_ns = self.times.read()
        plan = self._sink.plan
        flags = events.ENDS_CAPTURED if plan.ends else 0
        if self._device_in_use():
            flags |= events.DEVICE
        self._append(
            events.STEP_END,
            now,
            _RULE[rule] | flags,
            self.ordinal,
            self._iteration,
            cpu_ns,
            delay_ns,
        )
        self.ordinal += 1
        if self._iteration != events.NONE:
            self._iteration += 1
        plan.begin_step(self.ordinal, now - self._began_ns)
        self._on_plan(plan.ends)
        self._began_ns = now
        self._forget_step()
        self._on_boundary(self.ordinal)
        self._sink.start()  # last: where no thread can be started, the count has gone on

    def end_at_exit(self) -> None:
        """A loop that calls ``set_step()`` ends its last step with the program."""
        if not self._by_optimizer and self.worked:
            self._end("exit")

    def _forget_step(self) -> None:
        self._primary_stepped = False
        self._primary_skipped = False
        self._end_after_backward = False
        self.worked = False

    @property
    def _by_optimizer(self) -> bool:
        return self._set_step_calls < 2

    # -- optimizers ---------------------------------------------------------------------------

    def know_optimizer_frame(self, code: CodeType) -> None:
        """The code object that every optimizer's ``step`` runs inside of."""
        self._optimizer_code = code

    def add_optimizer(self, optimizer: Any) -> None:  # noqa: ANN401
        """Know an optimizer from its construction, so that the first step knows the primary."""
        counts = self._parameter_counts
        if optimizer not in counts:
            counts[optimizer] = sum(
                parameter.numel()
                for group in optimizer.param_groups
                for parameter in group["params"]
            )
            primary = self._primary()
            if primary is None or counts[optimizer] > counts[primary]:
                self._primary = weakref.ref(optimizer)

    def _is_primary(self, optimizer: Any) -> bool:  # noqa: ANN401
        """Whether it has most parameters; of several that do, the oldest."""
        if optimizer is self._primary():
            return True
        self.add_optimizer(optimizer)
        primary = self._primary()
        if primary is None:  # it died
            counts = dict(self._parameter_counts)
            primary = max(counts, key=counts.__getitem__)
            self._primary = weakref.ref(primary)
        return optimizer is primary

    def optimizer_begins(self, optimizer: Any) -> None:  # noqa: ANN401
        """An optimizer's ``step`` was entered (ZeRO nests them: the outermost counts)."""
        key = id(optimizer)
        if self._in_flight:
            depth = self._optimizers_on_the_stack()
            if depth:  # its own frame is one of them
                del self._in_flight[depth - 1 :]
            elif key in self._in_flight:  # compiled: its last step raised and never ended
                del self._in_flight[self._in_flight.index(key) :]
        self._in_flight.append(key)
        if len(self._in_flight) == 1:
            self._optimizer_began_ns = monotonic_ns()

    def optimizer_ends(self, optimizer: Any) -> None:  # noqa: ANN401
        """An optimizer's ``step`` returned."""
        self.worked = True
        if self._is_primary(optimizer):
            self._primary_stepped = True
            self._without_primary = 0
        elif not self._in_flight[1:]:
            self._without_primary += 1
            if self._without_primary >= _STALE_AFTER:  # it is kept, but trains no longer
                self._primary = weakref.ref(optimizer)
                self._primary_stepped = True
                self._without_primary = 0
        key = id(optimizer)
        while self._in_flight and self._in_flight.pop() != key:
            pass  # one inside it raised
        if self._in_flight:
            return
        flags = events.NESTED if self.backward_depth else 0
        self._append(events.OPTIMIZER, self._optimizer_began_ns, monotonic_ns(), 0, 0, flags, 0)
        if not self._primary_stepped or not self._by_optimizer:
            return
        if self.backward_depth:
            self._end_after_backward = True
        else:
            self._end("optimizer")

    @property
    def in_optimizer(self) -> bool:
        """Inside an optimizer's ``step`` (LBFGS runs forwards and backwards there)."""
        if self._in_flight:  # perhaps its step raised, and never said that it ended
            del self._in_flight[self._optimizers_on_the_stack() :]
        return bool(self._in_flight)

    def _optimizers_on_the_stack(self) -> int:
        """How many optimizers' steps this thread is inside of."""
        depth = 0
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the one cheap way
        while frame is not None:
            depth += frame.f_code is self._optimizer_code
            frame = frame.f_back
        return depth

    def scaler_steps(self, optimizer: Any) -> None:  # noqa: ANN401
        """``GradScaler.step`` is about to run or skip an optimizer."""
        if self._is_primary(optimizer):
            self._primary_skipped = True  # until its own hook says otherwise

    def scaler_updates(self) -> None:
        """``GradScaler.update`` closes the iteration: a skipped step ends here."""
        if self._primary_skipped and not self._primary_stepped and self._by_optimizer:
            self._end("scaler")

    # -- phases -------------------------------------------------------------------------------

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that trains, as far as is known."""
        return self.times.thread in (0, get_ident())

    def forget_thread(self) -> None:
        """In a forked child: whichever thread trains next is the one."""
        self.times.forget()

    def backward_begins(self) -> int:
        """An autograd pass begins; reentrant ones (checkpointing) count as part of the outer."""
        self.times.adopt()
        self.backward_depth += 1
        return monotonic_ns()

    def backward_ends(self, began_ns: int, *, ddp_waits: bool) -> None:
        """The matching end."""
        self.backward_depth = max(0, self.backward_depth - 1)
        if self.backward_depth:
            return
        self.worked = True
        flags = events.NESTED if self.in_optimizer else 0
        if ddp_waits:
            flags |= events.DDP_WAITS
        self._append(events.BACKWARD, began_ns, monotonic_ns(), 0, 0, flags, 0)
        if self._end_after_backward:
            self._end("backward")


def _that_fits(iteration: int) -> int:
    iteration = int(iteration)
    if abs(iteration) >= -events.NONE:
        msg = f"set_step({iteration}): the number of an iteration has at most 62 bits"
        raise ValueError(msg)
    return iteration
