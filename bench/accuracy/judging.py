"""Simulates one drawn run, asks the detectors (and the methods they are compared with), and scores."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from accuracy.baselines import BASELINES
from argus_otel._runtime.bundled import bundled_path
from argus_otel.align import align
from argus_otel.detect.definition import load_detectors
from argus_otel.detect.engine import diagnose_run
from argus_otel.detect.run import Run, run_of
from argus_otel.simulate.model import Model
from argus_otel.simulate.tables import RunName, TableMaker

if TYPE_CHECKING:
    from accuracy.runs import Drawn
    from argus_otel.simulate.cluster import Cluster
    from argus_otel.simulate.faults import Fault
    from argus_otel.tables.findings import Finding
    from argus_otel.tables.schemas import RunTables

DETECTORS = load_detectors(bundled_path("detectors"))
_MOST_DELAY = 10
_DELAY_EVERY = 4
"""One in so many runs is judged again, step by step after its onset, to see when it is found."""
_MOST_RANKS_FOR_DELAY = 64


def judge(drawn: Drawn) -> dict[str, Any]:
    """Everything that the score needs of one run."""
    began = time.perf_counter()
    cluster = drawn.build_cluster()
    faults = drawn.build_faults()
    maker = TableMaker(Model(cluster, faults, drawn.seed), RunName.of(drawn.id, drawn.seed))
    tables = align(maker.whole(drawn.steps))
    run = run_of(tables)
    outcome = _score(cluster, faults, _findings(run))
    outcome["baselines"] = {
        name: _score_baseline(method(run), faults) for name, method in BASELINES.items()
    }
    if faults and outcome["detected"] and drawn.onset and _wants_delay(drawn, cluster):
        outcome["delay_steps"] = _delay(cluster, faults, tables, drawn)
    return {
        **drawn.as_dict(),
        **outcome,
        "ranks": cluster.ranks,
        "cause": faults[0].cause if faults else None,
        "took_s": round(time.perf_counter() - began, 2),
    }


def _findings(run: Run) -> list[Finding]:
    return list(diagnose_run(run, DETECTORS).diagnosis.findings)


def _score(cluster: Cluster, faults: list[Fault], findings: list[Finding]) -> dict[str, Any]:
    loud = [finding for finding in findings if finding.severity != "info"]
    said = [
        {"cause": f.cause, "ranks": _short(f.ranks), "severity": f.severity, "detector": f.detector,
         "slowdown": f.slowdown, "first_step": f.first_step, "summary": f.summary}
        for f in findings
    ]  # fmt: skip
    if not faults:
        return {
            "detected": bool(loud),
            "right": not loud,
            "warned": False,
            "informed": bool(findings),
            "said": said,
        }
    (fault,) = faults
    strangers = [
        finding
        for finding in loud
        if finding.cause != fault.cause and not set(finding.ranks) & set(fault.ranks)
    ]
    return {
        "detected": bool(findings),
        "right": _is_named(cluster, fault, findings),
        "warned": _is_named(cluster, fault, loud),
        "accused_others": len(strangers),
        "said": said,
    }


def _is_named(cluster: Cluster, fault: Fault, findings: list[Finding]) -> bool:
    """Whether one finding, or several of one cause together, name cause and place."""
    of_cause = [finding for finding in findings if finding.cause == fault.cause]
    together = {rank for finding in of_cause for rank in finding.ranks}
    return any(_is_there(cluster, fault, finding) for finding in of_cause) or (
        bool(fault.ranks) and together == set(fault.ranks)
    )


def _is_there(cluster: Cluster, fault: Fault, finding: Finding) -> bool:
    """Whether a finding of the right cause names the right place."""
    named = set(finding.ranks)
    if not fault.ranks:
        return not named or len(named) == cluster.ranks
    if fault.kind == "stage":
        return named == set(fault.ranks) or finding.evidence.get("stage") == fault.stage
    if fault.kind == "micro_batch":
        stage = int(cluster.places["pp"][fault.ranks[0]])
        return named == set(fault.ranks) or finding.evidence.get("stage") == stage
    return named == set(fault.ranks)


def _score_baseline(said: tuple[bool, frozenset[int]], faults: list[Fault]) -> dict[str, bool]:
    """A method that knows no causes is right where it names the ranks."""
    detected, ranks = bool(said[0]), said[1]
    if not faults:
        return {"detected": detected, "right": not detected}
    return {"detected": detected, "right": detected and ranks == frozenset(faults[0].ranks)}


def _wants_delay(drawn: Drawn, cluster: Cluster) -> bool:
    # What shows in some steps only is told by how often it does: four of twenty.
    if "every=" in (drawn.fault or "") or not drawn.details.get("delay", True):
        return False
    return drawn.seed % _DELAY_EVERY == 0 and cluster.ranks <= _MOST_RANKS_FOR_DELAY


def _delay(
    cluster: Cluster, faults: list[Fault], tables: RunTables, drawn: Drawn
) -> int | None:  # fmt: skip
    """Steps from the onset until the cause is first named; None if not within ``_MOST_DELAY``."""
    for delay in range(1, _MOST_DELAY + 1):
        so_far = run_of(_until(tables, drawn.onset + delay))
        if _score(cluster, faults, _findings(so_far))["right"]:
            return delay
    return None


def _until(tables: RunTables, ordinal: int) -> RunTables:
    """What had arrived when step ``ordinal`` began."""
    cut = {
        name: (table := getattr(tables, name)).filter(pc.less(table["ordinal"], ordinal))
        for name in ("steps", "collectives", "events", "micro_batches", "devices", "heartbeats")
    }
    return replace(tables, **cut)


def _short(ranks: tuple[int, ...]) -> list[int]:
    return list(ranks[:64])
