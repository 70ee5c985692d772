"""Embedded OTLP/HTTP receiver, for laptops, CI and jobs without a Collector.

It stands on the standard library's threading server: a request spends its time waiting for the
disk, a job of a laptop or a node has tens of senders, and `argus serve` then needs nothing that
reading does not need anyway. Beyond a few hundred senders a Collector belongs in front.

Traces are stored. Metrics and logs are accepted and counted, so that a sender with all three
signals on runs without errors, and dropped: the digests hold the numbers that the metrics chart.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from argus_otel._runtime.errors import ConfigError
from argus_otel.store.bodies import BodyError
from argus_otel.store.commit import GATHER_S, MAX_PENDING_BYTES, GroupCommit
from argus_otel.store.http import HttpServer
from argus_otel.store.spans import read_request

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

    from argus_otel.store.commit import Sink

DEFAULT_PORT: Final = 4318
MAX_BODY_BYTES: Final = 20 * 2**20
"""As the Collector's own OTLP/HTTP receiver."""
MAX_DECODED_BYTES: Final = 64 * 2**20

_POLL_S: Final = 0.05
"""How soon ``stop`` is noticed."""

_REQUESTS: Final[Mapping[str, type[Any]]] = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


class Receiver:
    """Receives OTLP over HTTP and hands it to a sink; answers once it is durable."""

    def __init__(
        self,
        sink: Sink,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        gather_s: float = GATHER_S,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_decoded_bytes: int = MAX_DECODED_BYTES,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        """Bind at once, so that nothing sent from now on is refused; serve from ``start``.

        Args:
            sink: Where spans go; closed by ``stop``.
            host: Address to listen on. Anything but loopback lets others write: there is no
                authentication.
            port: 0 takes a free one; see ``endpoint``.
            gather_s: Seconds that the first request of a group waits for others.
            max_body_bytes: Most bytes of a request as sent.
            max_decoded_bytes: Most bytes of a request decompressed.
            max_pending_bytes: Most bytes waiting for the disk; more is answered with 503.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        self.max_body_bytes = max_body_bytes
        self.max_decoded_bytes = max_decoded_bytes
        self.counts: Counter[str] = Counter()
        """Requests by path, and spans stored; for people and tests."""
        try:
            self._server = HttpServer(host, port, self)
        except OSError as error:
            raise ConfigError(
                f"the address {host}:{port}",
                got=f"not usable: {error.strerror or error}",
                expected="a free port on an address of this machine",
                fix="Choose another with --port (0 takes any free one) or --host.",
            ) from error
        self._commit = GroupCommit(sink, gather_s=gather_s, max_pending_bytes=max_pending_bytes)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_S,),
            name="argus-store-receiver",
            daemon=True,
        )

    @property
    def endpoint(self) -> str:
        """What a sender's OTEL_EXPORTER_OTLP_ENDPOINT has to be."""
        host, port = self._server.server_address[:2]
        text = str(host)
        return f"http://[{text}]:{port}" if ":" in text else f"http://{text}:{port}"

    def start(self) -> Self:
        """Serve in a background thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Answer what has arrived, store it, and end."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.end_idle_connections()
        self._commit.close()
        self._server.end_reading()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def paths(self) -> Collection[str]:
        """The paths that take requests."""
        return _REQUESTS.keys()

    def accept(self, path: str, body: bytes) -> None:
        """Take one decoded request; returns once it is durable.

        Raises:
            BodyError: Not a message of this path.
            OverloadedError: Come back later.
        """
        try:
            message = _REQUESTS[path].FromString(body)
        except Exception as error:
            raise BodyError(400, "the body is not the protobuf message of this path") from error
        self.counts[path] += 1
        if not isinstance(message, ExportTraceServiceRequest):
            return
        spans = list(read_request(message))
        if spans:
            self._commit.submit(spans, len(body))
            self.counts["spans"] += len(spans)
