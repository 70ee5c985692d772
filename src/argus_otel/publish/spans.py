"""A finding as an ``argus.finding`` span under the culprit's step, with error status.

One for each of its states: it is open where it can be seen first, and ended in the step in which
it was seen last, unless it had ended before anybody looked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow.compute as pc

from argus_otel._runtime.errors import ArgusError
from argus_otel.semconv import names
from argus_otel.wire import ids

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import httpx
    import pyarrow as pa

    from argus_otel.tables.findings import Finding


# Tells a finding's two spans apart where both lie in one step: their ids come of its own.
_ENDED_MASK: Final = (1 << 64) - 1


class PublishError(ArgusError):
    """The verdict could not be sent; it still holds."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingSpan:
    """A span to be encoded: ids in bytes, times in Unix nanoseconds."""

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool | Sequence[int]]
    message: str


class Destination(Protocol):
    """Where finding spans go."""

    def send(self, body: bytes) -> None:
        """Deliver one ExportTraceServiceRequest.

        Raises:
            ArgusError: It did not arrive.
        """
        ...


class HttpDestination:
    """An OTLP/HTTP endpoint: a Collector, Jaeger, or ``argus serve``."""

    def __init__(
        self,
        endpoint: str,
        headers: Mapping[str, str] | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Name the endpoint, as OTEL_EXPORTER_OTLP_ENDPOINT does: without ``/v1/traces``."""
        self._url = f"{endpoint.rstrip('/')}/v1/traces"
        self._headers = {"content-type": "application/x-protobuf", **(headers or {})}
        self._transport = transport

    def send(self, body: bytes) -> None:
        """See ``Destination``."""
        # Not above: it takes a fifth of a second to load, for nothing where no verdict is sent.
        import httpx

        try:
            with httpx.Client(transport=self._transport, timeout=10.0) as client:
                answer = client.post(self._url, content=body, headers=self._headers)
                answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PublishError(
                f"the OTLP endpoint {self._url}",
                got=f"not taking the verdict ({error})",
                expected="an OTLP/HTTP receiver",
                fix="Check --otlp-endpoint or OTEL_EXPORTER_OTLP_ENDPOINT (the HTTP port, usually "
                "4318), or pass --dry-run.",
            ) from error


def finding_spans(
    findings: Sequence[Finding],
    steps: pa.Table,
    *,
    published: Collection[tuple[str, str]] = (),
) -> list[FindingSpan]:
    """The spans to send.

    Args:
        findings: From the detectors.
        steps: ``tables.STEPS`` of the run: which trace and time the step of a finding has.
        published: Finding ids with the states that the store has already; left out, so that a
            state is told once however often the detectors run.
    """
    spans = []
    for finding in findings:
        if (finding.id, finding.state) in published:
            continue
        rank = finding.evidence.get("look_at_rank")
        news = finding.state == "ended" and (finding.id, "open") in published
        wanted = [finding.last_step] if news else []
        place = _first_stored(steps, [*wanted, finding.evidence.get("look_at_step")], rank)
        if rank is None or place is None:
            continue
        trace_id = bytes.fromhex(place["trace_id"])
        number = int.from_bytes(bytes.fromhex(finding.id), "little")
        if finding.state == "ended":
            number ^= _ENDED_MASK
        spans.append(
            FindingSpan(
                trace_id=trace_id,
                span_id=ids.span_id(trace_id, ids.FINDING, rank, number),
                parent_span_id=ids.span_id(trace_id, ids.RANK_STEP, rank),
                start_ns=place["start_ns"],
                end_ns=place["start_ns"] + int(place["step_s"] * 1e9),
                attributes=_attributes(finding, int(rank)),
                message=_message(finding),
            )
        )
    return spans


def steps_of(findings: Sequence[Finding]) -> set[int]:
    """Steps in which spans of these findings may lie already."""
    steps: set[int] = set()
    for finding in findings:
        steps |= {finding.first_step, finding.last_step}
        steps |= {int(end) for _, end in finding.evidence.get("episodes", ())}
        if (look := finding.evidence.get("look_at_step")) is not None:
            steps.add(int(look))
    return steps


def _first_stored(
    steps: pa.Table, ordinals: Sequence[int | None], rank: int | None
) -> dict[str, Any] | None:
    """Where the first of these steps is that the rank has one of."""
    for ordinal in ordinals:
        row = steps.filter((pc.field("ordinal") == ordinal) & (pc.field("rank") == rank))
        if row.num_rows:
            (place,) = row.slice(0, 1).select(["trace_id", "start_ns", "step_s"]).to_pylist()
            return dict(place)
    return None


def _message(finding: Finding) -> str:
    """What Jaeger shows beside the error mark."""
    if finding.state == "open":
        return finding.summary
    return f"Over after step {finding.last_step}: {finding.summary}"


def _attributes(finding: Finding, rank: int) -> dict[str, str | int | float | bool | Sequence[int]]:
    return {
        names.ARGUS_FINDING_ID: finding.id,
        names.ARGUS_FINDING_DETECTOR: finding.detector,
        names.ARGUS_FINDING_CAUSE: finding.cause,
        names.ARGUS_FINDING_SEVERITY: finding.severity,
        names.ARGUS_FINDING_STATE: finding.state,
        names.ARGUS_FINDING_RANKS: list(finding.ranks),
        names.ARGUS_FINDING_SLOWDOWN: finding.slowdown,
        names.ARGUS_FINDING_SUMMARY: finding.summary,
        names.ARGUS_FINDING_NEXT_STEP: finding.next_step,
        names.DL_RANK: rank,
    }
