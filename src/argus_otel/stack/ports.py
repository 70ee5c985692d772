"""Every port that the stack listens on, and how a free one is found when the usual one is taken."""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING

from argus_otel.stack.errors import StartFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST = "127.0.0.1"

COLLECTOR_PORTS: Mapping[str, int] = {
    "otlp_grpc": 4317,
    "otlp_http": 4318,
    "health": 13133,
    "prometheus": 8889,
    "telemetry": 8888,
}
JAEGER_PORTS: Mapping[str, int] = {
    "jaeger_otlp_grpc": 14317,
    "jaeger_otlp_http": 14318,
    "jaeger_query_http": 16686,
    "jaeger_query_grpc": 16685,
    "jaeger_health": 13134,
    "jaeger_telemetry": 8887,
}

# Below the range from which Linux takes ports for outgoing connections (32768 up): a port found free
# here is not lost to somebody's client socket while a killed Collector waits to be started again.
_FREE_FROM, _FREE_TO = 20_000, 32_000
_TRIES = 200


def choose_ports(usual: Mapping[str, int], *, prefer_usual: bool) -> dict[str, int]:
    """Give each name a port that was free a moment ago, no port twice.

    Args:
        usual: Name → the port that people expect.
        prefer_usual: Take the usual port where it is free; otherwise always another one, so that a
            test never talks to the stack of whoever is logged in.

    Raises:
        StartFailedError: No free port found.
    """
    held: list[socket.socket] = []
    chosen: dict[str, int] = {}
    try:
        for name, usual_port in usual.items():
            listener = _listen_on(usual_port) if prefer_usual else None
            for _ in range(_TRIES):
                if listener is not None:
                    break
                listener = _listen_on(_FREE_FROM + secrets.randbelow(_FREE_TO - _FREE_FROM))
            if listener is None:
                raise StartFailedError(
                    f"a port for {name}",
                    got=f"none free in {_TRIES} tries",
                    expected=f"a free port on {HOST} in {_FREE_FROM}-{_FREE_TO}",
                    fix="See `ss -ltn` for what listens there.",
                )
            held.append(listener)  # held until all are chosen
            chosen[name] = listener.getsockname()[1]
    finally:
        for listener in held:
            listener.close()
    return chosen


def _listen_on(port: int) -> socket.socket | None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As Go does; without it a port whose last connections are in TIME_WAIT would look taken.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(1)
    except OSError:
        listener.close()
        return None
    return listener
