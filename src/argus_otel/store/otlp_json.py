"""OTLP as JSON, the way Jaeger's query API writes it, to spans.

The standard says hexadecimal ids and 64-bit integers as strings; gateways made from the protobuf
definitions write ids in base64 and enums by name. Both are read.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Any, Final

from argus_otel.semconv import names
from argus_otel.store.spans import STATUS, Span, clamp_ns, read_origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_LISTS: Final = (names.ARGUS_GROUPS, names.ARGUS_PHASE_NAMES)
_STATUS_NAMES: Final = {"STATUS_CODE_UNSET": 0, "STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}


def read_documents(text: str) -> Iterator[dict[str, Any]]:
    """Yield each JSON object of a body: one, or several in a row where the answer is a stream.

    Raises:
        ValueError: Not JSON objects.
    """
    decoder = json.JSONDecoder()
    place = 0
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        document, place = decoder.raw_decode(text, place)
        if not isinstance(document, dict):
            msg = "not a JSON object"
            raise ValueError(msg)  # noqa: TRY004 - what came, not what was called
        yield document


def read_resource_spans(resource_spans: Iterable[Mapping[str, Any]]) -> Iterator[Span]:
    """Yield every span under an array of OTLP ``resourceSpans``.

    Raises:
        ValueError: Something in there is not as OTLP/JSON has it.
    """
    try:
        for resource in resource_spans:
            origin = read_origin(_mapping(resource.get("resource", {}).get("attributes", ())))
            for scope_spans in resource.get("scopeSpans", ()):
                scope = scope_spans.get("scope", {}).get("name", "")
                for span in scope_spans.get("spans", ()):
                    status = span.get("status", {})
                    yield Span(
                        origin=origin,
                        scope=scope,
                        name=span.get("name", ""),
                        trace_id=_hex(span["traceId"], 16),
                        span_id=_hex(span["spanId"], 8),
                        parent_id=_hex(span.get("parentSpanId", ""), 8) or None,
                        start_ns=clamp_ns(int(span.get("startTimeUnixNano", 0))),
                        end_ns=clamp_ns(int(span.get("endTimeUnixNano", 0))),
                        status=_status(status.get("code", 0)),
                        status_message=status.get("message") or None,
                        attributes=_mapping(span.get("attributes", ())),
                        events=[_event(event) for event in span.get("events", ())],
                        links=[_link(link) for link in span.get("links", ())],
                    )
    except (KeyError, TypeError, AttributeError) as error:
        msg = f"not OTLP/JSON: {error!r}"
        raise ValueError(msg) from error


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "time_ns": int(event.get("timeUnixNano", 0)),
        "name": event.get("name", ""),
        "attributes": _mapping(event.get("attributes", ())),
    }


def _link(link: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "trace_id": _hex(link.get("traceId", ""), 16),
        "span_id": _hex(link.get("spanId", ""), 8),
        "attributes": _mapping(link.get("attributes", ())),
    }


def _mapping(attributes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    mapping = {pair["key"]: _value(pair.get("value", {})) for pair in attributes}
    for name in _LISTS:
        # Storages that know no lists (Cassandra, Badger) give them back as the JSON text of one.
        value = mapping.get(name)
        if isinstance(value, str) and value.startswith("["):
            mapping[name] = json.loads(value)
    return mapping


def _value(value: Mapping[str, Any]) -> Any:  # noqa: ANN401 - OTLP's AnyValue is any value
    for kind, item in value.items():
        if kind == "intValue":
            return int(item)
        if kind == "doubleValue":
            return float(item)  # "NaN" and "Infinity" come as strings
        if kind == "arrayValue":
            return [_value(part) for part in item.get("values", ())]
        if kind == "kvlistValue":
            return _mapping(item.get("values", ()))
        return item
    return None


def _hex(text: str, size: int) -> str:
    """An id of ``size`` bytes in lower-case hex, from hex or base64; "" stays so."""
    if not text or len(text) == 2 * size:
        return text.lower()
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        msg = f"id {text[:40]!r} is neither hexadecimal nor base64"
        raise ValueError(msg) from error
    if len(raw) != size:
        msg = f"id {text[:40]!r} has not {size} bytes"
        raise ValueError(msg)
    return raw.hex()


def _status(code: int | str) -> str:
    number = _STATUS_NAMES.get(code, 0) if isinstance(code, str) else code
    return STATUS[number] if 0 <= number < len(STATUS) else STATUS[0]
