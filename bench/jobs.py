"""Starting training jobs for measurement, and the endpoint that they send to.

The endpoint is a process of its own at the lowest priority: it must neither count as the job's
CPU time nor take a core that the job wants. It keeps bodies as they come and reads nothing; what
was sent is read after the job has ended.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BENCH = Path(__file__).parent
LOOPS = BENCH / "loops"
BIN = Path(sys.executable).parent

_ENDS_WITHIN_S = 40
"""torchrun gives its ranks 30 s."""

# Nothing that whoever measures has set for jobs of their own may steer these.
_FOREIGN = ("OTEL_", "ARGUS_", "TORCHELASTIC_", "SLURM_")


class JobError(Exception):
    """A job failed or hung; the message holds the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request as the endpoint got it."""

    path: str
    encoding: str
    body: bytes
    """As it came, compressed."""
    client_port: int

    @property
    def plain(self) -> bytes:
        """The body, decompressed."""
        return gzip.decompress(self.body) if self.encoding == "gzip" else self.body


class Sink:
    """What a finished endpoint process has got; filled when its context ends."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.requests: list[SentRequest] = []

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point a job here."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def traces(self) -> list[SentRequest]:
        """Requests with spans."""
        return [request for request in self.requests if request.path == "/v1/traces"]


@contextmanager
def running_sink() -> Iterator[Sink]:
    """An endpoint in a process of its own; its requests are there after the block."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "requests"
        process = subprocess.Popen(
            [sys.executable, str(BENCH / "sink.py"), str(dump)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None  # noqa: S101
        try:
            sink = Sink(process.stdout.readline().strip())
            yield sink
        finally:
            process.stdin.close()  # it ends when nobody holds the other side
            process.wait(timeout=60)
        sink.requests = list(_read_dump(dump))


def _read_dump(dump: Path) -> Iterator[SentRequest]:
    data = dump.read_bytes()
    at = 0
    while at < len(data):
        end = data.index(b"\n", at)
        head = json.loads(data[at:end])
        at = end + 1 + head.pop("size")
        yield SentRequest(body=data[end + 1 : at], **head)


def run_job(
    script: Path,
    arguments: Sequence[object],
    *,
    ranks: int,
    traced: bool,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900,
) -> list[dict[str, Any]]:
    """Run a script under torchrun to its end.

    Args:
        script: Takes ``--results FOLDER`` and writes ``rank<N>.json`` there.
        arguments: Further arguments.
        ranks: Processes, one thread of arithmetic each.
        traced: Through ``opentelemetry-instrument``, as a user would.
        environment: Added to this process's.
        timeout_s: After that long the job is killed.

    Returns:
        What each rank wrote, by rank; empty where the script writes nothing.

    Raises:
        JobError: It failed or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*(launcher() if traced else ()), *torchrun(ranks), str(script)]
        command += ["--results", folder, *map(str, arguments)]
        run(command, clean_environment(environment or {}), timeout_s)
        paths = [Path(folder) / f"rank{rank}.json" for rank in range(ranks)]
        return [json.loads(path.read_text()) for path in paths if path.is_file()]


def launcher() -> list[str]:
    """The one word that a user puts before their command."""
    return [str(BIN / "opentelemetry-instrument")]


def argus() -> str:
    """The command line tool beside this interpreter."""
    return str(BIN / "argus")


def torchrun(ranks: int) -> list[str]:
    """On this machine, at a free port."""
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without tracing of its own, and ``extra``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **extra}


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
    *,
    accept: Sequence[int] = (0,),
) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        JobError: Another exit code than those of ``accept``, or out of time.
    """
    (said,) = run_together([command], environment, timeout_s, accept=accept)
    return said


def run_together(
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    timeout_s: float,
    *,
    accept: Sequence[int] = (0,),
) -> list[str]:
    """Run commands side by side to their ends and return the standard output of each.

    Whatever happens here, an interruption too, none of them is left running.

    Raises:
        JobError: Another exit code than those of ``accept``, or out of time.
    """
    until_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            # Files, as a pipe that nobody reads would stop one while we wait for another.
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = stack.enter_context(started(command, environment, out, err))
            running.append((process, command, out, err))
        said = []
        for process, command, out, err in running:
            try:
                code = process.wait(max(until_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired as error:
                msg = f"{' '.join(command[:6])} …: no end after {timeout_s:.0f} s"
                raise JobError(msg) from error
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace"))
            if code not in accept:
                msg = f"{' '.join(command)}: exit code {code}\n{''.join(texts)[-3000:]}"
                raise JobError(msg)
            said.append(texts[0])
        return said


@contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: IO[bytes] | int,
    err: IO[bytes] | int,
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs; after the block it does not, nor does what it has started.

    It is asked first: torchrun's ranks have sessions of their own, and only torchrun ends them.
    """
    process = subprocess.Popen(
        command, env=dict(environment), stdout=out, stderr=err, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDS_WITHIN_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
