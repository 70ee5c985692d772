"""Starts a Collector and Jaeger on this machine and waits until both are healthy."""

from __future__ import annotations

import os
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from argus_otel._runtime.bundled import bundled_path
from argus_otel.stack import processes
from argus_otel.stack.build import Binaries, build_stack
from argus_otel.stack.errors import StartFailedError
from argus_otel.stack.ports import COLLECTOR_PORTS, HOST, JAEGER_PORTS, choose_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from argus_otel.stack.processes import ProcessIdentity

_CONFIGS = {
    "gateway": ("gateway.yaml",),
    "local": ("gateway.yaml", "local.yaml"),
    "agent": ("agent.yaml",),
}
# A Collector is healthy within a second; a loaded machine that swaps has taken twenty.
_READY_WITHIN_S = 90.0
_POLL_S = 0.05
# Somebody may take a port between our look and the Collector's bind.
_PORT_ATTEMPTS = 3
# Variables of the caller's shell that must not configure these two.
_FOREIGN = ("OTEL_", "ARGUS_", "JAEGER_")


@dataclass(slots=True, kw_only=True)
class Part:
    """One process of the stack: can be stopped, killed and started again on the same ports."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    health_url: str
    process: ProcessIdentity | None = None

    def start(self) -> None:
        """Start it; ``wait_until_healthy`` says when it can be used.

        Raises:
            StartFailedError: The executable cannot be run.
        """
        try:
            self.process = processes.spawn(self.argv, self.env, self.log)
        except OSError as error:
            raise StartFailedError(
                f"the executable of {self.name}",
                got=f"{self.argv[0]} ({error.strerror})",
                expected="a program for this machine",
                fix="Correct the path, or leave it out to have one built.",
            ) from error

    def is_alive(self) -> bool:
        """Say whether the process runs."""
        return self.process is not None and processes.is_alive(self.process)

    def is_healthy(self) -> bool:
        """Say whether it answers its health check."""
        return self.is_alive() and responds(self.health_url)

    def wait_until_healthy(self, within_s: float = _READY_WITHIN_S) -> None:
        """Return when it is healthy.

        Raises:
            StartFailedError: It ended, or was not healthy in time; with the end of its log.
        """
        deadline_s = time.monotonic() + within_s
        while not responds(self.health_url):
            ended = not self.is_alive()
            if ended or time.monotonic() > deadline_s:
                raise StartFailedError(
                    f"{self.name} (log: {self.log})",
                    got=f"{'ended' if ended else 'not healthy'}; it last said:\n{self.log_tail()}",
                    expected=f"healthy within {within_s:.0f} s at {self.health_url}",
                    fix="The log says why; a port that is taken and a typing error are the usual two.",
                )
            time.sleep(_POLL_S)

    def log_tail(self, lines: int = 12) -> str:
        """Give the end of its log."""
        if not self.log.exists():
            return "(nothing)"
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(line[:400] for line in text.splitlines()[-lines:])

    def stop(self) -> None:
        """Let it flush and end; nothing happens when it has ended."""
        if self.process is not None:
            processes.stop(self.process)

    def kill(self) -> None:
        """End it as a crash would: nothing is flushed."""
        if self.process is not None:
            processes.kill(self.process)

    def restart(self) -> None:
        """Stop it if it runs, start it again on the same ports, and wait until it is healthy."""
        self.stop()
        self.start()
        self.wait_until_healthy()


@dataclass(slots=True, kw_only=True)
class Stack:
    """A Collector and, unless it was left out, a Jaeger behind it."""

    config: str
    ports: Mapping[str, int]
    collector: Part
    jaeger: Part | None
    _parts: tuple[Part, ...] = field(init=False)

    def __post_init__(self) -> None:
        # Jaeger first: the Collector should not begin by retrying.
        self._parts = (*([self.jaeger] if self.jaeger else []), self.collector)

    @property
    def otlp_http_url(self) -> str:
        """Base address for OTLP/HTTP; add ``/v1/traces``."""
        return self._url("otlp_http")

    @property
    def otlp_grpc_endpoint(self) -> str:
        """Host and port for OTLP/gRPC, without TLS."""
        return f"{HOST}:{self.ports['otlp_grpc']}"

    @property
    def jaeger_query_url(self) -> str:
        """Base address of Jaeger's UI and API; add ``/api/v3/…``."""
        return self._url("jaeger_query_http")

    @property
    def jaeger_otlp_http_url(self) -> str:
        """Jaeger's own OTLP/HTTP receiver, past the Collector."""
        return self._url("jaeger_otlp_http")

    @property
    def prometheus_url(self) -> str:
        """Span metrics and the job's metrics, as text."""
        return self._url("prometheus") + "/metrics"

    @property
    def collector_metrics_url(self) -> str:
        """The Collector's metrics about itself, as text."""
        return self._url("telemetry") + "/metrics"

    @property
    def collector_log(self) -> Path:
        """Where the Collector writes."""
        return self.collector.log

    @property
    def jaeger_log(self) -> Path | None:
        """Where Jaeger writes."""
        return self.jaeger.log if self.jaeger else None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Processes in the order in which they start."""
        return self._parts

    def urls(self) -> dict[str, str]:
        """Addresses that a person needs, by name."""
        urls = {
            "otlp_http": self.otlp_http_url,
            "otlp_grpc": self.otlp_grpc_endpoint,
            "prometheus": self.prometheus_url,
            "collector_metrics": self.collector_metrics_url,
        }
        if self.jaeger:
            urls["jaeger"] = self.jaeger_query_url
        return urls

    def stop(self) -> None:
        """Stop the Collector, then Jaeger: what the Collector flushes still arrives."""
        for part in reversed(self._parts):
            part.stop()

    def _url(self, port_name: str) -> str:
        return f"http://{HOST}:{self.ports[port_name]}"


@contextmanager
def running_stack(
    *,
    config: str | Path | Sequence[Path] = "gateway",
    decision_wait_s: float | None = None,
    jaeger: bool = True,
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
    binaries: Binaries | None = None,
) -> Iterator[Stack]:
    """Run a stack on free ports (never the usual ones) while the block runs.

    Args:
        config: ``gateway``, ``local``, ``agent``, or files of your own. Those must use the variables
            of ``gateway.yaml`` for their addresses and have its ``health_check``.
        decision_wait_s: The tail sampler's wait; the configuration's default otherwise.
        jaeger: False starts the Collector alone; its backend is then what ``env`` says in
            ``ARGUS_BACKEND_OTLP_HTTP`` or ``ARGUS_GATEWAY_OTLP_HTTP``.
        env: More variables for both processes.
        directory: For logs and the agent's queue; temporary, and removed, by default.
        binaries: Executables to use; built when absent.

    Raises:
        GoMissingError: Nothing is built and there is no Go.
        StartFailedError: A part did not become healthy.
    """
    with tempfile.TemporaryDirectory(prefix="argus-stack-") as temporary:
        stack = start_stack(
            config=config,
            decision_wait_s=decision_wait_s,
            jaeger=jaeger,
            env=env,
            directory=directory or Path(temporary),
            binaries=binaries or build_stack(),
            prefer_usual_ports=False,
        )
        try:
            yield stack
        finally:
            stack.stop()


def start_stack(
    *,
    config: str | Path | Sequence[Path],
    decision_wait_s: float | None,
    jaeger: bool,
    env: Mapping[str, str] | None,
    directory: Path,
    binaries: Binaries,
    prefer_usual_ports: bool,
    on_spawn: Callable[[Stack], None] = lambda _stack: None,
) -> Stack:
    """Start a stack that runs on after this process ends; see ``running_stack``.

    Args:
        config: As in ``running_stack``, and the next three as well.
        decision_wait_s: Seconds.
        jaeger: False starts the Collector alone.
        env: More variables.
        directory: For logs and state; must outlive the stack.
        binaries: Executables.
        prefer_usual_ports: 4317, 4318, 16686 … where they are free.
        on_spawn: Called after every process that was started, before it is waited for.

    Raises:
        StartFailedError: A part did not become healthy; what had started is stopped.
    """
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        stack = _arrange(
            config, decision_wait_s, jaeger, env, directory, binaries, prefer_usual_ports
        )
        log_starts = {part.name: _size(part.log) for part in stack.parts}
        try:
            for part in stack.parts:
                part.start()
                on_spawn(stack)
                part.wait_until_healthy()
        except StartFailedError:
            stack.stop()
            if attempt == _PORT_ATTEMPTS or not _lost_a_port(stack, log_starts):
                raise
        except BaseException:
            stack.stop()
            raise
        else:
            return stack
    raise AssertionError("unreachable")


def responds(url: str) -> bool:
    """Say whether a GET gives 200."""
    # Without the shell's proxy: it does not reach this machine's own ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def config_files(config: str | Path | Sequence[Path]) -> tuple[Path, ...]:
    """Give the files behind a configuration's name.

    Raises:
        StartFailedError: No such name or file.
    """
    if isinstance(config, str) and config in _CONFIGS:
        return tuple(bundled_path("collector-config") / name for name in _CONFIGS[config])
    given = (config,) if isinstance(config, str | Path) else tuple(config)
    files = tuple(Path(file).absolute() for file in given)
    for file in files:
        if not file.is_file():
            raise StartFailedError(
                "the Collector configuration",
                got=str(config),
                expected=f"one of {', '.join(_CONFIGS)}, or a file",
                fix="Name one of these, or give the path of a YAML file.",
            )
    return files


def _arrange(
    config: str | Path | Sequence[Path],
    decision_wait_s: float | None,
    jaeger: bool,
    env: Mapping[str, str] | None,
    directory: Path,
    binaries: Binaries,
    prefer_usual_ports: bool,
) -> Stack:
    """Choose ports and write down both commands."""
    files = config_files(config)
    usual = {**COLLECTOR_PORTS, **(JAEGER_PORTS if jaeger else {})}
    ports = choose_ports(usual, prefer_usual=prefer_usual_ports)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}

    def address(port_name: str) -> str:
        return f"{HOST}:{ports[port_name]}"

    collector_env = {
        "ARGUS_OTLP_GRPC_ENDPOINT": address("otlp_grpc"),
        "ARGUS_OTLP_HTTP_ENDPOINT": address("otlp_http"),
        "ARGUS_HEALTH_ENDPOINT": address("health"),
        "ARGUS_PROMETHEUS_ENDPOINT": address("prometheus"),
        "ARGUS_TELEMETRY_HOST": HOST,
        "ARGUS_TELEMETRY_PORT": str(ports["telemetry"]),
        "ARGUS_QUEUE_DIR": str(directory / "queue"),
    }
    jaeger_part = None
    if jaeger:
        collector_env["ARGUS_BACKEND_OTLP_HTTP"] = f"http://{address('jaeger_otlp_http')}"
        jaeger_env = {
            "OTEL_TRACES_SAMPLER": "always_off",  # else Jaeger's own traces are among the user's
            "ARGUS_JAEGER_OTLP_GRPC_ENDPOINT": address("jaeger_otlp_grpc"),
            "ARGUS_JAEGER_OTLP_HTTP_ENDPOINT": address("jaeger_otlp_http"),
            "ARGUS_JAEGER_QUERY_HTTP_ENDPOINT": address("jaeger_query_http"),
            "ARGUS_JAEGER_QUERY_GRPC_ENDPOINT": address("jaeger_query_grpc"),
            "ARGUS_JAEGER_HEALTH_ENDPOINT": address("jaeger_health"),
            "ARGUS_JAEGER_TELEMETRY_PORT": str(ports["jaeger_telemetry"]),
        }
        jaeger_part = Part(
            name="jaeger",
            argv=(
                str(binaries.jaeger),
                "--config",
                str(bundled_path("collector-config") / "jaeger.yaml"),
            ),
            env={**inherited, **jaeger_env, **(env or {})},
            log=directory / "jaeger.log",
            health_url=f"http://{address('jaeger_health')}/status",
        )
    if decision_wait_s is not None:
        collector_env["ARGUS_DECISION_WAIT"] = f"{round(decision_wait_s * 1000)}ms"
    options = [option for file in files for option in ("--config", str(file))]
    return Stack(
        config=config if isinstance(config, str) else ", ".join(map(str, files)),
        ports=ports,
        collector=Part(
            name="collector",
            argv=(str(binaries.collector), *options),
            env={**inherited, **collector_env, **(env or {})},
            log=directory / "collector.log",
            health_url=f"http://{address('health')}/",
        ),
        jaeger=jaeger_part,
    )


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _lost_a_port(stack: Stack, log_starts: Mapping[str, int]) -> bool:
    """Say whether this start (not an earlier one in the same log) failed for a port."""
    return any(
        b"address already in use" in part.log.read_bytes()[log_starts[part.name] :]
        for part in stack.parts
        if part.log.exists()
    )
