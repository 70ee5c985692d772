"""What encoding in the background does to another thread that wants to run every 100 µs.

The training thread launches kernels; if the GIL is held when it wants to, the launch is late. A
thread sleeps 100 µs at a time and notes how much later than that it woke, while the main thread
is idle, encodes, or does the same with the OpenTelemetry SDK, in alternating blocks.

    python bench/gil.py [--json] [--out bench/results/gil.json]
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paired import as_json, describe_environment, spread, write_results
from span_makers import KernelColumns, OurMaker, SdkMaker

if TYPE_CHECKING:
    from collections.abc import Callable

SLEEP_S = 100e-6
BLOCK_S = 1.0
SPANS = 3000
PACE_S = 0.1
"""A step of 100 ms whose 3,000 kernels are all recorded: the most that is ever asked for."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each kind")
    options = parser.parse_args()
    results = {
        "unit": f"microseconds from the end of a {SLEEP_S * 1e6:.0f} us sleep to running again",
        "switch_interval_ms": sys.getswitchinterval() * 1e3,
        "loads": measure(options.rounds),
    }
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
        return
    print(f"{results['unit']}; median over blocks (95 % interval)\n")
    print(f"{'main thread':<36}{'p50':<26}{'p99':<26}{'spans/s'}")
    for name, row in results["loads"].items():
        print(f"{name:<36}{row['p50_us']!s:<26}{row['p99_us']!s:<26}{row['spans_a_second']:.0f}")


def measure(rounds: int) -> dict[str, Any]:
    """All loads in turn, round by round, the order reversed in every second one."""
    columns = KernelColumns(SPANS)
    ours, sdk = OurMaker(), SdkMaker()

    def ours_gzipped() -> None:
        for body in ours(columns):
            zlib.compress(body, 1, 31)

    loads: dict[str, Callable[[float], int]] = {
        "idle": _idle,
        "argus, a step of 3,000 each 100 ms": lambda end_s: _paced(ours_gzipped, end_s),
        "argus, without pause": lambda end_s: _without_pause(lambda: ours(columns), end_s),
        "argus and gzip, without pause": lambda end_s: _without_pause(ours_gzipped, end_s),
        "SDK, without pause": lambda end_s: _without_pause(lambda: sdk(columns), end_s),
    }
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in loads}
    for index in range(rounds):
        for name in list(loads) if index % 2 == 0 else reversed(loads):
            rows[name].append(_block(loads[name]))
    return {
        name: {
            "p50_us": spread([row[0] for row in of_load]),
            "p99_us": spread([row[1] for row in of_load]),
            "spans_a_second": float(np.median([row[2] for row in of_load])),
        }
        for name, of_load in rows.items()
    }


def _block(load: Callable[[float], int]) -> tuple[float, float, float]:
    """p50 and p99 of the sleeper's delays in µs, and spans a second, over one block."""
    delays_us: list[float] = []
    began_s = time.perf_counter()
    end_s = began_s + BLOCK_S

    def sleeper() -> None:
        while (before := time.perf_counter()) < end_s:
            time.sleep(SLEEP_S)
            delays_us.append((time.perf_counter() - before - SLEEP_S) * 1e6)

    thread = threading.Thread(target=sleeper)
    thread.start()
    spans = load(end_s)
    took_s = time.perf_counter() - began_s
    thread.join()
    p50, p99 = np.percentile(delays_us, (50, 99))
    return float(p50), float(p99), spans / took_s


def _idle(end_s: float) -> int:
    time.sleep(max(end_s - time.perf_counter(), 0))
    return 0


def _without_pause(work: Callable[[], object], end_s: float) -> int:
    batches = 0
    while time.perf_counter() < end_s:
        work()
        batches += 1
    return batches * SPANS


def _paced(work: Callable[[], object], end_s: float) -> int:
    batches = 0
    next_s = time.perf_counter()
    while next_s < end_s:
        work()
        batches += 1
        next_s += PACE_S
        time.sleep(max(min(next_s, end_s) - time.perf_counter(), 0))
    return batches * SPANS


if __name__ == "__main__":
    main()
