"""A finding as an OTLP log record when it is raised and when it is over, and as a metric while open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import httpx
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber

from argus_otel.publish.spans import PublishError
from argus_otel.semconv import names
from argus_otel.wire import ids, scopes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from argus_otel.publish.ledger import Change
    from argus_otel.tables.findings import Finding

EVENT_NAME: Final = "argus.finding"
_SEVERITY: Final = {
    "info": SeverityNumber.SEVERITY_NUMBER_INFO,
    "warning": SeverityNumber.SEVERITY_NUMBER_WARN,
    "critical": SeverityNumber.SEVERITY_NUMBER_ERROR,
}
_NO_SUCH_PATH: Final = (404, 405, 415, 501)


class NotTakenError(PublishError):
    """The endpoint takes no such signal, today or tomorrow."""


def logs_request(
    changes: Sequence[Change], resource: Mapping[str, str | int], now_ns: int
) -> bytes:
    """Body of an ExportLogsServiceRequest, one record a change.

    Args:
        changes: What was raised or is over.
        resource: Of the run.
        now_ns: Unix nanoseconds.
    """
    request = ExportLogsServiceRequest()
    logs = request.resource_logs.add(schema_url=names.SCHEMA_URL)
    logs.resource.attributes.extend(_attributes(resource))
    scoped = logs.scope_logs.add()
    scoped.scope.name = scopes.DIGEST
    for change in changes:
        scoped.log_records.append(_record(change, now_ns))
    return bytes(request.SerializeToString())


def _record(change: Change, now_ns: int) -> LogRecord:
    finding = change.finding
    over = change.kind == "closed"
    record = LogRecord(
        time_unix_nano=now_ns,
        observed_time_unix_nano=now_ns,
        # That it is over wakes nobody.
        severity_number=SeverityNumber.SEVERITY_NUMBER_INFO
        if over
        else _SEVERITY[finding.severity],
        severity_text="info" if over else finding.severity,
        event_name=EVENT_NAME,
        body=_value(f"Over ({change.why}): {finding.summary}" if over else finding.summary),
        attributes=_attributes(
            {
                names.ARGUS_FINDING_ID: finding.id,
                names.ARGUS_FINDING_DETECTOR: finding.detector,
                names.ARGUS_FINDING_CAUSE: finding.cause,
                names.ARGUS_FINDING_SEVERITY: finding.severity,
                names.ARGUS_FINDING_STATE: finding.state,
                names.ARGUS_FINDING_RANKS: list(finding.ranks),
                names.ARGUS_FINDING_SLOWDOWN: finding.slowdown,
                names.ARGUS_FINDING_SUMMARY: finding.summary,
                names.ARGUS_FINDING_NEXT_STEP: finding.next_step,
                names.ARGUS_STEP_ORDINAL: finding.first_step,
            }
        ),
    )
    trace_id, rank = finding.evidence.get("trace_id"), finding.evidence.get("look_at_rank")
    if trace_id is not None and rank is not None:
        record.trace_id = bytes.fromhex(trace_id)
        record.span_id = ids.span_id(record.trace_id, ids.RANK_STEP, rank)
    return record


def metrics_request(
    active: Sequence[Finding],
    over: Sequence[Finding],
    resource: Mapping[str, str | int],
    now_ns: int,
) -> bytes:
    """Body of an ExportMetricsServiceRequest: 1 for each open finding, 0 once for each that is over."""
    request = ExportMetricsServiceRequest()
    metrics = request.resource_metrics.add(schema_url=names.SCHEMA_URL)
    metrics.resource.attributes.extend(_attributes(resource))
    scoped = metrics.scope_metrics.add()
    scoped.scope.name = scopes.METRICS
    metric = scoped.metrics.add(name=names.METRIC_ARGUS_FINDING_ACTIVE, unit="{finding}")
    for value, findings in ((1, active), (0, over)):
        for finding in findings:
            point = metric.gauge.data_points.add(as_int=value, time_unix_nano=now_ns)
            point.attributes.extend(
                _attributes(
                    {
                        # Prometheus keeps attributes of the resource apart from the series.
                        names.ARGUS_RUN_ID: resource.get(names.ARGUS_RUN_ID, ""),
                        names.ARGUS_FINDING_ID: finding.id,
                        names.ARGUS_FINDING_CAUSE: finding.cause,
                        names.ARGUS_FINDING_SEVERITY: finding.severity,
                    }
                )
            )
    return bytes(request.SerializeToString())


def send(
    endpoint: str,
    signal: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    *,
    transport: httpx.BaseTransport | None = None,
) -> None:
    """Post to ``/v1/logs`` or ``/v1/metrics`` of an OTLP/HTTP endpoint.

    Raises:
        NotTakenError: It has no such path.
        PublishError: It did not arrive.
    """
    url = f"{endpoint.rstrip('/')}/v1/{signal}"
    about = {"expected": "an OTLP/HTTP receiver", "fix": "Check --otlp-endpoint."}
    try:
        with httpx.Client(transport=transport, timeout=10.0) as client:
            answer = client.post(
                url, content=body, headers={"content-type": "application/x-protobuf", **(headers or {})}
            )  # fmt: skip
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PublishError(
            f"the OTLP endpoint {url}", got=f"not there ({error})", **about
        ) from error
    if answer.status_code in _NO_SUCH_PATH:
        raise NotTakenError(
            f"the OTLP endpoint {url}",
            got=f"taking no {signal} (HTTP {answer.status_code})",
            expected="a Collector",
            fix=f"Findings go into traces all the same; {signal} are not tried again.",
        )
    if answer.is_error:
        raise PublishError(
            f"the OTLP endpoint {url}", got=f"refusing (HTTP {answer.status_code})", **about
        )


def _attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_value(value)) for name, value in values.items()]


def _value(value: Any) -> AnyValue:  # noqa: ANN401 - what attributes may be
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_value(part) for part in value]))
