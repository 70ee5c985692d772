"""Which stage of a pipeline works longer than the others, or has one pass that is late.

Shape legend: A = all steps, R = ranks, r = ranks with a long pass, S = stages, C = chunks of a stage,
M = passes of one direction (chunk and micro-batch), 2 = forward, backward.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from argus_otel.detect.api import (
    SUDDEN,
    WARM_UP_STEPS,
    Diagnosis,
    Finding,
    Params,
    Run,
    abstain_run,
    device_values,
    event_seconds,
    lasting,
    lasting_or_sudden,
    lower_middle,
    lowest_mean,
    luck_of_slowest,
    make_run_finding,
    median_over,
    name_run_ranks,
    step_growth_s,
    step_scatter,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.api import Passes

    Floats = NDArray[np.float64]


def detect(run: Run, params: Params) -> Diagnosis:
    """Name each stage that works longer, and each late pass."""
    stages = run.places.get("pp") if run.places else None
    if run.places and (stages is None or stages.max(initial=0) == 0):
        return Diagnosis()  # no pipeline
    if stages is None or run.passes is None:
        missing = "the stage of each rank" if stages is None else "compute of each micro-batch"
        return abstain_run(run, params, "missing_data", missing)
    ranks_S = [np.flatnonzero(stages == stage) for stage in range(int(stages.max()) + 1)]
    usual_ARC2 = _usual(run, run.passes)
    # One finding a stage: with more work than the others, it is late in other ways too.
    found = _late_passes(run, params, run.passes, ranks_S, usual_ARC2)
    found.update(_heavy_stages(run, params, run.passes, ranks_S, usual_ARC2))
    return Diagnosis(findings=tuple(found.values()))


def _settled(run: Run) -> NDArray[np.bool_]:
    return run.ordinals_A >= WARM_UP_STEPS


def _usual(run: Run, passes: Passes) -> Floats:
    """What the middle pass of each chunk takes, [A, R, C, 2]; of an even number the lesser of two."""
    usual_ARC2 = np.stack(
        [
            lower_middle(passes.duration_ARM2[:, :, passes.chunk_M == chunk], axis=2)
            for chunk in np.unique(passes.chunk_M)
        ],
        axis=2,
        dtype=np.float64,
    )
    usual_ARC2[~_settled(run)] = np.nan
    return usual_ARC2


def _heavy_stages(
    run: Run,
    params: Params,
    passes: Passes,
    ranks_S: list[NDArray[np.int64]],
    usual_ARC2: Floats,
) -> dict[int, Finding]:
    # A late micro-batch has its own finding.
    work_AR = usual_ARC2.sum(axis=(2, 3))
    middle_AS = np.stack([median_over(work_AR[:, ranks], axis=1) for ranks in ranks_S], axis=1)
    found = {}
    for stage, ranks in enumerate(ranks_S):
        others_A = lower_middle(np.delete(middle_AS, stage, axis=1), axis=1)
        ratio_A = middle_AS[:, stage] / others_A
        log_A = np.log(ratio_A)
        chance = luck_of_slowest(len(ranks_S)) * step_scatter(log_A)
        # Of a median over 20 steps, which errs by a quarter more than a mean.
        over_A = lasting_or_sudden(log_A, log(params["ratio"]), 1.25 * chance / np.sqrt(20))
        if not over_A.any():
            continue
        ratio = float(median_over(ratio_A[over_A], axis=0))
        each_R = median_over(work_AR[over_A][:, ranks] / others_A[over_A][:, None], axis=0)
        if float(lowest_mean(each_R, axis=0)) < ratio ** params["alike"]:
            continue
        usual_S = median_over(middle_AS[over_A], axis=0)
        count = len(set(passes.micro_batch_M.tolist()))
        # An even cut would give each stage the mean.
        lost_s = max(count * float(usual_S[stage] - usual_S.mean()), 0.0)
        alone = "; with one rank a stage it may be a slow node too" if ranks.size == 1 else ""
        found[stage] = _finding(
            run,
            params,
            ranks,
            over_A,
            ratio,
            lost_s,
            summary=f"Stage {stage} of {len(ranks_S)} works {ratio:.2f} times as long on a "
            f"micro-batch as the others: the model is cut unevenly, this is no bad node{alone}.",
            evidence={
                "pattern": "stage",
                "stage": stage,
                "work_s_by_stage": [round(float(value), 6) for value in usual_S],
                "wait_s_by_stage": _waits(run, ranks_S, over_A),
            },
        )
    return found


def _late_passes(
    run: Run,
    params: Params,
    passes: Passes,
    ranks_S: list[NDArray[np.int64]],
    usual_ARC2: Floats,
) -> dict[int, Finding]:
    base_AR2 = usual_ARC2.mean(axis=2)
    step_s = float(median_over(median_over(run.columns["step_s"], axis=1), axis=0))
    # The first pass of a step pays for what a step pays once; two or three show no usual one.
    few = passes.micro_batch_M.max() + 1 < params["late_passes"]
    unsure_M = (passes.micro_batch_M == 0) | few
    ratio_M = np.where(unsure_M, params["unsure_late_ratio"], params["late_ratio"])
    share_M = np.where(unsure_M, params["unsure_late_share"], params["late_share"])
    chunk_M = np.searchsorted(np.unique(passes.chunk_M), passes.chunk_M)
    long_R = np.zeros(run.ranks_R.size, dtype=bool)
    for m, chunk in enumerate(chunk_M.tolist()):
        floor_AR2 = np.maximum((ratio_M[m] - 1) * base_AR2, share_M[m] * step_s)
        longer_AR2 = passes.duration_ARM2[:, :, m] - usual_ARC2[:, :, chunk]
        long_R |= (longer_AR2 >= floor_AR2).any(axis=(0, 2))
    suspects = np.flatnonzero(long_R)
    if not suspects.size:
        return {}
    pauses_AR = _pauses(run)

    def excess(at: Any) -> Floats:  # noqa: ANN401
        """Seconds beyond the middle pass of the chunk, less what pauses took, at some steps and ranks."""
        over = passes.duration_ARM2[at] - usual_ARC2[at][:, :, chunk_M]
        less: Floats = np.maximum(over - pauses_AR[at][:, :, None, None], np.minimum(over, 0.0))
        return less

    excess_ArM2 = excess(np.s_[:, suspects])
    # Where lengths vary, passes differ; a late one is beyond what the rank's own passes scatter.
    scatter_r2 = median_over(
        np.abs(excess_ArM2).transpose(1, 3, 0, 2).reshape(suspects.size, 2, -1), axis=-1
    )
    if few:
        duration_ArM2 = passes.duration_ARM2[_settled(run)][:, suspects].astype(np.float64)
        scatter_r2 = np.fmax(scatter_r2, _scatter_of_few(duration_ArM2))
    floor_ArM2 = np.maximum(
        (ratio_M[:, None] - 1) * base_AR2[:, suspects, None], share_M[:, None] * step_s
    )
    chance = params["late_scatter"] * scatter_r2[:, None]
    known = ~np.isnan(excess_ArM2)
    over = excess_ArM2 >= np.maximum(floor_ArM2, chance)
    sudden = excess_ArM2 >= np.maximum(floor_ArM2, SUDDEN * chance)
    late_ARM2 = np.zeros(passes.duration_ARM2.shape, dtype=bool)
    late_ARM2[:, suspects] = lasting(over, known) | lasting(sudden, known, window=5)
    late_ARM2[:, suspects] &= _more_often(over, params["late_often"])[None]
    shown_A = np.asarray(late_ARM2.any(axis=(1, 2, 3)))
    if not shown_A.any():
        return {}
    size_RM2 = median_over(excess(shown_A), axis=0)
    late_RM2 = np.asarray(late_ARM2.any(axis=0))
    found = {}
    for stage, ranks in enumerate(ranks_S):
        late_M2 = np.asarray(late_RM2[ranks].any(axis=0))
        own_RM2 = np.where(late_RM2[ranks], np.nan_to_num(size_RM2[ranks]), 0.0)
        others = np.delete(np.arange(run.ranks_R.size), ranks)
        elsewhere_M2 = np.nan_to_num(median_over(size_RM2[others], axis=0))
        late_M2 &= elsewhere_M2 <= params["late_elsewhere"] * own_RM2.max(axis=0)
        if not late_M2.any():
            continue
        size_M2 = np.where(late_M2, own_RM2.max(axis=0), 0.0)
        place, direction = (int(at) for at in np.unravel_index(size_M2.argmax(), size_M2.shape))
        late = ranks[late_RM2[ranks][:, place, direction]]
        over_A = np.asarray(late_ARM2[:, late, place, direction].any(axis=1))
        whole = late.size * 2 > ranks.size
        base_s = float(
            median_over(median_over(base_AR2[over_A][:, late, direction], axis=1), axis=0)
        )
        found[stage] = _late_finding(
            run,
            params,
            ranks_S,
            (ranks if whole else late),
            over_A,
            {
                "pattern": "late micro-batch",
                "stage": stage,
                "micro_batch": int(passes.micro_batch_M[place]),
                "direction": "backward" if direction else "forward",
                "late_passes": int(late_M2.sum()),
                "pass_s": round(base_s + float(size_M2.max()), 6),
                "reference_pass_s": round(base_s, 6),
            },
            excess_s=float(size_M2.sum()),
            where="on all ranks of the stage"
            if whole
            else f"on {name_run_ranks(run, late.tolist())}",
        )
    return found


def _scatter_of_few(duration_ArM2: Floats) -> Floats:
    """How far apart two or three passes of a step are by chance [r, 2], where it is worst.

    One of them is the least each time, with no excess at all; how their distance jumps tells, which
    a pass that becomes late changes once.
    """
    apart = duration_ArM2 - median_over(duration_ArM2, axis=2)[:, :, None]
    jumps = np.abs(np.diff(apart, axis=0)) / np.sqrt(2)
    blocks = np.array_split(jumps, max(len(jumps) // 20, 1))
    worst_rM2 = np.fmax.reduce([median_over(block, axis=0) for block in blocks])
    scatter_r2: Floats = 2 * np.fmax.reduce(worst_rM2, axis=1)
    return scatter_r2


def _more_often(over_ARM2: NDArray[np.bool_], times: float) -> NDArray[np.bool_]:
    """Passes [R, M, 2] that are late so many times as often as the rank's middle other pass."""
    count_RM2 = over_ARM2.sum(axis=0).astype(np.float64)
    others = [np.delete(count_RM2, m, axis=1) for m in range(count_RM2.shape[1])]
    usual_RM2 = np.stack([median_over(other, axis=1) for other in others], axis=1)
    more: NDArray[np.bool_] = count_RM2 >= times * np.nan_to_num(usual_RM2)
    return more


