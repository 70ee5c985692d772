"""Where to send, from the ``OTEL_EXPORTER_OTLP_*`` variables, as OpenTelemetry defines them.

Source:
    https://opentelemetry.io/docs/specs/otel/protocol/exporter/ ; the time-out is in seconds, as in
    OpenTelemetry Python. Two differences: the default compression is gzip, since a job of thousands
    of ranks shares its network with the telemetry, and malformed values are errors, not warnings.
"""

from __future__ import annotations

import base64
import math
import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, unquote_to_bytes, urlsplit, urlunsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from argus_otel._runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PREFIX: Final = "OTEL_EXPORTER_OTLP_"
_DEFAULT_ENDPOINT: Final = "http://localhost:4318"
_DEFAULT_TIMEOUT_S: Final = 10.0
_COMPRESSIONS: Final = ("gzip", "deflate", "none")

# Characters of an HTTP field name (RFC 9110, token).
_TOKEN: Final = frozenset(
    "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)


class Signal(StrEnum):
    """What a request carries."""

    TRACES = "traces"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where and how one signal is sent."""

    url: str
    """Complete, without user and password (those are a header)."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """May hold secrets, so they are in no message and no repr."""
    timeout_s: float = _DEFAULT_TIMEOUT_S
    """Longest that one request may take, from connecting to the last byte of the answer."""
    compression: str = "gzip"
    """``gzip``, ``deflate`` or ``none``."""
    certificate_file: str | None = None
    """Trusted certificates (PEM); None for the system's."""
    client_certificate_file: str | None = None
    client_key_file: str | None = None
    """None where the key is in the certificate's file."""
    proxy_url: str | None = field(default=None, repr=False)

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS as this target wants it; None for plain http.

        Raises:
            OSError: A file is missing or is no certificate (``ssl.SSLError`` is an OSError).
        """
        if not self.url.startswith("https:"):
            return None
        context = ssl.create_default_context(cafile=self.certificate_file)
        context.set_alpn_protocols(["http/1.1"])
        if self.client_certificate_file is not None:
            context.load_cert_chain(self.client_certificate_file, self.client_key_file)
        return context


def targets_from_environment(
    environ: Mapping[str, str], signals: Iterable[Signal] = tuple(Signal)
) -> dict[Signal, Target]:
    """The target of each signal, from the OTLP exporter variables.

    Args:
        environ: Usually ``os.environ``. An empty value counts as unset, as OpenTelemetry says.
        signals: Those that are sent; the variables of others are not looked at.

    Raises:
        ConfigError: A value cannot be used. Header values are never in the message.
    """
    return {signal: _target(environ, signal) for signal in signals}


def basic_authorization(username: str, password: str) -> str:
    """The value of an Authorization field, from a URL's percent-encoded parts.

    Source:
        RFC 7617
    """
    pair = unquote_to_bytes(username) + b":" + unquote_to_bytes(password)
    return f"Basic {base64.b64encode(pair).decode('ascii')}"


def _target(environ: Mapping[str, str], signal: Signal) -> Target:
    _check_protocol(environ, signal)
    url, authorization = _endpoint(environ, signal)
    compression_name, compression = _lookup(environ, signal, "COMPRESSION")
    if (compression or "gzip").lower() not in _COMPRESSIONS:
        raise ConfigError(
            where=f"{compression_name} (environment)",
            got=repr(compression),
            expected="gzip, deflate or none",
            fix="Set it to gzip, or unset it for the default of gzip.",
        )
    target = Target(
        url=url,
        headers=authorization | _headers(environ, signal),
        timeout_s=_timeout_s(environ, signal),
        compression=(compression or "gzip").lower(),
        certificate_file=_file(environ, signal, "CERTIFICATE"),
        client_certificate_file=_file(environ, signal, "CLIENT_CERTIFICATE"),
        client_key_file=_file(environ, signal, "CLIENT_KEY"),
        proxy_url=_proxy(environ, url),
    )
    _check_certificates(environ, signal, target)
    return target


def _lookup(environ: Mapping[str, str], signal: Signal, what: str) -> tuple[str, str | None]:
    """The signal's own variable, else the general one: its name and its value."""
    own = f"{_PREFIX}{signal.upper()}_{what}"
    if value := environ.get(own, "").strip():
        return own, value
    return _PREFIX + what, environ.get(_PREFIX + what, "").strip() or None


def _check_protocol(environ: Mapping[str, str], signal: Signal) -> None:
    name, protocol = _lookup(environ, signal, "PROTOCOL")
    if protocol not in {None, "http/protobuf"}:
        raise ConfigError(
            where=f"{name} (environment)",
            got=repr(protocol),
            expected="http/protobuf, which is what argus sends",
            fix=(
                f"Set {name}=http/protobuf and point the endpoint at the Collector's HTTP port "
                "(4318 by default; 4317 is gRPC)."
            ),
        )


def _endpoint(environ: Mapping[str, str], signal: Signal) -> tuple[str, dict[str, str]]:
    name, value = _lookup(environ, signal, "ENDPOINT")
    endpoint = value or _DEFAULT_ENDPOINT
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname)
        _ = parts.port  # raises where it is no number
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            where=f"{name} (environment)",
            got=repr(endpoint.rpartition("@")[2]),
            expected="an http:// or https:// address",
            fix=f"Set it to {_DEFAULT_ENDPOINT}, or to your Collector's OTLP/HTTP address.",
        )
    path = parts.path
    if name == f"{_PREFIX}ENDPOINT":  # a base, to which each signal's path is appended
        path = f"{path.rstrip('/')}/v1/{signal}"
    authorization = {}
    if parts.username is not None:
        credentials = basic_authorization(parts.username, parts.password or "")
        authorization = {"authorization": credentials}
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, place, path or "/", parts.query, "")), authorization


