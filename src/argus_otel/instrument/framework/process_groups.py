"""Who this process is: the run's nonce, agreed through the job's own store.

Right after ``init_process_group`` each rank does an ``add`` and a ``compare_set`` on the store:
the first tells how many worlds the store has had, in the second the first writer wins. Two round
trips, no collective, no rank that has to come first. Where that fails the rank stands alone with
a nonce of its own, and says so.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from argus_otel.instrument.framework.collectives import Collectives
    from argus_otel.instrument.framework.steps import StepTracker
    from argus_otel.instrument.patches import Patches
    from argus_otel.instrument.sink import Sink

NONCE_BYTES: Final = 8


class World:
    """Follows ``init_process_group``, new groups and the end of the world."""

    def __init__(
        self,
        sink: Sink,
        steps: StepTracker,
        collectives: Collectives,
        on_world: Callable[[], None],
    ) -> None:
        self._on_world = on_world
        self._sink = sink
        self._steps = steps
        self._collectives = collectives

    def instrument(self, patches: Patches, c10d: Any) -> None:  # noqa: ANN401
        """Hook torch's module of process groups."""
        hooks: tuple[tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
            ("init_process_group", lambda f: self._after(f, self._begin)),
            ("new_group", lambda f: self._after(f, self._attach)),
            ("split_group", lambda f: self._after(f, self._attach)),
            ("destroy_process_group", self._wrap_destroy),
        )
        for name, make in hooks:
            original = getattr(c10d, name, None)
            patches.replace(c10d, name, make)
            # Imported already, it has the original under its own name too.
            package = sys.modules.get("torch.distributed")
            if original is not None and getattr(package, name, None) is original:
                patches.replace(package, name, functools.partial(_instead, getattr(c10d, name)))
        patches.on_undo(self._collectives.detach_all)

    def _after(
        self, original: Callable[..., Any], follow: Callable[[], None]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = original(*args, **kwargs)
            try:
                follow()
            except Exception as error:  # noqa: BLE001 - never into the user's training
                self._sink.faults.report("process_group_hook", error)
            return result

        return call

    def _attach(self) -> None:
        if self._sink.enabled:
            self._collectives.attach_all()

    def _wrap_destroy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = original(*args, **kwargs)
            try:
                import torch.distributed as dist

                if not dist.is_initialized():
                    self._collectives.forget_all()
                else:
                    self._collectives.forget_destroyed()
            except Exception as error:  # noqa: BLE001
                self._sink.faults.report("process_group_hook", error)
            return result

        return destroy_process_group

    def _begin(self) -> None:
        self._on_world()  # may wake a process that was asleep
        if not self._sink.enabled:
            return
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        before = self._sink.identity
        nonce, local = self._agree_on_nonce(c10d, before.attempt, dist.get_world_size())
        self._sink.set_identity(
            replace(
                before,
                nonce=nonce,
                nonce_local=local,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                local_rank=_local_rank(before.local_rank),
            )
        )
        self._collectives.attach_all()
        self._steps.begin_identity()
        self._sink.start()

    def _agree_on_nonce(
        self,
        c10d: Any,  # noqa: ANN401
        attempt: int,
        world_size: int,
    ) -> tuple[bytes, bool]:
        own = secrets.token_bytes(
            NONCE_BYTES
        )  # not `random`: user code seeds that alike everywhere
        if world_size == 1:
            return own, False  # nobody to share it with
        try:
            store = c10d._get_default_store()  # noqa: SLF001 - no public way to the store
            prefix = f"argus/nonce/{attempt}/{world_size}"
            # Counted in the store, where each rank of a world comes by once: how many worlds a
            # process has had is its own affair (a world of a rank's own before the job's).
            worlds_before = (store.add(f"{prefix}/ranks", 1) - 1) // world_size
            key = f"{prefix}/{worlds_before}"
            agreed = bytes.fromhex(bytes(store.compare_set(key, "", own.hex())).decode("ascii"))
        except Exception as error:  # noqa: BLE001 - FakeStore, a store without compare_set, …
            self._sink.faults.report("nonce_not_shared", error)
            return own, True
        if len(agreed) != NONCE_BYTES:
            self._sink.faults.report("nonce_not_shared")
            return own, True
        return agreed, False


def _local_rank(default: int) -> int:
    try:
        return int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError):  # not set, or set to nothing
        return default


def _instead(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """What a second name for ``original`` is to mean."""
    del original
    return replacement