def _late_finding(
    run: Run,
    params: Params,
    ranks_S: list[NDArray[np.int64]],
    ranks: NDArray[np.int64],
    over_A: NDArray[np.bool_],
    evidence: dict[str, Any],
    *,
    excess_s: float,
    where: str,
) -> Finding:
    growth_s = step_growth_s(run, over_A)
    lost_s = excess_s if growth_s is None else float(np.clip(growth_s, 0.0, excess_s))
    evidence["wait_s_by_stage"] = _waits(run, ranks_S, over_A)
    amplified = _amplification(run, over_A, excess_s * ranks.size)
    told = ""
    if amplified is not None:
        evidence["amplification"] = round(amplified, 2)
    if amplified is not None and amplified >= 1:
        told = f" Each second of it costs {amplified:.1f} seconds of waiting on other ranks."
    return _finding(
        run,
        params,
        ranks,
        over_A,
        evidence["pass_s"] / evidence["reference_pass_s"],
        lost_s,
        summary=f"The {evidence['direction']} pass of micro-batch {evidence['micro_batch']} on stage "
        f"{evidence['stage']} takes {excess_s * 1e3:.0f} ms longer than its others in each step, "
        f"{where}.{told}",
        evidence=evidence,
    )


def _pauses(run: Run) -> Floats:
    """Seconds [A, R] of pauses of the host that are known by name, and have their own detectors."""
    pauses_AR = np.nan_to_num(run.columns["gc_s"]) + np.nan_to_num(run.columns["run_delay_s"])
    pauses_AR += event_seconds(run, run.events)
    pauses_AR[np.nan_to_num(device_values(run, "allocator_retries")) > 0] = np.inf
    return pauses_AR


