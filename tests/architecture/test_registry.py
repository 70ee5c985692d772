"""The telemetry registry and what is made from it say the same."""

import re
from pathlib import Path

import pytest

from argus_otel import settings
from argus_otel.semconv import generate

ROOT = Path(__file__).parents[2]
REGISTRY = generate.load_registry()

# OpenTelemetry's naming rules: lower case, dots between namespaces, underscores inside a word.
NAME = re.compile(r"^[a-z][a-z0-9]*(_[a-z0-9]+)*(\.[a-z][a-z0-9]*(_[a-z0-9]+)*)*$")


@pytest.mark.parametrize(
    ("made", "render"),
    [
        ("src/argus_otel/semconv/names.py", generate.render_names),
        ("docs/reference/telemetry.md", generate.render_page),
    ],
)
def test_what_is_made_from_the_registry_is_up_to_date(made, render):
    """If this fails: `make semconv`."""
    assert (ROOT / made).read_text("utf-8") == render(REGISTRY)


def test_the_settings_page_is_up_to_date():
    """If this fails: `make semconv`."""
    assert (ROOT / "docs/reference/settings.md").read_text("utf-8") == settings.render_page()


@pytest.mark.parametrize("kind", ["spans", "attributes", "metrics"])
def test_names_follow_opentelemetrys_rules(kind):
    """So that they sort and search among everybody else's."""
    assert [name for name in REGISTRY[kind] if not NAME.match(name)] == []


def test_no_two_names_become_one_constant():
    """``a.b_c`` and ``a.b.c`` would."""
    lines = generate.render_names(REGISTRY).splitlines()
    constants = [line.split(":")[0] for line in lines if ": Final" in line]

    assert len(set(constants)) == len(constants)
