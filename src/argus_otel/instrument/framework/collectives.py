"""Every collective and point-to-point operation, by torch's process-group hooks (torch ≥ 2.14).

The hooks fire in C++ below every way of issuing one: ``torch.distributed``, functional
collectives, compiled graphs, DDP's reducer, FSDP2. Counts are our own, per group, and per
(source, destination) for point-to-point: torch's sequence numbers differ between ranks once
point-to-point shares a group.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.instrument.framework.dynamo import never_compile
from argus_otel.wire import events
from argus_otel.wire.codes import OPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from argus_otel.instrument.framework.steps import StepTracker
    from argus_otel.instrument.patches import Patches
    from argus_otel.instrument.sink import Sink

HOOK_ID: Final = 0x417267
"""Ours among the hooks of a process group."""

_MAX_TENSORS_SUMMED = 64
"""Beyond this many tensors the payload of a coalesced operation is estimated from the first."""

_OP_NAMES: Final = {
    "SEND": "send",
    "RECV": "recv",
    "BROADCAST": "broadcast",
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce",
    "REDUCE": "reduce",
    "ALLGATHER": "all_gather",
    "ALLGATHER_BASE": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "ALLGATHER_INTO_TENSOR_COALESCED": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "REDUCE_SCATTER_BASE": "reduce_scatter",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
    "BARRIER": "barrier",
    "SCATTER": "scatter",
    "GATHER": "gather",
}
_SEND, _RECV = OPS.index("send"), OPS.index("recv")

_NOBODY: Final = 0
_SEVERAL: Final = -1
_SHOWS_ITS_THREADS_IN: Final = 2
"""Boundaries for which a new group's post hook stays on, whatever is wanted: by then the threads
that use it (autograd's, a checkpointer's) have mostly done so. One that comes later to a group
whose post hook is off has it without ends for good: they stay unknown."""

_ABSENT: Final = object()


class _Hooked:
    """One group with our hooks on it, and which thread's operations it carries.

    torch reads a group's hooks without a lock, so changing them while another thread issues an
    operation crashes the process (seen within seconds). Every operation passes the pre hook
    first, which notes its thread here: as long as there is one only, that thread may change
    hooks between its operations, and none else ever may. The lock makes it exact: another
    thread's first operation waits the microsecond that a change takes.
    """

    __slots__ = ("_boundaries", "_lock", "after", "after_on", "attached", "group", "thread")

    def __init__(self, group: Any, after: Callable[[Any], None] | None) -> None:  # noqa: ANN401
        self.group = group
        self.after = after
        self.after_on = False
        self.attached = True
        self.thread = _NOBODY
        """Identifier of the one thread that has issued operations, or one of the two below."""
        self._boundaries = 0
        self._lock = threading.Lock()

    def join(self) -> bool:
        """Note that the calling thread issues an operation; whether it is to be recorded."""
        if self.thread != _SEVERAL:
            with self._lock:
                self.thread = get_ident() if self.thread == _NOBODY else _SEVERAL
        return self.attached

    def begin_step(self, *, ends: bool) -> bool:
        """Have the post hook on in steps whose ends are wanted, off in others.

        Returns:
            Whether this group still has to show which threads use it.
        """
        if self.after is None:
            return False
        if self._boundaries < _SHOWS_ITS_THREADS_IN:
            self._boundaries += 1
            return True
        with self._lock:
            if ends != self.after_on and self._may_change():
                if ends:
                    self.group.register_post_hook(HOOK_ID, self.after)
                else:
                    self.group.unregister_post_hook(HOOK_ID)
                self.after_on = ends
        return False

    def detach(self) -> None:
        """Take the hooks off; where several threads use the group they stay, and do nothing."""
        with self._lock:
            self.attached = False
            if self._may_change():
                self.group.unregister_pre_hook(HOOK_ID)
                self.group.unregister_post_hook(HOOK_ID)

    def _may_change(self) -> bool:
        return self.thread in (_NOBODY, get_ident())


class Collectives:
    """Hooks on all process groups of this process."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._attached: set[str] = set()
        self._hooked: list[_Hooked] = []
        self._op_codes: list[int] = []
        self._ends = True
        self._some_are_new = False
        self.hooked = False
        """This torch has process-group hooks, and at least one group is hooked."""

    def attach_all(self) -> None:
        """Hook every group that is not hooked yet, before its first use."""
        from torch.distributed import distributed_c10d as c10d

        for group in list(c10d._world.pg_map):  # noqa: SLF001 - no public list of groups
            name = group.group_name
            if name in self._attached:
                continue
            self._attached.add(name)
            ranks = sorted(
                c10d._world.pg_group_ranks[group].items(),  # noqa: SLF001
                key=lambda item: item[1],
            )
            backend = str(c10d._world.pg_map[group][0]).lower()  # noqa: SLF001
            self._attach(group, [rank for rank, _ in ranks], blocks_host="nccl" not in backend)

    def begin_step(self, ends: bool) -> None:
        """A step begins; ``ends`` says whether the ends of its operations are wanted.

        A post hook costs each operation a call from C++, so it is there in such steps only.

        Cost:
            Training thread: a comparison, and about 1 µs a group where ``ends`` changes.
        """
        if ends == self._ends and not self._some_are_new:
            return
        self._ends = ends
        some_are_new = False
        for hooked in self._hooked:
            try:
                some_are_new |= hooked.begin_step(ends=ends)
            except Exception as error:  # noqa: BLE001 - never into the user's training
                self._sink.faults.report("collective_end_hook", error)
        self._some_are_new = some_are_new

    def forget_all(self) -> None:
        """The world was destroyed; its groups take their hooks with them."""
        self._attached.clear()
        self._hooked.clear()

    def forget_destroyed(self) -> None:
        """Let go of groups that the user has destroyed one by one."""
        from torch.distributed import distributed_c10d as c10d

        alive = c10d._world.pg_map  # noqa: SLF001
        self._hooked = [hooked for hooked in self._hooked if hooked.group in alive]
        self._attached &= {group.group_name for group in alive}

    def detach_all(self) -> None:
        """Take the hooks off."""
        for hooked in self._hooked:
            with contextlib.suppress(Exception):  # one destroyed by other means
                hooked.detach()
        self.forget_all()

    def _attach(self, group: Any, ranks: list[int], *, blocks_host: bool) -> None:  # noqa: ANN401
        if not hasattr(group, "register_pre_hook"):
            self._sink.faults.report("torch_without_collective_hooks")
            return
        if not self._op_codes:
            self._op_codes = _op_codes()
        description = group.group_desc or "undefined"
        index = self._sink.add_group(description, ranks, blocks_host=blocks_host)
        # NCCL completes its futures at enqueue: that is no end, so there is none to ask for.
        after = self._make_after(index) if blocks_host else None
        hooked = _Hooked(group, after)
        before = self._make_before(hooked, index, ranks)  # before anything is registered
        if after is not None:
            group.register_post_hook(HOOK_ID, after)
            hooked.after_on = True
            self._some_are_new = True
        group.register_pre_hook(HOOK_ID, before)
        self._hooked.append(hooked)
        self.hooked = True

    def _make_before(self, hooked: _Hooked, index: int, ranks: list[int]) -> Callable[[Any], None]:
        """The pre hook of one group, with everything it needs bound as locals.

        What each thing costs here depends on the caches, which the model has just filled: a C
        function that the model's own code does not use takes a microsecond the first time.

        Cost:
            Training thread (autograd's on a GPU), 3 µs a collective, and 20 to 30 µs where
            arithmetic has filled the caches: a quarter for the name, a quarter for the size.
        """
        sink, now, this_thread = self._sink, monotonic_ns, get_ident
        held, capacity, overflowed = sink.held, sink.held.maxlen, sink.count_overflow
        push, plan, report = held.append, sink.plan, sink.faults.report
        collective, asynchronous = events.COLLECTIVE, 1 << 26
        # By whether it is asynchronous, then by torch's code of the operation; inverted (negative)
        # for point-to-point.
        packed_ops = [
            [
                ~(index | op << 20 | flag) if op in (_SEND, _RECV) else index | op << 20 | flag
                for op in self._op_codes
            ]
            for flag in (0, asynchronous)
        ]
        name_of, value_of, is_async, inputs_of = _getters()
        collectives = 0
        channel_counts: dict[int, int] = {}

        def before(args: Any) -> None:  # noqa: ANN401
            nonlocal collectives
            arrival_ns = now()  # first: what follows must not make the rank look late
            try:
                if hooked.thread != this_thread() and not hooked.join():
                    return
                if not sink.enabled:
                    return
                packed = packed_ops[is_async(args)][value_of(name_of(args))]
                if packed >= 0:
                    # Nothing is called between the two, so that no other thread comes between.
                    count = collectives
                    collectives = count + 1
                else:
                    root = args.root
                    peer = ranks[root] if 0 <= root < len(ranks) else -1
                    packed = ~packed | (peer + 1) << 32
                    channel = packed & ~asynchronous  # from us to the peer, or the other way
                    count = channel_counts.get(channel, 0)
                    channel_counts[channel] = count + 1
                tensors = inputs_of(args) or args.output_tensors
                size = tensors[0].nbytes if len(tensors) == 1 else _bytes_of(tensors)
                # Only an end that is asked for has to find its beginning again.
                op_id = args.op_id if hooked.after_on and plan.ends else -1
                if len(held) == capacity:
                    overflowed()
                push((collective, arrival_ns, 0, packed, count, size, op_id))
            except Exception as error:  # noqa: BLE001 - it would reach the user's collective
                report("collective_hook", error)

        never_compile(before, callees=True)
        return before

    def _make_after(self, index: int) -> Callable[[Any], None]:
        """The post hook of one group whose operations end on the host."""
        sink, append, now = self._sink, self._sink.append, monotonic_ns
        plan, report = sink.plan, sink.faults.report

        def after(args: Any) -> None:  # noqa: ANN401
            if not plan.ends or not sink.enabled:
                return
            try:
                began_ns = now()
                op_id = args.op_id
                work = args.work
                if work is None:
                    return

                def done(future: Any) -> None:  # noqa: ANN401, ARG001
                    append(events.END, now(), 0, index, 0, 0, op_id)

                try:
                    future = work.get_future()
                except RuntimeError:
                    return  # gloo has none for some operations: their ends stay unknown
                future.add_done_callback(done)
                plan.charge_end(now() - began_ns)
            except Exception as error:  # noqa: BLE001
                report("collective_end_hook", error)

        never_compile(after, callees=True)
        return after


