"""One rank of bench/overhead.py: one loop, its blocks under this tool or that; see there.

torchrun … bench/overhead_rank.py --results FOLDER --arms bare,argus --rounds 20 …
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from argus_otel._runtime import active
from argus_otel.settings import Settings

sys.path.insert(0, str(Path(__file__).parent / "loops"))
import common

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_HOOK_ID = 0x5D4
_WARM_UP_STEPS = 8
_SETTLE_INTERVALS = 1.3


class Bare:
    """Nothing; what the others are compared with."""

    def begin(self, settle_steps: int, steps: int) -> None:
        """Before a block."""

    def span(self, name: str) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Around a phase."""
        return nullcontext()

    def step_ends(self) -> None:
        """After each step."""

    def after(self) -> None:
        """After a block, unmeasured."""


class Argus(Bare):
    """Argus, which the launcher has installed, switched on for the block."""

    def __init__(self) -> None:
        tracer: Any = active.get()
        if tracer is None:
            msg = "argus is not in this process: start it by opentelemetry-instrument"
            raise SystemExit(msg)
        self.recorder = tracer.recorder
        self.recorder.enabled = False

    def begin(self, settle_steps: int, steps: int) -> None:  # noqa: ARG002
        """Hooks record."""
        self.recorder.enabled = True

    def after(self) -> None:
        """Hooks return at once."""
        self.recorder.enabled = False


class Sdk(Bare):
    """OpenTelemetry's SDK by hand: a span for each step, phase and collective."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("by.hand")
        self._open: dict[int, Any] = {}
        self._count = 0

    def begin(self, settle_steps: int, steps: int) -> None:  # noqa: ARG002
        """Hook the group."""
        group = dist.group.WORLD
        rank, size = dist.get_rank(), dist.get_world_size()

        def before(args: Any) -> None:  # noqa: ANN401
            self._count += 1
            payload = sum(tensor.nbytes for tensor in args.input_tensors)
            self._open[args.op_id] = self._tracer.start_span(
                "all_reduce",
                attributes={"rank": rank, "size": size, "seq": self._count, "bytes": payload},
            )

        def after(args: Any) -> None:  # noqa: ANN401
            span = self._open.pop(args.op_id)
            args.work.get_future().add_done_callback(lambda _: span.end())

        group.register_pre_hook(_HOOK_ID, before)
        group.register_post_hook(_HOOK_ID, after)

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A current span."""
        return self._tracer.start_as_current_span(name)

    def after(self) -> None:
        """Unhook, and send what is left."""
        group = dist.group.WORLD
        group.unregister_pre_hook(_HOOK_ID)
        group.unregister_post_hook(_HOOK_ID)
        self._provider.force_flush()


class Profiler(Bare):
    """torch.profiler, always on: each block is a window, exported at its end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._profiler: Any = None

    def begin(self, settle_steps: int, steps: int) -> None:
        """A window of the block's measured steps."""
        path = str(Path(self._folder.name) / f"rank{dist.get_rank()}.json")
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=settle_steps, active=steps),
            on_trace_ready=lambda profile: profile.export_chrome_trace(path),
        )
        self._profiler.start()

    def step_ends(self) -> None:
        """The schedule counts; after the last step it exports."""
        self._profiler.step()

    def after(self) -> None:
        """Drop it."""
        self._profiler.stop()
        self._profiler = None


MAKERS: dict[str, Callable[[], Bare]] = {
    "bare": Bare,
    "bare again": Bare,
    "argus": Argus,
    "SDK": Sdk,
    "torch.profiler": Profiler,
}


def main() -> None:
    """Train, block after block."""
    options = common.parser(__doc__)
    options.add_argument("--arms", default="bare,argus")
    options.add_argument("--rounds", type=int, default=2)
    given = options.parse_args()
    rank = common.begin(given.seed)
    batch = common.batch_for(given.layers, given.step_ms)
    arms = {name: MAKERS[name]() for name in given.arms.split(",")}
    model = DistributedDataParallel(common.make_model(given.layers), bucket_cap_mb=common.BUCKET_MB)
    loop = Loop(model, batch)
    quiet = Bare()
    settle_steps = _settle_steps(loop, quiet)
    blocks = []
    for index in range(given.rounds):
        order = list(arms)
        random.Random(index).shuffle(order)  # noqa: S311 - the same order on all ranks
        blocks += [
            {"round": index, "arm": name, **run_block(loop, arms[name], settle_steps, given.steps)}
            for name in order
        ]
    common.write_results(
        given.results, rank, {"blocks": blocks, "batch": batch, "ranks": dist.get_world_size()}
    )
    if "argus" in arms:
        arms["argus"].begin(0, 0)  # so that the flush at exit sends what is left
    dist.destroy_process_group()


class Loop:
    """What trains."""

    def __init__(self, model: torch.nn.Module, batch: int) -> None:
        self._model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._data = [torch.randn(batch, common.WIDTH) for _ in range(4)]
        self._taken = 0

    def step(self, arm: Bare) -> None:
        """One step, with the places where code by hand puts its spans."""
        with arm.span("step"):
            with arm.span("data"):
                rows = self._data[self._taken % len(self._data)]
                self._taken += 1
            with arm.span("forward"):
                loss = self._model(rows).square().mean()
            with arm.span("backward"):
                self._optimizer.zero_grad()
                loss.backward()
            with arm.span("optimizer"):
                self._optimizer.step()
        arm.step_ends()


def _settle_steps(loop: Loop, quiet: Bare) -> int:
    """Steps in which argus's thread surely wakes once, the same number on all ranks."""
    for _ in range(_WARM_UP_STEPS):  # DDP makes its buckets anew in the second step
        loop.step(quiet)
    began_s = time.perf_counter()
    for _ in range(_WARM_UP_STEPS):
        loop.step(quiet)
    step_s = (time.perf_counter() - began_s) / _WARM_UP_STEPS
    settle_steps = torch.tensor([math.ceil(_SETTLE_INTERVALS * Settings().interval_s / step_s)])
    dist.broadcast(settle_steps, 0)
    return int(settle_steps)


def run_block(loop: Loop, arm: Bare, settle_steps: int, steps: int) -> dict[str, Any]:
    """Some steps to settle in, then those that count."""
    resident = common.resident_bytes()
    arm.begin(settle_steps, steps)
    for _ in range(settle_steps):
        loop.step(arm)
    events, worker_s, began_ns = _events(), worker_cpu_s(), time.time_ns()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        loop.step(arm)
    took = {
        "steps": steps,
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "worker_cpu_s": worker_cpu_s() - worker_s,
        "events": _events() - events,
        "window_ns": (began_ns, time.time_ns()),
        "grown_bytes": common.resident_bytes() - resident,
    }
    arm.after()
    return took


def worker_cpu_s() -> float:
    """CPU time of argus's own thread, as the kernel counts it; 0 where there is none."""
    for thread in threading.enumerate():
        if thread.name == "argus-worker":
            path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            with contextlib.suppress(OSError):
                return int(path.read_text().split()[0]) * 1e-9
    return 0.0


def _events() -> int:
    """Events that argus's thread has taken from the ring so far."""
    tracer: Any = active.get()
    return 0 if tracer is None else int(tracer.recorder.ring.taken)


if __name__ == "__main__":
    main()
