"""Root of the half outside training: store → align → detect → report, publish.

The one place here that knows these stages and hands the one's output to the next.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from argus_otel._runtime.bundled import bundled_path
from argus_otel.align import align
from argus_otel.align.steps import with_one_step_count
from argus_otel.detect import operations
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose_run
from argus_otel.detect.run import COLUMNS, RunBuilder, run_of
from argus_otel.encode import EncodedSpans, encode_resource, encode_span, encode_trace_requests
from argus_otel.publish.spans import HttpDestination, finding_spans, steps_of
from argus_otel.report.view import Heat, RunView
from argus_otel.semconv import names
from argus_otel.store.opening import local_folder
from argus_otel.tables.schemas import STEPS
from argus_otel.wire import scopes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from argus_otel.detect.engine import Verdict
    from argus_otel.publish.spans import Destination
    from argus_otel.store.protocol import Store
    from argus_otel.tables.findings import Finding
    from argus_otel.tables.schemas import RunSummary

SERVICE_NAME: Final = "argus-detect"

SMALL_RUN_DIGESTS: Final = 200_000
"""Up to so many a run is read and aligned whole, clocks included; a larger one in blocks of steps."""
READ_COLUMNS: Final = {
    "steps": (
        "ordinal", "rank", "start_ns", "step_s", "keep", "truncated", "aligned", "trace_id",
        "boundary_counts", *(name for name in COLUMNS if name != "step_s"),
    ),
    "collectives": (*operations.COLUMNS, "count"),
}  # fmt: skip
"""Of a large run, what detectors need."""
_LOOKED_AT: Final = 20
"""Findings of a large run whose steps are read for the report and for publishing."""

NOTHING: Final = 0
"""Exit code: nothing above info."""
SOMETHING: Final = 1
NO_VERDICT: Final = 3
"""Exit code: every detector abstained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One run, read and judged."""

    run: RunSummary
    steps: pa.Table
    """``tables.STEPS``: all rows, or of a large run those of the steps that findings point to."""
    damaged_digests: int
    verdict: Verdict

    @property
    def exit_code(self) -> int:
        """What ``argus detect`` returns."""
        if any(finding.severity != "info" for finding in self.verdict.diagnosis.findings):
            return SOMETHING
        return NO_VERDICT if self.verdict.all_abstained else NOTHING


def judge(
    store: Store,
    run_name: str,
    *,
    since_ns: int | None = None,
    detector_folders: Sequence[Path] = (),
) -> Judged:
    """Read a run and let the detectors at it.

    Args:
        store: From ``store.opening.open_store``.
        run_name: ``latest``, a run id, or the start of a nonce.
        since_ns: Look only at runs that sent something since then, Unix nanoseconds.
        detector_folders: More detectors; one with the id of a bundled one replaces it.

    Raises:
        StoreError: No such run, or the store cannot be read.
        ConfigError: A detector's file is wrong.
    """
    detectors = load_detectors(bundled_path("detectors"), *detector_folders)
    run = store.resolve(run_name, since_ns)
    if run.ranks_seen * run.steps <= SMALL_RUN_DIGESTS:
        tables = align(store.read(run))
        return Judged(
            run=run,
            steps=tables.steps,
            damaged_digests=tables.damaged_digests,
            verdict=diagnose_run(run_of(tables), detectors),
        )
    builder = RunBuilder()
    damaged = 0
    for block in store.blocks(run, READ_COLUMNS):
        damaged = max(damaged, block.damaged_digests)
        builder.add(with_one_step_count(block))
    verdict = diagnose_run(builder.build(), detectors)
    return Judged(
        run=run,
        steps=_steps_to_look_at(store, run, verdict.diagnosis.findings),
        damaged_digests=damaged,
        verdict=verdict,
    )


def _steps_to_look_at(store: Store, run: RunSummary, findings: Sequence[Finding]) -> pa.Table:
    wanted: set[int] = set()
    for finding in findings[:_LOOKED_AT]:
        wanted |= {finding.last_step, int(finding.evidence.get("look_at_step", finding.last_step))}
    parts = [align(store.read(run, (step, step + 1))).steps for step in sorted(wanted)]
    return pa.concat_tables(parts) if parts else STEPS.empty_table()


def view_of(judged: Judged, *, ui_url: str | None = None) -> RunView:
    """What the reports are made from."""
    frame = judged.verdict.frame
    settled = frame.ordinals_S.size
    heat = None
    if settled and not np.isnan(frame.column("busy_s")).all():
        heat = Heat(
            ordinals_S=frame.ordinals_S,
            ranks_R=frame.ranks_R,
            ratio_SR=np.exp(frame.excess("own_work_s").log_SR),
        )
    return RunView(
        run=judged.run,
        diagnosis=judged.verdict.diagnosis,
        steps_judged=settled,
        first_step=int(frame.ordinals_S[0]) if settled else None,
        last_step=int(frame.ordinals_S[-1]) if settled else None,
        ranks_seen=int(frame.ranks_R.size),
        all_abstained=judged.verdict.all_abstained,
        damaged_digests=judged.damaged_digests,
        ui_url=ui_url,
        heat=heat,
        steps=judged.steps,
    )


def default_ui_url(store_url: str) -> str | None:
    """Jaeger's own pages, when the store is Jaeger; user and password left out."""
    scheme, separator, rest = store_url.partition("://")
    kind, _, protocol = scheme.partition("+")
    if kind != "jaeger" or not separator:
        return None
    return f"{protocol}://{rest.rpartition('@')[2]}"