def _bytes_of(tensors: list[Any]) -> int:
    """Payload of an operation on several tensors, or on none."""
    if len(tensors) <= _MAX_TENSORS_SUMMED:
        return sum(tensor.nbytes for tensor in tensors)
    return int(tensors[0].nbytes) * len(tensors)


def _getters() -> tuple[Callable[[Any], Any], ...]:
    """What ``args.name``, ``name.value``, ``args.async_op`` and ``args.input_tensors`` call.

    Without the ways through a property and a bound method: 0.1 µs each, or more out of cold caches.
    """
    from torch._C import _distributed_c10d

    # Neither class is public: where one is called otherwise, the way through Python works as well.
    args, name = (getattr(_distributed_c10d, n, None) for n in ("PreHookArgs", "HookOpName"))
    wanted = ((args, "name"), (name, "value"), (args, "async_op"), (args, "input_tensors"))
    getters = []
    for owner, attribute in wanted:
        getter = getattr(inspect.getattr_static(owner, attribute, None), "fget", None)
        # pybind11's function, from inside its wrapper for binding.
        getters.append(getattr(getter, "__func__", getter) or operator.attrgetter(attribute))
    return tuple(getters)


def _op_codes() -> list[int]:
    """Our operation code for each value of torch's ``HookOpName``."""
    from torch._C import _distributed_c10d

    names = _distributed_c10d.HookOpName.__members__
    codes = [OPS.index("other")] * (max(value.value for value in names.values()) + 1)
    for name, value in names.items():
        codes[value.value] = OPS.index(_OP_NAMES.get(name, "other"))
    return codes


def instrument_waits(
    dist: Any,  # noqa: ANN401 - torch.distributed
    patches: Patches,
    sink: Sink,
    steps: StepTracker,
) -> None:
    """Time ``Work.wait``: where a thread is made to wait for others, and a true end.

    ``torch.distributed``'s synchronous calls and FSDP2 come through here; DDP's reducer and
    functional collectives wait in C++ and do not.
    """
    held, capacity, overflowed = sink.held, sink.held.maxlen, sink.count_overflow
    push, now, this_thread, times = held.append, monotonic_ns, get_ident, steps.times
    kind, absent = events.WAIT, _ABSENT

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        # pybind11's method, from inside its wrapper for binding, which is slow to call through.
        inner = getattr(original, "__func__", original)

        def wait(self: Any, timeout: Any = absent) -> Any:  # noqa: ANN401
            began_ns = now()
            try:
                return inner(self) if timeout is absent else inner(self, timeout)
            finally:
                ended_ns = now()
                thread = times.thread
                if sink.enabled and (thread == this_thread() or not thread):
                    if len(held) == capacity:
                        overflowed()
                    push((kind, began_ns, ended_ns, 0, 0, 0, 0))

        never_compile(wait)
        return wait

    patches.replace(dist.Work, "wait", wrap)
