"""Kernels from the sender's encoder to the verdict: over HTTP into a store, and out of it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from argus_otel.cli.main import app, register_commands
from argus_otel.service import judge
from argus_otel.store.opening import open_store
from argus_otel.store.receiver import Receiver
from argus_otel.store.writer import ParquetWriter

FAULT = "compute:rank=3,kernel=gemm,factor=1.6,from=15"
EXPERT = "expert:axis=edp,group=1,factor=2,index=2"


@pytest.fixture(scope="module", autouse=True)
def commands():
    if not any(group.name == "detectors" for group in app.registered_groups):
        register_commands("")


def simulate(*options):
    result = CliRunner().invoke(app, ["simulate", *options])
    assert result.exit_code == 0, result.output


@pytest.fixture
def receiver(tmp_path):
    with Receiver(ParquetWriter(tmp_path / "sent")) as serving:
        yield serving


def test_the_slow_kernel_of_a_job_that_was_sent_is_named(receiver, tmp_path):
    """As of the same job that was written into a folder at once."""
    job = ["--cluster", "ddp-8", "--steps", "40", "--seed", "1", "--fault", FAULT]
    simulate(*job, "--otlp", receiver.endpoint)
    simulate(*job, "--out", str(tmp_path / "written"))

    def evidence(folder):
        (finding, *_) = judge(
            open_store(str(tmp_path / folder)), "latest"
        ).verdict.diagnosis.findings
        return {name: value for name, value in finding.evidence.items() if "kernel" in name}

    sent = evidence("sent")
    assert sent["kernels_slow"] == ["gemm"]
    assert sent == evidence("written")


def test_the_busy_expert_of_a_job_that_was_sent_is_named(receiver, tmp_path):
    """Its tokens go the same way."""
    small = ["--set", "dp=8", "--set", "ep=4", "--set", "pp=1", "--set", "noise=0.01"]
    simulate("--cluster", "moe-64", *small, "--steps", "40", "--seed", "1", "--fault", EXPERT,
             "--otlp", receiver.endpoint)  # fmt: skip

    findings = judge(open_store(str(tmp_path / "sent")), "latest").verdict.diagnosis.findings

    (finding,) = [finding for finding in findings if finding.cause == "expert_imbalance"]
    assert finding.evidence["hot_expert"] == 1 * 4 + 2
