"""The page in a real browser: it draws everything without an error, and says what the JSON says."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from argus_otel import service
from argus_otel.report.charts import heat_map
from argus_otel.report.html import render_html
from argus_otel.report.json import render_json
from argus_otel.report.links import trace_url
from argus_otel.report.pictures import Heat, transfers_of
from argus_otel.report.view import cost_of, since_of
from argus_otel.simulate.cluster import PRESETS
from argus_otel.simulate.faults import parse_fault
from argus_otel.simulate.model import Model
from argus_otel.simulate.tables import RunName, TableMaker
from argus_otel.store.bulk import write_run
from argus_otel.store.opening import open_store
from argus_otel.tables.schemas import RunSummary

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


def simulated(folder, cluster, *faults, steps=50):
    """A simulated run in a store folder, judged, with its view and pictures."""
    job, name = PRESETS[cluster], RunName.of("sim", 1)
    model = Model(job, [parse_fault(fault, job) for fault in faults], 1)
    summary = RunSummary(
        run=name.nonce.hex(), run_id="sim", attempt=0, role="trainer", service="simulated",
        world_size=job.ranks, ranks_seen=0, first_ns=0, last_ns=0, steps=0,
    )  # fmt: skip
    write_run(folder, summary, TableMaker(model, name).blocks(steps, block=steps))
    store = open_store(str(folder))
    return service.view_of(
        service.judge(store, "latest"), ui_url="http://jaeger:16686", store=store
    )


class Cards(HTMLParser):
    """Text of each finding's card, by the finding's id, and the attributes of the body."""

    def __init__(self):
        super().__init__()
        self.cards, self.body, self._open = {}, {}, None

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "body":
            self.body = attributes
        if tag == "section":
            self._open = attributes.get("data-finding")

    def handle_endtag(self, tag):
        if tag == "section":
            self._open = None

    def handle_data(self, data):
        if self._open is not None:
            self.cards[self._open] = f"{self.cards.get(self._open, '')} {data.strip()}"


def open_page(page, profile):
    """The document after its scripts ran, and what the browser complained of."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--v=0", f"--user-data-dir={profile}", "--virtual-time-budget=15000", "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
@pytest.mark.parametrize(
    ("cluster", "fault", "charts"),
    [
        ("pipeline-32", "micro_batch:rank=24,extra_s=0.2,index=3,from=30", 3),
        ("ddp-8", "compute:rank=3,factor=1.6,from=30", 2),
    ],
)
def test_a_browser_draws_it_all_and_shows_the_numbers_of_the_json(tmp_path, cluster, fault, charts):
    view = simulated(tmp_path / "store", cluster, fault)
    (tmp_path / "page.html").write_text(render_html(view), encoding="utf-8")

    document, complaints = open_page(tmp_path / "page.html", tmp_path / "profile")

    assert complaints == []
    seen = Cards()
    seen.feed(document)
    assert int(seen.body["data-drawn"]) >= charts
    assert document.count('class="main-svg"') >= charts
    findings = json.loads(render_json(view))["findings"]
    assert set(seen.cards) == {finding["id"] for finding in findings}
    for finding, known in zip(findings, view.diagnosis.findings, strict=True):
        card = seen.cards[finding["id"]]
        for text in (finding["summary"], finding["next_step"], cost_of(known), since_of(known)):
            assert text in card
        assert f"step {finding['evidence']['look_at_step']}" in card
        assert f'href="{finding["evidence"]["url"]}"' in document


def test_the_page_carries_the_json_and_the_chart_library_once(tmp_path):
    """Programs read the first; the second is half of the page's size even compressed."""
    view = simulated(tmp_path, "ddp-8", "compute:rank=3,factor=1.6,from=30")

    page = render_html(view)

    (packed,) = re.findall(r'id="argus-findings">(.*?)</script>', page, re.DOTALL)
    assert json.loads(packed) == json.loads(render_json(view))
    assert page.count('id="plotly-gz"') == 1
    assert "https://cdn" not in page
    assert len(page) < 3_000_000


def test_waits_and_transfers_of_a_step_add_up_to_its_operations(tmp_path):
    """Nothing is drawn that was not measured, and nothing of it is lost."""
    simulated(tmp_path, "ddp-8", "compute:rank=3,factor=1.6,from=30")
    store = open_store(str(tmp_path))
    rows = store.read(store.resolve("latest"), (40, 41)).collectives

    transfer_s = transfers_of(rows)

    duration_s = rows["duration_s"].to_numpy()
    assert (transfer_s <= duration_s + 1e-12).all()
    waits = {
        rank: float((duration_s - transfer_s)[rows["rank"].to_numpy() == rank].sum())
        for rank in range(8)
    }
    assert min(waits, key=waits.get) == 3


def test_a_large_job_is_drawn_as_percentiles_and_its_slowest_hosts():
    """Twelve thousand rows would be a grey blur of 50 MB."""
    ranks, steps = 12_960, 100
    ratio_SR = np.ones((steps, ranks))
    ratio_SR[40:, 1000] = 1.6
    heat = Heat(
        ordinals_S=np.arange(steps),
        ranks_R=np.arange(ranks),
        hosts_R=tuple(f"host-{rank // 8}" for rank in range(ranks)),
        stage_R=np.arange(ranks) // 4320,
        ratio_SR=ratio_SR,
    )

    figure = heat_map(heat, [])

    (cells,) = figure.data
    assert len(cells.y) <= 64
    assert cells.y[0] == "stage 0, median"
    assert "host-125, slowest" in cells.y
    assert len(figure.to_json()) < 200_000


@pytest.mark.parametrize(
    ("ui_url", "expected"),
    [
        ("http://jaeger:16686/", "http://jaeger:16686/trace/5718"),
        ("https://apm/t?id={trace_id}&x=1", "https://apm/t?id=5718&x=1"),
    ],
)
def test_a_link_leads_to_the_trace(ui_url, expected):
    assert trace_url(ui_url, "5718", 0, 1) == expected


def test_a_grafana_link_opens_the_trace_in_tempo_at_the_runs_time():
    """As Grafana's explore page writes its own address."""
    url = trace_url("grafana+https://g:3000/base?datasource=abc", "5718", 10**18, 10**18 + 10**9)

    head, _, panes = url.partition("&panes=")
    assert head == "https://g:3000/base/explore?schemaVersion=1&orgId=1"
    assert "%22query%22%3A%225718%22" in panes
    assert "%22uid%22%3A%22abc%22" in panes
    assert "%22from%22%3A%22999999940000%22" in panes
