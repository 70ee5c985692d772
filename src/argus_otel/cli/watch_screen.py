"""What ``argus watch`` shows on a terminal: step times, who is late, who waits, what is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from argus_otel.report.view import numbered, seconds, since_of, title_of
from argus_otel.report.wording import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from argus_otel.cli.watching import Look
    from argus_otel.detect.run import Run

_BARS: Final = "▁▂▃▄▅▆▇█"
_SHOWN_STEPS: Final = 60
_LATE_OVER: Final = 20
"""Latest steps that say who is late."""
_COLOUR: Final = {"critical": "bold red", "warning": "bold yellow", "info": "blue"}


def screen_of(look: Look) -> RenderableType:
    """The whole screen."""
    run = look.verdict.frame.whole
    head = Text(f"{look.run.run_id or look.run.run[:8]}", style="bold")
    head.append(f"  step {look.newest_step}, {counted(run.ranks_R.size, 'rank')}", style="")
    if run.ranks_R.size < run.world_size:
        head.append(f" of {run.world_size}", style="yellow")
    parts: list[RenderableType] = [head]
    steps = _step_times(run)
    if steps.size:
        line = Text("step time  ", style="dim")
        line.append(sparkline(steps))
        line.append(f"  {seconds(float(steps[-1]))}, usually {seconds(float(np.median(steps)))}")
        parts.append(line)
    parts += [
        Text.assemble((f"{label:<11}", "dim"), text) for label, text in _late_and_waiting(run)
    ]
    if not look.open:
        parts.append(Text("nothing open", style="green"))
        return Group(*parts)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("open", "where", "since", "what"):
        table.add_column(name, overflow="fold")
    for finding in look.open:
        everybody = not finding.ranks or len(finding.ranks) == run.world_size
        table.add_row(
            Text(title_of(finding), style=_COLOUR[finding.severity]),
            "all ranks" if everybody else numbered(finding.ranks),
            since_of(finding).removesuffix(", still going on").removeprefix("since "),
            finding.summary,
        )
    return Group(*parts, Text(""), table)


def sparkline(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
    """Bars from 0 to the longest, so that twice as high is twice as long."""
    top = float(values.max()) or 1.0
    return "".join(_BARS[min(int(value / top * len(_BARS)), len(_BARS) - 1)] for value in values)


def _step_times(run: Run) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    step_AR = run.columns["step_s"][-_SHOWN_STEPS:]
    known = ~np.isnan(step_AR).all(axis=1)
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = np.nanmedian(step_AR[known], axis=1)
    return found


def _late_and_waiting(run: Run) -> list[tuple[str, str]]:
    """Who makes others wait most, and who waits most, over the latest steps."""
    operations = run.operations
    wait_AL = (operations.longest_AL - operations.transfer_AL)[-_LATE_OVER:]
    last_AL = operations.last_AL[-_LATE_OVER:]
    known = (last_AL >= 0) & ~np.isnan(wait_AL)
    if not known.any():
        return []
    steps = wait_AL.shape[0]
    caused_R = np.bincount(last_AL[known], weights=wait_AL[known], minlength=run.ranks_R.size)
    late = int(np.argmax(caused_R))
    waited_R = operations.wait_AR[-_LATE_OVER:].mean(axis=0)
    waits = int(np.argmax(waited_R))
    return [
        (
            "last to come",
            f"rank {run.ranks_R[late]}: others wait {seconds(caused_R[late] / steps)} a step",
        ),
        ("waits most", f"rank {run.ranks_R[waits]}: {seconds(float(waited_R[waits]))} a step"),
    ]
