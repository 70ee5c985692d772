"""Whether steps wait for whoever has the longest sequences.

Shape legend: A = all steps, R = ranks, M = passes of one direction (chunk and micro-batch),
2 = forward, backward.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from argus_otel.detect.api import (
    WARM_UP_STEPS,
    Diagnosis,
    Params,
    Run,
    abstain_run,
    lasting,
    make_run_finding,
    median_over,
    own_time,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


_FEW = 100
"""Fewer (rank, step) pairs than this make no correlation."""


class _Evidence(NamedTuple):
    """What speaks for lengths."""

    source: str
    correlation: float
    time_AR: Floats
    """Seconds of each rank that follow the lengths, and what does not vary."""


def detect(run: Run, params: Params) -> Diagnosis:
    """Say how much of the time goes to waiting for the longest batch."""
    settled_A = run.ordinals_A >= WARM_UP_STEPS
    seen = _by_tokens(run, params, settled_A)
    if seen is None or seen.correlation <= 0:
        seen = _by_passes(run, params, settled_A) or seen
    if seen is None:
        return abstain_run(
            run,
            params,
            "missing_data",
            "tokens of each rank with its busy time, or compute of several micro-batches a step",
        )
    if seen.correlation <= 0:
        return Diagnosis()
    # Stages and tensor ranks work on the same batch; the slowest position of the data axis counts.
    time_AD = _by_position(run, seen.time_AR)
    known_AD = ~np.isnan(time_AD)
    # A step in which several batches are not known may miss the longest one.
    enough_A = known_AD.mean(axis=1) >= params["present"]
    most_A = np.where(known_AD, time_AD, 0.0).max(axis=1)
    mean_A = np.where(known_AD, time_AD, 0.0).sum(axis=1) / np.maximum(known_AD.sum(axis=1), 1)
    cost_A = np.where(enough_A, most_A / np.maximum(mean_A, 1e-9) - 1, np.nan)
    over_A = lasting(np.nan_to_num(cost_A) >= params["share"], enough_A)
    over_A |= _just_begun(params, np.nan_to_num(cost_A), enough_A)
    if not over_A.any():
        return Diagnosis()
    lost_s = float((most_A - mean_A)[over_A].mean())
    cost = float((most_A - mean_A)[over_A].sum() / mean_A[over_A].sum())
    if cost < params["share"]:
        return Diagnosis()
    slowest = np.bincount(np.nan_to_num(time_AD[over_A]).argmax(axis=1))
    often = float(slowest.max() / slowest.sum())
    before_A = enough_A & settled_A & (np.arange(over_A.size) < np.argmax(over_A))
    # What was nearly as uneven before is no news.
    grew = cost >= params["grew"] * float(median_over(cost_A[before_A], axis=0))
    new = grew and np.count_nonzero(before_A) >= WARM_UP_STEPS
    finding = make_run_finding(
        run,
        params,
        cause="sequence_imbalance",
        ranks=(),
        over_A=over_A,
        severity=params.severity(cost=cost, new_cost=cost if new else 0.0) or "info",
        slowdown=1 + cost,
        lost_s=lost_s,
        summary="No node is bad: in each step all ranks wait for the one with the longest batch, "
        f"which takes {1 + cost:.2f} times as long as the mean; it is another rank each time.",
        evidence={
            "pattern": "all ranks",
            "lost_share": round(cost, 3),
            "seen_by": seen.source,
            "correlation": round(seen.correlation, 3),
            "positions": int(time_AD.shape[1]),
            "slowest_most_often_share": round(often, 3),
        },
    )
    return Diagnosis(findings=(finding,))


def _just_begun(params: Params, cost_A: Floats, enough_A: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Steps [A] at the end of the run in which far more is lost than in any before."""
    over_A = lasting(cost_A >= params["begun_share"], enough_A, window=5)
    latest_A = over_A & (np.arange(over_A.size) >= over_A.size - 20)
    before_A = enough_A & ~over_A & (np.arange(over_A.size) >= WARM_UP_STEPS)
    if not over_A[-5:].any() or np.count_nonzero(before_A) < WARM_UP_STEPS:
        return np.zeros_like(over_A)
    usual = float(np.quantile(cost_A[before_A], 0.9))
    return latest_A & (cost_A >= params["grew"] * usual)


