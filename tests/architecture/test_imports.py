"""Who loads what: a training script pays for nothing it does not use, a detector knows one door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STAGES = (
    "instrument",
    "record",
    "condense",
    "encode",
    "export",
    "store",
    "align",
    "detect",
    "report",
    "publish",
    "simulate",
    "convert",
    "stack",
)
ROOTS = ("distro", "process", "worker", "service", "testing", "cli")
HEAVY = (
    "duckdb",
    "httpx",
    "jinja2",
    "numpy",
    "opentelemetry.sdk",
    "plotly",
    "pyarrow",
    "requests",
    "rich",
    "torch",
    "typer",
    "yaml",
)

# What a detector may build on besides the standard library.
MATHS = {"numpy", "scipy", "pyarrow", "duckdb"}
DETECTOR_DOOR = "argus_otel.detect.api"


def modules_after(statement):
    """Names in ``sys.modules`` of a fresh interpreter that ran one statement."""
    result = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    return set(result.stdout.split())


def within(loaded, package):
    return sorted(name for name in loaded if name == package or name.startswith(f"{package}."))


def test_importing_argus_otel_loads_no_stage_and_nothing_heavy():
    """`import argus_otel` in a training script, whether or not the launcher was used."""
    before = modules_after("pass")

    loaded = modules_after("import argus_otel") - before

    ours = [f"argus_otel.{name}" for name in (*STAGES, *ROOTS)]
    assert [found for name in (*ours, *HEAVY) for found in within(loaded, name)] == []


@pytest.mark.parametrize("module", ["argus_otel.wire.ids", "argus_otel.wire.digest"])
def test_what_both_halves_share_needs_numpy_and_no_more(module):
    """The wire is imported where it trains, on the service side, and by others' tools."""
    loaded = modules_after(f"import {module}")

    assert [found for name in HEAVY if name != "numpy" for found in within(loaded, name)] == []


def imported_by(path):
    """Absolute names that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_a_detector_imports_the_detector_api_and_maths_only():
    """So that a detector can be read, tested and shipped on its own."""
    strangers = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "detectors").rglob("*.py"))
        for name in imported_by(path)
        if name != DETECTOR_DOOR
        and name.split(".")[0] not in MATHS
        and name.split(".")[0] not in sys.stdlib_module_names
    ]

    assert strangers == []
