"""One is one: no "1 steps" for a person to stumble over."""

import io
import re

import pytest
from rich.console import Console

from argus_otel import service
from argus_otel.report.html import render_html
from argus_otel.report.text import print_view
from argus_otel.report.wording import counted, listed, stretch
from argus_otel.store.opening import open_store

_ONE_OF_MANY = re.compile(r"\b1 (?:rank|step|span|fault|digest|verdict)s\b")


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
