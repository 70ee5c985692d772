"""The two pictures of the page: ranks × steps as a heat map, one step as a timeline over ranks.

Shape legend: S = steps, R = ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
import pyarrow.compute as pc

from argus_otel.report.view import title_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from argus_otel.report.view import Heat
    from argus_otel.tables.findings import Finding

_MOST_ROWS: Final = 256
_MOST_COLUMNS: Final = 600
"""Cells beyond are put together, the slowest of each block shown: a straggler must not vanish."""

_MOST_RANKS_IN_TIMELINE: Final = 24

_COLD_TO_HOT: Final = (
    (0.0, "#5b8fc9"),
    (0.12, "#eef2f6"),
    (0.3, "#f8f6f2"),
    (0.4, "#fbe3b4"),
    (0.65, "#f2994a"),
    (1.0, "#b3261e"),
)
"""From 0.9 to 1.5 times the fastest peers; 0.96 to 1.08 is nearly white: jitter is no news."""

_PHASE_COLOURS: Final = {
    "data.wait": "#e0a100",
    "h2d": "#c8b273",
    "forward": "#4f86c6",
    "backward": "#7a5fb5",
    "optimizer.step": "#3aa17e",
    "between": "#c9ced6",
    "checkpoint": "#d1789b",
    "evaluation": "#9aa5b1",
}
_OTHER_COLOUR: Final = "#7f8b99"

_FONT: Final = {"family": "system-ui, sans-serif", "size": 13, "color": "#27313d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """A drawn step, and what it shows."""

    figure: go.Figure
    step: int
    shown: int
    ranks: int


def heat_map(heat: Heat, findings: Sequence[Finding]) -> go.Figure:
    """Own work of each rank and step against its fastest peers; findings marked at their onset."""
    ratio_RS, rows, columns = _coarse(heat.ratio_SR.T, heat.ranks_R, heat.ordinals_S)
    figure = go.Figure(
        go.Heatmap(
            z=np.round(ratio_RS, 3),
            x=columns,
            y=[str(rank) for rank in rows],
            zmin=0.9,
            zmax=1.5,
            colorscale=[list(stop) for stop in _COLD_TO_HOT],
            colorbar={"title": {"text": "times the<br>fastest peers"}, "thickness": 12},
            hovertemplate="rank %{y}, step %{x}: %{z}<extra></extra>",
            hoverongaps=False,
        )
    )
    for finding in findings[:6]:
        figure.add_vline(
            x=finding.onset.step - 0.5,
            line={"color": "#27313d", "width": 1, "dash": "dot"},
            annotation={
                "text": f"{title_of(finding)}, step {finding.onset.step}",
                "font": {**_FONT, "size": 11},
                "yshift": 18,
            },
            annotation_position="top right",
        )
    figure.update_layout(
        height=int(min(max(180, 26 * len(rows) + 110), 640)),
        xaxis_title="step",
        yaxis={"title": "rank", "type": "category", "autorange": "reversed"},
        plot_bgcolor="#d4d9df",
        **_layout(),
    )
    return figure


def _coarse(
    ratio_RS: NDArray[np.float64], ranks: NDArray[np.int64], steps: NDArray[np.int64]
) -> tuple[NDArray[np.float64], list[int], list[int]]:
    """Blocks of cells, the slowest of each, so that the page stays readable and small."""
    high = -(-ratio_RS.shape[0] // _MOST_ROWS)
    wide = -(-ratio_RS.shape[1] // _MOST_COLUMNS)
    filled = np.where(np.isnan(ratio_RS), -np.inf, ratio_RS)
    filled = np.maximum.reduceat(filled, np.arange(0, filled.shape[0], high), axis=0)
    filled = np.maximum.reduceat(filled, np.arange(0, filled.shape[1], wide), axis=1)
    coarse = np.where(np.isinf(filled), np.nan, filled)
    return coarse, ranks[::high].tolist(), steps[::wide].tolist()


def timeline(steps: pa.Table, finding: Finding | None) -> StepTimeline | None:
    """Phases of all ranks in the step that the finding points to, else in the longest step.

    Ranks beyond two dozen are left out, the culprits shown first.
    """
    rows = _rows_of_step(steps, finding)
    if not any(row["phases"] for row in rows):
        return None
    culprits = set() if finding is None else set(finding.ranks)
    look_at = None if finding is None else finding.evidence.get("look_at_rank")
    by_interest = sorted(
        rows, key=lambda row: (row["rank"] != look_at, row["rank"] not in culprits, row["rank"])
    )
    shown = sorted(by_interest[:_MOST_RANKS_IN_TIMELINE], key=lambda row: row["rank"])
    start_ns = min(_start_ns(row) for row in shown)
    bars: dict[str, dict[str, list[Any]]] = {}
    for row in shown:
        offset_s = (_start_ns(row) - start_ns) * 1e-9
        mark = " ◀" if row["rank"] in culprits else ""
        for phase in row["phases"]:
            bar = bars.setdefault(phase["name"], {"y": [], "base": [], "x": []})
            bar["y"].append(f"{row['rank']}{mark}")
            bar["base"].append(round((offset_s + phase["start_s"]) * 1e3, 3))
            bar["x"].append(round(phase["host_s"] * 1e3, 3))
    figure = go.Figure(
        [
            go.Bar(
                name=name,
                orientation="h",
                marker={"color": _PHASE_COLOURS.get(name, _OTHER_COLOUR)},
                hovertemplate="rank %{y}: " + name + " %{x} ms<extra></extra>",
                **bar,
            )
            for name, bar in bars.items()
        ]
    )
    figure.update_layout(
        height=int(max(180, 26 * len(shown) + 130)),
        barmode="overlay",
        bargap=0.25,
        xaxis={"title": "milliseconds from the step's start", "gridcolor": "#e3e7ec"},
        yaxis={
            "title": "rank",
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [
                f"{row['rank']}{' ◀' if row['rank'] in culprits else ''}" for row in shown
            ][::-1],
        },
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        plot_bgcolor="#fff",
        **_layout(),
    )
    return StepTimeline(
        figure=figure, step=int(rows[0]["ordinal"]), shown=len(shown), ranks=len(rows)
    )


def _rows_of_step(steps: pa.Table, finding: Finding | None) -> list[dict[str, Any]]:
    if steps.num_rows == 0:
        return []
    wanted = None if finding is None else finding.evidence.get("look_at_step")
    if wanted is None:
        longest = int(np.argmax(steps["step_s"].to_numpy()))
        wanted = steps["ordinal"][longest].as_py()
    columns = ["ordinal", "rank", "start_ns", "clock_offset_ns", "phases"]
    rows: list[dict[str, Any]] = (
        steps.filter(pc.equal(steps["ordinal"], wanted)).select(columns).to_pylist()
    )
    return rows


def _start_ns(row: dict[str, Any]) -> int:
    return int(row["start_ns"]) - int(row["clock_offset_ns"] or 0)


def _layout() -> dict[str, Any]:
    return {
        "font": _FONT,
        "margin": {"l": 64, "r": 24, "t": 44, "b": 52},
        "paper_bgcolor": "rgba(0,0,0,0)",
    }
