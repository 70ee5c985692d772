"""A link that is really slow: hosts in network namespaces, one of them behind ``tc tbf``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
RUN = "fsdp × 4 hosts, links of 400 Mbit/s, one at 100, slow rank 2"


@pytest.mark.timeout(400)
def test_the_host_with_the_slow_link_is_named_and_nobody_else():
    """Four ranks train for real over four links; the third has a quarter of the others' rate."""
    done = subprocess.run(
        [sys.executable, str(BENCH / "robustness.py"), "--json", "--only", RUN],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    if run["verdict"] == "not run":
        pytest.skip(f"no hosts of their own here: {run['missing']}")

    assert run["verdict"] != "failed", done.stderr
    serious = [finding for finding in run["findings"] if finding["severity"] != "info"]
    assert [(f["cause"], f["ranks"], f["hosts"]) for f in serious] == [
        ("slow_link", [2], ["node-2"])
    ], run
