"""Every configuration that ships is one that the Collector accepts."""

from __future__ import annotations

import subprocess

import pytest

from argus_otel._runtime.bundled import bundled_path

pytestmark = pytest.mark.multiproc

CONFIG = bundled_path("collector-config")

# What a person who has a Collector would have: the part that the fragment is merged into.
YOURS = """
receivers: {otlp: {protocols: {http: {endpoint: "127.0.0.1:0"}}}}
processors: {memory_limiter: {check_interval: 1s, limit_mib: 100}}
exporters: {otlp_http/yours: {endpoint: "http://127.0.0.1:1"}}
service:
  pipelines:
    traces:
      receivers: [otlp]
      processors: [memory_limiter]
      exporters: [forward/argus_timelines, forward/all_else]
"""


def accepted(binary, *files) -> str:
    """Give what the Collector says against these files; empty when it accepts them."""
    options = [option for file in files for option in ("--config", str(file))]
    done = subprocess.run(
        [str(binary), "validate", *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    "names",
    [("gateway",), ("gateway", "local"), ("agent",), ("agent", "fragments/two-gateways")],
    ids="+".join,
)
def test_the_collector_accepts(binaries, names):
    """As the files' own first lines say to run them."""
    assert accepted(binaries.collector, *(CONFIG / f"{name}.yaml" for name in names)) == ""


def test_the_collector_accepts_the_fragment_beside_a_configuration_of_yours(binaries, tmp_path):
    """After the edits that its head asks for."""
    yours = tmp_path / "yours.yaml"
    yours.write_text(YOURS)

    assert accepted(binaries.collector, yours, CONFIG / "fragments/existing-collector.yaml") == ""


def test_jaeger_accepts_its_configuration(binaries):
    """Also without any variable set."""
    assert accepted(binaries.jaeger, CONFIG / "jaeger.yaml") == ""
