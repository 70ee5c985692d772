"""How many compressed bytes a rank sends for a step.

    python bench/wire.py [--quick] [--json] [--out bench/results/wire.json]

A real job (DDP over gloo, 2 ranks, 20 all-reduces and about 60 ms a step) sends to an endpoint
that keeps its requests as they came: so many steps share a request as the sender chose. For each
class of spans the requests are built again with the spans of that class alone, and compressed as
the sender compresses. Bodies only; HTTP's own headers come on top once a request.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from argus_otel.export.requests import compress
from argus_otel.semconv import names
from argus_otel.wire import scopes
from jobs import LOOPS, run_job, running_sink
from paired import as_json, describe_environment, spread, write_results

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from jobs import SentRequest

RANKS = 2
COLLECTIVES = 20
MAX_BYTES = {"digest": 1500, "digest and timeline": 3000}
CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("digest", (scopes.DIGEST,)),
    ("digest and timeline", (scopes.DIGEST, scopes.TIMELINE)),
    ("all, with detail of kept steps", (scopes.DIGEST, scopes.TIMELINE, scopes.DETAIL)),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 steps, for CI")
    parser.add_argument("--steps", type=int, help="default 400")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    options = parser.parse_args()
    results = measure(options.steps or (60 if options.quick else 400))
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
    else:
        print_table(results)


def measure(steps: int) -> dict[str, Any]:
    """Run the job and weigh what it sent."""
    with running_sink() as sink:
        run_job(
            LOOPS / "ddp.py",
            ("--steps", steps, "--layers", COLLECTIVES, "--step-ms", 55),
            ranks=RANKS,
            traced=True,
            environment=sink.environment,
        )
    requests = sink.traces()
    counted = [count_steps(request) for request in requests]
    total = sum(counted)
    if not total:
        msg = "no digest arrived"
        raise SystemExit(msg)
    classes = {}
    for name, kept in CLASSES:
        sizes = [weigh(request, kept) for request in requests]
        a_step = sum(size for size, _ in sizes) / total
        target = MAX_BYTES.get(name)
        classes[name] = {
            "bytes_a_step": a_step,
            "of_requests": spread(
                [size / n for (size, _), n in zip(sizes, counted, strict=True) if n]
            ),
            "uncompressed_bytes_a_step": sum(plain for _, plain in sizes) / total,
            "spans_a_step": sum(count_spans(request, kept) for request in requests) / total,
            "target_bytes": target,
            "target_met": None if target is None else a_step <= target,
        }
    return {
        "unit": "bytes of gzip a rank and step",
        "steps": total / RANKS,
        "collectives_a_step": COLLECTIVES,
        "steps_a_request": spread([n for n in counted if n]),
        "requests": len(requests),
        "sent_bytes_a_step": sum(len(request.body) for request in requests) / total,
        "classes": classes,
    }


def parse(request: SentRequest) -> ExportTraceServiceRequest:
    """Read one request."""
    return ExportTraceServiceRequest.FromString(request.plain)


def count_steps(request: SentRequest) -> int:
    """Digests in it."""
    return sum(
        span.name == names.SPAN_RANK_STEP
        for resource in parse(request).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    )


def count_spans(request: SentRequest, kept: Collection[str]) -> int:
    """Spans of these scopes in it."""
    return sum(
        len(scope.spans)
        for resource in parse(request).resource_spans
        for scope in resource.scope_spans
        if scope.scope.name in kept
    )


def weigh(request: SentRequest, kept: Sequence[str]) -> tuple[int, int]:
    """Bytes of the same request with these scopes alone: compressed, and plain."""
    message = parse(request)
    for resource in message.resource_spans:
        chosen = [scope for scope in resource.scope_spans if scope.scope.name in kept]
        del resource.scope_spans[:]
        resource.scope_spans.extend(chosen)
    plain = message.SerializeToString()
    return len(compress(plain, "gzip")), len(plain)


def print_table(results: dict[str, Any]) -> None:
    """For people."""
    print(
        f"{results['unit']}; {results['collectives_a_step']} collectives a step, "
        f"{results['steps']:.0f} steps, {results['steps_a_request']} of them a request\n"
    )
    print(f"{'':<34}{'bytes':>8}  {'over requests':<26}{'plain':>8}{'spans':>8}  target")
    for name, row in results["classes"].items():
        target = ""
        if row["target_bytes"] is not None:
            target = f"{row['target_bytes']}: {'met' if row['target_met'] else 'NOT met'}"
        print(
            f"{name:<34}{row['bytes_a_step']:>8.0f}  {row['of_requests']!s:<26}"
            f"{row['uncompressed_bytes_a_step']:>8.0f}{row['spans_a_step']:>8.1f}  {target}"
        )
    print(f"\nas sent: {results['sent_bytes_a_step']:.0f} bytes in {results['requests']} requests")


if __name__ == "__main__":
    main()
