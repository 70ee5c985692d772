"""Root of the half outside training: store → align → detect → report, publish.

The one place here that knows these stages and hands the one's output to the next.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from argus_otel._runtime.ahead import one_ahead
from argus_otel._runtime.bundled import bundled_path
from argus_otel.align import align
from argus_otel.align.steps import with_one_step_count
from argus_otel.detect import operations
from argus_otel.detect.arrivals import last_to_arrive
from argus_otel.detect.compare import PhaseBuilder, Side
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose_run
from argus_otel.detect.ideal import what_if_table
from argus_otel.detect.run import COLUMNS, PASS_COLUMNS, RunBuilder, run_of
from argus_otel.encode import EncodedSpans, encode_resource, encode_span, encode_trace_requests
from argus_otel.publish.spans import HttpDestination, finding_spans, steps_of
from argus_otel.report.pictures import Heat, Pictures, StageShare, WhatIfBar, step_picture
from argus_otel.report.silence import without_verdict
from argus_otel.report.view import RunView
from argus_otel.report.wording import counted
from argus_otel.semconv import names
from argus_otel.store.opening import local_folder
from argus_otel.tables.schemas import STEPS
from argus_otel.wire import scopes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from argus_otel.detect.engine import Verdict
    from argus_otel.detect.frame import Frame
    from argus_otel.detect.run import Run
    from argus_otel.publish.spans import Destination
    from argus_otel.store.protocol import Store
    from argus_otel.tables.findings import Finding
    from argus_otel.tables.schemas import RunSummary, RunTables

SERVICE_NAME: Final = "argus-detect"

SMALL_RUN_DIGESTS: Final = 200_000
"""Up to so many a run is read and aligned whole, clocks included; a larger one in blocks of steps."""
READ_COLUMNS: Final = {
    "steps": (
        "ordinal", "rank", "start_ns", "step_s", "keep", "truncated", "aligned", "trace_id",
        "boundary_counts", *(name for name in COLUMNS if name != "step_s"),
    ),
    "collectives": (*operations.COLUMNS, "count"),
    "micro_batches": PASS_COLUMNS,
}  # fmt: skip
"""Of a large run, what detectors need."""
_FEW_STEPS: Final = 10
"""Settled steps below which no detector of windows says anything."""
_LOOKED_AT: Final = 20
"""Findings of a large run whose steps are read for the report and for publishing."""

NOTHING: Final = 0
"""Exit code: nothing above info."""
SOMETHING: Final = 1
NO_VERDICT: Final = 3
"""Exit code: too little is there to judge by."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One run, read and judged."""

    run: RunSummary
    read_steps: Callable[[], pa.Table]
    """Gives ``steps``: those of a large run, which publishing and pictures need, are read when asked for."""
    damaged_digests: int
    verdict: Verdict

    @cached_property
    def steps(self) -> pa.Table:
        """``tables.STEPS``: all rows, or of a large run those of the steps that findings point to.

        Raises:
            StoreError: The store cannot be read.
        """
        return self.read_steps()

    @property
    def exit_code(self) -> int:
        """What ``argus detect`` returns."""
        if any(finding.severity != "info" for finding in self.verdict.diagnosis.findings):
            return SOMETHING
        return NO_VERDICT if self.no_verdict else NOTHING

    @property
    def no_verdict(self) -> bool:
        """Whether too little is there to judge by: then it is neither sound nor ill."""
        return self.verdict.all_abstained or without_verdict(
            self.verdict.diagnosis.abstentions, len(self.verdict.judged)
        )


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
        steps = tables.steps
        return Judged(
            run=run,
            read_steps=lambda: steps,
            damaged_digests=tables.damaged_digests,
            verdict=diagnose_run(run_of(tables, rows=partial(store.rows, run)), detectors),
        )
    whole, damaged = _read_in_blocks(store, run)
    verdict = diagnose_run(whole, detectors)
    return Judged(
        run=run,
        read_steps=lambda: _steps_to_look_at(store, run, verdict.diagnosis.findings),
        damaged_digests=damaged,
        verdict=verdict,
    )


def _read_in_blocks(store: Store, run: RunSummary) -> tuple[Run, int]:
    """A large run, and its damaged digests; what it was built from is gone when this returns."""
    builder = RunBuilder(rows=partial(store.rows, run))
    damaged = 0
    for block in one_ahead(map(with_one_step_count, store.blocks(run, READ_COLUMNS))):
        damaged = max(damaged, block.damaged_digests)
        builder.add(block)
    return builder.build(), damaged


