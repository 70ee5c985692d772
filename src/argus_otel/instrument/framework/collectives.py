"""Every collective and point-to-point operation, by torch's process-group hooks (torch ≥ 2.14).

The hooks fire in C++ below every way of issuing one: ``torch.distributed``, functional
collectives, compiled graphs, DDP's reducer, FSDP2. Counts are our own, per group, and per
(source, destination) for point-to-point: torch's sequence numbers differ between ranks once
point-to-point shares a group.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from argus_otel._runtime.clock import monotonic_ns
from argus_otel.instrument.framework.dynamo import never_compile
from argus_otel.wire import events
from argus_otel.wire.digest import OPS

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


class Collectives:
    """Hooks on all process groups of this process."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._attached: set[str] = set()
        self._groups: list[Any] = []
        self._op_codes: list[int] = []
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

    def forget_all(self) -> None:
        """The world was destroyed; its groups take their hooks with them."""
        self._attached.clear()
        self._groups.clear()

    def forget_destroyed(self) -> None:
        """Let go of groups that the user has destroyed one by one."""
        from torch.distributed import distributed_c10d as c10d

        alive = c10d._world.pg_map  # noqa: SLF001
        self._groups = [group for group in self._groups if group in alive]
        self._attached &= {group.group_name for group in alive}

    def detach_all(self) -> None:
        """Take the hooks off."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # one destroyed by other means
                group.unregister_pre_hook(HOOK_ID)
                group.unregister_post_hook(HOOK_ID)
        self.forget_all()

    def _attach(self, group: Any, ranks: list[int], *, blocks_host: bool) -> None:  # noqa: ANN401
        if not hasattr(group, "register_pre_hook"):
            self._sink.faults.report("torch_without_collective_hooks")
            return
        if not self._op_codes:
            self._op_codes = _op_codes()
        description = group.group_desc or "undefined"
        index = self._sink.add_group(description, ranks, blocks_host=blocks_host)
        before, after = self._make_hooks(index, ranks, blocks_host=blocks_host)
        group.register_pre_hook(HOOK_ID, before)
        group.register_post_hook(HOOK_ID, after)
        self._groups.append(group)
        self.hooked = True

    def _make_hooks(
        self, index: int, ranks: list[int], *, blocks_host: bool
    ) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
        """The two hooks of one group, with everything they need bound as locals.

        Cost:
            Training thread (autograd's on a GPU), about 3 µs a collective.
        """
        sink, append, now, op_codes = self._sink, self._sink.append, monotonic_ns, self._op_codes
        plan, report = sink.plan, sink.faults.report
        collective, asynchronous = events.COLLECTIVE, 1 << 26
        own_rank = sink.identity.rank
        counts = [0]
        channel_counts: dict[tuple[int, int], int] = {}

        def before(args: Any) -> None:  # noqa: ANN401
            arrival_ns = now()  # first: what follows must not make the rank look late
            if not sink.enabled:
                return
            try:
                op = op_codes[args.name.value]
                tensors = args.input_tensors or args.output_tensors
                n_tensors = len(tensors)
                if n_tensors == 1:
                    size = tensors[0].nbytes
                elif n_tensors <= _MAX_TENSORS_SUMMED:
                    size = sum(tensor.nbytes for tensor in tensors)
                else:
                    size = tensors[0].nbytes * n_tensors
                packed = index | op << 20
                if args.async_op:
                    packed |= asynchronous
                if op == _SEND or op == _RECV:
                    root = args.root
                    peer = ranks[root] if 0 <= root < len(ranks) else -1
                    channel = (own_rank, peer) if op == _SEND else (peer, own_rank)
                    count = channel_counts.get(channel, 0)
                    channel_counts[channel] = count + 1
                    packed |= (peer + 1) << 32
                else:
                    count = counts[0]
                    counts[0] = count + 1
                # Only an end that is asked for has to find its beginning again.
                op_id = args.op_id if plan.ends else -1
                append(collective, arrival_ns, 0, packed, count, size, op_id)
            except Exception as error:  # noqa: BLE001 - it would reach the user's collective
                report("collective_hook", error)

        def after(args: Any) -> None:  # noqa: ANN401
            # NCCL completes its futures at enqueue: that is no end.
            if not plan.ends or not blocks_host or not sink.enabled:
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

        for hook in (before, after):
            never_compile(hook, callees=True)
        return before, after


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
    append = sink.append

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            began_ns = monotonic_ns()
            try:
                return original(self, *args, **kwargs)
            finally:
                if sink.enabled and steps.is_here:
                    append(events.WAIT, began_ns, monotonic_ns(), 0, 0, 0, 0)

        never_compile(wait)
        return wait

    patches.replace(dist.Work, "wait", wrap)
