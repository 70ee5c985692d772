"""What recording costs the thread that trains, beyond the bare call.

    python bench/record.py [--quick] [--json] [--out bench/results/record.json]

Each row is a pair of alternating blocks in one process: the bare thing and the same with argus's
hook. The difference of a pair, in microseconds a call, is what the hook costs; the interval is
that of the median over pairs. Blocks last milliseconds, shorter than what a scheduler hands to somebody
else, and there are many. Before each the ring is emptied, as the worker does every second: one
that is never emptied takes fresh memory for every event, which no job's does. Two rows come from
a job of two ranks, in which the backend's thread takes the GIL from the trainer.

In all of these a hook has just run, and is in the processor's caches. In a training loop it comes
after arithmetic that has filled them, and takes several times as long: ``in the loop`` is what the
hook alone takes there (bench/hooks_in_loop.py). By that argus counts its share of the training
thread's time: ``counted as`` is what the worker's table charges (``worker._HOOK_COST_NS``).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import argus_otel.worker as worker_module
from argus_otel._runtime.clock import monotonic_ns
from argus_otel.instrument.framework.collectives import Collectives, instrument_waits
from argus_otel.instrument.framework.optimizers import instrument_optimizers
from argus_otel.instrument.framework.phases import BackwardTimer, ForwardHooks, user_phase
from argus_otel.instrument.patches import Patches
from argus_otel.process.tracer import Tracer
from argus_otel.settings import Settings
from argus_otel.wire import events
from jobs import BENCH, run_job, running_sink
from paired import as_json, describe_environment, run_pairs, spread, write_results

sys.path.insert(0, str(Path(__file__).parent / "loops"))
import common

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from argus_otel.record.ring import EventRing
    from paired import Spread

_BUCKET_VALUES = 36_864  # 144 KB, as one bucket of the other loops


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One hook: what it costs, what was promised, and what the worker charges for it."""

    name: str
    beyond_us: Spread
    bare_us: Spread | None
    """None where the hook alone was timed."""
    target_us: float | None = None
    kinds: tuple[int, ...] = ()
    """Events that one call records."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        cost_ns = worker_module._HOOK_COST_NS  # noqa: SLF001 - the table that this checks
        met = None if self.target_us is None else self.beyond_us.median <= self.target_us
        return {
            "beyond_bare_us": self.beyond_us,
            "bare_us": self.bare_us,
            "target_us": self.target_us,
            "target_met": met,
            "counted_as_us": sum(int(cost_ns[kind]) for kind in self.kinds) / 1000 or None,
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some seconds, for CI")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.results:
        two_ranks(options.results, options.pairs)
        return
    pairs = 25 if options.quick else 151
    rows = [
        *one_process(pairs),
        *one_rank_group(pairs),
        *from_two_ranks(pairs),
        *from_a_loop(40 if options.quick else 300),
    ]
    results = {
        "unit": "microseconds a call beyond the bare call",
        "hooks": {row.name: row.as_dict() for row in rows},
    }
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
        return
    print(f"{results['unit']}; median over pairs (95 % interval)\n")
    print(f"{'':<44}{'beyond bare':<28}{'bare':>8}  {'counted as':>10}  target")
    for name, row in results["hooks"].items():
        counted = "" if row["counted_as_us"] is None else f"{row['counted_as_us']:.1f}"
        goal = "" if row["target_us"] is None else f"{row['target_us']:.0f}: "
        goal += {None: "", True: "met", False: "NOT met"}[row["target_met"]]
        bare = "" if row["bare_us"] is None else f"{row['bare_us'].median:.3g}"
        print(f"{name:<44}{row['beyond_bare_us']!s:<28}{bare:>8}  {counted:>10}  {goal}")


# -- one process, no group --------------------------------------------------------------------


def one_process(pairs: int) -> list[Row]:
    """Phases and step boundaries."""
    tracer = make_tracer()
    recorder, steps = tracer.recorder, tracer.instrumentation.steps
    ring, append = recorder.ring, recorder.append
    hooks = ForwardHooks(recorder, steps)
    backward = BackwardTimer(recorder, steps).wrap(_nothing)

    def span() -> None:
        began_ns = monotonic_ns()
        append(events.PHASE, began_ns, monotonic_ns(), 0, 0, 0, 0)

    def forward() -> None:
        hooks.enter(hooks)
        hooks.leave(hooks)

    rows = [
        _row(ring, "span: two clocks and an append", _nothing, span, pairs, 2000, target_us=1.0,
             kinds=(events.PHASE,)),
        _row(ring, "phase() of the user", _with(nullcontext), _with(lambda: user_phase(recorder, "x")),
             pairs, 1000, kinds=(events.PHASE,)),
        _row(ring, "backward", _nothing, backward, pairs, 500,
             kinds=(events.BACKWARD,)),
        _row(ring, "forward of DDP or FSDP, with CPU time and run delay", _nothing, forward, pairs,
             500,
             kinds=(events.FORWARD,)),
        _row(ring, "step boundary, with trace context", _nothing, steps.end_from_integration,
             pairs, 200, kinds=(events.STEP_END,)),
    ]  # fmt: skip
    return [*rows, optimizer_row(tracer, pairs)]


def optimizer_row(tracer: Tracer, pairs: int) -> Row:
    """An optimizer that is not the primary, so that no step ends: hooks and phase alone."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    primary = torch.optim.SGD([torch.nn.Parameter(torch.zeros(9))], lr=0.1)
    steps = tracer.instrumentation.steps
    steps.add_optimizer(primary)
    patches = Patches()
    times = 100

    def bare() -> float:
        return _time_us(optimizer.step, times)

    def hooked() -> float:
        instrument_optimizers(torch_optimizer_module(), patches, tracer.recorder, steps)
        tracer.recorder.ring.drain()
        try:
            return _time_us(optimizer.step, times)
        finally:
            patches.undo()

    return _paired("optimizer hooks", bare, hooked, pairs, kinds=(events.OPTIMIZER,))


