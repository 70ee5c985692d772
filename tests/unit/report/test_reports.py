"""What a person and a program read."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from argus_otel import service
from argus_otel._runtime.bundled import bundled_path
from argus_otel._runtime.errors import ConfigError
from argus_otel.cli import detect, report
from argus_otel.convert.flight_recorder import convert_flight_recorder
from argus_otel.report.html import render_html
from argus_otel.report.text import print_view
from argus_otel.store.bulk import write_run
from argus_otel.store.opening import open_store
from argus_otel.tables.findings import Diagnosis, Finding, Onset, Suppressed

SLOW = {
    "ranks": 4,
    "steps": 80,
    "ranks_per_host": 2,
    "changes": [{"ranks": [2], "steps": [30, 80], "own_times": 1.6}],
}
HEALTHY = {"ranks": 4, "steps": 60}


@pytest.fixture
def command():
    """``argus`` with the two commands; errors come out as exceptions."""
    app = typer.Typer()
    detect.register(app)
    report.register(app)

    def run(*arguments, **environment):
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": None, "NO_COLOR": "1", **environment}
        return CliRunner().invoke(app, [str(a) for a in arguments], env=env)

    return run


def view_of(folder, **options):
    """What the reports are given for a store folder."""
    return service.view_of(service.judge(open_store(str(folder)), "latest"), **options)


def text_of(view, **options):
    """The text, 100 columns wide."""
    out = io.StringIO()
    print_view(Console(file=out, width=100, no_color=True), view, **options)
    return out.getvalue()


def test_the_text_says_who_since_when_what_it_costs_and_what_to_do(tmp_path, write_store):
    """Everything that a person who was woken needs, in one screen."""
    write_store(tmp_path, SLOW)

    text = text_of(view_of(tmp_path, ui_url="http://jaeger:16686/"))

    assert (
        "CRITICAL  compute straggler: rank 2 on host-1, since step 30, still so at step 79" in text
    )
    assert "its 3 peers" in text
    assert "do now" in text
    assert "http://jaeger:16686/trace/" in text
    assert len(text.splitlines()) < 22
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_healthy_run_is_said_to_be_so_with_what_that_rests_on(tmp_path, write_store):
    """A number of steps and ranks, not just silence; and in one line what was not judged."""
    write_store(tmp_path, HEALTHY)

    sound, silent = text_of(view_of(tmp_path)).splitlines()

    assert sound == "No fault found in 50 steps (10 to 59) of 4 ranks (run llama-70b-3)."
    assert silent.startswith("Not judged: ")
    assert "comm regression" in silent


def test_what_this_job_cannot_have_is_not_listed_as_unjudged(tmp_path, write_store):
    """It has no stages, experts or GPUs; whoever wants to know asks with -v, and gets reasons."""
    write_store(tmp_path, HEALTHY)
    view = view_of(tmp_path)

    assert "pipeline" not in text_of(view)
    verbose = text_of(view, verbose=True)
    assert "pipeline imbalance, steps 0 to 59. Needs the stage of each rank" in verbose
    assert all(line == line.rstrip() for line in verbose.splitlines())


def test_a_run_with_half_of_its_ranks_is_not_called_sound(tmp_path, write_store):
    """Half of the ranks are silent: that is told, and that the rest says nothing."""
    write_store(tmp_path, {"ranks": 8, "steps": 60, "missing": [{"ranks": [4, 5, 6, 7]}]})

    text = text_of(view_of(tmp_path))

    assert text.startswith("No verdict on 50 steps (10 to 59) of 4 of 8 ranks")
    assert "only 4 sent any" in text
    assert "silent rank: ranks 4-7" in text


def test_a_hang_in_a_run_without_settled_steps_comes_first(tmp_path):
    """A verdict with a fault is one; what could not be judged comes after it."""
    archive = Path(__file__).parents[2] / "data/nvrx/flight_recorder_gpu_error.tar.gz"
    (conversion,) = convert_flight_recorder([archive])
    write_run(tmp_path, conversion.summary, conversion.blocks)

    view = view_of(tmp_path)
    text = text_of(view)

    assert text.startswith("1 fault in a run of 16 ranks that shows no settled step (run ")
    assert text.index("CRITICAL  hang") < text.index("Not judged: ")
    assert "are in their own code" in " ".join(text.split())
    assert "(its trace is not stored)" in text
    assert "Too little is known" not in render_html(view)


def test_the_stack_of_who_hangs_is_shown(tmp_path, write_store):
    """A frame a line, outermost first: the next step says to read it."""
    write_store(tmp_path, HEALTHY)
    evidence = {"stack": "train.py:9 main > io.py:3 read", "look_at_step": 5, "look_at_rank": 1}
    stuck = finding(cause="hang", ranks=(1,), evidence=evidence)
    view = replace(view_of(tmp_path), diagnosis=Diagnosis(findings=(stuck,)))

    lines = text_of(view).splitlines()

    at = lines.index("  stack    train.py:9 main")
    assert lines[at + 1] == "           io.py:3 read"
    assert "<code>io.py:3 read</code>" in render_html(view)


def test_a_run_that_has_hardly_begun_gets_no_verdict(tmp_path, write_store):
    """One reason, not one for each detector."""
    write_store(tmp_path, {"ranks": 4, "steps": 12})

    verdict, reason = text_of(view_of(tmp_path)).splitlines()[:2]

    assert verdict == "No verdict on 2 steps (10 to 11) of 4 ranks (run llama-70b-3)."
    assert "20 steps" in reason


def finding(**differences):
    """A finding of nobody in particular."""
    about = {
        "detector": "slow_steps",
        "cause": "regression_unexplained",
        "ranks": (),
        "first_step": 30,
        "last_step": 59,
        "onset": Onset(step=30, exact=True),
        "severity": "warning",
        "slowdown": 1.4,
        "summary": "Steps take longer.",
        "next_step": "Look.",
    }
    return Finding(**{**about, **differences})


@pytest.mark.parametrize(
    ("differences", "place"),
    [
        ({}, "all 32 ranks"),
        ({"ranks": tuple(range(32))}, "all 32 ranks"),
        ({"ranks": tuple(range(24, 32))}, "stage 3 (ranks 24-31)"),
        ({"ranks": (3, 4), "hosts": ("a",)}, "ranks 3-4 on a"),
        ({"groups": ("77",)}, "dp group of 8 ranks"),
        ({"groups": ("77", "78", "79")}, "dp group of 8 ranks, 78 and 1 more group"),
    ],
    ids=["nobody", "everybody", "a stage", "two ranks", "a group", "groups"],
)
def test_a_place_is_named_as_people_name_it(tmp_path, write_store, differences, place):
    """Nobody to blame is everybody; a stage is a stage and not eight numbers."""
    write_store(tmp_path, HEALTHY)
    view = view_of(tmp_path)
    view = replace(
        view,
        run=replace(view.run, world_size=32),
        stages={3: tuple(range(24, 32))},
        group_names={"77": "dp group of 8 ranks"},
    )

    assert view.place_of(finding(**differences)) == place


def test_the_worst_comes_first_and_notes_are_short(tmp_path, write_store):
    """What costs most may need nobody; two lines of it are enough beside what does."""
    write_store(tmp_path, HEALTHY)
    judged = service.judge(open_store(str(tmp_path)), "latest")
    note = finding(severity="info", summary="A note.", cost_gpu_hours=9.0)
    fault = finding(severity="critical", ranks=(2,), summary="A fault.", cost_gpu_hours=1.0)
    verdict = replace(judged.verdict, diagnosis=Diagnosis(findings=(note, fault)))

    text = text_of(service.view_of(replace(judged, verdict=verdict)))

    assert text.startswith("1 fault and 1 note in 50 steps")
    assert text.index("A fault.") < text.index("A note.")
    assert text.count("do now") == 1


def test_a_run_with_nothing_but_notes_has_no_fault(tmp_path, write_store):
    """As the exit code says."""
    write_store(tmp_path, HEALTHY)
    judged = service.judge(open_store(str(tmp_path)), "latest")
    verdict = replace(judged.verdict, diagnosis=Diagnosis(findings=(finding(severity="info"),)))

    text = text_of(service.view_of(replace(judged, verdict=verdict)))

    assert text.startswith("No fault found and 1 note in 50 steps")


def test_a_symptom_without_ranks_is_one_of_all(tmp_path, write_store):
    """No dangling "on ranks"."""
    write_store(tmp_path, HEALTHY)
    view = view_of(tmp_path)

    said = [
        view.symptom_of(Suppressed(cause="regression_unexplained", ranks=())),
        view.symptom_of(Suppressed(cause="gpu_throttled", ranks=(1,))),
    ]

    assert said == ["steps slower than before, on all ranks", "GPU throttled, on rank 1"]


@pytest.mark.parametrize(
    ("case", "code"),
    [(HEALTHY, 0), (SLOW, 1), ({"ranks": 4, "steps": 12}, 3)],
    ids=["healthy", "slow", "too short"],
)
def test_the_exit_code_tells_sound_from_ill_from_unknown(
    tmp_path, command, write_store, case, code
):
    """Scripts and CI go by it."""
    write_store(tmp_path, case)

    assert command("detect", "--store", tmp_path, "--dry-run").exit_code == code


def test_what_was_published_is_said(tmp_path, command, write_store):
    """Each time: that nothing was new is not the same as that an endpoint took it."""
    write_store(tmp_path, SLOW)

    said = [
        command("detect", "--store", tmp_path, *options).stderr
        for options in (["--dry-run"], [], ["--otlp-endpoint", "http://127.0.0.1:9"])
    ]

    assert said == [
        "argus: nothing published (dry run)\n",
        "argus: 1 new verdict written into the traces\n",
        "argus: nothing new to write into the traces\n",
    ]


def test_a_detector_that_replaces_a_bundled_one_is_named(tmp_path, command, write_store):
    """It may be a slip of the pen, and then its cause is silently judged no more."""
    (tmp_path / "store").mkdir()
    write_store(tmp_path / "store", HEALTHY)
    folder = bundled_path("detectors") / "compute_straggler"

    result = command("detect", "--store", tmp_path / "store", "--detectors", folder)

    assert "compute_straggler of --detectors in place of" in result.stderr


def test_a_store_with_only_older_runs_is_not_called_empty(tmp_path, command, write_store):
    """Its newest is named, with its time."""
    write_store(tmp_path, HEALTHY)

    message = str(command("detect", "--store", tmp_path, "--since", "1s").exception)

    assert "without a run in the last 1s" in message
    assert "The newest, llama-70b-3, is from " in message


def test_a_store_that_cannot_be_read_has_a_code_of_its_own(tmp_path, command):
    """The error carries 4, which the root command exits with."""
    result = command("detect", "--store", tmp_path / "nowhere")

    assert result.exception.exit_code == 4


def test_json_carries_the_findings_schema_and_links(tmp_path, command, write_store):
    """What other programs parse."""
    write_store(tmp_path, SLOW)

    result = command("detect", "--store", tmp_path, "--dry-run", "--json", "--ui-url", "http://j")

    document = json.loads(result.stdout)
    (finding,) = document["findings"]
    assert document["schema"] == "argus.findings/1"
    assert finding["ranks"] == [2]
    assert finding["evidence"]["url"] == f"http://j/trace/{finding['evidence']['trace_id']}"


def test_colours_are_left_out_where_no_color_is_set(tmp_path, command, write_store):
    """Also in a terminal."""
    write_store(tmp_path, SLOW)

    result = command("detect", "--store", tmp_path, "--dry-run", FORCE_COLOR="1")

    assert "\x1b[31" not in result.stdout
    assert "\x1b[1;31" not in result.stdout


def test_the_page_is_one_file_and_shows_the_verdict(tmp_path, command, write_store):
    """It opens where there is no network; run names cannot smuggle markup in."""
    (tmp_path / "store").mkdir()
    write_store(tmp_path / "store", SLOW, run_id="<script>alert(1)</script>")

    result = command("report", "--store", tmp_path / "store", "--html", tmp_path / "page.html")

    assert result.exit_code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "compute straggler: rank 2 on host-1" in page
    assert "<script>alert(1)" not in page
    assert 'id="heat"' in page
    assert 'id="timeline"' in page
    assert "<script src=" not in page
    assert '<link rel="stylesheet' not in page


def test_the_page_has_a_name_of_its_own_and_the_verdict_is_said(
    tmp_path, command, write_store, monkeypatch
):
    """Without --html, in the working folder."""
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "store", SLOW)

    result = command("report", "--store", "store")

    wrote, verdict = result.stdout.splitlines()
    assert wrote == "Wrote argus-report.html"
    assert verdict == "1 fault in 70 steps (10 to 79) of 4 ranks (run llama-70b-3)."
    assert (tmp_path / "argus-report.html").is_file()


@pytest.mark.parametrize(
    "url", ["foo", "jaeger:16686", "javascript:alert('{trace_id}')", "http://"]
)
def test_an_address_that_makes_no_link_is_refused(tmp_path, command, write_store, url):
    """Before a page is passed around with links that lead nowhere."""
    write_store(tmp_path, HEALTHY)

    error = command("report", "--store", tmp_path, "--ui-url", url).exception

    assert isinstance(error, ConfigError)
    assert "--ui-url" in str(error)


def test_a_link_that_is_no_web_address_is_not_made_clickable(tmp_path, write_store):
    """The page is passed around; a javascript: address would run in somebody's browser."""
    write_store(tmp_path, SLOW)

    assert 'href="javascript' not in render_html(view_of(tmp_path, ui_url="javascript:alert(1)"))
