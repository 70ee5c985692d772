"""What argus costs a training loop, beside what people use today.

    python bench/overhead.py [--quick] [--json] [--out bench/results/overhead.json]

A DDP loop over gloo (linear layers, 22 all-reduces a step, about 60 ms a step, 2 and 4 ranks),
started by ``opentelemetry-instrument torchrun``. **One process a rank alternates blocks** of
steps under each tool, in an order shuffled anew in every round; ratios are taken inside a round.
Separate runs, A B A B, spread many times more: two starts of the same loop differ by some
percent in step time (placement, memory layout), and seconds pass between them. What the choice
costs: in the bare blocks argus's hooks stay in place and return at their first line (0.1 to
0.3 µs each, under 0.02 % of the step), and its idle thread wakes twice a second; so a ratio
could be too small by that much. Steps at the start of each block are not counted: in them the
thread still works on the block before. The loop against itself (``bare again``) is in the table,
for what chance alone shows.

CPU time is that of the ranks' processes, all threads. The endpoint is another process at the
lowest priority. Argus's own CPU time is given twice: as its digests say it (``argus.self.cpu``,
hooks counted by table), and its thread's as the kernel counts it.

No effect is claimed to be absent; the smallest that would have been found is printed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argus_otel.semconv import names
from argus_otel.testing.received import read_trace_request
from effects import smallest_effect
from jobs import BENCH, run_job, running_sink
from paired import as_json, describe_environment, ratios, spread, write_results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs import Sink

MAX_RATIO = 1.01
MAX_OWN_SHARE = {2: 0.005, 4: 0.01}
LAYERS = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One job."""

    ranks: int
    arms: tuple[str, ...]
    rounds: int
    steps: int
    compute_ms: float
    """Forward and backward of a rank alone; four ranks on two cores take turns."""


