"""https: who is trusted, and who the endpoint trusts."""

import contextlib
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading

import pytest

from argus_otel._runtime.errors import ConfigError
from argus_otel.export import Sender, Signal, Target, targets_from_environment
from argus_otel.testing import InMemoryReceiver

BUDGET_S = 30.0

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl command to make certificates"
)


def make_certificate(folder, name, *, signed_by=None, extensions=()):
    """``<name>.pem`` and ``<name>.key``, self-signed or signed by another of this folder."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
    if signed_by:
        command += ["-CA", folder / f"{signed_by}.pem", "-CAkey", folder / f"{signed_by}.key"]
    for extension in extensions:
        command += ["-addext", extension]
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    authority = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"]
    make_certificate(folder, "authority", extensions=authority[1:])
    make_certificate(folder, "stranger", extensions=authority[1:])
    leaf = ["basicConstraints=critical,CA:FALSE", "subjectAltName=IP:127.0.0.1"]
    make_certificate(folder, "server", signed_by="authority", extensions=leaf)
    make_certificate(folder, "client", signed_by="authority", extensions=leaf)
    return folder


@pytest.fixture
def server_context(certificates):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    return context


@pytest.fixture
def receiver(server_context):
    with InMemoryReceiver(tls=server_context) as running:
        yield running


@pytest.fixture
def send_one(receiver, clock, spans_body):
    """Send one span over a target with these files; the sender's stats afterwards."""

    def send(**files):
        target = Target(url=f"{receiver.endpoint}/v1/traces", **files)
        sender = Sender({Signal.TRACES: target}, clock=clock, random=lambda: 0.0)
        sender.submit(Signal.TRACES, spans_body(1), 1)
        sender.pump(BUDGET_S)
        stats = sender.stats
        sender.close()
        return stats

    return send


def test_a_trusted_certificate_is_accepted(send_one, certificates, receiver):
    stats = send_one(certificate_file=str(certificates / "authority.pem"))

    assert stats.sent_records == 1
    assert len(receiver.spans()) == 1


@pytest.mark.parametrize("trusted", ["stranger", None])
def test_nothing_is_sent_to_an_endpoint_that_is_not_trusted(
    send_one, certificates, receiver, trusted
):
    stats = send_one(certificate_file=trusted and str(certificates / f"{trusted}.pem"))

    assert receiver.requests == []
    assert stats.queue_records == 1
    assert "CERTIFICATE_VERIFY_FAILED" in stats.last_error


def test_a_client_certificate_is_shown(send_one, certificates, server_context, receiver):
    server_context.verify_mode = ssl.CERT_REQUIRED
    server_context.load_verify_locations(certificates / "authority.pem")
    authority = str(certificates / "authority.pem")

    without = send_one(certificate_file=authority)
    with_one = send_one(
        certificate_file=authority,
        client_certificate_file=str(certificates / "client.pem"),
        client_key_file=str(certificates / "client.key"),
    )

    assert (without.sent_records, with_one.sent_records) == (0, 1)


def test_a_silent_endpoint_is_left_in_time_over_tls_too(receiver, certificates, clock, spans_body):
    receiver.dribble(times=float("inf"))
    target = Target(
        url=f"{receiver.endpoint}/v1/traces",
        certificate_file=str(certificates / "authority.pem"),
        timeout_s=0.5,
    )
    sender = Sender({Signal.TRACES: target}, clock=clock, random=lambda: 0.0)
    sender.submit(Signal.TRACES, spans_body(1), 1)

    sender.pump(BUDGET_S)

    assert sender.stats.queue_records == 1
    sender.close()


class TunnelHandler(socketserver.StreamRequestHandler):
    """An HTTP proxy that knows CONNECT and nothing else."""

    def handle(self):
        method, place, _ = self.rfile.readline().decode().split()
        while self.rfile.readline().strip():
            pass
        self.server.asked.append((method, place))
        host, _, port = place.partition(":")
        with socket.create_connection((host, int(port))) as onward:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=self.copy, args=(onward, self.connection))
            back.start()
            self.copy(self.connection, onward)
            back.join()

    @staticmethod
    def copy(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


class TlsServer(socketserver.ThreadingTCPServer):
    """A server that speaks TLS where it is given a context."""

    context = None

    def finish_request(self, request, client_address):
        if self.context is not None:
            request = self.context.wrap_socket(request, server_side=True)
        with request:
            super().finish_request(request, client_address)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_https_goes_through_a_proxy_as_a_tunnel(
    send_one, certificates, receiver, server_context, monkeypatch, scheme
):
    """A https:// proxy is trusted as the system says, not as the endpoint is."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "authority.pem"))
    with TlsServer(("127.0.0.1", 0), TunnelHandler) as proxy:
        proxy.asked = []
        proxy.context = server_context if scheme == "https" else None
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        stats = send_one(
            certificate_file=str(certificates / "authority.pem"),
            proxy_url=f"{scheme}://127.0.0.1:{proxy.server_address[1]}",
        )
        proxy.shutdown()
        thread.join()

        assert stats.last_error is None
        assert stats.sent_records == 1
        assert proxy.asked == [("CONNECT", receiver.endpoint.removeprefix("https://"))]


def test_an_endpoint_that_never_shakes_hands_is_left_in_time(certificates, clock, spans_body):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Target(
            url=f"https://127.0.0.1:{silent.getsockname()[1]}/v1/traces",
            certificate_file=str(certificates / "authority.pem"),
            timeout_s=0.3,
        )
        sender = Sender({Signal.TRACES: target}, clock=clock, random=lambda: 0.0)
        sender.submit(Signal.TRACES, spans_body(1), 1)

        sender.pump(BUDGET_S)

        assert sender.stats.queue_records == 1
        assert "timed out" in sender.stats.last_error
        sender.close()


def test_the_environment_names_the_files(certificates):
    targets = targets_from_environment(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4318",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificates / "authority.pem"),
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(certificates / "client.pem"),
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(certificates / "client.key"),
        }
    )

    target = targets[Signal.TRACES]
    assert target.certificate_file == str(certificates / "authority.pem")
    assert target.client_certificate_file == str(certificates / "client.pem")
    assert target.client_key_file == str(certificates / "client.key")


def test_a_key_that_does_not_fit_is_found_at_start(certificates):
    with pytest.raises(ConfigError, match="CLIENT_CERTIFICATE"):
        targets_from_environment(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4318",
                "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(certificates / "client.pem"),
                "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(certificates / "server.key"),
            }
        )
