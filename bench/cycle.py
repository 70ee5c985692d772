"""What the background thread spends on a step, stage by stage.

    python bench/cycle.py [--quick] [--json] [--out bench/results/cycle.json]

Events of a DDP loop (20 all-reduces a step) go through the real worker in batches, as it finds
them when it wakes: drain, condense, encode, compress; the post goes to an endpoint in another
process. Stages are timed by wrapping them, in CPU time of the thread; the wrapping costs about a
microsecond a call, and some stages lie within others ("pack digests" within "digest spans", all of
"condense" within its whole). Nearly all steps follow a model here; the stages between "their spans"
and "digest spans" are those of the few that do not. Whole cycles without it are given beside, and alternate with cycles of other
batch sizes. The processor's caches are warm here, as they are not in a job: a loop's figure
(bench/overhead.py) is higher.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import argus_otel.condense.condenser as condenser_module
import argus_otel.condense.digests as digests_module
import argus_otel.export.sender as sender_module
import argus_otel.worker as worker_module
from argus_otel._runtime.clock import monotonic_ns
from argus_otel._runtime.faults import FaultLog
from argus_otel.condense.detail import Detail
from argus_otel.condense.regular import Models, RegularSteps
from argus_otel.condense.timeline import Timeline
from argus_otel.encode import StepRowsEncoder
from argus_otel.encode.meters import Meters
from argus_otel.export import Sender, targets_from_environment
from argus_otel.record.ring import EventRing
from argus_otel.settings import Settings
from argus_otel.wire import events
from argus_otel.wire.codes import OPS
from argus_otel.wire.identity import Identity
from jobs import running_sink
from paired import as_json, describe_environment, spread, write_results

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paired import Spread

COLLECTIVES = 20
BATCHES = (8, 16, 64)
MAX_US = 200.0
_STEP_NS = 60_000_000
_ALL_REDUCE = OPS.index("all_reduce")

STAGES: tuple[tuple[str, Any, str], ...] = (
    ("drain the ring", EventRing, "drain"),
    ("condense: follow a model", Models, "match"),
    ("condense: their spans", RegularSteps, "spans"),
    ("condense: numbers", condenser_module, "condense_step"),
    ("condense: digests", condenser_module, "make_digest"),
    ("condense: pack digests", digests_module, "encode_digest"),
    ("condense: timeline", Timeline, "spans"),
    ("condense: detail", Detail, "spans"),
    ("condense: what to keep", condenser_module.KeepRule, "decide"),
    ("condense: groups", condenser_module.Condenser, "_group_info"),
    ("condense: digest spans", condenser_module, "digest_spans"),
    ("condense, whole", condenser_module.Condenser, "take"),
    ("encode: follow a model", StepRowsEncoder, "encode"),
    ("encode: digests", worker_module.Worker, "_encode_spans"),
    ("encode: known shapes", worker_module.Worker, "_encode_shaped"),
    ("encode: many of one shape", worker_module.Worker, "_encode_rows"),
    ("encode: requests", worker_module, "encode_trace_requests"),
    ("meters", Meters, "add"),
    ("memory size", worker_module, "_resident_bytes"),
    ("compress", sender_module, "compress"),
    ("post", Sender, "pump"),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for CI")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    options = parser.parse_args()
    cycles = 12 if options.quick else 80
    with running_sink() as sink:
        job = Job(sink.environment)
        whole_us: dict[int, list[float]] = {size: [] for size in BATCHES}
        for index in range(cycles + 2):
            for size in BATCHES:
                took_us = job.cycle(size)
                if index >= 2:
                    whole_us[size].append(took_us)
        stages = {size: by_stage(job, size, cycles) for size in BATCHES}
    results: dict[str, Any] = {
        "unit": "microseconds of thread CPU time a step",
        "collectives_a_step": COLLECTIVES,
        "target_us": MAX_US,
        "batches": {
            str(size): {"whole_us": spread(whole_us[size]), "stages_us": stages[size]}
            for size in BATCHES
        },
    }
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
    else:
        print_table(results)


class Job:
    """A rank's recorder and worker, and a loop that only writes events."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.worker = worker_module.Worker(
            Settings(),
            FaultLog(),
            Sender(targets_from_environment(environment), first_post_jitter_s=0),
            resource=lambda: {"service.name": "bench", "host.name": "host", "process.pid": 1},
            metric_interval_s=None,
        )
        recorder = self.worker.recorder
        recorder.on_first_record = lambda: None
        recorder.set_identity(
            Identity(
                nonce=b"benchmrk", nonce_local=False, run_id="bench", attempt=0, role="trainer",
                rank=0, world_size=2, local_rank=0,
            )
        )  # fmt: skip
        self._group = recorder.add_group("default_pg", (0, 1), blocks_host=True)
        self._at_ns = monotonic_ns()
        self._ordinal = 0

    def cycle(self, steps: int) -> float:
        """CPU µs a step of one round of the worker over so many steps."""
        for _ in range(steps):
            self._record_step()
        began_s = time.thread_time()
        self.worker._cycle()  # noqa: SLF001 - what its thread calls
        self.worker._sender.pump(10.0)  # noqa: SLF001
        return (time.thread_time() - began_s) * 1e6 / steps

    def _record_step(self) -> None:
        append, at = self.worker.recorder.append, self._at_ns
        none = events.NONE
        forward, backward, end = at + 1_000_000, at + 20_000_000, at + _STEP_NS
        append(events.FORWARD, forward, backward - 50_000, at, none, 0, 0)
        packed = events.pack_collective(self._group, _ALL_REDUCE, is_async=True, peer=-1)
        for n in range(COLLECTIVES):
            count = self._ordinal * COLLECTIVES + n
            # Arrivals that jitter, so that packing and compression have real digits to carry.
            arrival = backward + n * 1_700_000 + (count * 7919 % 1013) * 1000
            append(events.COLLECTIVE, arrival, 0, packed, count, 147_456, count)
        append(events.BACKWARD, backward, end - 3_000_000, at, none, events.DDP_WAITS, 0)
        append(events.OPTIMIZER, end - 2_900_000, end - 20_000, 0, 0, 0, 0)
        append(events.STEP_END, end, 0, self._ordinal, none, end, self._ordinal * 1000)
        self._at_ns = end + (self._ordinal * 31 % 17) * 10_000
        self._ordinal += 1


