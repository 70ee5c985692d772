"""An OTLP/HTTP endpoint that answers at once and keeps bodies unread; see jobs.running_sink.

    python bench/sink.py FILE

Prints its address, writes each request to FILE (a line of JSON, then the body), and ends when
its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_POST(self) -> None:
        """Keep it and say that all is well."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        head = {
            "path": self.path,
            "encoding": self.headers.get("content-encoding", "identity"),
            "client_port": self.client_address[1],
            "size": len(body),
        }
        with self.server.lock:
            self.server.out.write(json.dumps(head).encode() + b"\n" + body)
        self.send_response_only(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.out = path.open("wb")
        super().__init__(("127.0.0.1", 0), _Handler)


def main() -> None:
    """Serve until the standard input ends."""
    os.nice(19)
    server = _Server(Path(sys.argv[1]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()
    server.shutdown()
    with server.lock:
        server.out.close()


if __name__ == "__main__":
    main()