def torch_optimizer_module() -> Any:  # noqa: ANN401
    """``torch.optim.optimizer``, which is no attribute of ``torch.optim``."""
    return sys.modules["torch.optim.optimizer"]


def make_tracer() -> Tracer:
    """What the launcher makes in a rank, without its thread and without hooks."""
    tracer = Tracer(Settings(), dormant=False)
    tracer.recorder.on_first_record = lambda: None
    return tracer


# -- collectives ------------------------------------------------------------------------------


def one_rank_group(pairs: int) -> list[Row]:
    """A synchronous all_reduce of a few bytes, alone in its group: nobody to wait for."""
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}.s", rank=0, world_size=1)
    tensor = torch.zeros(4)
    block = CollectiveBlock(make_tracer(), lambda: dist.all_reduce(tensor), times=100)
    row = _paired(
        "all_reduce and its wait, one rank", block.bare, block.hooked, pairs, target_us=5.0,
        kinds=(events.COLLECTIVE, events.WAIT),
    )  # fmt: skip
    dist.destroy_process_group()
    return [row]


class CollectiveBlock:
    """Blocks of one operation with hooks and without."""

    def __init__(self, tracer: Tracer, call: Callable[[], object], *, times: int) -> None:
        self._tracer, self._call, self._times = tracer, call, times

    def bare(self) -> float:
        """µs a call, nothing attached."""
        return _time_us(self._call, self._times)

    def hooked(self) -> float:
        """µs a call with what argus attaches."""
        return self._with_hooks(ends=False)

    def hooked_with_ends(self) -> float:
        """The same in a step of the sample, whose ends are asked for."""
        return self._with_hooks(ends=True)

    def _with_hooks(self, *, ends: bool) -> float:
        recorder = self._tracer.recorder
        collectives, patches = Collectives(recorder), Patches()
        collectives.attach_all()
        instrument_waits(dist, patches, recorder, self._tracer.instrumentation.steps)
        recorder.plan.ends = ends
        for _ in range(3):  # boundaries: a new group keeps its post hook for two of them
            collectives.begin_step(ends)
        recorder.ring.drain()
        try:
            return _time_us(self._call, self._times)
        finally:
            recorder.plan.ends = False
            patches.undo()
            collectives.detach_all()