def _by_position(run: Run, time_AR: Floats) -> Floats:
    """The middle one of the ranks that work on the same batches, for each position [A, D]."""
    if not run.places or "dp" not in run.places:
        return time_AR
    positions = np.unique(run.places["dp"])
    return np.stack(
        [median_over(time_AR[:, run.places["dp"] == place], axis=1) for place in positions], axis=1
    )


def _by_tokens(run: Run, params: Params, settled_A: NDArray[np.bool_]) -> _Evidence | None:
    """How far each rank's own time follows its tokens; None where either is not known."""
    own = own_time(run)
    best: _Evidence | None = None
    for name in ("tokens", "sum_len2"):
        work = run.columns[name]
        known = (work > 0) & (own > 0) & settled_A[:, None]
        if known.sum() * 2 < settled_A.sum() * run.ranks_R.size or known.sum() < _FEW:
            continue
        log_work = _varying(np.log(np.where(known, work, np.nan)))
        x = log_work[known]
        if float(np.std(x)) < params["least_variation"]:
            best = best or _Evidence(name, 0.0, own)
            continue
        y = _varying(np.log(np.where(known, own, np.nan)))[known]
        correlation = float(np.corrcoef(x, y)[0, 1])
        slope = float(np.dot(x, y) / np.dot(x, x))
        if correlation < params["follows"]:
            best = best or _Evidence(name, 0.0, own)
        elif best is None or correlation > best.correlation:
            best = _Evidence(name, correlation, np.exp(slope * log_work) * _usual(own, settled_A))
    return best


def _by_passes(run: Run, params: Params, settled_A: NDArray[np.bool_]) -> _Evidence | None:
    """How far forward and backward of the same micro-batch are slow together."""
    if run.passes is None or run.passes.micro_batch_M.max(initial=0) < 1:
        return None
    took = run.passes.duration_ARM2[settled_A]
    log_took = np.log(np.where(took > 0, took, np.nan), dtype=np.float64)
    # A slow rank, or a slow step of one, is slow in all its passes; a late place in each step.
    log_took -= median_over(log_took, axis=2)[:, :, None]
    log_took -= median_over(log_took, axis=0)[None]
    both = log_took[..., 0], log_took[..., 1]
    known = ~(np.isnan(both[0]) | np.isnan(both[1]))
    forward, backward = (way[known] for way in both)
    if forward.size < _FEW:
        return None
    # Whoever is slower than the others in all steps is another matter.
    time_AR = np.full((settled_A.size, run.ranks_R.size), np.nan)
    time_AR[settled_A] = took.sum(axis=(2, 3), dtype=np.float64)
    usual_R = median_over(time_AR, axis=0)
    time_AR *= median_over(usual_R, axis=0) / usual_R
    if min(float(np.std(forward)), float(np.std(backward))) < params["least_variation"]:
        return _Evidence("passes", 0.0, time_AR)
    (of_forward, of_lengths), (_, of_backward) = np.cov(forward, backward)
    correlation = float(of_lengths / np.sqrt(of_forward * of_backward))
    time_AR = _following(
        time_AR, float(of_lengths), micro_batches=int(run.passes.micro_batch_M.max()) + 1
    )
    return _Evidence("passes", correlation if correlation >= params["both_ways"] else 0.0, time_AR)


def _following(time_AR: Floats, variance: float, *, micro_batches: int) -> Floats:
    """Seconds [A, R] with that part of their spread that lengths account for; the rest is noise.

    Args:
        time_AR: Compute of a rank in a step.
        variance: Of the logarithm of one micro-batch about the rank's mean in the step, by its length.
        micro_batches: In a step: their mean varies by as much less.
    """
    log_AR = np.log(np.where(time_AR > 0, time_AR, np.nan))
    middle_A = median_over(log_AR, axis=1)[:, None]
    rest = log_AR - middle_A
    about = float(np.nanmean(rest**2))
    of_lengths = variance / max(micro_batches - 1, 1)
    kept = np.sqrt(min(of_lengths / max(about, 1e-12), 1.0))
    following: Floats = np.exp(middle_A + kept * rest)
    return following


def _usual(own: Floats, settled_A: NDArray[np.bool_]) -> float:
    return float(median_over(median_over(own[settled_A], axis=1), axis=0))


def _varying(log_AR: Floats) -> Floats:
    """What is left without each rank's own level and each step's."""
    rest = log_AR - median_over(log_AR, axis=0)[None, :]
    left: Floats = rest - median_over(rest, axis=1)[:, None]
    return left
