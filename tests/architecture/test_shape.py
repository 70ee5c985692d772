"""The shape of the code: every module says what it is, and none is called after nothing."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "detectors").rglob("*.py"))

NO_JOB = {"utils", "util", "common", "helpers", "core", "misc", "manager", "base"}


def test_every_module_says_what_it_is():
    """A reader opens a file and its first line tells."""
    silent = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]

    assert silent == []


def test_no_module_is_named_after_nothing():
    """If it has no better name, it has no single job."""
    assert [
        str(path) for path in MODULES if path.stem in NO_JOB or path.parent.name in NO_JOB
    ] == []
