"""The trigger: step time that rises to a new level, or jumps again and again.

Shape legend: S = settled steps with a known step time, R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Finding,
    Params,
    Run,
    abstain_run,
    make_run_finding,
    median_over,
    settled_steps,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_POINTS = 400
"""More steps than this are looked at in blocks: intervals are counted by their square."""
_BURST_WINDOW = 20
_MOST_MEMORY = 0.9
"""A slow drift looks like noise that hangs together; beyond this it is one."""


def detect(run: Run, params: Params) -> Diagnosis:
    """Say where step time rose, or that it jumps; the engine drops what others explain."""
    job_step_A = median_over(run.columns["step_s"], axis=1)
    at = np.flatnonzero(settled_steps(run) & ~np.isnan(job_step_A))
    if at.size < params["settled_steps"]:
        return abstain_run(
            run, params, "too_few_steps",
            f"{params['settled_steps']:.0f} steps after the warm-up and without compilation",
        )  # fmt: skip
    logs = [np.log(_without_known_parts(run, job_step_A)[at])]
    tokens = run.columns["tokens"][at]
    if not np.isnan(tokens).all(axis=1).any():
        # The step waits for whoever has most, and all share the transfers.
        logs.append(logs[0] - np.log(np.maximum(np.nanmax(tokens, axis=1), 1.0)))
    findings = [_level(run, params, at, logs), _bursts(run, params, at, logs)]
    return Diagnosis(findings=tuple(finding for finding in findings if finding))


def _without_known_parts(run: Run, job_step_A: Floats) -> Floats:
    """Step time [A] less what other columns account for: collection, and waits for shared cores."""
    columns = run.columns
    delay_AR = np.where(run.has_gpu_R, 0.0, np.nan_to_num(columns["run_delay_s"]))
    aside_A = delay_AR.max(axis=1) + np.nan_to_num(columns["gc_s"]).max(axis=1)
    rest: Floats = np.maximum(job_step_A - aside_A, 0.2 * job_step_A)
    return rest


def _level(run: Run, params: Params, at: NDArray[np.int64], logs: list[Floats]) -> Finding | None:
    """A new, higher level, by time and by time per token."""
    first, last = _interval(logs[0], params)
    if first == 0:
        return None
    inside = np.zeros(at.size, dtype=bool)
    inside[first:last] = True
    ratio = np.inf
    for log_S in logs:
        before, now = np.median(log_S[:first]), np.median(log_S[inside])
        sigma = _scatter(log_S, inside)
        outside = log_S[~inside]
        error = sigma * np.sqrt(1 / inside.sum() + 1 / outside.size) * _memory(log_S, inside)
        shift = float(min(now - before, now - np.median(outside)))
        if shift < max(params["shift_sigma"] * sigma, params["z"] * error):
            return None
        ratio = min(ratio, float(np.exp(shift)))
    if ratio < params["ratio"]:
        return None
    step_s = median_over(run.columns["step_s"], axis=1)[at]
    now_s = float(np.median(step_s[inside]))
    mild = not run.has_gpu_R.any() and (
        ratio < params["burst_ratio"]
        or inside.sum() < params["held_steps"]
        or _crowding(run, at[inside]) >= params["crowded_share"]
    )
    # Over, and soon: there is nothing left to do.
    mild |= last < at.size and inside.sum() < params["brief_steps"]
    over_A = np.zeros(run.ordinals_A.size, dtype=bool)
    over_A[at[inside]] = True
    since = int(run.ordinals_A[at[first]])
    when = f"Since step {since}"
    if last < at.size:
        when = f"From step {since} to {int(run.ordinals_A[at[last - 1]])}"
    return make_run_finding(
        run,
        params,
        cause="regression_unexplained",
        ranks=[],
        over_A=over_A,
        severity=params.severity(slowdown=0.0 if mild else ratio) or "info",
        slowdown=ratio,
        lost_s=now_s * (1 - 1 / ratio),
        summary=f"{when} steps take {ratio:.2f} times as long as before "
        f"({now_s * 1e3:.0f} ms), on all ranks, and no single cause was found.",
        evidence={
            "pattern": "lasting",
            "step_s_before": round(now_s / ratio, 6),
            "step_scatter_ratio": round(float(np.exp(_scatter(logs[-1], inside))) - 1, 4),
        },
    )


def _crowding(run: Run, at: NDArray[np.int64]) -> float:
    """Share of these steps that the middle rank waits for a core; CPU time stretches as well then."""
    share_AR = np.nan_to_num(run.columns["run_delay_s"][at]) / run.columns["step_s"][at]
    return float(np.nan_to_num(median_over(median_over(share_AR, axis=1), axis=0)))


def _interval(log_S: Floats, params: Params) -> tuple[int, int]:
    """The steps whose mean is above the rest's by most standard errors; (0, 0) where none is.

    Source:
        Olshen and others (2004), circular binary segmentation; single spikes are taken out by a
        running median of five first.
    """
    block = -(-log_S.size // _POINTS)
    edges = np.arange(0, log_S.size, block)
    smooth = _running_median(log_S, 5)
    value = np.array([np.median(smooth[edge : edge + block]) for edge in edges])
    least = max(2, -(-int(params["segment_steps"]) // block))
    total = np.concatenate(([0.0], np.cumsum(value - value.mean())))
    n = value.size
    begin, end = np.meshgrid(np.arange(n), np.arange(1, n + 1), indexing="ij")
    width = end - begin
    fits = (begin >= least) & (width >= least) & (n - width >= least)
    if not fits.any():
        return 0, 0
    inner = total[end] - total[begin]
    score = np.where(fits, inner / np.sqrt(np.maximum(width * (n - width), 1)), -np.inf)
    first, last = np.unravel_index(int(np.argmax(score)), score.shape)
    return int(edges[first]), min(int(last + 1) * block, log_S.size)


def _running_median(log_S: Floats, width: int) -> Floats:
    padded = np.pad(log_S, width // 2, mode="edge")
    return median_over(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)


def _memory(log_S: Floats, inside: NDArray[np.bool_]) -> float:
    """How much larger a mean's error is because steps hang together, from neighbours within a level.

    Source:
        Bayley and Hammersley (1946), effective number of autocorrelated observations, first order.
    """
    rest = np.where(inside, log_S - np.median(log_S[inside]), log_S - np.median(log_S[~inside]))
    rest = np.clip(rest, *np.quantile(rest, (0.02, 0.98)))
    together = float((rest[1:] * rest[:-1]).mean() / max(float((rest**2).mean()), 1e-12))
    kept = min(max(together, 0.0), _MOST_MEMORY)
    return float(np.sqrt((1 + kept) / (1 - kept)))


def _scatter(log_S: Floats, inside: NDArray[np.bool_]) -> float:
    """Standard deviation of one step within the two levels; 0.2 % at least, for clocks."""
    parts = [log_S[inside], log_S[~inside]] if inside.any() else [log_S]
    rest = np.concatenate([part - np.median(part) for part in parts if part.size])
    return max(1.4826 * float(np.median(np.abs(rest))), 0.002)


def _bursts(run: Run, params: Params, at: NDArray[np.int64], logs: list[Floats]) -> Finding | None:
    """Several of twenty steps that are far longer than their neighbours."""
    over_S = np.ones(at.size, dtype=bool)
    nothing = np.zeros(at.size, dtype=bool)
    for log_S in logs:
        rest = log_S - _running_median(log_S, _BURST_WINDOW + 1)
        bar = max(np.log(params["burst_ratio"]), params["burst_sigma"] * _scatter(rest, nothing))
        over_S &= rest > bar
    window = min(_BURST_WINDOW, at.size)
    count = np.convolve(over_S, np.ones(window), mode="valid")
    if count.max() < params["burst_steps"]:
        return None
    step_s = median_over(run.columns["step_s"], axis=1)[at]
    usual_s = np.exp(_running_median(np.log(step_s), _BURST_WINDOW + 1))
    extra_S = np.where(over_S, step_s - usual_s, 0.0)
    since = int(np.argmax(over_S))
    cost = float(extra_S.sum() / step_s[since:].sum())
    if cost < params["burst_cost"]:
        return None
    over_A = np.zeros(run.ordinals_A.size, dtype=bool)
    over_A[at[over_S]] = True
    longer = float(np.median((step_s / usual_s)[over_S]))
    return make_run_finding(
        run,
        params,
        cause="regression_unexplained",
        ranks=[],
        over_A=over_A,
        severity=params.severity(slowdown=1 + cost if run.has_gpu_R.any() else 0.0) or "info",
        slowdown=longer,
        lost_s=float(extra_S[over_S].mean()),
        summary=f"{int(over_S.sum())} of {at.size - since} steps take {longer:.1f} times as long as "
        f"their neighbours, on all ranks ({cost:.0%} of the time), and no single cause was found.",
        evidence={"pattern": "intermittent", "cost_share": round(cost, 4)},
    )
