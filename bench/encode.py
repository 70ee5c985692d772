"""What a span costs: our encoder against the OpenTelemetry SDK, in alternating blocks.

python bench/encode.py [--json] [--out bench/results/encode.json]
"""

from __future__ import annotations

import argparse
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from argus_otel.encode import encode_span
from argus_otel.testing.received import read_trace_request
from paired import as_json, describe_environment, ratios, run_pairs, spread, write_results
from span_makers import KernelColumns, OurMaker, SdkMaker

if TYPE_CHECKING:
    from collections.abc import Callable

BATCHES = (100, 1000, 3000, 10_000)
GZIP_LEVELS = (1, 2, 3, 4, 5, 6)

# Enough work in a block that the clock and one hiccup do not show.
_OUR_SPANS_A_BLOCK = 100_000
_SDK_SPANS_A_BLOCK = 2000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    parser.add_argument("--pairs", type=int, default=11, help="pairs per batch size")
    options = parser.parse_args()
    check_same_spans()
    results = {
        "unit": "microseconds of wall time a span, one thread",
        "span": "100-character name, 8 attributes (2 texts, 4 integers, 2 doubles)",
        "batches": {str(size): compare(size, options.pairs) for size in BATCHES},
        "single_span_20_attributes_us": single_span_us(),
        "gzip": gzip_levels(),
    }
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
    else:
        print_table(results)


def compare(size: int, pairs: int) -> dict[str, Any]:
    """Both ways for one batch size."""
    columns = KernelColumns(size)
    ours, sdk = OurMaker(), SdkMaker()
    our_us, sdk_us = run_pairs(
        lambda: time_us(lambda: ours(columns), max(_OUR_SPANS_A_BLOCK // size, 1)) / size,
        lambda: time_us(lambda: sdk(columns), max(_SDK_SPANS_A_BLOCK // size, 1)) / size,
        pairs=pairs,
    )
    return {
        "argus_us": spread(our_us),
        "sdk_us": spread(sdk_us),
        "sdk_over_argus": ratios(sdk_us, our_us),
        "argus_bytes_a_span": sum(map(len, ours(columns))) / size,
        "sdk_bytes_a_span": sum(map(len, sdk(columns))) / size,
    }


def check_same_spans() -> None:
    """Refuse to compare two things that do not say the same."""
    columns = KernelColumns(50)
    said = [
        [
            (span.name, span.start_ns, span.end_ns, span.attributes)
            for body in maker(columns)
            for span in read_trace_request(body)
        ]
        for maker in (OurMaker(), SdkMaker())
    ]
    if said[0] != said[1]:
        msg = "the two encoders do not produce the same spans"
        raise SystemExit(msg)


def single_span_us() -> Any:  # noqa: ANN401
    """A digest: one span with attributes of its own, by ``encode_span``."""
    attributes = {f"argus.some.name_{n}": (n, n / 7, "optimizer", n > 9)[n % 4] for n in range(20)}
    attributes["argus.digest.sync"] = "A" * 1400

    def make() -> None:
        encode_span(
            name="rank.step",
            trace_id=b"t" * 16,
            span_id=b"s" * 8,
            parent_span_id=b"p" * 8,
            start_ns=1_750_000_000_000_000_000,
            end_ns=1_750_000_000_100_000_000,
            attributes=attributes,
        )

    return spread([time_us(make, 2000) for _ in range(9)])


def gzip_levels() -> dict[str, Any]:
    """What each level makes of a 3,000-kernel body, and what it takes."""
    (body,) = OurMaker()(KernelColumns(3000))
    levels = {}
    for level in GZIP_LEVELS:
        packed = zlib.compress(body, level, 31)
        taken_us = [time_us(lambda at=level: zlib.compress(body, at, 31), 1) for _ in range(7)]
        levels[str(level)] = {
            "us_a_span": float(np.median(taken_us)) / 3000,
            "bytes_a_span": len(packed) / 3000,
            "ratio": len(body) / len(packed),
        }
    return levels


def time_us(work: Callable[[], object], times: int) -> float:
    """Mean microseconds of one call over a block of calls."""
    began_ns = time.perf_counter_ns()
    for _ in range(times):
        work()
    return (time.perf_counter_ns() - began_ns) / 1e3 / times


def print_table(results: dict[str, Any]) -> None:
    """For people; the interval in brackets is the median's, 95 %."""
    print(f"{results['span']}; {results['unit']}\n")
    print(f"{'batch':>6}  {'argus':<26}{'SDK':<26}{'SDK / argus':<26}{'bytes argus, SDK'}")
    for size, row in results["batches"].items():
        sizes = f"{row['argus_bytes_a_span']:.0f}, {row['sdk_bytes_a_span']:.0f}"
        print(
            f"{size:>6}  {row['argus_us']!s:<26}{row['sdk_us']!s:<26}"
            f"{row['sdk_over_argus']!s:<26}{sizes}"
        )
    print(f"\none span of 21 attributes by itself: {results['single_span_20_attributes_us']} µs")
    print(
        "\ngzip level, 3,000 kernels: "
        + "; ".join(
            f"{level}: {row['us_a_span']:.2f} µs, {row['bytes_a_span']:.0f} B a span"
            for level, row in results["gzip"].items()
        )
    )


if __name__ == "__main__":
    main()
