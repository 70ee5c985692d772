"""One is one: no "1 steps" for a person to stumble over."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from argus_otel import service
from argus_otel.cli.demo import Fault, outcome_of
from argus_otel.report.html import render_html
from argus_otel.report.silence import Unjudged, paragraph
from argus_otel.report.text import print_view
from argus_otel.report.view import cost_of, why_of
from argus_otel.report.wording import counted, listed, stretch
from argus_otel.store.opening import open_store
from argus_otel.tables.findings import Finding, Onset

_ONE_OF_MANY = re.compile(r"\b1 (?:rank|step|span|fault|digest|verdict)s\b")


FINDING = Finding(
    detector="slow_steps",
    cause="regression_unexplained",
    ranks=(),
    first_step=1,
    last_step=2,
    onset=Onset(step=1, exact=True),
    severity="info",
    slowdown=1.0,
    summary="",
    next_step="",
    evidence={},
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (counted(0, "span"), "0 spans"),
        (counted(1, "span"), "1 span"),
        (counted(2, "span"), "2 spans"),
        (listed("rank", [3]), "rank 3"),
        (listed("rank", [3, 5]), "ranks 3, 5"),
        (stretch("step", 4, 4), "step 4"),
        (stretch("step", 4, 9), "steps 4 to 9"),
    ],
)
def test_a_noun_follows_its_number(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("name", "value", "phrase"),
    [
        ("own_work_s", 0.075, "own work 75 ms"),
        ("step_s_before", 0.069075, "step before 69.1 ms"),
        ("save_s_of_middle_rank", 2.0, "save of middle rank 2 s"),
        ("run_delay_share_over_others", 0.25, "run delay over others 25%"),
        ("step_scatter_ratio", 0.0173, "step scatter 1.7%"),
        ("own_work_ratio", 1.612, "own work 1.61 times"),
        ("growth_bytes_per_step", 2.5e6, "growth per step 2.5 MB"),
        ("bandwidth_bytes_per_s", 3.2e9, "bandwidth 3.2 GB/s"),
        ("syncs_per_step", 3.0, "syncs per step 3"),
    ],
)
def test_evidence_has_its_unit_and_no_raw_name(name, value, phrase):
    assert why_of(replace(FINDING, evidence={name: value})) == [phrase]


@pytest.mark.parametrize(
    ("evidence", "phrases"),
    [
        (
            {"own_work_s": 0.101, "reference_own_work_s": 0.0624, "own_work_ratio": 1.62},
            ["own work 101 ms instead of 62.4 ms (1.62 times)"],
        ),
        (
            {"data_wait_share": 0.6, "data_wait_share_of_others": 0.01, "data_wait_s": 0.1},
            ["data wait 60% (others: 1%)", "data wait 100 ms"],
        ),
        ({"pass_s": 0.1, "reference_pass_s": 0.02}, ["pass 100 ms instead of 20 ms"]),
    ],
    ids=["with its ratio", "of others", "without a ratio"],
)
def test_a_quantity_is_said_with_its_reference(evidence, phrases):
    """One phrase, not three for the reader to put together."""
    assert why_of(replace(FINDING, evidence=evidence)) == phrases


@pytest.mark.parametrize(
    ("state", "affected", "said"),
    [
        ("open", 60, "1 s of every 2 s step on all ranks: training runs 2 times as long; 3 GPU-hours so far"),
        ("ended", 60, "1 s of every 2 s step on all ranks: training ran 2 times as long; 3 GPU-hours in all"),
        ("open", 4, "1 s in each of 4 steps on all ranks: such a step takes 2 times as long; 3 GPU-hours so far"),
    ],
    ids=["open", "ended", "four of sixty steps"],
)  # fmt: skip
def test_the_cost_is_that_of_the_steps_that_have_it(state, affected, said):
    """A save in each twentieth step does not make training 15 times as long."""
    evidence = {"lost_s_per_step": 1.0, "step_s": 2.0, "steps_affected": affected}

    finding = replace(
        FINDING, evidence=evidence, state=state, step_slowdown=2.0, cost_gpu_hours=3.0, last_step=60
    )

    assert cost_of(finding) == said


@pytest.mark.parametrize(
    ("hours", "said"),
    [(0.00482, "0.0048 GPU-hours so far"), (1.0, "1 GPU-hour so far"), (1234.5, "1,234 GPU-hours so far")],
)  # fmt: skip
def test_hours_are_written_out(hours, said):
    """No 1.2e+03 at 3 a.m."""
    assert cost_of(replace(FINDING, cost_gpu_hours=hours)) == said


def test_a_demo_without_a_fault_does_not_find_one():
    """Nothing was planted: then "found what was planted" says too much."""
    assert outcome_of(Fault.NONE, as_planted=True) == "Nothing was planted, and nothing found."
    assert outcome_of(Fault.GC, as_planted=True) == "Found what was planted."


def test_what_was_not_judged_needs_something():
    """Whatever the reason is, it reads as a sentence."""
    one = Unjudged(
        detectors=("slow_link",),
        missing="a second group that transfers the same, to compare with",
        code="no_peers",
        steps=None,
    )

    said = paragraph([one], width=120, lines=1)

    assert said == (
        "Not judged: slow link (needs a second group that transfers the same, to compare with)."
    )


def test_one_step_of_one_rank_reads_as_one(tmp_path, write_store):
    """Text and page; ten steps of warm-up are left out, so the eleventh is the only one."""
    write_store(tmp_path, {"ranks": 1, "steps": 11})

    view = service.view_of(service.judge(open_store(str(tmp_path)), "latest"))
    with (console := Console(file=io.StringIO(), width=200)).capture() as captured:
        print_view(console, view)
    text = captured.get()
    page = render_html(view)

    assert "1 step (10 to 10) of 1 rank" in text
    assert "1 step (10 to 10) of 1 rank" in page
    assert not _ONE_OF_MANY.search(text)
    assert not _ONE_OF_MANY.search(page)