def _amplification(run: Run, over_A: NDArray[np.bool_], excess_s: float) -> float | None:
    """Seconds that all ranks wait more than before, per second of the late passes together."""
    waited_A = run.operations.wait_AR.sum(axis=1)
    before_A = _settled(run) & (np.arange(over_A.size) < np.argmax(over_A))
    if np.count_nonzero(before_A) < WARM_UP_STEPS:
        return None
    more_s = float(median_over(waited_A[over_A], axis=0) - median_over(waited_A[before_A], axis=0))
    return max(more_s, 0.0) / excess_s


def _waits(run: Run, ranks_S: list[NDArray[np.int64]], over_A: NDArray[np.bool_]) -> list[float]:
    """Seconds that the middle rank of each stage waits in a step."""
    wait_R = median_over(run.operations.wait_AR[over_A], axis=0)
    return [round(float(median_over(wait_R[ranks], axis=0)), 6) for ranks in ranks_S]


def _finding(
    run: Run,
    params: Params,
    ranks: NDArray[np.int64],
    over_A: NDArray[np.bool_],
    ratio: float,
    lost_s: float,
    *,
    summary: str,
    evidence: dict[str, Any],
) -> Finding:
    step_s = float(median_over(median_over(run.columns["step_s"][over_A], axis=1), axis=0))
    # A late pass is several times as long at once: its cost says how bad it is.
    heavy = ratio if evidence["pattern"] == "stage" else params["ratio"]
    return make_run_finding(
        run,
        params,
        cause="pipeline_imbalance",
        ranks=ranks.tolist(),
        over_A=over_A,
        severity=params.severity(slowdown=heavy, cost=lost_s / step_s) or "info",
        slowdown=ratio,
        lost_s=lost_s,
        summary=summary,
        evidence=evidence,
    )
