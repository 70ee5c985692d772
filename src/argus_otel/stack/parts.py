"""A stack as an object: its two processes, their addresses, and what can be done to them."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from argus_otel.stack import processes
from argus_otel.stack.errors import StartFailedError
from argus_otel.stack.ports import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from argus_otel.stack.processes import ProcessIdentity

# A Collector is healthy within a second; this is for a machine that swaps.
_READY_WITHIN_S = 90.0
_POLL_S = 0.05


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


def responds(url: str) -> bool:
    """Say whether a GET gives 200."""
    # Without the shell's proxy: it does not reach this machine's own ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
