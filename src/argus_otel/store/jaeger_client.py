"""Jaeger's query API over HTTP: what to ask, how often to try, and what its answers mean."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import httpx

from argus_otel._runtime.errors import StoreError
from argus_otel.store.otlp_json import read_documents, read_resource_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from argus_otel.store.spans import Span

_TRIES: Final = 4
_FIRST_PAUSE_S: Final = 0.25
_TIMEOUT_S: Final = httpx.Timeout(60.0, connect=5.0)
_AGAIN: Final = frozenset({429, 502, 503, 504})
_REFUSED: Final = frozenset({401, 403})
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_NOT_FOUND: Final = 404
_OK: Final = 200


class CallMissingError(Exception):
    """This Jaeger does not have the call; an older or a newer one would."""


class JaegerClient:
    """A few calls of the API v3, each with its predecessor where there is one."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Name the server; it is asked when something is read.

        Args:
            url: Of the query service, with its base path if it has one.
            headers: Sent with every request, for authentication.
            transport: Instead of a network connection.
            pause: Waits between tries, seconds.
        """
        self.url = url.rstrip("/")
        self._pause = pause
        self._http = httpx.Client(
            base_url=self.url,
            headers=dict(headers or {}),
            timeout=_TIMEOUT_S,
            transport=transport,
            trust_env=httpx.URL(self.url).host not in _LOOPBACK,  # no proxy leads back to us
            follow_redirects=False,  # a login page is no answer, and headers stay where they belong
        )

    def services(self) -> list[str]:
        """Names of all services that have sent something."""
        try:
            answer = self._documents("/api/v3/services", {})[0].get("services")
        except CallMissingError:
            answer = self._documents("/api/services", {})[0].get("data")
        return [str(name) for name in answer or ()]

    def operations(self, service: str) -> list[str] | None:
        """Span names of a service; None where this Jaeger does not tell."""
        try:
            answer = self._documents("/api/v3/operations", {"service": service})[0]
            listed = answer.get("operations")
        except CallMissingError:
            try:
                listed = self._documents("/api/operations", {"service": service})[0].get("data")
            except CallMissingError:
                return None
        return [str(entry["name"]) for entry in listed or ()]

    def search(
        self, service: str, operation: str, start_ns: int, end_ns: int, limit: int
    ) -> tuple[list[Span], int]:
        """Whole traces that have such a span in a time window.

        Returns:
            Their spans, and the answer's size in bytes.
        """
        return self._spans(
            "/api/v3/traces",
            {
                "query.service_name": service,
                "query.operation_name": operation,
                "query.start_time_min": _rfc3339(start_ns),
                "query.start_time_max": _rfc3339(end_ns),
                "query.num_traces": str(limit),
                # Without it Jaeger may move spans of hosts whose clocks differ.
                "query.raw_traces": "true",
            },
        )

    def trace(self, trace_id: str) -> list[Span]:
        """All spans of a trace; empty where there is none."""
        return self._spans(f"/api/v3/traces/{trace_id}", {"raw_traces": "true"})[0]

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def _spans(self, path: str, query: Mapping[str, str]) -> tuple[list[Span], int]:
        response = self._get(path, query)
        if response.status_code == _NOT_FOUND and "No traces found" in response.text:
            return [], len(response.content)
        spans: list[Span] = []
        try:
            for document in self._checked(response, path):
                result = document.get("result", document)
                spans += read_resource_spans(result.get("resourceSpans", ()))
        except CallMissingError as error:
            raise self._error(
                f"without the call {path}",
                expected="Jaeger 2.0 or newer, whose API v3 argus reads",
                fix="See that the URL is that of jaeger-query, with its base path.",
            ) from error
        except ValueError as error:
            raise self._error(f"answering {path} with something else: {error}") from error
        return spans, len(response.content)

    def _documents(self, path: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        try:
            return self._checked(self._get(path, query), path) or [{}]
        except ValueError as error:
            raise self._error(f"answering {path} with something else: {error}") from error

    def _checked(self, response: httpx.Response, path: str) -> list[dict[str, Any]]:
        status = response.status_code
        if status in _REFUSED:
            raise self._error(
                f"refusing access (HTTP {status})",
                expected="a server that lets us read",
                fix="Pass what it wants: --header 'Authorization: Bearer …' (may be repeated).",
            )
        body = response.text
        # Paths that Jaeger does not know are answered with its user interface, status 200.
        if status == _NOT_FOUND or body.lstrip()[:1] == "<":
            raise CallMissingError(path)
        if status != _OK:
            raise self._error(f"answering {path} with HTTP {status}: {body[:300].strip()}")
        documents = list(read_documents(body))
        for document in documents:
            if "error" in document:
                raise self._error(f"answering {path} with {document['error']}")
        return documents

    def _get(self, path: str, query: Mapping[str, str]) -> httpx.Response:
        """Ask, several times where the network or a proxy is at fault. Every call only reads."""
        failure = ""
        for tried in range(_TRIES):
            if tried:
                self._pause(_FIRST_PAUSE_S * 2 ** (tried - 1))
            try:
                response = self._http.get(path, params=dict(query))
            except httpx.TransportError as error:
                failure = str(error) or type(error).__name__
                continue
            if response.status_code not in _AGAIN:
                return response
            failure = f"HTTP {response.status_code}"
        raise self._error(
            f"not answering after {_TRIES} tries: {failure}",
            fix="See that Jaeger runs and that the URL and its port are those of jaeger-query "
            "(16686 unless changed).",
        )

    def _error(
        self,
        got: str,
        *,
        expected: str = "the query API of Jaeger",
        fix: str = "See that the URL is that of jaeger-query, and what its log says.",
    ) -> StoreError:
        return StoreError(f"Jaeger at {self.url}", got=got, expected=expected, fix=fix)


def _rfc3339(time_ns: int) -> str:
    seconds, rest_ns = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns:09d}Z"
