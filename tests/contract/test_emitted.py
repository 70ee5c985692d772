"""Everything that a training process sends is in the telemetry registry, with the type it says."""

from __future__ import annotations

from collections import defaultdict

import pytest

from argus_otel._runtime.clock import monotonic_ns
from argus_otel._runtime.faults import FaultLog
from argus_otel.export import Sender, targets_from_environment
from argus_otel.semconv.generate import load_registry
from argus_otel.settings import Settings
from argus_otel.testing import InMemoryReceiver
from argus_otel.wire import events, scopes
from argus_otel.wire.codes import OPS
from argus_otel.wire.identity import Compilation, Identity, UncaughtException
from argus_otel.worker import Worker

REGISTRY = load_registry()
MS = 1_000_000

# OpenTelemetry's own names, which our registry does not repeat.
OF_OPENTELEMETRY = {
    "code.function.name": str,
    "error.type": str,
    "code.stacktrace": str,
    "exception.message": str,
}
TYPES = {
    "string": str,
    "int": int,
    "double": float,
    "boolean": bool,
    "string[]": list,
    "int[]": list,
}


def identity(**changes):
    fields = {
        "nonce": b"12345678",
        "nonce_local": True,
        "run_id": "run",
        "attempt": 0,
        "role": "trainer",
        "rank": 0,
        "world_size": 2,
        "local_rank": 0,
    }
    return Identity(**(fields | changes))


def record_a_job_with_everything(recorder):
    """Twenty ordinary steps, then one with everything that a step can have."""
    append = recorder.append
    recorder.set_identity(identity(world_size=1))
    recorder.set_identity(identity())
    group = recorder.add_group("default_pg", [0, 1], blocks_host=True)

    def collective(op, at_ms, count, peer=-1):
        packed = events.pack_collective(group, OPS.index(op), is_async=False, peer=peer)
        append(events.COLLECTIVE, at_ms * MS, 0, packed, count, 1024, count)
        append(events.WAIT, at_ms * MS, (at_ms + 1) * MS, 0, 0, 0, 0)

    began_ms = monotonic_ns() // MS + 1  # after the identity, as in any job
    for step in range(21):
        at = began_ms + 100 * step
        special = step == 20
        append(events.DATA, (at + 2) * MS, (at + 4) * MS, 0, 0, 0, 0)
        micro_batches = range(at + 4, at + 24) if special else [at + 4]
        for begin in micro_batches:
            append(events.FORWARD, begin * MS, begin * MS + MS // 2, 0, 0, 0, 0)
        collective("all_reduce", at + 25, step)
        if special:
            collective("send", at + 27, 0, peer=1)
            append(events.GC, (at + 30) * MS, (at + 85) * MS, 2, 100, 0, 0)
            append(events.PHASE, at * MS, (at + 1) * MS, recorder.phase_index("rollout"), 0, 0, 0)
            for kind in range(len(events.WORK_KINDS)):
                append(events.WORK, at * MS, 0, kind, 8, 0, 0)
            recorder.record_compilation(
                Compilation(function="forward", reason="0/0: a size mismatch"),
                (at + 5) * MS,
                (at + 8) * MS,
            )
            recorder.record_exception(
                UncaughtException(type_name="OSError", frames=("a.py:1 f",), message="no")
            )
        append(events.BACKWARD, (at + 30) * MS, (at + 40) * MS, 0, 0, 0, 0)
        append(events.OPTIMIZER, (at + 40) * MS, (at + 41) * MS, 0, 0, 0, 0)
        flags = events.ENDS_CAPTURED if special else 0
        append(events.STEP_END, (at + 90) * MS, flags, step, 500 + step, 80 * MS, MS)


@pytest.fixture(scope="module")
def received():
    """What arrives of such a job."""
    with InMemoryReceiver() as receiver:
        worker = Worker(
            Settings(baseline_ratio=1.0),
            FaultLog(reraise=True),
            Sender(targets_from_environment(receiver.environment), first_post_jitter_s=0),
            resource=lambda: {"service.name": "test"},
            metric_interval_s=60,
        )
        record_a_job_with_everything(worker.recorder)
        assert worker.flush(30)
        worker._sender.close()
        yield receiver


def test_every_span_is_registered_in_its_scope(received):
    """Collectives are named by their operation, user phases by the user."""
    known = {name: entry["scope"] for name, entry in REGISTRY["spans"].items()}
    operations = {name: {scopes.TIMELINE, scopes.DETAIL} for name in OPS}
    for span in received.spans():
        if span.name == "rollout":
            continue
        assert span.scope in operations.get(span.name, {known.get(span.name)}), span.name
        assert span.schema_url == REGISTRY["schema_url"]


def test_every_attribute_is_registered_with_its_type(received):
    """A value of another type would be another column in every store."""
    seen = defaultdict(set)
    for span in received.spans():
        for name, value in span.attributes.items():
            seen[_without_part(name)].add(type(value))
    registered = {
        name: TYPES[entry["type"]] for name, entry in REGISTRY["attributes"].items()
    } | OF_OPENTELEMETRY

    assert {name: types for name, types in seen.items() if name not in registered} == {}
    assert {n: t for n, t in seen.items() if t != {registered[n]}} == {}


def test_the_job_with_everything_has_nearly_every_attribute(received):
    """Or the test above would check nothing; what is missing needs other machines or tools."""
    seen = {_without_part(name) for span in received.spans() for name in span.attributes}
    expected = {
        name
        for name, entry in REGISTRY["attributes"].items()
        if "resource" != entry["where"] and "argus.finding" not in entry["where"]
    }

    # Kernels need a GPU, and nothing counts an expert's tokens yet.
    of_a_gpu = {"argus.digest.kernels", "argus.kernel.names", "argus.work.expert_tokens"}
    assert expected - seen <= {"argus.drops", "argus.digest.truncated", *of_a_gpu}


def test_resource_attributes_are_registered(received):
    """Of ours, those that depend on the rank."""
    resource = received.spans()[0].resource

    ours = {name for name in resource if name.startswith(("argus.", "dl."))}
    assert ours <= set(REGISTRY["attributes"])
    assert resource["argus.run.nonce_local"] is True


def test_every_metric_is_registered_with_its_kind_and_unit(received):
    """Nothing that is registered is missing, but for drops, and for what `argus watch` sends."""
    kinds = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
    registered = {
        name: (kinds[entry["instrument"]], entry["unit"])
        for name, entry in REGISTRY["metrics"].items()
    }
    got = {metric.name: (metric.kind, metric.unit) for metric in received.metrics()}

    assert got.items() <= registered.items()
    assert set(registered) - set(got) <= {"argus.self.drops", "argus.finding.active"}
    counters = [metric for metric in received.metrics() if metric.kind == "sum"]
    assert all(metric.monotonic and metric.temporality == "cumulative" for metric in counters)


def test_no_value_is_longer_than_tempo_keeps(received):
    """It cuts at 2,048 bytes."""
    texts = [v for span in received.spans() for v in span.attributes.values() if type(v) is str]

    assert max(map(len, texts)) <= 2000


def _without_part(name):
    """``argus.digest.sync.1`` continues ``argus.digest.sync``."""
    head, _, tail = name.rpartition(".")
    return head if tail.isdecimal() else name