def by_stage(job: Job, size: int, cycles: int) -> dict[str, Spread]:
    """CPU µs a step of each stage, over ``cycles`` rounds."""
    of_cycle: dict[str, list[float]] = {name: [] for name, _, _ in STAGES}
    of_cycle["all of it"] = []
    spent_s: dict[str, float] = defaultdict(float)
    with _wrapped(spent_s):
        for _ in range(cycles):
            spent_s.clear()
            of_cycle["all of it"].append(job.cycle(size))
            for name, _, _ in STAGES:
                of_cycle[name].append(spent_s[name] * 1e6 / size)
    return {name: spread(values) for name, values in of_cycle.items()}


@contextmanager
def _wrapped(spent_s: dict[str, float]) -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for _, owner, name in STAGES]
    for stage, owner, name in STAGES:
        setattr(owner, name, _timed(getattr(owner, name), stage, spent_s))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _timed(original: Any, stage: str, spent_s: dict[str, float]) -> Any:  # noqa: ANN401
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        began_s = time.thread_time()
        result = original(*args, **kwargs)
        if stage == "encode: requests":
            result = list(result)  # a generator: its work is not done yet
        spent_s[stage] += time.thread_time() - began_s
        return result

    return run


def print_table(results: dict[str, Any]) -> None:
    """For people; medians over cycles."""
    sizes = list(results["batches"])
    print(f"{results['unit']}, {results['collectives_a_step']} collectives a step\n")
    print(f"{'steps in a batch':<28}" + "".join(f"{size:>10}" for size in sizes))
    for name in next(iter(results["batches"].values()))["stages_us"]:
        row = [results["batches"][size]["stages_us"][name].median for size in sizes]
        print(f"{name:<28}" + "".join(f"{value:>10.1f}" for value in row))
    print(f"\nwhole cycles, untouched (target {results['target_us']:.0f} µs):")
    for size in sizes:
        whole = results["batches"][size]["whole_us"]
        met = "met" if whole.median <= results["target_us"] else "NOT met"
        print(f"{size:>6} steps  {whole}  {met}")


if __name__ == "__main__":
    main()
