"""``argus demo``: a small real job with a fault planted, traced, stored, judged."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from argus_otel._runtime.errors import ArgusError
from argus_otel.cli.launching import run_and_wait, traced_environment
from argus_otel.cli.run import run_local
from argus_otel.report.html import render_html
from argus_otel.report.text import print_view
from argus_otel.service import default_ui_url, judge, publish, view_of
from argus_otel.store.opening import open_store
from argus_otel.tables.findings import diagnosis_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from argus_otel.service import Judged

_JOB: Final = Path(__file__).parent / "demo_job" / "train.py"
_LEAST_STEPS: Final = 60
"""10 of warm-up are left out, a window has 20, and the fault begins a third into the rest."""
_READ_BACK_S: Final = 60.0


class Fault(StrEnum):
    """What is planted, in one rank."""

    NONE = "none"
    COMPUTE = "compute"
    INPUT = "input"
    GC = "gc"


_CAUSE_OF: Final = {
    Fault.COMPUTE: "compute_straggler",
    Fault.INPUT: "input_stall",
    Fault.GC: "gc_pause",
}
_IN_WORDS: Final = {
    Fault.NONE: "nothing: a healthy run",
    Fault.COMPUTE: "three times the matrix work",
    Fault.INPUT: "a slow read of every sample",
    Fault.GC: "much garbage and a full collection in every third step",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    fault: Annotated[Fault, typer.Option(help="What to plant in one rank.")] = Fault.COMPUTE,
    ranks: Annotated[int, typer.Option(min=2, max=64, help="Ranks, on this machine.")] = 4,
    steps: Annotated[
        int, typer.Option(min=_LEAST_STEPS, max=100_000, help="Training steps.")
    ] = 120,
    stack: Annotated[
        bool, typer.Option("--stack", help="Send through a real Collector into a real Jaeger.")
    ] = False,
    store: Annotated[Path, typer.Option(help="Folder for the store and the report.")] = Path(
        "argus-demo"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a small DDP model with a fault planted in one rank, and find it.

    Everything is real: torchrun, gloo, the launcher, the store and the detectors. Exits with 0
    when what was found is what was planted.
    """
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    culprit = ranks - 2 if ranks > 2 else 1
    from_step = max(10 + 5, steps // 3)
    where = "" if fault is Fault.NONE else f" in rank {culprit}, from step {from_step}"
    console.print(f"Planted: {_IN_WORDS[fault]}{where}.", markup=False)
    console.print(f"Training {steps} steps on {ranks} ranks (torchrun, gloo, CPU) …", markup=False)
    job = _job(fault, ranks, steps, culprit, from_step)
    began_s = time.monotonic()
    with _in_stack(job, console) if stack else _beside_receiver(job, store) as store_url:
        console.print(f"Trained and stored in {time.monotonic() - began_s:.0f} s.", markup=False)
        judged = _judge_when_complete(store_url, ranks, steps)
        if not stack:
            publish(judged, open_store(store_url), store_url, endpoint=None)
        view = view_of(judged, ui_url=default_ui_url(store_url), store=open_store(store_url))
    report = store / "report.html"
    store.mkdir(parents=True, exist_ok=True)
    report.write_text(render_html(view), "utf-8")
    as_planted = _as_planted(judged, fault, culprit)
    if as_json:
        document = diagnosis_document(judged.run.run, judged.verdict.diagnosis)
        document["planted"] = {
            "fault": str(fault),
            "ranks": [] if fault is Fault.NONE else [culprit],
            "from_step": None if fault is Fault.NONE else from_step,
        }
        document["as_planted"] = as_planted
        typer.echo(json.dumps(document))
    else:
        console.print()
        print_view(console, view)
        console.print()
    console.print(outcome_of(fault, as_planted=as_planted), markup=False)
    console.print(f"Look at it:  {report}", markup=False)
    if not stack:
        console.print(f"Once more:   argus detect --store {store}", markup=False)
    if not as_planted:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Job:
    command: list[str]
    environ: dict[str, str]

    def run(self, runner: Callable[[list[str], dict[str, str]], int]) -> None:
        code = runner(self.command, self.environ)
        if code:
            raise ArgusError(
                "the demo's training job",
                got=f"ended, with exit code {code}",
                expected="a job that trains to its end",
                fix="Its output above says why. Is torch installed? (pip install torch)",
            )


def _job(fault: Fault, ranks: int, steps: int, culprit: int, from_step: int) -> _Job:
    environ = traced_environment(os.environ)
    environ |= {
        "DEMO_FAULT": str(fault),
        "DEMO_RANK": str(-1 if fault is Fault.NONE else culprit),
        "DEMO_FROM_STEP": str(from_step),
        "DEMO_STEPS": str(steps),
        "OMP_NUM_THREADS": "1",
        "ARGUS_RUN_ID": time.strftime("demo-%Y%m%d-%H%M%S", time.gmtime()),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return _Job([*command, "--nproc-per-node", str(ranks), str(_JOB)], environ)


@contextmanager
def _beside_receiver(job: _Job, store: Path) -> Iterator[str]:
    job.run(lambda command, environ: run_local(command, environ, str(store), quiet=True))
    yield str(store)


@contextmanager
def _in_stack(job: _Job, console: Console) -> Iterator[str]:
    from argus_otel.stack import running_stack

    console.print("Starting a Collector and a Jaeger (built once, minutes) …", markup=False)
    with running_stack(decision_wait_s=2) as stack:
        job.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = stack.otlp_http_url
        job.run(run_and_wait)
        yield f"jaeger+{stack.jaeger_query_url}"


def _judge_when_complete(store_url: str, ranks: int, steps: int) -> Judged:
    """Judge the newest run once all of it can be read: a Collector hands on in batches."""
    end_s = time.monotonic() + _READ_BACK_S
    while True:
        try:
            judged = judge(open_store(store_url), "latest")
        except ArgusError:
            if time.monotonic() > end_s:
                raise
        else:
            if judged.steps.num_rows >= ranks * steps or time.monotonic() > end_s:
                return judged
        time.sleep(0.5)


def outcome_of(fault: Fault, *, as_planted: bool) -> str:
    """The last sentence: whether what was found is what was planted."""
    if fault is Fault.NONE:
        found = "nothing found" if as_planted else "something found all the same"
        return f"Nothing was planted, and {found}."
    return f"Found {'what' if as_planted else 'something else than'} was planted."


def _as_planted(judged: Judged, fault: Fault, culprit: int) -> bool:
    """Whether the findings above info are exactly what was planted."""
    found = [f for f in judged.verdict.diagnosis.findings if f.severity != "info"]
    if fault is Fault.NONE:
        return not found
    return [(f.cause, f.ranks) for f in found] == [(_CAUSE_OF[fault], (culprit,))]