def publish(
    judged: Judged,
    store: Store,
    store_url: str,
    *,
    endpoint: str | None,
    headers: Mapping[str, str] | None = None,
) -> int | None:
    """Put each finding into the trace of the step it speaks of, unless it is there already.

    One that was published as open is published once more when it has ended.

    Args:
        judged: What to publish.
        store: Asked for what is there already.
        store_url: Written to where it is a folder and no endpoint is given.
        endpoint: OTLP/HTTP endpoint; None for the store's folder.
        headers: Sent along, to an endpoint.

    Returns:
        Spans sent; None where there is nowhere to send them.

    Raises:
        ArgusError: They did not arrive.
    """
    findings = judged.verdict.diagnosis.findings
    destination = _destination(store_url, endpoint, headers)
    if destination is None:
        return None
    spans = finding_spans(
        findings, judged.steps, published=_published(judged, store) if findings else ()
    )
    encoded = [
        encode_span(
            name=names.SPAN_ARGUS_FINDING,
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_span_id=span.parent_span_id,
            start_ns=span.start_ns,
            end_ns=span.end_ns,
            attributes=span.attributes,
            error=span.message,
            parent_is_remote=True,
        )
        for span in spans
    ]
    if not encoded:
        return 0
    resource = encode_resource(
        {
            "service.name": SERVICE_NAME,
            names.ARGUS_RUN_ID: judged.run.run_id,
            names.ARGUS_RUN_NONCE: judged.run.run,
            names.ARGUS_ATTEMPT: judged.run.attempt,
            names.ARGUS_ROLE: judged.run.role,
        }
    )
    batch = EncodedSpans(data=b"".join(encoded), count=len(encoded))
    for body, _ in encode_trace_requests(resource, {scopes.DIGEST: [batch]}):
        destination.send(body)
    return len(encoded)


def _published(judged: Judged, store: Store) -> set[tuple[str, str]]:
    """Findings, by id and state, that the steps in question have already."""
    found: set[tuple[str, str]] = set()
    for step in steps_of(judged.verdict.diagnosis.findings):
        spans = store.spans(judged.run, (step, step + 1))
        for name, text in zip(
            spans["name"].to_pylist(), spans["attributes"].to_pylist(), strict=True
        ):
            if name == names.SPAN_ARGUS_FINDING:
                attributes = json.loads(text)
                state = attributes.get(names.ARGUS_FINDING_STATE, "open")
                found.add((str(attributes.get(names.ARGUS_FINDING_ID)), str(state)))
    return found


def _destination(
    store_url: str, endpoint: str | None, headers: Mapping[str, str] | None
) -> Destination | None:
    if endpoint:
        return HttpDestination(endpoint, headers)
    if "://" in store_url and not store_url.startswith("parquet:"):
        return None
    return _Folder(local_folder(store_url.removeprefix("parquet://")))


class _Folder:
    """The embedded store, written by itself: nothing may be serving it at the time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(self, body: bytes) -> None:
        """See ``publish.spans.Destination``."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        from argus_otel.store.spans import read_request
        from argus_otel.store.writer import ParquetWriter

        with ParquetWriter(self._folder) as writer:
            writer.write(list(read_request(ExportTraceServiceRequest.FromString(body))))
