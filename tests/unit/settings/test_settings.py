"""Settings: where they come from, and what a person is told who gets one wrong."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.settings import Settings, load

CONFIGURATIONS = Path(__file__).parents[3] / "collector-config"


def test_without_anything_the_defaults_hold():
    """And say so."""
    loaded = load({"PATH": "/bin"})

    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.problems == ()


def test_the_environment_wins_over_the_file(tmp_path):
    """Which wins over the default."""
    file = tmp_path / "argus.toml"
    file.write_text('baseline_ratio = 0.5\nrole = "actor"\n')

    loaded = load({"ARGUS_CONFIG": str(file), "ARGUS_BASELINE_RATIO": "0.25"})

    assert (loaded.settings.baseline_ratio, loaded.settings.role) == (0.25, "actor")
    assert loaded.origins["baseline_ratio"] == "environment"
    assert loaded.origins["role"] == str(file)
    assert loaded.origins["run_id"] == "default"


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_switches_may_be_written_in_any_usual_way(text):
    """Shells and YAML files differ."""
    assert load({"ARGUS_STRICT": text}).settings.strict is True


def test_an_empty_variable_counts_as_unset():
    """As OpenTelemetry says of its own."""
    loaded = load({"ARGUS_RING_EVENTS": ""})

    assert loaded.problems == ()
    assert loaded.origins["ring_events"] == "default"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ARGUS_RING_EVENTS", "64k", "a whole number, 1024 or more, at most 3000000"),
        ("ARGUS_RING_EVENTS", "10", "a whole number, 1024 or more"),
        (
            "ARGUS_QUEUE_BYTES",
            "1000000000000",
            "a whole number, 1048576 or more, at most 1073741824",
        ),
        ("ARGUS_BASELINE_RATIO", "2", "a number, 0 or more, at most 1 (unit 1)"),
        ("ARGUS_BASELINE_RATIO", "nan", "a number, 0 or more"),
        ("ARGUS_STRICT", "maybe", "1 or 0"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_and_the_default_stands(name, value, expected):
    """What it was, what it should be, and what to do."""
    loaded = load({name: value})

    (problem,) = loaded.problems
    assert loaded.settings == Settings()
    assert str(problem).startswith(f"{name} (environment) is '{value}'; expected {expected}")
    assert "unset it for the default of" in str(problem)


def test_a_misspelt_setting_names_the_nearest():
    """The commonest mistake."""
    (problem,) = load({"ARGUS_BASELIN_RATIO": "1"}).problems

    assert "ARGUS_BASELIN_RATIO (environment)" in str(problem)
    assert "Did you mean ARGUS_BASELINE_RATIO?" in str(problem)


def variables_of_the_configurations():
    """Every ``${env:ARGUS_…}`` of the files that are given to a Collector or to Jaeger."""
    files = sorted(CONFIGURATIONS.rglob("*.yaml"))
    return sorted({n for f in files for n in re.findall(r"\$\{env:(ARGUS_\w+)", f.read_text())})


@pytest.mark.parametrize("name", ["ARGUS_LAUNCHED", *variables_of_the_configurations()])
def test_variables_of_the_collectors_configuration_are_no_mistakes(name):
    """They share the prefix, and may be set for a whole host."""
    loaded = load({name: "x"})

    assert loaded.problems == ()
    assert loaded.settings == Settings()


def test_the_configurations_have_variables():
    """Else the test above would say nothing."""
    assert {"ARGUS_COLLECTOR_QUEUE_BYTES", "ARGUS_JAEGER_MAX_TRACES"} <= set(
        variables_of_the_configurations()
    )


@pytest.mark.parametrize(
    "text",
    ["ring_events = 2000.5", "ring_events = inf", "baseline_ratio = [1]", "enabled = {a = 1}"],
)
def test_a_wrong_type_in_the_file_is_a_problem_and_no_crash(tmp_path, text):
    """A fraction is not cut to a whole number behind one's back."""
    file = tmp_path / "argus.toml"
    file.write_text(text)

    loaded = load({"ARGUS_CONFIG": str(file)})

    assert len(loaded.problems) == 1
    assert loaded.settings == Settings(config=str(file))


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"a = = b"])
def test_a_file_that_cannot_be_read_is_a_problem_and_no_crash(tmp_path, content):
    """Absent, not text, not TOML."""
    file = tmp_path / "argus.toml"
    if content is not None:
        file.write_bytes(content)

    (problem,) = load({"ARGUS_CONFIG": str(file)}).problems

    assert "ARGUS_CONFIG" in str(problem)


@given(
    st.dictionaries(
        st.sampled_from([f"ARGUS_{field.name.upper()}" for field in fields(Settings)]),
        st.text(st.characters(exclude_characters="\0"), max_size=12),
    )
)
def test_loading_never_raises(environ):
    """It runs in every rank of a job."""
    load(environ)


def test_the_names_of_the_settings_are_frozen():
    """A new one is a decision: it is for ever."""
    assert sorted(field.name for field in fields(Settings)) == [
        "baseline_ratio",
        "cache_dir",
        "config",
        "detail_spans",
        "enabled",
        "exception_messages",
        "flush_timeout_s",
        "interval_s",
        "overhead_budget",
        "queue_bytes",
        "ring_events",
        "role",
        "run_id",
        "store",
        "strict",
    ]


def test_every_setting_says_what_it_means():
    """The reference page and `argus doctor` are made from it."""
    assert [field.name for field in fields(Settings) if not field.metadata["meaning"]] == []
