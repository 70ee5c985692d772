"""What is the same fault, and when it is over."""

from dataclasses import replace

import httpx
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from argus_otel._runtime.errors import ConfigError
from argus_otel.publish import signals
from argus_otel.publish.ledger import REST_STEPS, Ledger
from argus_otel.publish.spans import PublishError
from argus_otel.tables.findings import Finding, Onset, Suppressed, finding_id


def finding(*ranks, last=40, **differences):
    """A straggler that began in step 30."""
    about = {
        "detector": "compute_straggler",
        "cause": "compute_straggler",
        "ranks": ranks,
        "first_step": 30,
        "last_step": last,
        "onset": Onset(step=30, exact=True),
        "severity": "warning",
        "slowdown": 1.4,
        "summary": "It is slow.",
        "next_step": "Look.",
        "evidence": {"trace_id": "5718c37843ea8845e975f2eafbbcb183", "look_at_rank": 2},
        **differences,
    }
    return Finding(**about, id=finding_id("run", about["cause"], ranks))


def kinds(changes):
    """What is told."""
    return [change.kind for change in changes]


def test_a_rank_that_joins_is_no_new_fault():
    """Its host's other ranks fall ill a little later; the id stays what it was."""
    ledger = Ledger()
    (first,) = ledger.update("run", [finding(2)], 40)

    assert ledger.update("run", [finding(2, 3, last=45)], 45) == []

    (known,) = ledger.open_in("run")
    assert known.id == first.finding.id
    assert known.ranks == (2, 3)


def test_another_rank_is_another_fault():
    ledger = Ledger()

    changes = ledger.update("run", [finding(2), finding(7)], 40)

    assert kinds(changes) == ["raised", "raised"]


def test_what_rests_is_not_over():
    """An intermittent fault is told once, not each time that it comes."""
    ledger = Ledger()
    ledger.update("run", [finding(2, last=40)], 40)

    assert ledger.update("run", [], 40 + REST_STEPS - 1) == []
    assert ledger.update("run", [finding(2, last=60)], 60) == []
    assert kinds(ledger.update("run", [], 60 + REST_STEPS)) == ["closed"]
    assert ledger.update("run", [], 200) == []


def test_what_comes_back_long_after_is_told_again():
    """It was said to be over; that is no longer so."""
    ledger = Ledger()
    ledger.update("run", [finding(2)], 40)
    ledger.update("run", [finding(2, state="ended")], 70)

    (change,) = ledger.update("run", [finding(2, last=150)], 150)

    assert (change.kind, change.why) == ("raised", "it is back")


def test_what_was_over_before_anybody_looked_is_told_as_both():
    ledger = Ledger()

    changes = ledger.update("run", [finding(2, last=50, state="ended")], 120)

    assert kinds(changes) == ["raised", "closed"]
    assert ledger.update("run", [finding(2, last=50, state="ended")], 130) == []


def test_a_symptom_is_closed_when_its_cause_is_found():
    """And it is said by what it is explained."""
    ledger = Ledger()
    symptom = finding(cause="regression_unexplained", detector="slow_steps")
    ledger.update("run", [symptom], 40)
    cause = replace(
        finding(2), suppressed=(Suppressed(cause="regression_unexplained", ranks=()),)
    )  # fmt: skip

    changes = ledger.update("run", [cause], 45)

    assert sorted(kinds(changes)) == ["closed", "raised"]
    assert "explained by compute straggler" in {change.why for change in changes}


def test_it_reads_what_it_wrote(tmp_path):
    ledger = Ledger(path=tmp_path / "state.json")
    ledger.update("run", [finding(2, hosts=("a",), groups=("7",))], 40)
    ledger.write()

    assert Ledger.read(tmp_path / "state.json").runs == ledger.runs


def test_it_remembers_so_many_runs_and_no_more(tmp_path):
    ledger = Ledger(path=tmp_path / "state.json")
    for run in range(50):
        ledger.update(str(run), [finding(2)], 40)
    ledger.write()

    assert list(Ledger.read(tmp_path / "state.json").runs)[-1] == "49"
    assert len(Ledger.read(tmp_path / "state.json").runs) == 20


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "x", "runs": {}}', '{"schema": 1'])
def test_a_damaged_file_is_a_clear_error(tmp_path, text):
    (tmp_path / "state.json").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="Remove it"):
        Ledger.read(tmp_path / "state.json")


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="--state"):
        Ledger(path=tmp_path / "nowhere" / "state.json").write()


def test_a_log_record_is_an_event_on_the_span_of_the_step():
    """Severity as its finding's when raised; information when it is over."""
    ledger = Ledger()
    changes = [
        *ledger.update("run", [finding(2, severity="critical")], 40),
        *ledger.close_all("run", "the job ended"),
    ]

    request = ExportLogsServiceRequest.FromString(
        signals.logs_request(changes, {"service.name": "argus-detect"}, 5)
    )

    raised, over = request.resource_logs[0].scope_logs[0].log_records
    assert {raised.event_name, over.event_name} == {"argus.finding"}
    assert (raised.severity_text, over.severity_text) == ("critical", "info")
    assert raised.severity_number > over.severity_number
    assert raised.trace_id.hex() == "5718c37843ea8845e975f2eafbbcb183"
    assert len(raised.span_id) == 8
    attributes = {a.key: a.value for a in over.attributes}
    assert attributes["argus.finding.state"].string_value == "ended"
    assert over.body.string_value == "Over (the job ended): It is slow."


def test_the_metric_is_one_while_open_and_nought_after():
    request = ExportMetricsServiceRequest.FromString(
        signals.metrics_request([finding(2)], [finding(7)], {}, 5)
    )

    (metric,) = request.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("argus.finding.active", "{finding}")
    assert [point.as_int for point in metric.gauge.data_points] == [1, 0]


@pytest.mark.parametrize(
    ("status", "error"), [(404, signals.NotTakenError), (503, PublishError)]
)  # fmt: skip
def test_an_endpoint_without_logs_is_told_from_one_that_is_down(status, error):
    """The first is not asked again."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status))

    with pytest.raises(error):
        signals.send("http://c:4318", "logs", b"", transport=transport)
