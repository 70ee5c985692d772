"""The OTLP exporter variables, read as OpenTelemetry defines them."""

import pytest

from argus_otel._runtime.errors import ConfigError
from argus_otel.export import Signal, targets_from_environment


def target(signal=Signal.TRACES, **variables):
    environ = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    return targets_from_environment(environ)[signal]


def test_an_empty_environment_means_a_collector_on_this_host():
    targets = targets_from_environment({})

    assert {signal: it.url for signal, it in targets.items()} == {
        Signal.TRACES: "http://localhost:4318/v1/traces",
        Signal.METRICS: "http://localhost:4318/v1/metrics",
    }
    traces = targets[Signal.TRACES]
    assert (traces.timeout_s, traces.compression, dict(traces.headers)) == (10.0, "gzip", {})
    assert traces.proxy_url is None


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/otlp/", "https://host/otlp/v1/traces"),
        ("https://host/otlp", "https://host/otlp/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ("https://host/otlp?tenant=a", "https://host/otlp/v1/traces?tenant=a"),
        ("", "http://localhost:4318/v1/traces"),
    ],
)
def test_the_signals_path_is_appended_to_the_general_endpoint(endpoint, url):
    assert target(ENDPOINT=endpoint).url == url


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ("http://collector:4318/custom", "http://collector:4318/custom"),
        ("http://collector:4318", "http://collector:4318/"),
    ],
)
def test_a_signals_own_endpoint_is_used_as_it_is(endpoint, url):
    assert target(TRACES_ENDPOINT=endpoint, ENDPOINT="http://other:1").url == url


def test_a_signals_own_variable_is_nobody_elses():
    metrics = target(Signal.METRICS, TRACES_ENDPOINT="http://traces:1", TRACES_TIMEOUT="3")

    assert metrics.url == "http://localhost:4318/v1/metrics"
    assert metrics.timeout_s == 10.0


def test_headers_are_percent_decoded_and_their_names_are_lower_case():
    headers = target(HEADERS="Api-Key=a%3Db%2Cc, x-team = ml%20infra ,,").headers

    assert headers == {"api-key": "a=b,c", "x-team": "ml infra"}


def test_a_signals_headers_replace_the_general_ones():
    assert target(HEADERS="a=1", TRACES_HEADERS="b=2").headers == {"b": "2"}


def test_a_password_in_the_address_becomes_a_header():
    it = target(ENDPOINT="https://user:p%40ss@host:4318")

    assert it.url == "https://host:4318/v1/traces"
    assert it.headers == {"authorization": "Basic dXNlcjpwQHNz"}


def test_the_timeout_is_in_seconds():
    assert target(TIMEOUT="2.5").timeout_s == 2.5


def test_compression_can_be_turned_off():
    assert target(COMPRESSION="none").compression == "none"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT .*expected an http://"),
        ({"TRACES_ENDPOINT": "grpc://a:1"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ({"ENDPOINT": "http://host:port"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"ENDPOINT": "http://"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"TIMEOUT": "10s"}, "OTEL_EXPORTER_OTLP_TIMEOUT .*'10s'; expected seconds"),
        ({"TIMEOUT": "-1"}, "TIMEOUT"),
        ({"TIMEOUT": "nan"}, "TIMEOUT"),
        ({"COMPRESSION": "zstd"}, "COMPRESSION .*gzip, deflate or none"),
        ({"CERTIFICATE": "/nowhere.pem"}, "CERTIFICATE .*'/nowhere.pem'"),
        ({"PROTOCOL": "grpc"}, r"PROTOCOL .*http/protobuf, which is what argus sends"),
        ({"TRACES_PROTOCOL": "grpc", "PROTOCOL": "http/protobuf"}, "TRACES_PROTOCOL"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(variables, said):
    with pytest.raises(ConfigError, match=said):
        target(**variables)


@pytest.mark.parametrize(
    "headers", ["hunter2", "a=1,hunter2", "=hunter2", "a b=hunter2", "a=hunter2%0d%0ab: c"]
)
def test_malformed_headers_are_refused_without_showing_a_secret(headers):
    with pytest.raises(ConfigError, match="malformed in entry") as caught:
        target(HEADERS=headers)

    assert "hunter2" not in str(caught.value)


def test_a_targets_repr_shows_no_secret():
    it = target(ENDPOINT="https://user:hunter2@host", TRACES_HEADERS="key=hunter2")

    assert "hunter2" not in repr(it)


@pytest.mark.parametrize(
    ("environ", "proxy"),
    [
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ({"https_proxy": "proxy:3128"}, "http://proxy:3128"),
        ({"HTTP_PROXY": "http://proxy:3128"}, None),
        ({"ALL_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".example"}, None),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "*"}, None),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "other"}, "http://proxy:3128"),
    ],
)
def test_proxy_variables_are_honoured(environ, proxy):
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector.example"}

    assert targets_from_environment(endpoint | environ)[Signal.TRACES].proxy_url == proxy


def test_a_kind_of_proxy_that_is_not_spoken_is_named():
    with pytest.raises(ConfigError, match="socks5 proxy"):
        targets_from_environment({"ALL_PROXY": "socks5://proxy:1080"})


def test_a_signal_that_is_not_sent_may_be_set_as_it_likes():
    """Metrics over gRPC, by another exporter, are no reason to send no traces."""
    environ = {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"}

    assert list(targets_from_environment(environ, [Signal.TRACES])) == [Signal.TRACES]
    with pytest.raises(ConfigError, match="METRICS_PROTOCOL"):
        targets_from_environment(environ)
