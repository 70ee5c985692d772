"""What the job would gain if one cause were healed: the arbiter of what is worth a warning.

A synchronous step waits for whoever needs longest for what is its own: work, input, garbage
collection. Healing a cause helps only as far as nobody else is as late. Where ranks meet only at the
end of the step (plain data parallelism), that is the latest one's own time; waiting for a core is
left out then, because on a crowded host it falls on another rank in every step. Other jobs are
replayed (``healing``).

Shape legend: S = steps of a finding, R = ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.healing import Gain, meets_only_at_the_end, replayed_gain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from argus_otel.detect.frame import Floats, Frame
    from argus_otel.tables.findings import Finding

LEAST_GAIN: Final = 0.03
"""Share of the step. A cause whose healing gains less is reported as info: nobody drains a node
for it, and on shared cores noise reaches as far (bench/verdicts)."""

_ILL_AT_NO_COST: Final = frozenset({"slow_link"})
"""Hardware that was well, and fails, is worth a warning before it costs anything (ARGUS's second case: a
link at a fraction of its speed, and the step time flat). One that was never faster may be built so:
in a published trace of 64 GPUs several pairs are, at no cost (tests/data/bytedance)."""

_KNOWN_SHARE: Final = 0.9
"""Share of ranks whose own time is known, below which the latest one may be unseen."""


def weigh(finding: Finding, frame: Frame) -> Finding:
    """Give a finding the cost that its healing would save, and the severity that goes with it.

    Findings of causes that this model does not know, and steps whose own times are not known,
    keep what their detector said.
    """
    gain = healing_gain(finding, frame)
    if gain is None or "step_s" not in finding.evidence:
        return finding
    step_s = float(finding.evidence["step_s"])
    # The finding's own numbers are of one window; the share carries over, seconds would not.
    lost_s = min(gain.share, 0.99) * step_s
    claimed_s = float(finding.evidence["lost_s_per_step"])
    cost = finding.cost_gpu_hours
    if cost is not None:
        cost = float(f"{cost * lost_s / claimed_s:.4g}") if claimed_s > 0 else 0.0
    severity, summary = finding.severity, finding.summary
    evidence = {**finding.evidence, "lost_s_per_step": round(lost_s, 6)}
    fell_ill = finding.cause in _ILL_AT_NO_COST and finding.onset.exact and finding.state == "open"
    if lost_s < LEAST_GAIN * step_s and fell_ill:
        severity = "info" if severity == "info" else "warning"
        summary += " It costs the job almost nothing yet: there is other work to hide it."
    elif lost_s < LEAST_GAIN * step_s:
        severity = "info"
        if gain.latest_rank is not None:
            evidence["hidden_behind_rank"] = gain.latest_rank
            summary += (
                f" Healing it alone gains almost nothing now: rank {gain.latest_rank} is later."
            )
    return replace(
        finding,
        severity=severity,
        summary=summary,
        step_slowdown=round(step_s / (step_s - lost_s), 3),
        cost_gpu_hours=cost,
        evidence=evidence,
    )


def weigh_together(
    findings: Sequence[Finding], alone: Sequence[Finding], frame: Frame
) -> list[Finding]:
    """Weigh together those of one cause that hide behind each other.

    Of two ranks that are equally slow, healing either one gains nothing: both are worth a warning.

    Args:
        findings: As their detectors said.
        alone: The same, each weighed for itself.
        frame: Of the run.
    """
    weighed = list(alone)
    for cause in {finding.cause for finding in findings}:
        hidden = [
            at
            for at, finding in enumerate(weighed)
            if finding.cause == cause
            and finding.severity == "info" != findings[at].severity
            and "hidden_behind_rank" in finding.evidence
        ]
        accused = {rank for at in hidden for rank in findings[at].ranks}
        together = [at for at in hidden if weighed[at].evidence["hidden_behind_rank"] in accused]
        if len(together) < 2:
            continue
        gain = healing_gain(_joint([findings[at] for at in together]), frame)
        if gain is None or gain.share < LEAST_GAIN:
            continue
        for at in together:
            weighed[at] = _one_of_several(findings[at], gain.share, together=len(together))
    return weighed


def _joint(findings: Sequence[Finding]) -> Finding:
    """One finding over all their ranks, in the steps that all of them share."""
    slowdowns = {
        str(rank): finding.evidence.get("slowdown_by_rank", {}).get(str(rank), finding.slowdown)
        for finding in findings
        for rank in finding.ranks
    }
    first = max(finding.first_step for finding in findings)
    return replace(
        findings[0],
        ranks=tuple(sorted({rank for finding in findings for rank in finding.ranks})),
        first_step=first,
        last_step=max(first, min(finding.last_step for finding in findings)),
        evidence={**findings[0].evidence, "slowdown_by_rank": slowdowns},
    )


def _one_of_several(finding: Finding, share: float, *, together: int) -> Finding:
    """With its part of what healing all of them gains."""
    step_s = float(finding.evidence["step_s"])
    lost_s = min(share, 0.99) * step_s / together
    claimed_s = float(finding.evidence["lost_s_per_step"])
    cost = finding.cost_gpu_hours
    if cost is not None and claimed_s > 0:
        cost = float(f"{cost * lost_s / claimed_s:.4g}")
    return replace(
        finding,
        summary=f"{finding.summary} {together} ranks hold the step up in equal measure: healing all "
        f"of them gains {share:.0%} of it, healing one alone almost nothing.",
        step_slowdown=round(step_s / (step_s - lost_s), 3),
        cost_gpu_hours=cost,
        evidence={
            **finding.evidence,
            "lost_s_per_step": round(lost_s, 6),
            "gain_together_share": round(share, 3),
        },
    )


def healing_gain(finding: Finding, frame: Frame) -> Gain | None:
    """What the finding's steps gain with its cause healed; None where that cannot be said.

    Where all ranks only ever meet at the end of their step, the latest one's own time says it.
    Elsewhere, and for causes that own times do not show, the steps are replayed.
    """
    plain = meets_only_at_the_end(frame.whole)
    gain = _gain_of_latest(finding, frame) if plain else None
    return replayed_gain(finding, frame) if gain is None else gain


def _gain_of_latest(finding: Finding, frame: Frame) -> Gain | None:
    """For plain data parallelism: the gain of the latest rank's own time."""
    in_finding = (frame.ordinals_S >= finding.first_step) & (frame.ordinals_S <= finding.last_step)
    culprits = np.flatnonzero(np.isin(frame.ranks_R, finding.ranks))
    parts = {name: frame.column(name)[in_finding] for name in ("own_work_s", "data_wait_s", "gc_s")}
    healed = _healed(finding, parts, culprits, frame)
    if healed is None or not culprits.size:
        return None
    before_SR = parts["own_work_s"] + _known(parts["data_wait_s"]) + _known(parts["gc_s"])
    after_SR = healed["own_work_s"] + _known(healed["data_wait_s"]) + _known(healed["gc_s"])
    enough_S = np.count_nonzero(~np.isnan(before_SR), axis=1) >= _KNOWN_SHARE * frame.ranks_R.size
    enough_S &= ~np.isnan(before_SR[:, culprits]).any(axis=1)
    if not enough_S.any():
        return None
    before_SR, after_SR = before_SR[enough_S], after_SR[enough_S]
    gain_S = np.nanmax(before_SR, axis=1) - np.nanmax(after_SR, axis=1)
    # A cause that comes and goes is in some steps only: its gain is a part of the mean.
    lasting = finding.evidence.get("pattern") in ("lasting", "all ranks")
    step_S = frame.job_step_s[in_finding][enough_S]
    gain_s = float(np.median(gain_S) if lasting else gain_S.mean())
    step_s = float(np.median(step_S) if lasting else step_S.mean())
    latest = Counter(np.nanargmax(after_SR, axis=1).tolist()).most_common(1)[0][0]
    return Gain(
        share=max(0.0, gain_s) / step_s,
        latest_rank=None if latest in culprits else int(frame.ranks_R[latest]),
    )


def _known(values_SR: Floats) -> Floats:
    return np.nan_to_num(values_SR)


def _healed(
    finding: Finding, parts: dict[str, Floats], culprits: NDArray[np.int64], frame: Frame
) -> dict[str, Floats] | None:
    healed = {name: values.copy() for name, values in parts.items()}
    if finding.cause == "compute_straggler":
        slowdowns = finding.evidence.get("slowdown_by_rank", {})
        for rank in culprits.tolist():
            factor = slowdowns.get(str(int(frame.ranks_R[rank])), finding.slowdown)
            healed["own_work_s"][:, rank] /= max(float(factor), 1.0)
    elif finding.cause == "input_stall":
        healed["data_wait_s"][:, culprits] = 0.0
    elif finding.cause == "gc_pause":
        healed["gc_s"][:, culprits] = 0.0
    else:
        return None
    return healed
