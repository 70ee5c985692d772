"""Where a trace can be looked at: Jaeger's own pages, Grafana over Tempo, or any pattern."""

from __future__ import annotations

import json
from typing import Final
from urllib.parse import parse_qs, quote, urlsplit

from argus_otel._runtime.errors import ConfigError

PLACEHOLDER: Final = "{trace_id}"
_MARGIN_MS: Final = 60_000


def check_ui_url(ui_url: str | None) -> str | None:
    """The address as given, if links can be made from it.

    Raises:
        ConfigError: They cannot.
    """
    if ui_url is None:
        return None
    parts = urlsplit(ui_url.removeprefix("grafana+").replace(PLACEHOLDER, "0"))
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            "--ui-url",
            got=repr(ui_url),
            expected="http(s)://HOST:PORT, grafana+http(s)://HOST, or an address with {trace_id}",
            fix="For example: --ui-url http://jaeger:16686",
        )
    return ui_url


def trace_url(ui_url: str, trace_id: str, first_ns: int, last_ns: int) -> str:
    """The address of one trace.

    Args:
        ui_url: Jaeger's pages (``http://jaeger:16686``); Grafana over Tempo
            (``grafana+https://grafana:3000?datasource=UID``, ``tempo`` unless told otherwise); or
            any address with ``{trace_id}`` in it.
        trace_id: Hex.
        first_ns: When the run began, Unix nanoseconds: Grafana looks between the two.
        last_ns: And when it was heard of last.
    """
    if PLACEHOLDER in ui_url:
        return ui_url.replace(PLACEHOLDER, trace_id)
    if not ui_url.startswith("grafana+"):
        return f"{ui_url.rstrip('/')}/trace/{trace_id}"
    parts = urlsplit(ui_url.removeprefix("grafana+"))
    source = parse_qs(parts.query).get("datasource", ["tempo"])[0]
    query = {
        "refId": "A",
        "datasource": {"type": "tempo", "uid": source},
        "queryType": "traceql",
        "query": trace_id,
    }
    span = {
        "from": str(first_ns // 1_000_000 - _MARGIN_MS),
        "to": str(last_ns // 1_000_000 + _MARGIN_MS),
    }
    panes = {"argus": {"datasource": source, "queries": [query], "range": span}}
    packed = quote(json.dumps(panes, separators=(",", ":")), safe="")
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return f"{base}/explore?schemaVersion=1&orgId=1&panes={packed}"