def _steps_to_look_at(store: Store, run: RunSummary, findings: Sequence[Finding]) -> pa.Table:
    wanted: set[int] = set()
    for finding in findings[:_LOOKED_AT]:
        wanted |= {finding.last_step, int(finding.evidence.get("look_at_step", finding.last_step))}
    parts = [align(store.read(run, (step, step + 1))).steps for step in sorted(wanted)]
    return pa.concat_tables(parts) if parts else STEPS.empty_table()


def view_of(judged: Judged, *, ui_url: str | None = None, store: Store | None = None) -> RunView:
    """What the reports are made from.

    Args:
        judged: What was said of the run.
        ui_url: For links; see ``report.links``.
        store: Read again for the pictures of the page; None where there need be none.

    Raises:
        StoreError: The store cannot be read.
    """
    verdict = judged.verdict
    frame = verdict.frame
    settled = frame.ordinals_S.size
    return RunView(
        run=judged.run,
        diagnosis=replace(verdict.diagnosis, findings=_worst_first(verdict.diagnosis.findings)),
        steps_judged=settled,
        first_step=int(frame.ordinals_S[0]) if settled else None,
        last_step=int(frame.ordinals_S[-1]) if settled else None,
        ranks_seen=int(frame.ranks_R.size),
        all_abstained=judged.no_verdict,
        last_to_arrive=last_to_arrive(frame.whole)
        if judged.no_verdict and settled < _FEW_STEPS
        else None,
        damaged_digests=judged.damaged_digests,
        traits=_traits(frame.whole),
        stages={stage: tuple(frame.ranks_R[of].tolist()) for stage, of in _stages(frame.whole)},
        group_names={
            str(group.key): f"{group.description} group of {counted(group.members.size, 'rank')}"
            for group in frame.whole.groups
        },
        ui_url=ui_url,
        pictures=None if store is None else _pictures(judged, store),
    )


def _worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """By severity; those of one severity as the engine has them, by cost."""
    levels = ("critical", "warning", "info")
    return tuple(sorted(findings, key=lambda finding: levels.index(finding.severity)))


def _stages(run: Run) -> list[tuple[int, NDArray[np.int64]]]:
    """Pipeline stages with the indices of their ranks; none where there is but one."""
    stage_R = None if run.places is None else run.places.get("pp")
    stages = [] if stage_R is None else np.unique(stage_R).tolist()
    if len(stages) < 2:
        return []
    return [(stage, np.flatnonzero(stage_R == stage)) for stage in stages]


def _traits(run: Run) -> frozenset[str]:
    """What the job has; see ``report.silence``."""
    places = {} if run.places is None else run.places
    has = {
        "gpu": bool(run.has_gpu_R.any()),
        "stages": bool(_stages(run)) or "send" in run.operations.op_L,
        "experts": bool(places.get("ep", np.zeros(1)).any())
        or any(op.startswith("all_to_all") for op in run.operations.op_L),
        "peers of groups": len(run.groups) > 1,
    }
    return frozenset(name for name, there in has.items() if there)


def _pictures(judged: Judged, store: Store) -> Pictures:
    frame = judged.verdict.frame
    worst = next(iter(_worst_first(judged.verdict.diagnosis.findings)), None)
    heat = None
    if frame.ordinals_S.size and not np.isnan(frame.column("busy_s")).all():
        heat = Heat(
            ordinals_S=frame.ordinals_S,
            ranks_R=frame.ranks_R,
            hosts_R=frame.hosts_R,
            stage_R=None if frame.whole.places is None else frame.whole.places.get("pp"),
            ratio_SR=np.exp(frame.excess("own_work_s").log_SR),
        )
    ordinal = _step_to_draw(judged, worst)
    step = None
    if ordinal is not None:
        tables = store.read(judged.run, (ordinal, ordinal + 1))
        here = judged.steps.filter(pc.field("ordinal") == ordinal)
        offsets = zip(here["rank"].to_pylist(), here["clock_offset_ns"].to_pylist(), strict=True)
        step = step_picture(tables, ordinal, worst, {rank: ns or 0 for rank, ns in offsets})
    stages, since = _stage_shares(frame, worst)
    step_s = frame.job_step_s
    return Pictures(
        heat=heat,
        step=step,
        stages=stages,
        stages_since=since,
        what_if=_what_if(frame.whole),
        step_s=float(np.nanmedian(step_s)) if step_s.size and not np.isnan(step_s).all() else None,
    )


