"""A run as a store holds it: tables of a detector's case, sent through the digest's codec."""

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from argus_otel.encode import EncodedSpans, encode_resource, encode_span, encode_trace_requests
from argus_otel.semconv import names
from argus_otel.store.spans import read_request
from argus_otel.store.writer import ParquetWriter
from argus_otel.testing.cases import build_run
from argus_otel.wire import ids, scopes
from argus_otel.wire.codes import OPS, PHASES
from argus_otel.wire.digest import (
    PhaseColumns,
    StepDigest,
    SyncColumns,
    encode_digests,
)

NONCE = bytes.fromhex("9f2c41d6a0b35e77")


@pytest.fixture
def write_store():
    """A function that writes a case into a store folder."""
    return _write_store


def _write_store(
    folder,
    case,
    *,
    run_id="llama-70b-3",
    service="train",
    from_step=0,
    until_step=1 << 30,
    only_ranks=None,
    nonce=NONCE,
):
    """Write a case, or some steps of it, into a store folder, as ``argus serve`` would."""
    tables = build_run(case)
    world = case["ranks"]
    members = tuple(range(world))
    group = np.uint64(ids.group_key("default", members, 0))
    hosts = dict(
        zip(tables.ranks["rank"].to_pylist(), tables.ranks["host"].to_pylist(), strict=True)
    )
    with ParquetWriter(folder) as writer:
        for rank, host in hosts.items():
            rows = [
                row
                for row in tables.steps.to_pylist()
                if row["rank"] == rank and from_step <= row["ordinal"] < until_step
            ]
            if not rows or (only_ranks is not None and rank not in only_ranks):
                continue
            digests = [_digest(row, group, members) for row in rows]
            spans = b"".join(
                encode_span(
                    name=names.SPAN_RANK_STEP,
                    trace_id=(trace := ids.step_trace_id(nonce, 0, digest.ordinal, 0)),
                    span_id=ids.span_id(trace, ids.RANK_STEP, rank),
                    parent_span_id=ids.span_id(trace, ids.ROOT, 0),
                    start_ns=digest.start_ns,
                    end_ns=digest.end_ns,
                    attributes=attributes,
                )
                for digest, attributes in zip(digests, encode_digests(digests), strict=True)
            )
            resource = encode_resource(
                {
                    "service.name": service,
                    "host.name": host,
                    names.ARGUS_RUN_ID: run_id,
                    names.ARGUS_RUN_NONCE: nonce.hex(),
                    names.DL_RANK: rank,
                    names.DL_WORLD_SIZE: world,
                }
            )
            batch = EncodedSpans(data=spans, count=len(digests))
            for body, _ in encode_trace_requests(resource, {scopes.DIGEST: [batch]}):
                writer.write(list(read_request(ExportTraceServiceRequest.FromString(body))))


def _digest(row, group, members):
    wait, step = row["data_wait_s"] or 0.0, row["step_s"]
    own = (row["busy_s"] or step) - wait
    edges = np.cumsum([0, wait, own * 0.35, step - wait - own * 0.35 - 0.1 * own, 0.1 * own]) * 1e6
    edges = edges.astype(np.int64)
    codes = [PHASES.index(n) for n in ("data.wait", "forward", "backward", "optimizer.step")]
    start_ns = row["start_ns"]
    optional = ("busy_s", "cpu_s", "run_delay_s", "data_wait_s", "gc_s", "tokens", "keep")
    return StepDigest(
        ordinal=row["ordinal"],
        rank=row["rank"],
        start_ns=start_ns,
        end_ns=start_ns + int(step * 1e9),
        between_s=row["between_s"],
        end_rule="optimizer",
        phases=PhaseColumns(name=np.array(codes), start_us=edges[:-1], duration_us=np.diff(edges)),
        sync=SyncColumns(
            group_keys=np.array([group]),
            start_counts=np.array([row["ordinal"]]),
            group=np.array([0]),
            op=np.array([OPS.index("all_reduce")]),
            payload_bytes=np.array([1 << 20]),
            peer=np.array([-1]),
            phase=np.array([PHASES.index("backward")]),
            arrival_us=np.array([int(own * 1e6)]),
            duration_us=np.array([-1]),
        ),
        group_info=(f"{int(group):016x}|default|0-{len(members) - 1}",),
        **{name: row[name] for name in optional},
    )
