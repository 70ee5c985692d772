"""The pictures of the page, as plotly figures. Colours that depend on light or dark are the page's.

Shape legend: S = steps, R = ranks, Y = rows of the heat map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go

from argus_otel.report.pictures import PASSES
from argus_otel.report.view import title_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from argus_otel.report.pictures import Bar, Heat, StageShare, StepPicture, WhatIfBar
    from argus_otel.tables.findings import Finding

    Floats = NDArray[np.float64]

_MOST_ROWS: Final = 512
"""Beyond so many ranks: percentiles, and the hosts that have the slowest ranks."""
_MOST_HOSTS: Final = 40
_MOST_COLUMNS: Final = 600
"""Steps beyond are put together, the slowest of each block shown: a straggler must not vanish."""
_PERCENTILES: Final = ((50, "median"), (90, "90 %"), (99, "99 %"), (100, "slowest"))

_PHASE_COLOURS: Final = {
    "data.wait": "#e0a100",
    "h2d": "#c8b273",
    "forward": "#4f86c6",
    PASSES[0]: "#4f86c6",
    "backward": "#7a5fb5",
    PASSES[1]: "#7a5fb5",
    "optimizer.step": "#3aa17e",
    "between": "#c9ced6",
    "checkpoint": "#d1789b",
    "evaluation": "#9aa5b1",
    "gc": "#d9480f",
}
_OTHER_COLOUR: Final = "#7f8b99"
_WORTH_NAMING: Final = 0.0005
"""Of the step; replays are no more exact than that."""
_TRANSFER_COLOUR: Final = "#12889b"
_WAIT_COLOUR: Final = "#e8837a"

_FONT: Final = {"family": "system-ui, sans-serif", "size": 13}
_LEGEND: Final = {
    "orientation": "h",
    "y": 1.0,
    "yanchor": "bottom",
    "x": 0,
    "traceorder": "normal",
}
_MARGIN: Final = {"l": 8, "r": 12, "t": 36, "b": 44}


def heat_map(heat: Heat, findings: Sequence[Finding]) -> go.Figure:
    """Own work of each rank and step against its fastest peers; findings marked at their onset."""
    ratio_YS, names = _rows(heat)
    ratio_YS, columns = _coarse(ratio_YS, heat.ordinals_S)
    figure = go.Figure(
        go.Heatmap(
            z=np.round(ratio_YS, 3).astype(np.float32),
            x=columns,
            y=names,
            zmin=0.9,
            zmax=1.5,
            colorbar={
                "thickness": 10,
                "lenmode": "pixels",
                "len": 130,
                "yanchor": "top",
                "y": 1,
                "tickformat": ".1f",
                "ticksuffix": " ×",
            },
            hovertemplate="%{y}, step %{x}: %{z:.2f} times the fastest peers<extra></extra>",
            hoverongaps=False,
        )
    )
    for level, finding in enumerate(_first_of_each_onset(findings)):
        figure.add_vline(
            x=finding.onset.step - 0.5,
            line={"width": 1, "dash": "dot", "color": "#7f8b99"},
            annotation={
                "text": f"{title_of(finding)}, step {finding.onset.step}",
                "font": {**_FONT, "size": 11},
                "yshift": 18 + 13 * level,
            },
            annotation_position="top right",
        )
    figure.update_layout(
        height=int(min(max(230, 22 * len(names) + 110), 640)),
        xaxis_title="step",
        yaxis={"type": "category", "autorange": "reversed", "automargin": True},
        **_layout(top=34 + 13 * min(len(findings), 3)),
    )
    return figure


def _first_of_each_onset(findings: Sequence[Finding]) -> list[Finding]:
    """At most three marks, none over another."""
    chosen: list[Finding] = []
    for finding in findings:
        if all(abs(finding.onset.step - other.onset.step) > 1 for other in chosen):
            chosen.append(finding)
    return chosen[:3]


def _rows(heat: Heat) -> tuple[Floats, list[str]]:
    """Values [Y, S] and names of rows: ranks, or of a large job percentiles and the slowest hosts."""
    ratio_RS = heat.ratio_SR.T
    if heat.ranks_R.size <= _MOST_ROWS:
        return ratio_RS, [f"rank {rank}" for rank in heat.ranks_R.tolist()]
    rows, names = [], []
    stages = [None] if heat.stage_R is None else np.unique(heat.stage_R).tolist()
    for stage in stages if len(stages) <= 16 else [None]:
        of_stage = slice(None) if stage is None else heat.stage_R == stage
        place = "all ranks" if stage is None or len(stages) == 1 else f"stage {stage}"
        for percent, label in _PERCENTILES:
            rows.append(_percentile(ratio_RS[of_stage], percent))
            names.append(f"{place}, {label}")
    codes, host_R = np.unique(np.array(heat.hosts_R), return_inverse=True)
    worst_HS = np.full((codes.size, ratio_RS.shape[1]), -np.inf)
    np.maximum.at(worst_HS, host_R, np.nan_to_num(ratio_RS, nan=-np.inf))
    worst_HS = np.where(np.isinf(worst_HS), np.nan, worst_HS)
    # Slow for a tenth of the steps is enough to be shown; one odd step is not.
    rank_by = _percentile(worst_HS.T, 90)
    for host in np.argsort(-np.nan_to_num(rank_by))[:_MOST_HOSTS].tolist():
        rows.append(worst_HS[host])
        names.append(f"{codes[host]}, slowest")
    return np.stack(rows), names


def _percentile(values: Floats, percent: float) -> Floats:
    """Over the first axis, NaN left out, NaN where nothing is known."""
    known = ~np.isnan(values).all(axis=0)
    found = np.full(values.shape[1], np.nan)
    found[known] = np.nanpercentile(values[:, known], percent, axis=0, method="higher")
    return found


def _coarse(ratio_YS: Floats, steps: NDArray[np.int64]) -> tuple[Floats, list[int]]:
    """Blocks of steps, the slowest of each, so that the page stays small."""
    wide = -(-ratio_YS.shape[1] // _MOST_COLUMNS)
    filled = np.where(np.isnan(ratio_YS), -np.inf, ratio_YS)
    filled = np.maximum.reduceat(filled, np.arange(0, filled.shape[1], wide), axis=1)
    return np.where(np.isinf(filled), np.nan, filled), steps[::wide].tolist()


def timeline(step: StepPicture) -> go.Figure:
    """Two rows a rank: what it did itself, and what it took part in with the wait in it."""
    place = {rank: float(at) for at, rank in enumerate(step.ranks)}
    figure = go.Figure()
    by_name: dict[str, list[Bar]] = {}
    for bar in step.phases:
        by_name.setdefault(bar.name, []).append(bar)
    known = list(_PHASE_COLOURS)
    for name in sorted(by_name, key=lambda n: known.index(n) if n in known else len(known)):
        colour = _PHASE_COLOURS.get(name, _OTHER_COLOUR)
        figure.add_trace(_bars(name, by_name[name], place, -0.2, 0.4, {"color": colour}))
    wait = {
        "color": "rgba(232,131,122,0.25)",
        "line": {"color": _WAIT_COLOUR, "width": 0.5},
        "pattern": {"shape": "/", "fgcolor": _WAIT_COLOUR, "size": 5, "solidity": 0.3},
    }
    if step.waits:
        figure.add_trace(_bars("waiting for others", list(step.waits), place, 0.18, 0.26, wait))
    if step.transfers:
        transfer = {"color": _TRANSFER_COLOUR}
        figure.add_trace(_bars("transfer", list(step.transfers), place, 0.18, 0.26, transfer))
    if step.arrivals:
        figure.add_trace(
            go.Scatter(
                name="comes to a collective",
                x=[round(bar.start_s * 1e3, 3) for bar in step.arrivals],
                y=[place[bar.rank] + 0.31 for bar in step.arrivals],
                mode="markers",
                marker={
                    "symbol": "line-ns",
                    "size": 9,
                    "line": {"width": 2, "color": _TRANSFER_COLOUR},
                },
                customdata=[f"rank {bar.rank}: {bar.detail}" for bar in step.arrivals],
                hovertemplate="%{customdata}<br>at %{x} ms<extra></extra>",
            )
        )
    figure.update_layout(
        height=int(max(200, 30 * len(step.ranks) + 130)),
        barmode="overlay",
        xaxis={"title": "milliseconds from the step's start", "zeroline": False},
        yaxis={
            "tickvals": list(place.values()),
            "ticktext": [
                f"<b>rank {rank} ▶</b>" if rank in step.culprits else f"rank {rank}"
                for rank in step.ranks
            ],
            "range": [len(step.ranks) - 0.4, -0.6],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
        legend=_LEGEND,
        **_layout(),
    )
    return figure


def _bars(
    name: str,
    bars: Sequence[Bar],
    place: dict[int, float],
    offset: float,
    width: float,
    marker: dict[str, Any],
) -> go.Bar:
    return go.Bar(
        name=name,
        orientation="h",
        y=[place[bar.rank] + offset for bar in bars],
        base=[round(bar.start_s * 1e3, 3) for bar in bars],
        x=[round(bar.duration_s * 1e3, 3) for bar in bars],
        width=width,
        marker={"line": {"width": 0}, **marker},
        customdata=[
            f"rank {bar.rank}: {name}{', ' + bar.detail if bar.detail else ''}" for bar in bars
        ],
        hovertemplate="%{customdata}<br>%{x} ms, from %{base} ms<extra></extra>",
    )


def stage_shares(stages: Sequence[StageShare], since: int | None) -> go.Figure:
    """How much of its step each pipeline stage works, waits, and does neither."""
    names = [
        f"stage {stage.stage} waits {stage.waiting:.0%}"
        + (
            ""
            if stage.waiting_before is None
            else f"<br>before step {since}: {stage.waiting_before:.0%}"
        )
        for stage in stages
    ]
    own = [round(stage.own * 100, 1) for stage in stages]
    waiting = [round(stage.waiting * 100, 1) for stage in stages]
    rest = [max(round(100 - a - b, 1), 0.0) for a, b in zip(own, waiting, strict=True)]
    figure = go.Figure(
        [
            _share("own work", names, own, {"color": "#4f86c6"}),
            _share(
                "waiting for others",
                names,
                waiting,
                {
                    "color": "rgba(232,131,122,0.35)",
                    "pattern": {"shape": "/", "fgcolor": _WAIT_COLOUR, "solidity": 0.3},
                },
            ),
            _share("transfers and the rest", names, rest, {"color": "#aab4bf"}),
        ]
    )
    figure.update_layout(
        height=46 * len(stages) + 120,
        barmode="stack",
        xaxis={"title": "% of the step", "range": [0, 100]},
        yaxis={"type": "category", "autorange": "reversed", "automargin": True},
        legend=_LEGEND,
        **_layout(),
    )
    return figure


def _share(name: str, stages: list[str], values: list[float], marker: dict[str, Any]) -> go.Bar:
    return go.Bar(
        name=name,
        orientation="h",
        y=stages,
        x=values,
        marker=marker,
        hovertemplate=name + ": %{x} % of the step<extra></extra>",
    )


def what_if(bars: Sequence[WhatIfBar]) -> go.Figure:
    """Milliseconds that each part of the job would give back, most first."""
    ordered = sorted(bars, key=lambda bar: -bar.gained_s)
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=[bar.label for bar in ordered],
            x=[round(max(bar.gained_s, 0.0) * 1e3, 3) for bar in ordered],
            marker={"color": "#3aa17e"},
            text=[
                f" {bar.gained_s * 1e3:.3g} ms, {bar.step_share:.1%} of the step"
                if bar.step_share >= _WORTH_NAMING
                else " nothing"
                for bar in ordered
            ],
            textposition=[
                "auto" if bar.step_share >= _WORTH_NAMING else "outside" for bar in ordered
            ],
            hovertemplate="%{y}: %{x} ms a step<extra></extra>",
        )
    )
    figure.update_layout(
        height=34 * len(ordered) + 90,
        xaxis_title="milliseconds a step that would be gained",
        yaxis={"type": "category", "autorange": "reversed", "automargin": True},
        showlegend=False,
        **_layout(top=12),
    )
    return figure


def _layout(top: int | None = None) -> dict[str, Any]:
    return {
        "font": _FONT,
        "margin": _MARGIN if top is None else {**_MARGIN, "t": top},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "template": None,
    }
