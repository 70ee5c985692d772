"""What a report is made from: the diagnosis, and how much of the run it rests on.

Shape legend: S = steps, R = ranks.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from argus_otel.report.wording import counted

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from argus_otel.tables.findings import Diagnosis, Finding
    from argus_otel.tables.schemas import RunSummary

_NOT_A_MEASUREMENT: Final = {
    "look_at_step",
    "look_at_rank",
    "lost_s_per_step",
    "step_s",
    "steps_affected",
    "steps_over",
    "steps_in_window",
    "windows",
    "peers",
    "peer_data",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """How long each rank takes for its own part of each step, against its fastest peers."""

    ordinals_S: NDArray[np.int64]
    ranks_R: NDArray[np.int64]
    ratio_SR: NDArray[np.float64]
    """1 is as fast as the fastest quarter of the peers; NaN unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run and what is said about it."""

    run: RunSummary
    diagnosis: Diagnosis
    steps_judged: int
    """Steps that count: without warm-up and compilation."""
    first_step: int | None
    last_step: int | None
    ranks_seen: int
    all_abstained: bool = False
    """No detector could judge anything: neither sound nor ill."""
    damaged_digests: int = 0
    ui_url: str | None = None
    """Address of Jaeger's pages, for links."""
    heat: Heat | None = None
    steps: pa.Table | None = None
    """``tables.STEPS``, for the timeline."""

    def trace_url(self, finding: Finding) -> str | None:
        """Where to look at the step that a finding points to."""
        trace_id = finding.evidence.get("trace_id")
        if self.ui_url is None or trace_id is None:
            return None
        return f"{self.ui_url.rstrip('/')}/trace/{trace_id}"


def title_of(finding: Finding) -> str:
    """The cause as people say it: ``compute straggler``."""
    return finding.cause.replace("_", " ")


def place_of(finding: Finding) -> str:
    """``rank 2 on host-a``, ``ranks 8-15 on host-b``, ``all 64 ranks of 8 hosts``."""
    ranks = list(finding.ranks)
    if not ranks:
        return "all ranks"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    numbers = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:8])
    if len(runs) > 8:
        numbers = f"{numbers} … ({len(ranks)} in all)"
    hosts = finding.hosts
    where = f" on {', '.join(hosts)}" if len(hosts) <= 2 else f" on {len(hosts)} hosts"
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}{where if hosts else ''}"


def since_of(finding: Finding) -> str:
    """``since step 30, still going on`` or ``step 30 to 59``."""
    at_latest = "" if finding.onset.exact else " or before"
    if finding.state == "open":
        return f"since step {finding.onset.step}{at_latest}, still going on"
    end = f" to {finding.last_step}" if finding.last_step != finding.onset.step else ""
    return f"step {finding.onset.step}{at_latest}{end}, over now"


def cost_of(finding: Finding) -> str:
    """What it costs, in one sentence."""
    parts = []
    if finding.step_slowdown is not None:
        lost_s = float(finding.evidence.get("lost_s_per_step", 0.0))
        parts.append(
            f"{seconds(lost_s)} of every {seconds(float(finding.evidence.get('step_s', 0.0)))} step "
            f"on all ranks: training runs {finding.step_slowdown:.2f} times as long"
        )
    if finding.cost_gpu_hours is not None:
        unit = finding.evidence.get("cost_unit", "GPU-hours")
        cost = f"{finding.cost_gpu_hours:.2g}"
        parts.append(f"{cost} {unit.removesuffix('s') if cost == '1' else unit} so far")
    return "; ".join(parts)


def why_of(finding: Finding, most: int | None = 3) -> list[str]:
    """The evidence as short phrases, most telling first.

    Args:
        finding: Its evidence names quantities with their units (``own_work_s``, ``cpu_ratio``).
        most: Leave out what comes after so many; None for all.
    """
    phrases = []
    for name, value in finding.evidence.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if name not in _NOT_A_MEASUREMENT:
            phrases.append(_phrase(name, float(value)))
    phrases = phrases if most is None else phrases[:most]
    over, window = finding.evidence.get("steps_over"), finding.evidence.get("steps_in_window")
    if over is not None and window is not None:
        phrases.append(f"in {over} of {counted(window, 'step')}")
    return phrases


def _phrase(name: str, value: float) -> str:
    for suffix, text in (("_s", seconds(value)), ("_share", f"{value:.0%}")):
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')} {text}"
    return f"{name.replace('_', ' ')} {value:g}"


def seconds(value: float) -> str:
    """A duration as people read it: ``75 ms``, ``1.4 s``."""
    if value >= 1:
        return f"{value:.3g} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"


def what_was_seen(view: RunView) -> str:
    """``90 steps (10 to 99) of 4 ranks``."""
    if view.first_step is None:
        return f"no settled step of {counted(view.ranks_seen, 'rank')}"
    ranks = counted(view.ranks_seen, "rank")
    if view.ranks_seen < view.run.world_size:
        ranks = f"{view.ranks_seen} of {counted(view.run.world_size, 'rank')}"
    steps = counted(view.steps_judged, "step")
    return f"{steps} ({view.first_step} to {view.last_step}) of {ranks}"


def document_of(view: RunView, document: dict[str, Any]) -> dict[str, Any]:
    """The findings document with links added where the pages' address is known."""
    for finding, data in zip(view.diagnosis.findings, document["findings"], strict=True):
        url = view.trace_url(finding)
        if url is not None:
            data["evidence"] = {**data["evidence"], "url": url}
    return document
