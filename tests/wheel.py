"""Run by `make wheel-test` with the Python of an environment that holds the wheel and nothing else."""

import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import argus_otel
from argus_otel._runtime.bundled import bundled_path


def check(*, holds: bool, what: str) -> None:
    """Print one line, and stop at the first thing that is not so."""
    print("ok  " if holds else "FAIL", what)  # noqa: T201 - this is a script
    if not holds:
        sys.exit(1)


here = Path(sys.prefix).resolve()
package = Path(argus_otel.__file__).resolve()
check(
    holds=package.is_relative_to(here),
    what=f"argus_otel {version('argus-otel')} comes from the wheel",
)
for name in ("detectors", "collector-config"):
    folder = bundled_path(name)
    check(holds=folder.resolve().is_relative_to(here), what=f"{name} comes from the wheel")
    check(holds=any(folder.rglob("*.yaml")), what=f"{name} holds its files")
check(holds=(package.parent / "py.typed").is_file(), what="types are announced")
for group in ("opentelemetry_distro", "opentelemetry_configurator", "opentelemetry_instrumentor"):
    check(holds="argus" in entry_points(group=group).names, what=f"{group} names argus")
check(holds="torch" not in sys.modules, what="no torch was needed")
