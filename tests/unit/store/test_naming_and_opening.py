"""What people type: names of runs, addresses of stores, headers."""

import pytest

from argus_otel._runtime.errors import ConfigError, StoreError
from argus_otel.store.jaeger import JaegerStore
from argus_otel.store.naming import resolve
from argus_otel.store.opening import open_store, read_headers
from argus_otel.store.parquet import ParquetStore
from argus_otel.tables.schemas import RunSummary


def run(nonce, run_id="llama", *, attempt=0, role="trainer", first=0, last=10):
    return RunSummary(
        run=nonce,
        run_id=run_id,
        attempt=attempt,
        role=role,
        service="training",
        world_size=8,
        ranks_seen=8,
        first_ns=first,
        last_ns=last,
        steps=5,
    )


FIRST = run("aa01", last=10)
RESTART = run("ab02", attempt=1, first=20, last=30)
OTHER = run("bc03", "mixtral", last=5)
RUNS = [OTHER, FIRST, RESTART]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latest", RESTART),
        ("llama", RESTART),
        ("mixtral", OTHER),
        ("aa01", FIRST),
        ("b", OTHER),
        ("AB", RESTART),
    ],
)
def test_a_run_is_found_by_latest_its_id_or_the_start_of_its_nonce(name, expected):
    """Of several attempts under one id the newest is meant."""
    assert resolve(name, RUNS, store="here") is expected


def test_a_restart_wins_over_an_attempt_whose_last_spans_came_at_the_same_moment():
    """A tie of times must not depend on the order of folders."""
    assert resolve("llama", [run("aa", attempt=1), run("ab")], store="here").attempt == 1


def test_a_prefix_of_several_nonces_is_ambiguous():
    """And the answer lists them."""
    with pytest.raises(StoreError, match="ambiguous") as raised:
        resolve("a", RUNS, store="here")

    assert "aa01" in str(raised.value)
    assert "ab02" in str(raised.value)


def test_worlds_that_ran_side_by_side_are_told_apart_by_nonce_only():
    """Trainer and rollout of one reinforcement-learning job share the id."""
    worlds = [run("aa01"), run("bb02", role="rollout", last=11)]

    with pytest.raises(StoreError, match="side by side"):
        resolve("llama", worlds, store="here")

    assert resolve("aa", worlds, store="here") is worlds[0]


def test_an_unknown_name_is_answered_with_the_nearest():
    """A typing slip."""
    with pytest.raises(StoreError, match="Nearest: mixtral"):
        resolve("mixtrel", RUNS, store="here")


def test_an_empty_store_says_so():
    """Not 'unknown run': nothing has arrived at all."""
    with pytest.raises(StoreError, match="no run has sent anything"):
        resolve("latest", [], store="here")


@pytest.mark.parametrize("form", ["{}", "parquet:{}", "parquet://{}"])
def test_a_folder_is_a_parquet_store(tmp_path, form):
    """With or without saying so."""
    assert isinstance(open_store(form.format(tmp_path)), ParquetStore)


@pytest.mark.parametrize("url", ["jaeger+http://host:16686", "jaeger+https://host/jaeger/"])
def test_jaeger_is_named_by_its_query_service(url):
    """Nothing is asked of it yet."""
    assert isinstance(open_store(url, {"Authorization": "Bearer x"}), JaegerStore)


def test_tempo_is_said_not_to_be_readable_yet():
    """Clearly, with what works instead."""
    with pytest.raises(StoreError, match="cannot read yet") as raised:
        open_store("tempo+http://host:3200")

    assert "argus serve" in raised.value.fix


@pytest.mark.parametrize(
    "url", ["", "parquet:", "http://host:16686", "jaeger://host", "jaeger+http://", "s3://bucket/x"]
)
def test_a_malformed_address_is_answered_with_the_forms_there_are(url):
    """Four parts: where, what it got, what was expected, what to do."""
    with pytest.raises(ConfigError) as raised:
        open_store(url)

    assert raised.value.exit_code == 2
    assert "jaeger+http" in raised.value.fix


def test_headers_are_read_as_people_write_them():
    """The value may hold colons."""
    assert read_headers(["Authorization: Bearer a:b", "X-Scope-OrgID:7"]) == {
        "Authorization": "Bearer a:b",
        "X-Scope-OrgID": "7",
    }


@pytest.mark.parametrize("line", ["no colon", ": value", "Bad Name: x", "A: b\r\nC: d"])
def test_a_header_that_is_none_is_refused_without_showing_its_value(line):
    """It may be a secret; and a line break would smuggle in another header."""
    with pytest.raises(ConfigError, match="--header"):
        read_headers([line])