def _step_to_draw(judged: Judged, worst: Finding | None) -> int | None:
    """The step that the worst finding points to, else the longest settled one."""
    if worst is not None and worst.evidence.get("look_at_step") is not None:
        return int(worst.evidence["look_at_step"])
    frame = judged.verdict.frame
    if frame.ordinals_S.size and not np.isnan(frame.job_step_s).all():
        return int(frame.ordinals_S[np.nanargmax(frame.job_step_s)])
    ordinals = frame.whole.ordinals_A
    return int(ordinals[-1]) if ordinals.size else None


_LEAST_STEPS_BEFORE: Final = 5


def _stage_shares(frame: Frame, worst: Finding | None) -> tuple[tuple[StageShare, ...], int | None]:
    """Shares of the step of each pipeline stage, since the worst finding began where there is one."""
    run, at = frame.whole, frame.index_S
    stages = _stages(run)
    if not stages or not at.size:
        return (), None
    step_SR = frame.columns["step_s"]
    wait_SR = np.where(run.operations.known_AR[at], run.operations.wait_AR[at], np.nan)
    own_SR = frame.columns["busy_s"] / step_SR
    # What overlaps with own work is no bubble.
    wait_SR = np.minimum(wait_SR / step_SR, 1 - np.minimum(own_SR, 1))
    since = None if worst is None else worst.first_step
    now = frame.ordinals_S >= (since or 0)
    if np.count_nonzero(~now) < _LEAST_STEPS_BEFORE or not now.any():
        since, now = None, np.ones(at.size, dtype=bool)
    shares = []
    for stage, members in stages:
        own, waiting = own_SR[:, members], wait_SR[:, members]
        if np.isnan(own[now]).all() or np.isnan(waiting[now]).all():
            return (), None
        before = waiting[~now]
        shares.append(
            StageShare(
                stage=stage,
                ranks=tuple(frame.ranks_R[members].tolist()),
                own=float(np.nanmedian(own[now])),
                waiting=float(np.nanmedian(waiting[now])),
                waiting_before=None
                if since is None or np.isnan(before).all()
                else float(np.nanmedian(before)),
            )
        )
    return tuple(shares), since


def _what_if(run: Run) -> tuple[WhatIfBar, ...]:
    """What each part of the job would give back; empty where its steps cannot be replayed."""
    if run.ranks_R.size < 2:
        return ()
    return tuple(
        WhatIfBar(label=row.label, gained_s=row.recovered_s, step_share=row.step_share)
        for row in what_if_table(run)
        if np.isfinite(row.recovered_s)
    )


def read_side(
    store: Store,
    run_name: str,
    steps: tuple[int, int | None] | None,
    *,
    label: str,
    since_ns: int | None = None,
) -> Side:
    """One side of a comparison.

    Args:
        store: Where the run is.
        run_name: ``latest``, a run id, or the start of a nonce.
        steps: First and last step, both included, None to the end; None for the whole run.
        label: What it is called.
        since_ns: As in ``judge``.

    Raises:
        StoreError: No such run, or the store cannot be read.
    """
    run = store.resolve(run_name, since_ns)
    builder, phases = RunBuilder(rows=partial(store.rows, run)), PhaseBuilder()
    for tables in one_ahead(map(with_one_step_count, _blocks_between(store, run, steps))):
        builder.add(tables)
        phases.add(tables.steps)
    built = builder.build()
    return Side(label=label, run=built, phases=phases.build(built))


def _blocks_between(
    store: Store, run: RunSummary, steps: tuple[int, int | None] | None
) -> Iterator[RunTables]:
    """The tables of some steps, or all, a bearable number of digests at a time."""
    if steps is None:
        wanted = {**READ_COLUMNS, "steps": (*READ_COLUMNS["steps"], "phases")}
        yield from store.blocks(run, wanted)
        return
    first = steps[0]
    # Ordinals may have gaps, so that the last one is not known from the number of steps.
    last = steps[1]
    at_once = max(1, SMALL_RUN_DIGESTS // max(run.ranks_seen, 1))
    if last is None:
        yield store.read(run, (first, 1 << 62))
        return
    for begin in range(first, last + 1, at_once):
        yield store.read(run, (begin, min(begin + at_once, last + 1)))


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