def from_two_ranks(pairs: int) -> list[Row]:
    """Start the job of two ranks and read what rank 0 measured."""
    results = run_job(BENCH / "record.py", ("--pairs", pairs), ranks=2, traced=False)[0]
    rows = []
    for name, kinds in (
        ("all_reduce of 144 KB, two ranks", (events.COLLECTIVE, events.WAIT)),
        (_WITH_ENDS, (events.COLLECTIVE, events.WAIT, events.END)),
    ):
        bare_us, own_us = results[name]
        beyond = [b - a for a, b in zip(bare_us, own_us, strict=True)]
        rows.append(Row(name=name, beyond_us=spread(beyond), bare_us=spread(bare_us), kinds=kinds))
    return rows


_WITH_ENDS = "the same with its end (done-callback)"


def two_ranks(results: Path, pairs: int) -> None:
    """What each rank of that job does."""
    rank = common.begin(0)
    tensor = torch.zeros(_BUCKET_VALUES)
    block = CollectiveBlock(make_tracer(), lambda: dist.all_reduce(tensor), times=40)
    measured = {
        "all_reduce of 144 KB, two ranks": run_pairs(block.bare, block.hooked, pairs=pairs),
        _WITH_ENDS: run_pairs(block.bare, block.hooked_with_ends, pairs=pairs),
    }
    common.write_results(results, rank, measured)
    dist.destroy_process_group()


# -- in a loop --------------------------------------------------------------------------------


def from_a_loop(steps: int) -> list[Row]:
    """Each hook where it happens, in a DDP loop of two ranks: rank 0's."""
    with running_sink() as sink:
        took_ns = run_job(
            BENCH / "hooks_in_loop.py",
            ("--steps", steps, "--layers", 22, "--step-ms", 60),
            ranks=2,
            traced=True,
            environment=sink.environment,
        )[0]
    return [
        Row(
            name=f"in the loop: {name}",
            beyond_us=spread([ns / 1e3 for ns in took_ns[name]]),
            bare_us=None,
            kinds=(kind,),
        )
        for name, kind in (
            ("collective", events.COLLECTIVE),
            ("forward", events.FORWARD),
            ("backward", events.BACKWARD),
            ("optimizer", events.OPTIMIZER),
            ("step boundary", events.STEP_END),
        )
    ]


# -- pairs ------------------------------------------------------------------------------------


def _row(
    ring: EventRing,
    name: str,
    bare: Callable[[], object],
    own: Callable[[], object],
    pairs: int,
    times: int,
    *,
    target_us: float | None = None,
    kinds: tuple[int, ...],
) -> Row:
    def hooked() -> float:
        ring.drain()
        return _time_us(own, times)

    return _paired(
        name,
        lambda: _time_us(bare, times),
        hooked,
        pairs,
        target_us=target_us,
        kinds=kinds,
    )


def _paired(
    name: str,
    bare: Callable[[], float],
    own: Callable[[], float],
    pairs: int,
    *,
    target_us: float | None = None,
    kinds: tuple[int, ...],
) -> Row:
    bare_us, own_us = run_pairs(bare, own, pairs=pairs)
    return Row(
        name=name,
        beyond_us=spread([b - a for a, b in zip(bare_us, own_us, strict=True)]),
        bare_us=spread(bare_us),
        target_us=target_us,
        kinds=kinds,
    )


def _time_us(call: Callable[[], object], times: int) -> float:
    began_ns = time.perf_counter_ns()
    for _ in range(times):
        call()
    return (time.perf_counter_ns() - began_ns) / 1e3 / times


def _with(make: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    def run() -> None:
        with make():
            pass

    return run


def _nothing() -> None:
    pass


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
