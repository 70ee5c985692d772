"""Run by `make wheel-test` with the Python of an environment that holds the wheel and nothing else."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import entry_points, version
from pathlib import Path

import argus_otel
from argus_otel._runtime.bundled import bundled_path


def check(*, holds: bool, what: str) -> None:
    """Print one line, and stop at the first thing that is not so."""
    print("ok  " if holds else "FAIL", what)  # noqa: T201 - this is a script
    if not holds:
        sys.exit(1)


class Endpoint(BaseHTTPRequestHandler):
    """Accepts whatever is posted, as a Collector would, so that the doctor has one to reach."""

    def do_POST(self) -> None:
        """Answer an empty OTLP response."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the output for the checks."""


def argus(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command that the wheel installed."""
    result = subprocess.run(
        [str(here / "bin" / "argus"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **variables},
    )
    print(result.stdout, result.stderr, sep="")  # noqa: T201
    return result


here = Path(sys.prefix).resolve()
package = Path(argus_otel.__file__).resolve()
check(
    holds=package.is_relative_to(here),
    what=f"argus_otel {version('argus-otel')} comes from the wheel",
)
for name in ("detectors", "collector-config"):
    folder = bundled_path(name)
    check(holds=folder.resolve().is_relative_to(here), what=f"{name} comes from the wheel")
    check(holds=any(folder.rglob("*.yaml")), what=f"{name} holds its files")
check(holds=(package.parent / "py.typed").is_file(), what="types are announced")
for group in ("opentelemetry_distro", "opentelemetry_configurator", "opentelemetry_instrumentor"):
    check(holds="argus" in entry_points(group=group).names, what=f"{group} names argus")
check(holds="torch" not in sys.modules, what="no torch was needed")

check(holds=argus("--help").returncode == 0, what="argus --help")
with HTTPServer(("127.0.0.1", 0), Endpoint) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    doctor = argus("doctor", OTEL_EXPORTER_OTLP_ENDPOINT=address)
    server.shutdown()
check(holds=doctor.returncode == 0, what="argus doctor")
detect = argus("detect", "--store", "nowhere")
check(
    holds=detect.returncode == 2 and "argus-otel[service]" in detect.stderr,
    what="argus detect says what to install",
)
