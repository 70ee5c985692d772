"""How long ``argus detect`` takes, and how much memory, as ranks and steps grow.

    python bench/detect_scale.py [--quick] [--json] [--out bench/results/detect_scale.json]

Runs with one slow rank are simulated into a Parquet store, and judged by all detectors, the
replay of what the fault costs included. Each command is a process of its own, imports counted. Growth
is the exponent between two sizes: 1 is linear, and below 1 is what does not grow at all (imports). It is
taken of CPU time, which other load on the machine disturbs less than the clock on the wall.
Nothing else should run on the machine: both cores are used.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paired import as_json, describe_environment, write_results

MAX_WALL_S = 10.0
MAX_RSS_MB = 2000.0
"""Both of the largest run, on 2 cores."""
MAX_SIMULATE_S = 60.0
MAX_GROWTH = 1.1
"""Exponent: twice the ranks or steps may take 2.14 times as long."""

_FROM = 40
_SLOW = 1.6
_ALARM = (0, 1)
"""Exit codes of ``argus detect``: nothing found, something found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A run to simulate and judge."""

    cluster: str
    ranks: int
    steps: int
    slow_rank: int


SIZES = (
    Size(cluster="audio-512", ranks=512, steps=100, slow_rank=47),
    Size(cluster="video-4096", ranks=4096, steps=100, slow_rank=471),
    Size(cluster="moe-12960", ranks=12_960, steps=50, slow_rank=4711),
    Size(cluster="moe-12960", ranks=12_960, steps=100, slow_rank=4711),
)
QUICK = SIZES[:1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="512 ranks alone, for CI")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    options = parser.parse_args()
    results = measure(QUICK if options.quick else SIZES)
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
    else:
        print_table(results)


def measure(sizes: tuple[Size, ...]) -> dict[str, Any]:
    """Every size in turn."""
    runs = [_of(size) for size in sizes]
    largest = runs[-1]
    growth = _growth(runs)
    whole = len(runs) > 1
    return {
        "unit": "seconds, MB of the largest resident memory of the process",
        "runs": runs,
        "growth": growth,
        "max_wall_s": MAX_WALL_S,
        "max_rss_mb": MAX_RSS_MB,
        "max_simulate_s": MAX_SIMULATE_S,
        "max_growth": MAX_GROWTH,
        # Asked of the largest size only.
        "wall_met": largest["detect"]["wall_s"] <= MAX_WALL_S if whole else None,
        "rss_met": largest["detect"]["rss_mb"] <= MAX_RSS_MB if whole else None,
        "simulate_met": largest["simulate"]["wall_s"] <= MAX_SIMULATE_S if whole else None,
        "linear": max(growth.values()) <= MAX_GROWTH if whole else None,
    }


def _of(size: Size) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="argus-scale-") as folder:
        fault = f"compute:rank={size.slow_rank},factor={_SLOW},from={min(_FROM, size.steps // 2)}"
        simulated = _timed(
            *("simulate", "--cluster", size.cluster, "--fault", fault),
            *("--steps", str(size.steps), "--out", folder),
        )
        stored = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        judged = _timed("detect", "--store", folder, "--dry-run", "--json")
    return {
        "cluster": size.cluster,
        "ranks": size.ranks,
        "steps": size.steps,
        "store_mb": stored / 1e6,
        "simulate": simulated,
        "detect": judged,
    }


def _timed(*arguments: str) -> dict[str, float]:
    """Wall and CPU seconds, and peak memory, of one command."""
    argus = Path(sys.executable).with_name("argus")
    began_s = time.monotonic()
    process = subprocess.Popen([str(argus), *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in _ALARM:
        raise RuntimeError(f"argus {' '.join(arguments)} ended with {process.returncode}")
    return {
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "rss_mb": usage.ru_maxrss * 1024 / 1e6,
    }


def _growth(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Exponents of the CPU time of detection: by steps at the largest job, and by digests overall."""
    found = {}
    by_steps = [run for run in runs if run["ranks"] == runs[-1]["ranks"]]
    if len(by_steps) > 1:
        found["by_steps"] = _exponent(by_steps[0], by_steps[-1])
    hundred = [run for run in runs if run["steps"] == runs[-1]["steps"]]
    if len(hundred) > 1:
        found["by_ranks"] = _exponent(hundred[0], hundred[-1])
        # What a process takes to start weighs less from here on.
        found["by_ranks_of_large_jobs"] = _exponent(hundred[-2], hundred[-1])
    return found


def _exponent(small: dict[str, Any], large: dict[str, Any]) -> float:
    more = large["ranks"] * large["steps"] / (small["ranks"] * small["steps"])
    return math.log(large["detect"]["cpu_s"] / small["detect"]["cpu_s"]) / math.log(more)


def print_table(results: dict[str, Any]) -> None:
    """For people."""
    print(f"{results['unit']}\n")
    print(
        f"{'cluster':<12}{'ranks':>8}{'steps':>7}{'store MB':>10}{'simulate s':>12}"
        f"{'detect s':>10}{'CPU s':>8}{'peak MB':>9}"
    )
    for run in results["runs"]:
        detect = run["detect"]
        print(
            f"{run['cluster']:<12}{run['ranks']:>8}{run['steps']:>7}{run['store_mb']:>10.0f}"
            f"{run['simulate']['wall_s']:>12.1f}{detect['wall_s']:>10.1f}{detect['cpu_s']:>8.1f}"
            f"{detect['rss_mb']:>9.0f}"
        )
    for name, exponent in results["growth"].items():
        print(f"\nCPU time grows {name.replace('_', ' ')} with exponent {exponent:.2f}")
    asked = {
        f"detect in {MAX_WALL_S:.0f} s": results["wall_met"],
        f"in {MAX_RSS_MB:.0f} MB": results["rss_met"],
        f"simulate in {MAX_SIMULATE_S:.0f} s": results["simulate_met"],
        f"exponents up to {MAX_GROWTH}": results["linear"],
    }
    if results["wall_met"] is not None:
        print()
    for what, met in asked.items():
        if met is not None:
            print(f"{what}: {'met' if met else 'NOT met'}")


if __name__ == "__main__":
    main()
