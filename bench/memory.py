"""Memory of a traced rank over 20,000 short steps, and of the same loop bare.

    python bench/memory.py [--quick] [--json] [--out bench/results/memory.json]

Both jobs run at the same time: what is measured is memory, which does not depend on speed, and
they hold on the machine whatever it does to one of them. The first third of the samples is
warm-up (allocator, caches, the first batches) and is left out of the slope. Resident memory
moves in jumps; the interval of the slope is from resampling blocks of neighbouring samples.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs import LOOPS, run_job, running_sink
from paired import as_json, describe_environment, write_results

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEPS = 20_000
MAX_MORE_MB = 64.0
MAX_SLOPE_MB = 0.1
"""A thousand steps. At 60 ms a step that is 6 MB an hour; a leak of one event a step is 0.06."""

_RESAMPLES = 2000
_BLOCK_SAMPLES = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 steps, for CI")
    parser.add_argument("--steps", type=int, help=f"default {STEPS}")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    options = parser.parse_args()
    steps = options.steps or (1000 if options.quick else STEPS)
    results = compare(steps, options.ranks)
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
    else:
        print_table(results)


def compare(steps: int, ranks: int) -> dict[str, Any]:
    """Both jobs, and what is between them."""
    with running_sink() as sink, ThreadPoolExecutor(2) as both:
        jobs = {
            name: both.submit(
                run_job,
                LOOPS / "short_steps.py",
                ("--steps", steps),
                ranks=ranks,
                traced=traced,
                environment=sink.environment if traced else {},
            )
            for name, traced in (("bare", False), ("argus", True))
        }
        done = {name: job.result() for name, job in jobs.items()}
    loops = {name: describe(done[name]) for name in done}
    more_mb = loops["argus"]["last_mb"] - loops["bare"]["last_mb"]
    slope = loops["argus"]["slope_mb"]
    return {
        "steps": steps,
        "ranks": ranks,
        "unit": "MB of resident memory a rank (the largest); slopes in MB a thousand steps",
        "loops": loops,
        "more_mb": more_mb,
        "more_met": more_mb <= MAX_MORE_MB,
        # Flat: the interval reaches down to nothing, or what it says is less than matters.
        "flat": slope["low"] <= 0 or slope["slope"] <= MAX_SLOPE_MB,
        "requests": len(sink.requests),
    }


def describe(of_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The rank with most memory at the end."""
    rank = max(of_rank, key=lambda one: one["resident_bytes"][-1])
    step = np.array(rank["step"], dtype=np.float64)
    resident_mb = np.array(rank["resident_bytes"]) / 1e6
    thirds = np.array_split(resident_mb, 3)
    settled = step >= step[len(thirds[0])]
    return {
        "first_mb": float(resident_mb[0]),
        "last_mb": float(resident_mb[-1]),
        "largest_mb": float(resident_mb.max()),
        "last_third_minus_middle_mb": float(np.median(thirds[2]) - np.median(thirds[1])),
        "slope_mb": slope_of(step[settled] / 1000, resident_mb[settled]),
        "step_ms": rank["step_ms"],
        "samples_mb": resident_mb.tolist(),
    }


def slope_of(x: NDArray[np.float64], y: NDArray[np.float64]) -> dict[str, float]:
    """Least squares, with a 95 % interval from resampling blocks of residuals."""
    slope, start = np.polyfit(x, y, 1)
    residual = y - (start + slope * x)
    block = min(_BLOCK_SAMPLES, x.size)
    source = np.random.default_rng(0)
    begins = source.integers(0, x.size - block + 1, (_RESAMPLES, -(-x.size // block)))
    picked = (begins[:, :, None] + np.arange(block)).reshape(_RESAMPLES, -1)[:, : x.size]
    slopes = [np.polyfit(x, start + slope * x + residual[row], 1)[0] for row in picked]
    low, high = np.percentile(slopes, (2.5, 97.5))
    return {"slope": float(slope), "low": float(low), "high": float(high)}


def print_table(results: dict[str, Any]) -> None:
    """For people."""
    print(f"{results['steps']} steps, {results['ranks']} ranks a job; {results['unit']}\n")
    print(f"{'':<8}{'first':>8}{'last':>8}{'largest':>9}{'last - middle third':>21}   slope")
    for name, row in results["loops"].items():
        slope = row["slope_mb"]
        print(
            f"{name:<8}{row['first_mb']:>8.1f}{row['last_mb']:>8.1f}{row['largest_mb']:>9.1f}"
            f"{row['last_third_minus_middle_mb']:>+21.2f}   {slope['slope']:+.4f} "
            f"({slope['low']:+.4f} to {slope['high']:+.4f}), {row['step_ms']:.1f} ms a step"
        )
    print(
        f"\nargus beyond bare: {results['more_mb']:+.1f} MB, target {MAX_MORE_MB:.0f}: "
        f"{'met' if results['more_met'] else 'NOT met'}; "
        f"flat: {'yes' if results['flat'] else 'NO'}"
    )


if __name__ == "__main__":
    main()
