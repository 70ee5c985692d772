"""``argus compare``: what became slower between two runs, or two stretches of one."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from argus_otel import service
from argus_otel._runtime.errors import ConfigError
from argus_otel.cli.options import Headers, Since, StoreUrl, begin_ns, opened
from argus_otel.detect.api import join_numbers
from argus_otel.detect.compare import THRESHOLD, compare, comparison_document
from argus_otel.report.view import seconds
from argus_otel.report.wording import counted

if TYPE_CHECKING:
    from argus_otel.detect.compare import Change, Comparison, Line, Side
    from argus_otel.store.protocol import Store

_STEPS: Final = re.compile(r"(\d+)-(\d+)?")
_OF_OTHERS: Final = "Phases and waits hold what others cause; look at the parts above them first."
_WIDE: Final = 160
_COLOURS: Final = {"slower": "bold red", "faster": "green", "unsure": "yellow", "same": ""}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(compare_runs)


def compare_runs(
    run_a: Annotated[
        str, typer.Argument(help="Before: latest, a run id or nonce; RUN@10-50 for those steps.")
    ],
    run_b: Annotated[str, typer.Argument(help="After, written the same way.")],
    store: StoreUrl = None,
    store_b: Annotated[
        str | None, typer.Option(help="Where RUN_B is, if it is in another store.")
    ] = None,
    since: Since = None,
    header: Headers = None,
    threshold: Annotated[
        float, typer.Option(help="Growth that counts, in percent.", min=0.0)
    ] = THRESHOLD * 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also what did not change.")
    ] = False,
) -> None:
    """Say what became slower from RUN_A to RUN_B, where, by how much, and how sure that is.

    Exit codes: 0 nothing is slower, 1 something is, with its whole interval beyond the threshold,
    2 wrong usage, 3 too little to compare, 4 a store could not be read.
    """
    source, _ = opened(store, header)
    other = source if store_b is None else opened(store_b, header)[0]
    begin = begin_ns(since)
    (name_a, steps_a), (name_b, steps_b) = read_stretch(run_a), read_stretch(run_b)
    before = service.read_side(source, name_a, steps_a, label=run_a, since_ns=begin)
    _check_there(before, source, name_a, steps_a, begin)
    after = service.read_side(other, name_b, steps_b, label=run_b, since_ns=begin)
    _check_there(after, other, name_b, steps_b, begin)
    comparison = compare(before, after, threshold=threshold / 100)
    if as_json:
        typer.echo(json.dumps(comparison_document(comparison), indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, _WIDE)  # one line a part, for grep and logs
        print_comparison(console, comparison, verbose=verbose)
    if not comparison.lines:
        raise typer.Exit(service.NO_VERDICT)
    raise typer.Exit(service.SOMETHING if comparison.slower else service.NOTHING)


def read_stretch(text: str) -> tuple[str, tuple[int, int | None] | None]:
    """The run's name, and which steps of it: ``RUN@10-50``, both included; ``RUN@10-`` to the end.

    Raises:
        ConfigError: What follows the @ is no stretch of steps.
    """
    name, separator, steps = text.rpartition("@")
    if not separator:
        return text, None
    match = _STEPS.fullmatch(steps)
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise ConfigError(
            f"the run {text!r}",
            got=f"followed by @{steps}",
            expected="two step numbers, the lower one first",
            fix="For example: latest@10-50, or latest@51- for all from 51 on.",
        )
    return name or "latest", (int(match[1]), None if match[2] is None else int(match[2]))


def _check_there(
    side: Side, store: Store, name: str, steps: tuple[int, int | None] | None, since_ns: int | None
) -> None:
    """Refuse a stretch that has no step of the run; a run without any step is told by `compare`."""
    if steps is None or side.run.ordinals_A.size:
        return
    ends: list[int] = []
    for block in store.blocks(store.resolve(name, since_ns), {"steps": ("ordinal",)}):
        ordinals = block.steps["ordinal"].to_numpy()
        ends += [int(ordinals.min()), int(ordinals.max())] if ordinals.size else []
    if not ends:
        return
    asked = f"from {steps[0]} on" if steps[1] is None else f"from {steps[0]} to {steps[1]}"
    raise ConfigError(
        f"the run {side.label!r}",
        got=f"without a step {asked}: the run has steps {min(ends)} to {max(ends)}",
        expected="a stretch that lies within them",
        fix=f"For example: {name}@{min(ends)}-{max(ends)}, or {name} for all of it.",
    )


def print_comparison(console: Console, comparison: Comparison, *, verbose: bool = False) -> None:
    """The verdict in a sentence, then a table of what changed."""
    for missing in comparison.missing if not comparison.lines else ():
        console.print(f"Not compared: needs {missing}.", markup=False, highlight=False)
    if not comparison.lines:
        return
    sides = [
        f"{name} (steps {span[0]} to {span[1]}, {span[2]} of them)"
        for name, span in zip((comparison.before, comparison.after), comparison.steps, strict=True)
        if span is not None
    ]
    console.print(f"{sides[1]} against {sides[0]}", markup=False, highlight=False, soft_wrap=True)
    step = comparison.lines[0]
    console.print(Text(_sentence(step, comparison.threshold), style=_COLOURS[step.state]))
    shown = [line for line in comparison.lines[1:] if verbose or line.state in ("slower", "faster")]
    if shown:
        console.print()
        console.print(_table(shown, step.change.before_s))
        if {"wait", "phase"} & {line.kind for line in shown}:
            console.print(Text(f"\n{_OF_OTHERS}", style="dim"))
    counts = {
        state: sum(line.state == state for line in comparison.lines[1:]) for state in _COLOURS
    }
    rest = [f"{counted(counts['same'], 'part')} as before"] if counts["same"] else []
    if counts["unsure"]:
        rest.append(f"{counts['unsure']} that cannot be told (too much scatter for so few steps)")
    if rest and not verbose:
        console.print(f"\n{' and '.join(rest)}; -v lists them.", markup=False, highlight=False)
    for missing in comparison.missing:
        console.print(f"Not compared: needs {missing}.", markup=False, highlight=False)


def _sentence(step: Line, threshold: float) -> str:
    change = step.change
    times = f"{_times(change)} times as long"
    if step.state == "slower":
        said = f"A step takes {seconds(change.after_s)} instead of {seconds(change.before_s)}"
        return f"{said}: {times}."
    if step.state == "faster":
        said = f"A step takes {seconds(change.after_s)} instead of {seconds(change.before_s)}"
        return f"{said}: it became shorter, {times}."
    if step.state == "same":
        return f"A step takes {seconds(change.after_s)}, as before: {times}."
    return f"Whether steps became slower by {threshold:.0%} cannot be told: {times}."


def _times(change: Change) -> str:
    if np.isnan(change.ratio):
        return "–"
    if np.isnan(change.low):
        return f"{change.ratio:.2f}"
    return f"{change.ratio:.2f} ({change.low:.2f} to {change.high:.2f})"


def _table(lines: list[Line], step_s: float) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "part", "where", "before", "after", "times as long (95 %)", "of the step"):
        right = name in ("before", "after", "of the step")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for line in lines:
        change, where = line.change, "all"
        if line.places:
            change, where = line.places[0].change, _where(line)
        table.add_row(
            Text(line.state, style=_COLOURS[line.state]),
            line.part,
            where,
            seconds(change.before_s),
            seconds(change.after_s),
            _times(change),
            f"{(change.after_s - change.before_s) / step_s:+.1%}",
        )
    return table


def _where(line: Line) -> str:
    """``rank 9``; ``rank 9 and 3 more (10-12)``: the worst one, whose numbers are beside it."""
    worst, *others = line.places
    more = len(others) + line.more_places
    if not more:
        return worst.name
    if all(len(place.ranks) == 1 for place in line.places) and not line.more_places:
        return f"{worst.name} and {more} more ({join_numbers(sorted(p.ranks[0] for p in others))})"
    return f"{worst.name} and {more} more"
