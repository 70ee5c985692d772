"""What ``argus watch`` shows on a terminal: step times, who is late, who waits, what is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from argus_otel.detect.statistics import median_over
from argus_otel.report.view import numbered, onset_of, seconds, title_of
from argus_otel.report.wording import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from argus_otel.cli.watching import Look
    from argus_otel.detect.frame import Frame
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
        line = Text("step time      ", style="dim")
        line.append(sparkline(steps))
        line.append(f"  {seconds(float(steps[-1]))}, usually {seconds(float(np.median(steps)))}")
        parts.append(line)
    parts += [
        Text.assemble((f"{label:<15}", "dim"), text)
        for label, text in _late_and_waiting(look.verdict.frame)
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
            onset_of(finding),
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


def _late_and_waiting(frame: Frame) -> list[tuple[str, str]]:
    """Who needs longest for what is its own, and who waits most, over the latest steps.

    Not who comes last to a collective: behind a late stage everybody comes late.
    """
    found = []
    run = frame.whole
    if frame.ordinals_S.size and not np.isnan(frame.column("busy_s")).all():
        ratio_R = np.exp(median_over(frame.excess("own_work_s").log_SR[-_LATE_OVER:], axis=0))
        if not np.isnan(ratio_R).all():
            late = int(np.nanargmax(ratio_R))
            said = f"rank {run.ranks_R[late]}: {ratio_R[late]:.2f} times its fastest peers"
            found.append(("most own work", said))
    operations = run.operations
    known_AR = operations.known_AR[-_LATE_OVER:]
    if operations.lanes and known_AR.any():
        step_AR, busy_AR = (run.columns[name][-_LATE_OVER:] for name in ("step_s", "busy_s"))
        wait_AR = np.fmin(operations.wait_AR[-_LATE_OVER:], np.maximum(step_AR - busy_AR, 0.0))
        waited_R = median_over(np.where(known_AR, wait_AR, np.nan), axis=0)
        waits = int(np.argmax(np.nan_to_num(waited_R)))
        said = f"rank {run.ranks_R[waits]}: {seconds(float(np.nan_to_num(waited_R)[waits]))} a step"
        found.append(("waits most", said))
    return found
