"""``argus detectors``: list them, try them on their cases, start a new one."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from argus_otel._runtime.bundled import bundled_path
from argus_otel._runtime.errors import ConfigError
from argus_otel.detect.definition import load_detectors
from argus_otel.report.wording import counted
from argus_otel.tables.findings import CAUSES
from argus_otel.testing.cases import read_cases

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")

_app = typer.Typer(help="List detectors, try them on their cases, start a new one.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(_app, name="detectors", no_args_is_help=True)


@_app.command("list")
def list_detectors(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the detectors that come with argus."""
    found = load_detectors(bundled_path("detectors"))
    if as_json:
        rows = [
            {"id": d.id, "cause": d.cause, "title": d.title, "scope": d.scope,
             "needs": list(d.needs)}
            for d in found
        ]  # fmt: skip
        typer.echo(json.dumps({"schema": "argus.detectors/1", "detectors": rows}))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("detector", "cause", "says"):
        table.add_column(column)
    for detector in found:
        table.add_row(detector.id, detector.cause, detector.title)
    Console().print(table)


@_app.command("test")
def test_detectors(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of detectors, or of one; default: those that come with argus."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Passed cases too.")] = False,
) -> None:
    """Run the cases of detectors: each says what must be found in a run, and what must not.

    Exit codes: 0 all as their files say, 1 a case is not, 2 a file is wrong.
    """
    console = Console(highlight=False, soft_wrap=True)
    cases = failed = 0
    for detector in load_detectors(*(paths or [bundled_path("detectors")])):
        for case in read_cases(detector.folder):
            cases += 1
            differences = case.differences(detector)
            failed += bool(differences)
            if differences:
                console.print(f"[red]FAILED[/red] {detector.id}/{case.name}: {case.why}")
                for difference in differences:
                    console.print(f"       {difference}", markup=False)
            elif verbose:
                console.print(f"passed {detector.id}/{case.name}", markup=False)
    console.print(f"{counted(cases, 'case')}, {failed} failed", markup=False)
    raise typer.Exit(1 if failed or not cases else 0)


@_app.command("new")
def new_detector(
    name: Annotated[str, typer.Argument(help="lower_case; also the name of its folder.")],
    into: Annotated[Path, typer.Option(help="Folder to make it in.")] = Path("detectors"),
    cause: Annotated[
        str, typer.Option(help="One of the causes that findings may have.")
    ] = "regression_unexplained",
    replace: Annotated[
        bool, typer.Option("--replace", help="Allow the name of one that comes with argus.")
    ] = False,
) -> None:
    """Start a detector: a folder with all its files, which passes its own three cases."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the detector's name {name!r}", got="not usable", expected="lower_case letters, digits",
            fix="For example: argus detectors new slow_disk",
        )  # fmt: skip
    if not replace and (bundled_path("detectors") / name / "detector.yaml").is_file():
        raise ConfigError(
            f"the detector's name {name!r}",
            got="that of a detector that comes with argus, which it would replace",
            expected="a name of its own",
            fix="Take another name, or add --replace if that is what you want.",
        )
    if cause not in CAUSES:
        raise ConfigError(
            f"--cause {cause}", got="unknown", expected=f"one of {', '.join(CAUSES)}",
            fix="The list is closed, so that alerts can rely on it.",
        )  # fmt: skip
    folder = into / name
    if folder.exists():
        raise ConfigError(
            f"the folder {folder}", got="there already", expected="a new one",
            fix="Take another name, or another --into.",
        )  # fmt: skip
    skeleton = files("argus_otel.cli").joinpath("detector_skeleton")
    (folder / "cases").mkdir(parents=True)
    for source in [*skeleton.iterdir(), *skeleton.joinpath("cases").iterdir()]:
        if source.is_dir() or source.name.startswith("__"):
            continue
        text = source.read_text("utf-8").replace("@name@", name).replace("@cause@", cause)
        place = (
            folder / "cases" if source.name.startswith(("fires", "quiet", "abstains")) else folder
        )
        (place / source.name.removesuffix(".txt")).write_text(text, "utf-8")
    Console(highlight=False, soft_wrap=True).print(
        f"Made {folder}. Next: argus detectors test {folder}, then change detector.py.",
        markup=False,
    )
