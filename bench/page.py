"""Writes docs/explanation/measured.md from bench/results: no figure is copied by hand.

    python bench/page.py

Part of ``make bench``. A result that is not there is said to be missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
RESULTS = BENCH / "results"
PAGE = BENCH.parent / "docs" / "explanation" / "measured.md"

INTRODUCTION = """\
# Measured

Made from `bench/results/*.json` by `bench/page.py`; `make bench` repeats it all. Brackets hold the
95 % interval of the median. "Would show" is the smallest effect that the run would have found: a ratio
nearer to 1 than that proves nothing. How it is measured: [overhead](overhead.md).
"""


def main() -> None:
    """Write the page."""
    parts = [INTRODUCTION]
    for name, render in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            parts.append(f"*No result of `bench/{name}.py` yet.*\n")
            continue
        results = json.loads(path.read_text("utf-8"))
        parts.append(render(results) + _environment(results["environment"]))
    PAGE.write_text("\n".join(parts), "utf-8")
    print(f"wrote {PAGE}")


def _environment(environment: dict[str, Any]) -> str:
    packages = environment["packages"]
    return (
        f"\n*{environment['date']}, {environment['cores']} cores ({environment['cpu']}), Python "
        f"{environment['python']}, torch {packages['torch']}, numpy {packages['numpy']}, load "
        f"average {environment['load_average_1min']} at the start.*\n"
    )


def _spread(row: dict[str, float]) -> str:
    return f"{row['median']:.3g} ({row['low']:.3g} to {row['high']:.3g})"


def _met(met: bool | None) -> str:
    return "" if met is None else "met" if met else "**not met**"


def overhead(results: dict[str, Any]) -> str:
    """The whole loop."""
    lines = ["## A whole training loop"]
    for job in results["jobs"]:
        own = job["argus"]
        lines += [
            "",
            (
                f"{job['ranks']} ranks of gloo DDP, {job['collectives_a_step']} collectives a step, "
                f"bare step {_spread(job['bare_step_ms'])} ms, {job['rounds']} alternating rounds."
            ),
            "",
            (
                "| | step time, ratio to bare | would show | CPU time, ratio to bare | would show "
                "| memory a rank |"
            ),
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {_spread(row['wall_ratio'])} | {row['wall_smallest_effect']:.1%} "
            f"| {_spread(row['cpu_ratio'])} | {row['cpu_smallest_effect']:.1%} "
            f"| {row['grown_mb']:+.0f} MB |"
            for name, row in job["arms"].items()
        ]
        lines += [
            "",
            (
                f"argus's own CPU time: {own['own_cpu_share_said']:.2%} of the job's as its digests say "
                f"({own['own_cpu_us_a_step_said']:.0f} µs a rank and step, hooks included), its thread "
                f"{own['own_cpu_share_thread']:.2%} ({own['thread_cpu_us_a_step']:.0f} µs), at "
                f"{own['events_a_second']:.0f} events/s and {own['spans_a_step']:.1f} spans a rank and "
                f"step. Target {own['target_share']:.1%}: {_met(own['target_met'])}."
            ),
        ]
    return "\n".join(lines) + "\n"


def record(results: dict[str, Any]) -> str:
    """The training thread."""
    lines = [
        "## Recording on the training thread",
        "",
        (
            f'In {results["unit"]}, with the hook called again and again; "in the loop" is the hook '
            "alone in the middle of training, where arithmetic has filled the caches."
        ),
        "",
        "| hook | beyond bare | target | |",
        "|---|---|---|---|",
    ]
    for name, row in results["hooks"].items():
        target = "" if row["target_us"] is None else f"{row['target_us']:g}"
        lines.append(
            f"| {name} | {_spread(row['beyond_bare_us'])} | {target} | {_met(row['target_met'])} |"
        )
    return "\n".join(lines) + "\n"


def encode(results: dict[str, Any]) -> str:
    """Spans to bytes."""
    lines = [
        "## Encoding",
        "",
        f"{results['unit']}; {results['span']}.",
        "",
        "| spans a batch | argus | OpenTelemetry SDK | SDK / argus |",
        "|---|---|---|---|",
    ]
    for size, row in results["batches"].items():
        lines.append(
            f"| {size} | {_spread(row['argus_us'])} | {_spread(row['sdk_us'])} "
            f"| {_spread(row['sdk_over_argus'])} |"
        )
    return "\n".join(lines) + "\n"


def gil(results: dict[str, Any]) -> str:
    """What the background thread does to others."""
    lines = [
        "## What the background thread does to others",
        "",
        f"In {results['unit']}.",
        "",
        "| main thread | p50 | p99 |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {_spread(row['p50_us'])} | {_spread(row['p99_us'])} |"
        for name, row in results["loads"].items()
    ]
    return "\n".join(lines) + "\n"


def wire(results: dict[str, Any]) -> str:
    """Bytes."""
    lines = [
        "## On the wire",
        "",
        (
            f"{results['unit']}, {results['collectives_a_step']} collectives a step, "
            f"{_spread(results['steps_a_request'])} steps a request; as sent "
            f"{results['sent_bytes_a_step']:.0f} bytes."
        ),
        "",
        "| | bytes | uncompressed | target | |",
        "|---|---|---|---|---|",
    ]
    for name, row in results["classes"].items():
        target = row["target_bytes"]
        lines.append(
            f"| {name} | {row['bytes_a_step']:.0f} | {row['uncompressed_bytes_a_step']:.0f} "
            f"| {'' if target is None else target} | {_met(row['target_met'])} |"
        )
    return "\n".join(lines) + "\n"


def memory(results: dict[str, Any]) -> str:
    """Megabytes."""
    lines = [
        "## Memory of a rank",
        "",
        f"{results['steps']} steps; {results['unit']}.",
        "",
        "| loop | first | last | largest | slope after warm-up |",
        "|---|---|---|---|---|",
    ]
    for name, row in results["loops"].items():
        slope = row["slope_mb"]
        lines.append(
            f"| {name} | {row['first_mb']:.0f} | {row['last_mb']:.0f} | {row['largest_mb']:.0f} "
            f"| {slope['slope']:+.3f} ({slope['low']:+.3f} to {slope['high']:+.3f}) |"
        )
    lines += [
        "",
        (
            f"argus beyond bare: {results['more_mb']:+.1f} MB, target 64: "
            f"{_met(results['more_met'])}; flat: {'yes' if results['flat'] else '**no**'}."
        ),
    ]
    return "\n".join(lines) + "\n"


def sketch(results: dict[str, Any]) -> str:
    """Kernel durations."""
    lines = [
        "## Kernel durations: sketch, and ARGUS's compression",
        "",
        (
            f"Bytes {results['unit']}. Errors of the Wasserstein-1 distance to the other ranks (or "
            "steps), as a share of the median duration: 95 % of the kernels' time is below the first, "
            "the worst row is the second. ARGUS's is written from its published description "
            f"(`bench/sketch.py`). Target: {results['target_bytes']} bytes sent and "
            f"{results['target_error']:.0%}."
        ),
        "",
        (
            "| kernels | rows | packed | sent | error | ARGUS: packed | sent | error "
            "| time to build, ARGUS / sketch | target |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for job in results["jobs"]:
        cells = [f"{job['title']}: {job['kernels']:.0f}", f"{job['rows']:.0f}"]
        for way in ("sketch", "argus"):
            row = job[way]
            error = row["distance"]
            cells += [
                f"{row['bytes']:.0f}",
                f"{row['sent_bytes']:.0f}",
                f"{error['p95']:.1%}, {error['worst']:.1%}",
            ]
        cells += [_spread(job["argus_time_over_sketch"]), _met(job["target_met"])]
        lines.append(f"| {' | '.join(cells)} |")
    merged = all(job["sketch"]["mergeable"] for job in results["jobs"])
    lines += [
        "",
        (
            "Sketches of ranks merged are, byte for byte, the sketch of all their kernels: "
            f"{'yes' if merged else '**no**'}. ARGUS's triples cannot be merged; here they stand "
            "side by side."
        ),
    ]
    return "\n".join(lines) + "\n"


def detect_scale(results: dict[str, Any]) -> str:
    """Time and memory of a verdict."""
    lines = [
        "## Judging a large job",
        "",
        f"`argus detect` on a simulated run with one slow rank, from Parquet; {results['unit']}.",
        "",
        "| cluster | ranks | steps | store | simulating | detecting | of CPU | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in results["runs"]:
        detect = run["detect"]
        lines.append(
            f"| {run['cluster']} | {run['ranks']:,} | {run['steps']} | {run['store_mb']:.0f} MB "
            f"| {run['simulate']['wall_s']:.1f} s | {detect['wall_s']:.1f} s "
            f"| {detect['cpu_s']:.1f} s | {detect['rss_mb']:.0f} MB |"
        )
    grows = [
        f"{name.replace('_', ' ')} with exponent {exponent:.2f}"
        for name, exponent in results["growth"].items()
    ]
    if grows:
        lines += ["", f"CPU time of detecting grows {', '.join(grows)}."]
    if results["wall_met"] is not None:
        lines += [
            "",
            (
                f"The largest: target {results['max_wall_s']:.0f} s, {_met(results['wall_met'])}; "
                f"target {results['max_rss_mb']:.0f} MB, {_met(results['rss_met'])}."
            ),
        ]
    return "\n".join(lines) + "\n"


def _counts(results: dict[str, Any]) -> str:
    """``7 right, 1 wrong``."""
    return ", ".join(f"{count} {name}" for name, count in results["counts"].items())


def _found(row: dict[str, Any]) -> str:
    """The findings of one real job, in a cell."""
    return "; ".join(
        f"{one['severity']} {one['cause']} {one['ranks']} {one['slowdown']:.2f}"
        for one in row["findings"]
    )


def verdicts(results: dict[str, Any]) -> str:
    """Real jobs."""
    lines = [
        "## Verdicts on real jobs",
        "",
        f"{_counts(results)}. Realised: own time of the slow rank over that of the fastest other.",
        "",
        "| run | planted | realised | found | verdict |",
        "|---|---|---|---|---|",
    ]
    for row in results["runs"]:
        planted = "" if row["planted_rank"] is None else f"rank {row['planted_rank']}"
        factor = "" if row["planted_factor"] is None else f", {row['planted_factor']:g} times"
        realised = "" if row["realised_ratio"] is None else f"{row['realised_ratio']:.2f}"
        lines.append(
            f"| {row['name']} | {planted}{factor} | {realised} | {_found(row)} | {row['verdict']} |"
        )
    return "\n".join(lines) + "\n"


def robustness(results: dict[str, Any]) -> str:
    """Real jobs with faults of all kinds."""
    lines = [
        "## Faults of all kinds on real jobs",
        "",
        f"{_counts(results)}. Each fault planted in one rank of a real job, and healthy twins of it.",
        "",
        "| run | planted | found | verdict |",
        "|---|---|---|---|",
    ]
    for row in results["runs"]:
        planted = (
            ""
            if row["planted_rank"] is None
            else f"{row['planted_cause']}, rank {row['planted_rank']}"
        )
        lines.append(f"| {row['name']} | {planted} | {_found(row)} | {row['verdict']} |")
    return "\n".join(lines) + "\n"


SECTIONS = {
    "overhead": overhead,
    "record": record,
    "encode": encode,
    "gil": gil,
    "wire": wire,
    "sketch": sketch,
    "memory": memory,
    "detect_scale": detect_scale,
    "verdicts": verdicts,
    "robustness": robustness,
}

if __name__ == "__main__":
    main()
