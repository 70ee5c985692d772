"""Building: what is said without Go, what is not built twice, and what a failed build leaves."""

from __future__ import annotations

import threading

import pytest

from argus_otel.stack.build import build_stack
from argus_otel.stack.cache import cache_dir, exclusive
from argus_otel.stack.errors import BuildFailedError, GoMissingError

# A `go` that "builds" by writing the file after -o; its version is what the test says.
FAKE_GO = """#!/bin/sh
echo "$@" >> {calls}
case "$1" in
  version) echo "go version go{version} linux/amd64" ;;
  run) mkdir -p sources ;;
  build) {build} ;;
esac
"""
WRITES = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Put a fake Go first on PATH."""

    def install(version: str = "1.26.8", build: str = WRITES):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "go"
        script.write_text(FAKE_GO.format(version=version, build=build, calls=tmp_path / "calls"))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return tmp_path / "calls"

    return install


@pytest.fixture
def no_go(monkeypatch):
    """As on a machine without Go."""
    monkeypatch.setattr("shutil.which", lambda _: None)


def test_without_go_the_error_says_what_to_install_and_what_needs_none(tmp_path, no_go):
    """Somebody's first minute with the product."""
    with pytest.raises(GoMissingError) as caught:
        build_stack(folder=tmp_path)

    assert "not found" in str(caught.value)
    assert "Go 1.24" in str(caught.value)
    assert "argus run --local" in caught.value.fix


def test_a_go_that_is_too_old_is_named(tmp_path, go):
    """The message says which was found."""
    go(version="1.21.3")

    with pytest.raises(GoMissingError, match=r"1\.21\.3"):
        build_stack(folder=tmp_path / "cache")


def test_what_is_built_is_not_built_again(tmp_path, go):
    """The second call only asks for Go's version."""
    calls = go()

    first = build_stack(folder=tmp_path / "cache")
    calls.write_text("")
    second = build_stack(folder=tmp_path / "cache")

    assert first == second
    assert first.collector.read_text() == first.jaeger.read_text() == "built\n"
    assert set(calls.read_text().split()) == {"version"}


def test_another_go_version_builds_anew(tmp_path, go):
    """A new Go is a new build, the old one stays."""
    go(version="1.26.8")
    first = build_stack(folder=tmp_path / "cache")
    go(version="1.27.0")

    assert build_stack(folder=tmp_path / "cache").collector != first.collector


def test_what_was_built_earlier_runs_without_go(tmp_path, go, monkeypatch):
    """A cache folder that was brought along."""
    go()
    first = build_stack(folder=tmp_path / "cache")
    monkeypatch.setattr("shutil.which", lambda _: None)

    assert build_stack(folder=tmp_path / "cache") == first


def test_a_failed_build_shows_its_end_and_leaves_no_executable(tmp_path, go):
    """A half-made file would be taken for a whole one the next time."""
    go(build="echo 'undefined: otlp'; exit 3")

    with pytest.raises(BuildFailedError, match="undefined: otlp") as caught:
        build_stack(folder=tmp_path / "cache")

    assert "build.log" in caught.value.fix
    assert not list((tmp_path / "cache").glob("*/argus-collector"))


def test_two_builders_take_turns(tmp_path):
    """The second is told that it waits."""
    waiting = threading.Event()

    def second() -> None:
        with exclusive(tmp_path / "lock", waiting.set):
            pass

    other = threading.Thread(target=second)
    with exclusive(tmp_path / "lock", lambda: pytest.fail("nobody held it")):
        other.start()
        assert waiting.wait(30)
        assert other.is_alive()
    other.join(30)

    assert not other.is_alive()


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/a", "/b", "/a"),
        (None, "/b", "/b/argus-otel/stack"),
        (None, None, "/home/x/.cache/argus-otel/stack"),
    ],
)
def test_the_cache_folder(monkeypatch, own, xdg, expected):
    """ARGUS_CACHE_DIR, then the XDG folder, then ~/.cache."""
    monkeypatch.setenv("HOME", "/home/x")
    for name, value in (("ARGUS_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg)):
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)

    assert str(cache_dir()) == expected
