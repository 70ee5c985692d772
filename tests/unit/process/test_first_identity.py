"""What a process is called before a process group says so."""

import os
import re

import pytest

from argus_otel.process.first_identity import first_identity
from argus_otel.process.tracer import _metric_interval_s
from argus_otel.settings import Settings

STARTED = {"ARGUS_LAUNCHED": "1790000000.0", "MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}


def run_id(**environ):
    return first_identity(Settings(), environ).run_id


def test_rank_and_attempt_are_the_launchers():
    """Each process has a nonce of its own until it meets the others."""
    environ = {"RANK": "5", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}

    one, other = (first_identity(Settings(role="actor"), environ) for _ in range(2))

    assert (one.rank, one.local_rank, one.attempt, one.role, one.world_size) == (
        5,
        1,
        2,
        "actor",
        1,
    )
    assert one.nonce != other.nonce
    assert not one.nonce_local


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"])
def test_a_number_that_is_none_counts_as_zero(name):
    """Whatever set it, training goes on."""
    identity = first_identity(Settings(), {name: "many"})

    assert (identity.rank, identity.local_rank, identity.attempt) == (0, 0, 0)


def test_a_run_is_called_what_its_user_says_else_what_its_scheduler_does():
    assert first_identity(Settings(run_id="night"), {"SLURM_JOB_ID": "77"}).run_id == "night"
    assert run_id(SLURM_JOB_ID="77", JOB_NAME="other") == "77"
    assert run_id(TORCHELASTIC_RUN_ID="my-run") == "my-run"


@pytest.mark.parametrize(
    "nobodys", ["", "none", "None", "0f3a7c52-8d1e-4b6f-9a2c-5e7d8f901234"],
    ids=["empty", "torchrun's default", "capital", "torchrun --standalone"],
)  # fmt: skip
def test_a_name_that_nobody_gave_is_passed_over_for_the_time_of_the_start(nobodys):
    """All ranks of a host say the same; a job that starts beside it says another."""
    names = {run_id(TORCHELASTIC_RUN_ID=nobodys, **STARTED) for _ in range(2)}
    beside = run_id(TORCHELASTIC_RUN_ID=nobodys, **STARTED | {"MASTER_PORT": "29501"})

    (name,) = names
    assert re.fullmatch(r"run-20260921-141320-[0-9a-f]{4}", name)
    assert beside.rpartition("-")[0] == name.rpartition("-")[0]
    assert beside != name


def test_without_a_mark_of_the_launcher_the_parents_start_counts():
    """It was before now, and this machine's boot was before that."""
    assert re.fullmatch(r"run-\d{8}-\d{6}-[0-9a-f]{4}", run_id())
    assert run_id() == run_id()
    assert os.getppid() > 0


@pytest.mark.parametrize(
    ("environ", "expected_s"),
    [
        ({}, 60.0),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "5000"}, 5.0),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "soon"}, 60.0),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "-5"}, 60.0),
        ({"OTEL_METRICS_EXPORTER": "none"}, None),
        ({"OTEL_METRICS_EXPORTER": "prometheus,otlp"}, 60.0),
    ],
)
def test_metrics_leave_as_often_as_opentelemetrys_variables_say(environ, expected_s):
    """Milliseconds there; a value that is none is as if it were not set."""
    assert _metric_interval_s(environ) == expected_s
