"""A detector imports the detectors' API and third-party maths, nothing else of ours."""

import ast
from pathlib import Path

import pytest

DETECTORS = sorted((Path(__file__).parents[2] / "detectors").glob("*/detector.py"))
ALLOWED = {"argus_otel.detect.api", "numpy", "numpy.typing", "scipy", "math"}
STANDARD = {"__future__", "typing", "collections.abc", "dataclasses"}


def imported_modules(source):
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("path", DETECTORS, ids=lambda path: path.parent.name)
def test_a_detector_imports_only_its_api_and_maths(path):
    """So that anybody can write one, and none reaches into a store or a report."""
    strange = set(imported_modules(path.read_text(encoding="utf-8"))) - ALLOWED - STANDARD

    assert strange == set()


def test_there_are_detectors_to_look_at():
    """An empty list would pass the test above."""
    assert len(DETECTORS) >= 3