ALONE = ("bare", "argus", "bare again")
ALL = ("bare", "argus", "SDK", "torch.profiler")
DEFAULT = (
    Plan(ranks=2, arms=ALONE, rounds=18, steps=40, compute_ms=50),
    Plan(ranks=4, arms=ALONE, rounds=18, steps=40, compute_ms=24),
    Plan(ranks=2, arms=ALL, rounds=7, steps=50, compute_ms=50),
)
QUICK = (
    Plan(ranks=2, arms=ALONE, rounds=4, steps=24, compute_ms=40),
    Plan(ranks=2, arms=ALL, rounds=2, steps=20, compute_ms=40),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute, for CI")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    options = parser.parse_args()
    results = {
        "unit": "ratio to the bare blocks of the same round",
        "jobs": [measure(plan) for plan in (QUICK if options.quick else DEFAULT)],
    }
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
    else:
        for job in results["jobs"]:
            print_job(job)


def measure(plan: Plan) -> dict[str, Any]:
    """Run one job and compare its blocks."""
    with running_sink() as sink:
        of_rank = run_job(
            BENCH / "overhead_rank.py",
            (
                "--arms", ",".join(plan.arms),
                "--rounds", plan.rounds,
                "--steps", plan.steps,
                "--step-ms", plan.compute_ms,
                "--layers", LAYERS,
            ),
            ranks=plan.ranks,
            traced=True,
            environment=sink.environment,
        )  # fmt: skip
    blocks = [_over_ranks(same) for same in zip(*(r["blocks"] for r in of_rank), strict=True)]
    bare = _by_round(blocks, "bare")
    argus = _by_round(blocks, "argus")
    step_ms = spread([block["wall_s"] / block["steps"] * 1e3 for block in bare])
    return {
        "ranks": plan.ranks,
        "rounds": plan.rounds,
        "steps_a_block": plan.steps,
        "collectives_a_step": LAYERS,
        "bare_step_ms": step_ms,
        "arms": {
            name: _against(_by_round(blocks, name), bare) for name in plan.arms if name != "bare"
        },
        "argus": _own_cost(argus, sink, plan),
    }


def _over_ranks(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One block of all ranks: CPU time summed, time of rank 0 (they end together)."""
    summed = ("cpu_s", "worker_cpu_s", "events")
    return {
        **blocks[0],
        **{name: sum(block[name] for block in blocks) for name in summed},
        "grown_bytes": max(block["grown_bytes"] for block in blocks),
    }


def _by_round(blocks: Sequence[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    return sorted((b for b in blocks if b["arm"] == arm), key=lambda block: block["round"])


def _against(own: Sequence[dict[str, Any]], bare: Sequence[dict[str, Any]]) -> dict[str, Any]:
    compared: dict[str, Any] = {}
    for name in ("wall_s", "cpu_s"):
        pairs = [a[name] / b[name] for a, b in zip(own, bare, strict=True)]
        compared[name.replace("_s", "_ratio")] = ratios(
            [a[name] for a in own], [b[name] for b in bare]
        )
        compared[name.replace("_s", "_smallest_effect")] = smallest_effect(pairs)
    compared["grown_mb"] = max(block["grown_bytes"] for block in own) / 1e6
    return compared


def _own_cost(argus: Sequence[dict[str, Any]], sink: Sink, plan: Plan) -> dict[str, Any]:
    cpu_s = sum(block["cpu_s"] for block in argus)
    wall_s = sum(block["wall_s"] for block in argus)
    steps = sum(block["steps"] for block in argus) * plan.ranks
    # Digests of the steps that count: what is before them also bears the idle wake-ups of the
    # blocks between.
    windows_ns = [block["window_ns"] for block in argus]
    said_s, digests, spans = 0.0, 0, 0
    for request in sink.traces():
        for span in read_trace_request(request.plain):
            counts = any(begin < span.start_ns and span.end_ns <= end for begin, end in windows_ns)
            if not counts or not span.scope.startswith("argus_otel."):
                continue
            spans += 1
            if span.name == names.SPAN_RANK_STEP:
                digests += 1
                said_s += float(span.attributes.get(names.ARGUS_SELF_CPU) or 0.0)
    if not digests:
        msg = "no digest arrived, so there is nothing to compare"
        raise SystemExit(msg)
    cpu_a_step_s = cpu_s / steps
    thread_share = sum(block["worker_cpu_s"] for block in argus) / cpu_s
    said_share = said_s / digests / cpu_a_step_s
    return {
        "own_cpu_share_said": said_share,
        "own_cpu_share_thread": thread_share,
        "own_cpu_us_a_step_said": said_s / digests * 1e6,
        "thread_cpu_us_a_step": thread_share * cpu_a_step_s * 1e6,
        "events_a_second": sum(block["events"] for block in argus) / wall_s,
        "spans_a_step": spans / digests,
        "digests": digests,
        "target_share": MAX_OWN_SHARE[plan.ranks],
        "target_met": max(said_share, thread_share) <= MAX_OWN_SHARE[plan.ranks],
    }


def print_job(job: dict[str, Any]) -> None:
    """For people; the interval in brackets is the median's, 95 %."""
    print(
        f"\n{job['ranks']} ranks, {job['collectives_a_step']} collectives a step, bare step "
        f"{job['bare_step_ms']} ms, {job['rounds']} rounds of {job['steps_a_block']} steps a block"
    )
    print(f"{'':<16}{'step time':<26}{'would show':<12}{'CPU time':<26}{'would show':<12}memory")
    for name, row in job["arms"].items():
        print(
            f"{name:<16}{row['wall_ratio']!s:<26}{row['wall_smallest_effect']:<12.2%}"
            f"{row['cpu_ratio']!s:<26}{row['cpu_smallest_effect']:<12.2%}"
            f"{row['grown_mb']:+.0f} MB a rank"
        )
    for what in ("wall_ratio", "cpu_ratio"):
        shown = job["arms"]["argus"][what].low > MAX_RATIO
        said = "an effect is shown" if shown else "no effect shown"
        print(f"argus, {what.partition('_')[0]}: {said} above {MAX_RATIO}")
    own = job["argus"]
    print(
        f"argus's own CPU: {own['own_cpu_share_said']:.2%} of the job's as its digests say "
        f"({own['own_cpu_us_a_step_said']:.0f} µs a rank and step), its thread "
        f"{own['own_cpu_share_thread']:.2%} ({own['thread_cpu_us_a_step']:.0f} µs); target "
        f"{own['target_share']:.1%}: {'met' if own['target_met'] else 'NOT met'}; "
        f"{own['events_a_second']:.0f} events/s, {own['spans_a_step']:.1f} spans a rank and step"
    )


if __name__ == "__main__":
    main()
