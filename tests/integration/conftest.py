"""A really built Collector and Jaeger, started once for the whole test session; training jobs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from argus_otel.stack import Binaries, GoMissingError, Stack, build_stack, running_stack
from argus_otel.testing import InMemoryReceiver

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Long enough for four posts in a row on a machine that does other things as well.
DECISION_WAIT_S = 3.0
# A cold build takes minutes on 2 cores; whichever test comes first pays for it.
_BUILD_LIMIT_S = 1800
_BUILDING_FIXTURES = {"binaries", "stack"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that may have to build the stack the time for it."""
    for item in items:
        needed = _BUILDING_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if needed and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_BUILD_LIMIT_S))


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    """Executables of the Collector and Jaeger, built if they are not in the cache."""
    try:
        return build_stack()
    except GoMissingError as error:
        pytest.skip(f"no Collector and Jaeger: {error.where} is {error.got}")


@pytest.fixture(scope="session")
def stack(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """The gateway's configuration in front of Jaeger, on free ports; shared, so do not stop it."""
    with running_stack(
        config="gateway",
        decision_wait_s=DECISION_WAIT_S,
        env={"ARGUS_COLLECTOR_SPANMETRICS_FLUSH": "1s"},
        directory=tmp_path_factory.mktemp("stack"),
        binaries=binaries,
    ) as running:
        yield running


@dataclass
class TrainingJob:
    """A training program that runs, or has run, under ``opentelemetry-instrument``."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def stderr(self) -> str:
        """What it has said so far, of all its processes."""
        return (self.folder / "stderr").read_text("utf-8", "replace")

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return (self.folder / "stdout").read_text("utf-8", "replace")

    def results(self) -> list[dict[str, object]]:
        """What the program's ``report(...)`` calls said, in no order between processes."""
        lines: list[dict[str, object]] = []
        for path in sorted(self.folder.glob("report-*")):
            lines += [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        return lines

    def wait(self) -> int:
        """Its exit code, as soon as it has one."""
        return self.process.wait(PATIENCE_S)

    def finish(self) -> TrainingJob:
        """Wait for its end, which must be a good one."""
        code = self.wait()
        assert code == 0, f"exit {code}\n{self.stderr[-6000:]}"
        return self


PATIENCE_S = 240
"""How long to wait for what must happen: another job may have both cores."""

# Everything a small job needs. Seeds are what users set; `report` is how a test looks inside.
_PROLOGUE = """
import json, os, sys, time
from pathlib import Path

FOLDER = Path(os.environ["JOB_FOLDER"])

def report(**values):
    with open(FOLDER / f"report-{os.getpid()}", "a") as file:
        file.write(json.dumps({"rank": int(os.environ.get("RANK", 0)), "pid": os.getpid()} | values) + "\\n")

def until(name):
    while not (FOLDER / name).exists():
        time.sleep(0.02)
"""


class Launcher:
    """Starts training programs; whatever still runs at the end of the test is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: list[TrainingJob] = []

    def __call__(
        self,
        script: str,
        *,
        under: Sequence[str] = ("python",),
        env: Mapping[str, str] | None = None,
        instrument: bool = True,
    ) -> TrainingJob:
        """Start a program.

        Args:
            script: Its source; ``report``, ``until`` and ``FOLDER`` are defined.
            under: What runs the script: ``("torchrun", "--nproc-per-node", "2")``.
            env: Variables on top of a clean environment; usually the receiver's and more.
            instrument: Run it under ``opentelemetry-instrument``.
        """
        folder = self._folder / f"job-{len(self._jobs)}"
        folder.mkdir()
        path = folder / "train.py"
        path.write_text(_PROLOGUE + textwrap.dedent(script), "utf-8")
        return self.again(folder, under=under, env=env, instrument=instrument)

    def again(
        self,
        folder: Path,
        *,
        under: Sequence[str] = ("python",),
        env: Mapping[str, str] | None = None,
        instrument: bool = True,
    ) -> TrainingJob:
        """Start the program of an earlier job once more, in the same folder."""
        bin_folder = Path(sys.executable).parent
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OTEL_", "ARGUS_", "TORCHELASTIC_", "PYTEST_"))
        }
        environment |= {
            "PATH": f"{bin_folder}:{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": "1",
            "JOB_FOLDER": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            **(env or {}),
        }
        wrapper = ["opentelemetry-instrument"] if instrument else []
        with (folder / "stdout").open("ab") as out, (folder / "stderr").open("ab") as err:
            process = subprocess.Popen(
                [*wrapper, *under, str(folder / "train.py")],
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
                executable=str(bin_folder / (wrapper or list(under))[0]),
            )
        job = TrainingJob(process, folder)
        self._jobs.append(job)
        return job

    def end(self) -> None:
        """Kill what still runs, with all that it has started."""
        for job in self._jobs:
            if job.process.poll() is None:
                job.process.terminate()  # torchrun ends its ranks, which have sessions of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.process.wait(40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait(PATIENCE_S)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """Starts training programs for one test."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


@pytest.fixture(scope="module")
def launch_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Starts training programs whose telemetry several tests of a module look at."""
    launcher = Launcher(tmp_path_factory.mktemp("jobs"))
    yield launcher
    launcher.end()


@pytest.fixture
def receiver() -> Iterator[InMemoryReceiver]:
    """A real OTLP endpoint."""
    with InMemoryReceiver() as running:
        yield running