def _headers(environ: Mapping[str, str], signal: Signal) -> dict[str, str]:
    name, value = _lookup(environ, signal, "HEADERS")
    headers = {}
    for number, pair in enumerate((value or "").split(","), start=1):
        if not pair.strip():
            continue
        key, equals, content = pair.partition("=")
        key, content = unquote(key).strip().lower(), unquote(content).strip()
        if not equals or not key or not _TOKEN.issuperset(key) or not _is_field_value(content):
            raise ConfigError(
                where=f"{name} (environment)",
                got=f"malformed in entry {number}",
                expected="key=value pairs separated by commas, values percent-encoded",
                fix='Write it like "api-key=abc,x-team=ml%20infra", or unset it.',
            )
        headers[key] = content
    return headers


def _is_field_value(content: str) -> bool:
    """No line breaks, which would smuggle in headers, and nothing that HTTP cannot carry."""
    return all(character == "\t" or " " <= character <= "ÿ" for character in content)


def _timeout_s(environ: Mapping[str, str], signal: Signal) -> float:
    name, value = _lookup(environ, signal, "TIMEOUT")
    if value is None:
        return _DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise ConfigError(
            where=f"{name} (environment)",
            got=repr(value),
            expected="seconds, more than 0",
            fix="Set it to 10, or unset it for the default of 10.",
        )
    return timeout_s


def _file(environ: Mapping[str, str], signal: Signal, what: str) -> str | None:
    name, value = _lookup(environ, signal, what)
    if value is not None and not Path(value).is_file():
        raise ConfigError(
            where=f"{name} (environment)",
            got=repr(value),
            expected="the path of a PEM file that this process may read",
            fix="Correct the path, mount the file, or unset the variable.",
        )
    return value


def _check_certificates(environ: Mapping[str, str], signal: Signal, target: Target) -> None:
    if target.certificate_file is None and target.client_certificate_file is None:
        return
    try:
        target.ssl_context()
    except OSError as error:
        what = "CERTIFICATE" if target.client_certificate_file is None else "CLIENT_CERTIFICATE"
        name, _ = _lookup(environ, signal, what)
        raise ConfigError(
            where=f"{name} (environment)",
            got=f"not usable ({error})",
            expected="PEM files; with a client certificate, its key in CLIENT_KEY",
            fix=f"Check {_PREFIX}CERTIFICATE, _CLIENT_CERTIFICATE and _CLIENT_KEY.",
        ) from error


def _proxy(environ: Mapping[str, str], url: str) -> str | None:
    parts = urlsplit(url)
    without = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    host = parts.hostname or ""
    if without and proxy_bypass_environment(parts.netloc, {"no": without}):
        return None
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        if proxy := environ.get(name) or environ.get(name.upper()):
            if not proxy.lower().startswith(("http://", "https://")):
                proxy = proxy if "://" in proxy else f"http://{proxy}"
            if proxy.lower().startswith(("http://", "https://")):
                return proxy
            raise ConfigError(
                where=f"{name} (environment)",
                got=f"a {proxy.partition('://')[0]} proxy",
                expected="an http:// or https:// proxy",
                fix=f"Add {host} to NO_PROXY, or name an HTTP proxy.",
            )
    return None
