"""From an unchanged DDP job to what Jaeger's API answers: the whole way, with no part replaced."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from argus_otel.semconv import names
from argus_otel.wire import ids, scopes
from argus_otel.wire.digest import decode_digest

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

JOB = Path(__file__).parent / "jobs" / "train.py"
BIN = Path(sys.executable).parent
RANKS = [0, 1]
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")
WITHIN_S = 600
"""A deadline for a loaded machine, not an expectation."""

STEPS = 200
PLANTED = (100, 125, 150, 175, 195)
"""Steps in which rank 1 sleeps for ten times a usual step."""
PAUSE_S = 0.04
SLEEP_S = 0.4
BASELINE_RATIO = 0.05

CULPRIT = 1
CULPRIT_STEPS = 60


# --- The parts of the way -----------------------------------------------------------------------


def environment(stack, **variables: str) -> dict[str, str]:
    """What a job's shell would have, and nothing of what runs these tests."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ARGUS_", "OTEL_", "TORCHELASTIC_", "PYTEST_"))
    }
    return {
        **inherited,
        "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": stack.otlp_http_url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        **variables,
    }


def start_job(stack, folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    """As people start it; what it says goes to a file."""
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [
                BIN / "opentelemetry-instrument",
                *TORCHRUN,
                JOB,
            ],
            env=environment(stack, **variables),
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(job: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        code = job.wait(WITHIN_S)
    finally:
        job.kill()
    assert code == 0, (folder / "output").read_text("utf-8", "replace")[-4000:]


def argus(stack, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command line, as a person elsewhere has it: no endpoint set unless given."""
    env = environment(stack)
    del env["OTEL_EXPORTER_OTLP_ENDPOINT"]
    return subprocess.run(
        [BIN / "argus", *arguments, "--store", f"jaeger+{stack.jaeger_query_url}"],
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def wait_for(what: str, condition):
    """Poll until ``condition()`` gives something true, and give that."""
    deadline_s = time.monotonic() + WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not within {WITHIN_S} s: {what}"
        time.sleep(0.2)
    return found


@dataclass(frozen=True, kw_only=True)
class Span:
    """One span as Jaeger gives it back; ids in hex."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a root."""
    scope: str
    name: str
    rank: int | None
    """Of the process that sent it."""
    attributes: dict[str, object]
    start_ns: int
    end_ns: int
    status: dict[str, object]


def read_trace(stack, trace_id: bytes) -> list[Span]:
    """Every stored span of a trace; none where Jaeger has no such trace.

    A request that a sender repeats, having waited too long for the answer, is stored twice.
    """
    spans: list[Span] = []
    for span in read_all(stack, trace_id):
        if span not in spans:
            spans.append(span)
    return spans


def read_all(stack, trace_id: bytes) -> list[Span]:
    """Every span of a trace as often as it is stored."""
    answer = httpx.get(
        f"{stack.jaeger_query_url}/api/v3/traces/{trace_id.hex()}",
        params={"raw_traces": "true"},
        trust_env=False,
        timeout=60,
    )
    if answer.status_code == httpx.codes.NOT_FOUND:
        return []
    answer.raise_for_status()
    spans = []
    for block in json.loads(answer.text)["result"]["resourceSpans"]:
        rank = plain(block["resource"].get("attributes", ())).get(names.DL_RANK)
        for scoped in block["scopeSpans"]:
            spans += [
                Span(
                    trace_id=found["traceId"],
                    span_id=found["spanId"],
                    parent_id=found.get("parentSpanId", ""),
                    scope=scoped.get("scope", {}).get("name", ""),
                    name=found["name"],
                    rank=rank,
                    attributes=plain(found.get("attributes", ())),
                    start_ns=int(found["startTimeUnixNano"]),
                    end_ns=int(found["endTimeUnixNano"]),
                    status=found.get("status", {}),
                )
                for found in scoped.get("spans", ())  # absent where Jaeger removed a duplicate
            ]
    return spans


def plain(attributes) -> dict[str, object]:
    return {each["key"]: _value(each["value"]) for each in attributes}


def _value(value: dict) -> object:
    kind, content = next(iter(value.items()))
    if kind == "arrayValue":
        return [_value(each) for each in content.get("values", ())]
    return int(content) if kind == "intValue" else content


def post(
    stack, service: str, scope: str, trace_id: bytes, spans: dict[str, dict[str, str]]
) -> None:
    """Send spans, by name with their attributes, as some other process would."""
    request = ExportTraceServiceRequest()
    block = request.resource_spans.add()
    block.resource.attributes.add(key="service.name").value.string_value = service
    scoped = block.scope_spans.add()
    scoped.scope.name = scope
    now_ns = time.time_ns()
    for name, attributes in spans.items():
        made = scoped.spans.add(
            trace_id=trace_id,
            span_id=secrets.token_bytes(8),
            name=name,
            start_time_unix_nano=now_ns,
            end_time_unix_nano=now_ns + 1_000_000,
        )
        for key, value in attributes.items():
            made.attributes.add(key=key).value.string_value = value
    httpx.post(
        f"{stack.otlp_http_url}/v1/traces",
        content=request.SerializeToString(),
        headers={"Content-Type": "application/x-protobuf"},
        trust_env=False,
        timeout=60,
    ).raise_for_status()


def wait_until_decided(stack) -> None:
    """The sampler decides in order of arrival: once this comes out, so has all before it."""
    trace_id = secrets.token_bytes(16)
    post(stack, "last", scopes.TIMELINE, trace_id, {"last": {names.ARGUS_KEEP: "slow"}})
    wait_for("a kept trace", lambda: read_trace(stack, trace_id))


def nonce_when_complete(stack, run_id: str, steps: int) -> bytes:
    """The run's nonce, as soon as Jaeger has something of all of its steps."""

    def complete() -> bytes | None:
        listed = argus(stack, "runs", "--json")
        assert listed.returncode == 0, listed.stderr
        for run in json.loads(listed.stdout)["runs"]:
            if run["run_id"] == run_id and (run["steps"], run["ranks_seen"]) == (steps, 2):
                return bytes.fromhex(run["run"])
        return None

    return wait_for(f"{steps} steps of {run_id}", complete)


def of_step(spans: list[Span], name: str) -> dict[int, Span]:
    """The spans of one name by rank; a second one of a rank is an error."""
    ranks = [span.rank for span in spans if span.name == name]
    assert len(ranks) == len(set(ranks)), f"{name} twice on one of the ranks {ranks}"
    return {span.rank: span for span in spans if span.name == name}


def ranks_of(spans: list[Span], scope: str) -> list[int]:
    return sorted({span.rank for span in spans if span.scope == scope})


def why_kept(spans: list[Span]) -> dict[int, str]:
    """What each rank's digest says about its own decision, where it kept the step."""
    said = {
        rank: span.attributes.get(names.ARGUS_KEEP)
        for rank, span in of_step(spans, names.SPAN_RANK_STEP).items()
    }
    return {rank: why for rank, why in said.items() if why}


def missing_from_timelines(spans: list[Span]) -> list[str]:
    """What a rank's timeline lacks of what its digest has counted; empty for whole timelines."""
    missing = []
    for rank in RANKS:
        step = of_step(spans, names.SPAN_RANK_STEP).get(rank)
        if step is None:
            missing.append(f"rank {rank}: digest")
            continue
        digest = decode_digest(step.attributes, start_ns=step.start_ns, end_ns=step.end_ns)
        timeline = [s for s in spans if s.scope == scopes.TIMELINE and s.rank == rank]
        phases = Counter(digest.phases.names[code] for code in digest.phases.name.tolist())
        missing += [f"rank {rank}: {name}" for name in phases - Counter(s.name for s in timeline)]
        shown = sum(s.attributes.get(names.ARGUS_COLLECTIVE_COUNT, 0) for s in timeline)
        if shown != digest.sync.op.size:
            missing.append(f"rank {rank}: {digest.sync.op.size - shown} collectives")
    return missing


# --- A job with a few slow steps ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job that has run, and what Jaeger has of it."""

    run_id: str
    nonce: bytes
    traces: dict[int, list[Span]]
    """By step ordinal, one more than there were steps."""
    shop: bytes
    """Trace of another application."""
    shop_spans: dict[str, dict[str, str]]

    @property
    def baseline(self) -> list[int]:
        """Steps of the healthy sample, as anybody who knows the nonce can tell."""
        return [s for s in range(STEPS) if ids.is_baseline(self.nonce, 0, s, BASELINE_RATIO)]


@pytest.fixture(scope="module")
def run(stack, tmp_path_factory) -> Run:
    """Two hundred steps, five of them slow; another application sends through the same gateway."""
    folder = tmp_path_factory.mktemp("slow-steps")
    run_id = f"slow-steps-{secrets.token_hex(4)}"
    progress = folder / "progress"
    shop, shop_spans = secrets.token_bytes(16), {}
    job = start_job(
        stack,
        folder,
        ARGUS_RUN_ID=run_id,
        ARGUS_BASELINE_RATIO=str(BASELINE_RATIO),
        JOB_STEPS=str(STEPS),
        JOB_PAUSE_S=str(PAUSE_S),
        JOB_CULPRIT="1",
        JOB_SLOW_STEPS=",".join(map(str, PLANTED)),
        JOB_SLOW_S=str(SLEEP_S),
        JOB_PROGRESS=str(progress),
    )
    try:
        for part in range(4):  # a trace that grows while the job trains
            wait_for(
                f"step {part * 45}",
                lambda at=part * 45: (
                    job.poll() is not None
                    or (progress.exists() and int(progress.read_text() or -1) >= at)
                ),
            )
            some = {f"GET /{part}/{n}": {"http.route": f"/{part}/{n}"} for n in range(5)}
            post(stack, "shop", "opentelemetry.instrumentation.flask", shop, some)
            shop_spans |= some
    finally:
        finish(job, folder)
    wait_until_decided(stack)
    nonce = nonce_when_complete(stack, run_id, STEPS)
    traces: dict[int, list[Span]] = {}
    deadline_s = time.monotonic() + WITHIN_S
    open_steps = list(range(STEPS + 1))
    # What is missing at the deadline is for the tests to say.
    while open_steps and time.monotonic() < deadline_s:
        for step in open_steps:
            traces[step] = read_trace(stack, ids.step_trace_id(nonce, 0, step, 0))
        open_steps = [step for step in open_steps if step < STEPS and is_open(traces[step])]
    return Run(run_id=run_id, nonce=nonce, traces=traces, shop=shop, shop_spans=shop_spans)


def is_open(spans: list[Span]) -> bool:
    """Whether something of a step is still on its way."""
    if sorted(of_step(spans, names.SPAN_RANK_STEP)) != RANKS:
        return True
    return bool(why_kept(spans) and missing_from_timelines(spans))


def test_every_step_has_one_digest_of_each_rank(run):
    """In the trace whose id anybody computes; kept or not; and after the last step there is none."""
    for step in range(STEPS):
        digests = of_step(run.traces[step], names.SPAN_RANK_STEP)

        assert sorted(digests) == RANKS, f"step {step}"
        for rank, span in digests.items():
            digest = decode_digest(span.attributes, start_ns=span.start_ns, end_ns=span.end_ns)
            assert (digest.ordinal, digest.rank, digest.drops) == (step, rank, 0)
            assert digest.sync.op.size > 0, f"step {step} of rank {rank} has no collective"
    assert run.traces[STEPS] == []


def test_ids_are_those_that_every_rank_computes(run):
    """Trace, root and each rank's step: all by name and rank, none by chance."""
    for step in range(STEPS):
        trace = ids.step_trace_id(run.nonce, 0, step, 0)
        spans = run.traces[step]

        assert {span.trace_id for span in spans} == {trace.hex()}
        assert {rank: s.span_id for rank, s in of_step(spans, names.SPAN_TRAIN_STEP).items()} == {
            0: ids.span_id(trace, ids.ROOT, 0).hex()
        }
        assert {rank: s.span_id for rank, s in of_step(spans, names.SPAN_RANK_STEP).items()} == {
            rank: ids.span_id(trace, ids.RANK_STEP, rank).hex() for rank in RANKS
        }


def test_every_parent_is_in_the_trace(run):
    """The root of rank 0 above all ranks' steps; below each step only what its own rank did."""
    for step in range(STEPS):
        spans = run.traces[step]
        by_id = {span.span_id: span for span in spans}

        assert len(by_id) == len(spans), f"step {step}: an id twice"
        for span in spans:
            if span.name == names.SPAN_TRAIN_STEP:
                assert span.parent_id == ""
                continue
            parent = by_id.get(span.parent_id)
            assert parent is not None, f"step {step}: {span.name} of rank {span.rank}"
            if span.name in (names.SPAN_RANK_STEP, names.SPAN_RANK_START):
                assert parent.name == names.SPAN_TRAIN_STEP
            else:
                assert parent.rank == span.rank
                assert parent.name == names.SPAN_RANK_STEP or parent.scope == scopes.TIMELINE


@pytest.mark.parametrize("step", PLANTED)
def test_a_slow_step_keeps_the_whole_timelines_of_all_ranks(run, step):
    """All phases and all collectives, of the rank that slept and of the one that waited for it."""
    spans = run.traces[step]
    if not why_kept(spans):  # a busy machine has slow steps of its own, and 5 % are kept at most
        assert [rank for rank in RANKS if slow_before(run, rank, step) < 0.05 * (step + 1)] == []
        pytest.skip("both ranks had used up their share of slow steps, as the rule says")

    assert missing_from_timelines(spans) == []


def slow_before(run: Run, rank: int, step: int) -> int:
    return sum(why_kept(run.traces[s]).get(rank) == "slow" for s in range(step))


def test_baseline_steps_keep_timelines_and_details_of_all_ranks(run):
    """Healthy steps to compare with: the ones that the nonce says, agreed without a word."""
    assert run.baseline, "at 5 % of 200 steps there is one, but for once in 28,000 runs"

    for step in run.baseline:
        assert sorted(why_kept(run.traces[step])) == RANKS, f"step {step}"
        assert missing_from_timelines(run.traces[step]) == [], f"step {step}"
        assert ranks_of(run.traces[step], scopes.DETAIL) == RANKS, f"step {step}"


def test_no_step_is_kept_by_half(run):
    """One rank's mark is enough: every step has the whole timelines of all ranks, or of none."""
    for step in range(STEPS):
        spans = run.traces[step]

        if why_kept(spans):
            assert missing_from_timelines(spans) == [], f"step {step}"
        else:
            assert {span.scope for span in spans} == {scopes.DIGEST}, f"step {step}"


def test_another_applications_trace_arrives_whole(stack, run):
    """Twenty spans, sent in four parts while the job trained: all there, with what they said."""
    stored = wait_for(
        "all spans of the other application",
        lambda: (found := read_trace(stack, run.shop)) and len(found) == 20 and found,
    )

    assert {span.name: span.attributes for span in stored} == run.shop_spans


def test_runs_lists_the_run_for_people(stack, run):
    """One line, whatever the width."""
    listed = argus(stack, "runs")

    assert listed.returncode == 0, listed.stderr
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith(run.run_id)]
    assert line.split()[1:7] == [
        run.nonce.hex()[:8],
        "0",
        "trainer",
        "pytorch-training",
        "2/2",
        "200",
    ]


# --- A job with a slow rank, and the verdict in its trace ---------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What ``argus detect`` said three times, and the step's trace after each."""

    dry: subprocess.CompletedProcess[str]
    dry_spans: list[Span]
    first: subprocess.CompletedProcess[str]
    first_spans: list[Span]
    second: subprocess.CompletedProcess[str]
    second_spans: list[Span]

    @property
    def finding(self) -> dict:
        """The one about the planted rank; a crowded machine may have others, true ones."""
        return about_the_culprit(self.first)

    def spans_in(self, spans: list[Span]) -> list[Span]:
        """Those of ``spans`` that carry it."""
        return [
            span
            for span in spans
            if span.name == names.SPAN_ARGUS_FINDING
            and span.attributes[names.ARGUS_FINDING_ID] == self.finding["id"]
        ]


def about_the_culprit(detect: subprocess.CompletedProcess[str]) -> dict:
    """The finding that the planted rank must give."""
    (found,) = [
        finding
        for finding in json.loads(detect.stdout)["findings"]
        if (finding["cause"], finding["ranks"]) == ("compute_straggler", [CULPRIT])
    ]
    return found


@pytest.fixture(scope="module")
def verdict(stack, tmp_path_factory) -> Verdict:
    """Rank 1 has ten times the CPU work of rank 0, in every step: no noise is as large."""
    folder = tmp_path_factory.mktemp("slow-rank")
    run_id = f"slow-rank-{secrets.token_hex(4)}"
    job = start_job(
        stack,
        folder,
        ARGUS_RUN_ID=run_id,
        JOB_STEPS=str(CULPRIT_STEPS),
        JOB_WORK_S="0.004",
        JOB_CULPRIT=str(CULPRIT),
        JOB_CULPRIT_WORK_S="0.04",
    )
    finish(job, folder)
    nonce = nonce_when_complete(stack, run_id, CULPRIT_STEPS)
    for step in range(CULPRIT_STEPS):
        trace_id = ids.step_trace_id(nonce, 0, step, 0)
        wait_for(
            f"both digests of step {step}",
            lambda t=trace_id: len(of_step(read_trace(stack, t), names.SPAN_RANK_STEP)) == 2,
        )

    detect = ("detect", "--json", "--run", run_id)
    dry = argus(stack, *detect, "--dry-run", OTEL_EXPORTER_OTLP_ENDPOINT=stack.otlp_http_url)
    assert dry.returncode == 1, dry.stdout + dry.stderr
    trace = bytes.fromhex(about_the_culprit(dry)["evidence"]["trace_id"])
    wait_until_passed_by(stack)
    dry_spans = read_trace(stack, trace)

    first = argus(stack, *detect, "--otlp-endpoint", stack.otlp_http_url)
    mine = about_the_culprit(first)["id"]
    wait_for(
        "the verdict in the step's trace",
        lambda: any(
            span.attributes.get(names.ARGUS_FINDING_ID) == mine for span in read_trace(stack, trace)
        ),
    )
    first_spans = read_trace(stack, trace)

    second = argus(stack, *detect, OTEL_EXPORTER_OTLP_ENDPOINT=stack.otlp_http_url)
    wait_until_passed_by(stack)
    return Verdict(
        dry=dry,
        dry_spans=dry_spans,
        first=first,
        first_spans=first_spans,
        second=second,
        second_spans=read_all(stack, trace),
    )


def wait_until_passed_by(stack) -> None:
    """What is not sampled is passed on in order: once this is there, so is all before it."""
    trace_id = secrets.token_bytes(16)
    post(stack, "last", scopes.DIGEST, trace_id, {"last": {}})
    wait_for("what passes by the sampler", lambda: read_trace(stack, trace_id))


def test_the_verdict_names_the_rank_and_the_cause(stack, verdict):
    """From Jaeger alone, with the address of the step to look at."""
    assert verdict.first.returncode == 1, verdict.first.stderr
    assert verdict.finding["severity"] in ("warning", "critical")
    assert verdict.finding["evidence"]["url"].startswith(f"{stack.jaeger_query_url}/trace/")


def test_the_verdict_shows_in_the_trace_of_its_step(verdict):
    """Below the step of the rank that it names, as an error, in the words of the finding."""
    (span,) = verdict.spans_in(verdict.first_spans)
    by_id = {s.span_id: s for s in verdict.first_spans}

    assert span.scope == scopes.DIGEST
    assert by_id[span.parent_id].name == names.SPAN_RANK_STEP
    assert by_id[span.parent_id].rank == CULPRIT
    assert span.status == {"code": 2, "message": verdict.finding["summary"]}
    assert span.attributes[names.ARGUS_FINDING_ID] == verdict.finding["id"]
    assert span.attributes[names.ARGUS_FINDING_CAUSE] == "compute_straggler"
    assert span.attributes[names.ARGUS_FINDING_RANKS] == [CULPRIT]


def test_a_second_detect_says_the_same_and_writes_nothing_new(verdict):
    """A verdict is in its trace once, however often somebody asks."""
    assert verdict.second.returncode == 1, verdict.second.stderr
    assert json.loads(verdict.second.stdout) == json.loads(verdict.first.stdout)
    assert len(verdict.spans_in(verdict.second_spans)) == 1


def test_a_dry_run_says_it_and_writes_nothing(verdict):
    """Also where an endpoint is set."""
    assert json.loads(verdict.dry.stdout) == json.loads(verdict.first.stdout)
    assert names.SPAN_ARGUS_FINDING not in {s.name for s in verdict.dry_spans}
