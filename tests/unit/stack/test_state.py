"""The state file, and what `status`, `down` and `up` make of a stale one."""

from __future__ import annotations

import json
import os
import sys

import pytest

from argus_otel.stack import processes
from argus_otel.stack.build import Binaries
from argus_otel.stack.control import bring_up, read_status, take_down
from argus_otel.stack.errors import StackError, StartFailedError
from argus_otel.stack.state import PartRecord, StackRecord, read_record, write_record


def part(name: str, pid: int, start_mark: str) -> PartRecord:
    return PartRecord(
        name=name, pid=pid, start_mark=start_mark, log="/log", health_url="http://127.0.0.1:9/"
    )


def state_file(folder):
    return folder / "run" / "stack.json"


def test_what_was_written_is_read_back(tmp_path):
    """All of it."""
    record = StackRecord(
        config="local", urls={"jaeger": "http://x"}, parts=(part("jaeger", 7, "m"),), complete=True
    )

    write_record(tmp_path / "run" / "stack.json", record)

    assert read_record(tmp_path / "run" / "stack.json") == record


def test_no_file_means_stopped(tmp_path):
    """And `down` has nothing to do."""
    assert read_status(folder=tmp_path).state == "stopped"
    assert take_down(folder=tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", '{"version": 99}', '{"version": 1, "parts": [{}]}'])
def test_a_file_that_is_not_ours_is_an_error(tmp_path, text):
    """Guessing which pids to stop would be worse."""
    file = tmp_path / "stack.json"
    file.write_text(text)

    with pytest.raises(StackError, match="state file"):
        read_record(file)


def test_a_stale_pid_is_degraded_and_down_spares_its_new_owner(tmp_path):
    """After a reboot, the Collector's pid is this very test's."""
    stale = StackRecord(
        config="local", parts=(part("collector", os.getpid(), "an earlier boot:1"),), complete=True
    )
    write_record(state_file(tmp_path), stale)

    status = read_status(folder=tmp_path)
    stopped = take_down(folder=tmp_path)

    assert (status.state, status.parts[0].alive) == ("degraded", False)
    assert stopped == []
    assert not state_file(tmp_path).exists()


def test_down_stops_what_a_cut_short_start_left(tmp_path):
    """`up` was killed after it had started the first of the two."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = processes.spawn(sleep, os.environ, tmp_path / "log")
    write_record(
        state_file(tmp_path),
        StackRecord(config="local", parts=(part("jaeger", left.pid, left.start_mark),)),
    )

    assert read_status(folder=tmp_path).state == "degraded"
    assert take_down(folder=tmp_path) == ["jaeger"]
    assert not processes.is_alive(left)


def test_up_leaves_nothing_when_a_part_does_not_start(tmp_path):
    """Jaeger is a program that ends at once; the error holds its last words."""
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no such storage' >&2\nexit 1\n")
    broken.chmod(0o755)

    with pytest.raises(StartFailedError, match="no such storage"):
        bring_up(folder=tmp_path, binaries=Binaries(collector=broken, jaeger=broken))

    assert read_status(folder=tmp_path).state == "stopped"


def test_up_with_a_configuration_that_does_not_exist_says_which_there_are(tmp_path):
    """A slip of the pen."""
    nothing = Binaries(collector=tmp_path, jaeger=tmp_path)

    with pytest.raises(StartFailedError, match="local, agent, or a file"):
        bring_up(config="gatway", folder=tmp_path, binaries=nothing)


def test_an_executable_that_does_not_exist_is_named(tmp_path):
    """`--jaeger-bin` with a slip in it."""
    wrong = tmp_path / "jeager"

    with pytest.raises(StartFailedError, match="jeager"):
        bring_up(folder=tmp_path, binaries=Binaries(collector=wrong, jaeger=wrong))

    assert read_status(folder=tmp_path).state == "stopped"


def test_the_status_document_is_json(tmp_path):
    """Scripts read it."""
    document = json.loads(json.dumps(read_status(folder=tmp_path).as_json()))

    assert document == {
        "schema": "argus.stack/1",
        "state": "stopped",
        "config": None,
        "urls": {},
        "parts": [],
        "state_file": str(state_file(tmp_path)),
    }
