"""``argus demo --stack``: the demo through a real Collector into a real Jaeger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1800)]

BIN = Path(sys.executable).parent
STEPS = 60
TRIES = 2
"""A machine that does other things as well may slow another rank once; a wrong verdict repeats."""


def demo(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ARGUS_", "OTEL_", "TORCHELASTIC_", "PYTEST_"))
    }
    return subprocess.run(
        [
            *(BIN / "argus", "demo", "--stack", "--json", "--fault", "compute"),
            *("--ranks", "2", "--steps", str(STEPS), "--store", folder),
        ],
        env=environment | {"PATH": f"{BIN}:{os.environ.get('PATH', '')}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.mark.usefixtures("binaries")
def test_the_demo_finds_its_fault_through_collector_and_jaeger(tmp_path):
    """And leaves the report behind, with all steps of both ranks in what it judged."""
    for attempt in range(TRIES):
        folder = tmp_path / f"demo-{attempt}"
        done = demo(folder)
        assert done.returncode in (0, 1), done.stderr
        document = json.loads(done.stdout)
        assert document["planted"]["ranks"] == [1]
        page = (folder / "report.html").read_text("utf-8")
        assert f"{STEPS - 10} steps (10 to {STEPS - 1}) of 2 ranks" in page
        if done.returncode == 0:
            break

    assert done.returncode == 0, done.stdout
    assert document["as_planted"] is True
    assert ("compute_straggler", [1]) in [(f["cause"], f["ranks"]) for f in document["findings"]]
    assert "http://127.0.0.1:" in page  # links into that Jaeger
