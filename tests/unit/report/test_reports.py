"""What a person and a program read."""

import io
import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from argus_otel import service
from argus_otel.cli import detect, report
from argus_otel.report.html import render_html
from argus_otel.report.text import print_view
from argus_otel.store.opening import open_store

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

    assert "CRITICAL  compute straggler: rank 2 on host-1, since step 30, still going on" in text
    assert "its 3 peers" in text
    assert "do now" in text
    assert "http://jaeger:16686/trace/" in text
    assert len(text.partition("not judged")[0].splitlines()) < 30
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_healthy_run_is_said_to_be_so_with_what_that_rests_on(tmp_path, write_store):
    """A number of steps and ranks, not just silence."""
    write_store(tmp_path, HEALTHY)

    text = text_of(view_of(tmp_path))

    assert text.startswith("No fault found in 50 steps (10 to 59) of 4 ranks (run llama-70b-3).\n")


def test_a_run_that_nothing_could_judge_is_not_called_sound(tmp_path, write_store):
    """It has hardly begun."""
    write_store(tmp_path, {"ranks": 4, "steps": 12})

    text = text_of(view_of(tmp_path))

    assert text.startswith("No verdict on 2 steps (10 to 11) of 4 ranks")
    assert "not judged: " in text


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
    assert "<link" not in page


def test_a_link_that_is_no_web_address_is_not_made_clickable(tmp_path, write_store):
    """The page is passed around; a javascript: address would run in somebody's browser."""
    write_store(tmp_path, SLOW)

    assert 'href="javascript' not in render_html(view_of(tmp_path, ui_url="javascript:alert(1)"))
