"""Which stage of a pipeline works longer than the others, or has one pass that is late.

Shape legend: A = all steps, R = ranks, S = stages, M = passes of one direction (chunk and
micro-batch), 2 = forward, backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from argus_otel.detect.api import (
    WARM_UP_STEPS,
    Diagnosis,
    Finding,
    Params,
    Run,
    abstain_run,
    device_values,
    event_seconds,
    lasting,
    lowest_mean,
    make_run_finding,
    median_over,
    step_growth_s,
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
    # One finding a stage: with more work than the others, it is late in other ways too.
    found = _late_passes(run, params, run.passes, ranks_S)
    found.update(_heavy_stages(run, params, run.passes, ranks_S))
    return Diagnosis(findings=tuple(found.values()))


def _settled(run: Run) -> NDArray[np.bool_]:
    return run.ordinals_A >= WARM_UP_STEPS


def _heavy_stages(
    run: Run, params: Params, passes: Passes, ranks_S: list[NDArray[np.int64]]
) -> dict[int, Finding]:
    # The middle micro-batch of each chunk: a late one has its own finding.
    work_AR = np.zeros((run.ordinals_A.size, run.ranks_R.size))
    for chunk in np.unique(passes.chunk_M):
        mine = passes.duration_ARM2[:, :, passes.chunk_M == chunk].astype(np.float64)
        work_AR += _lower_middle(mine, axis=2).sum(axis=-1)
    work_AR[~_settled(run)] = np.nan
    middle_AS = np.stack([median_over(work_AR[:, ranks], axis=1) for ranks in ranks_S], axis=1)
    found = {}
    for stage, ranks in enumerate(ranks_S):
        others_A = _lower_middle(np.delete(middle_AS, stage, axis=1), axis=1)
        ratio_A = middle_AS[:, stage] / others_A
        over_A = lasting(np.nan_to_num(ratio_A) >= params["ratio"], ~np.isnan(ratio_A))
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
    run: Run, params: Params, passes: Passes, ranks_S: list[NDArray[np.int64]]
) -> dict[int, Finding]:
    excess_ASM2, base_ASM2 = _excess(run, passes, ranks_S)
    step_s = float(median_over(median_over(run.columns["step_s"], axis=1), axis=0))
    floor = np.maximum((params["late_ratio"] - 1) * base_ASM2, params["late_share"] * step_s)
    known = ~np.isnan(excess_ASM2)
    late_ASM2 = lasting(np.where(known, excess_ASM2, 0) >= np.where(known, floor, np.inf), known)
    size_SM2 = median_over(
        np.where(late_ASM2.any(axis=(1, 2, 3), keepdims=True), excess_ASM2, np.nan), axis=0
    )
    found = {}
    for stage, ranks in enumerate(ranks_S):
        elsewhere_M2 = np.nan_to_num(np.delete(size_SM2, stage, axis=0)).max(axis=0, initial=0.0)
        own_M2 = late_ASM2[:, stage].any(axis=0)
        own_M2 &= elsewhere_M2 <= params["late_elsewhere"] * np.nan_to_num(size_SM2[stage])
        if not own_M2.any():
            continue
        size_M2 = np.where(own_M2, size_SM2[stage], 0.0)
        place, direction = (int(at) for at in np.unravel_index(size_M2.argmax(), size_M2.shape))
        over_A = late_ASM2[:, stage, place, direction]
        excess_s, base_s = (
            float(size_M2.sum()),
            float(median_over(base_ASM2[over_A][:, stage, place, direction], axis=0)),
        )
        growth_s = step_growth_s(run, over_A)
        lost_s = excess_s if growth_s is None else float(np.clip(growth_s, 0.0, excess_s))
        way = "backward" if direction else "forward"
        evidence: dict[str, Any] = {
            "pattern": "late micro-batch",
            "stage": stage,
            "micro_batch": int(passes.micro_batch_M[place]),
            "direction": way,
            "late_passes": int(own_M2.sum()),
            "pass_s": round(base_s + float(size_M2.max()), 6),
            "reference_pass_s": round(base_s, 6),
            "wait_s_by_stage": _waits(run, ranks_S, over_A),
        }
        amplified = _amplification(run, over_A, excess_s * ranks.size)
        told = ""
        if amplified is not None:
            evidence["amplification"] = round(amplified, 2)
        if amplified is not None and amplified >= 1:
            told = f" Each second of it costs {amplified:.1f} seconds of waiting on other ranks."
        found[stage] = _finding(
            run,
            params,
            ranks,
            over_A,
            1 + float(size_M2.max()) / base_s,
            lost_s,
            summary=f"The {way} pass of micro-batch {evidence['micro_batch']} on stage {stage} "
            f"takes {excess_s * 1e3:.0f} ms longer than its others in each step, on all ranks of "
            f"the stage.{told}",
            evidence=evidence,
        )
    return found


def _excess(run: Run, passes: Passes, ranks_S: list[NDArray[np.int64]]) -> tuple[Floats, Floats]:
    """What each pass takes beyond the middle pass of its chunk, and that one; median of a stage."""
    columns = run.columns
    # Pauses of the host that are known by name have their own detectors.
    known_AR = np.nan_to_num(columns["gc_s"]) + np.nan_to_num(columns["run_delay_s"])
    known_AR += event_seconds(run, run.events)
    took = passes.duration_ARM2.astype(np.float64)
    took[~_settled(run)] = np.nan
    base = np.empty_like(took)
    for chunk in np.unique(passes.chunk_M):
        mine = passes.chunk_M == chunk
        base[:, :, mine] = _lower_middle(took[:, :, mine], axis=2)[:, :, None]
    over = took - base
    retried_AR = np.nan_to_num(device_values(run, "allocator_retries")) > 0
    known_AR[retried_AR] = np.inf
    over = np.where(over > 0, np.maximum(over - known_AR[:, :, None, None], 0.0), over)
    return (
        np.stack([median_over(over[:, ranks], axis=1) for ranks in ranks_S], axis=1),
        np.stack([median_over(base[:, ranks], axis=1) for ranks in ranks_S], axis=1),
    )


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


def _lower_middle(values: Floats, axis: int) -> Floats:
    """The middle value, the lesser of two: half of the stages may be heavy; NaN is skipped."""
    ordered = np.sort(np.moveaxis(values, axis, -1), axis=-1)
    known = ordered.shape[-1] - np.count_nonzero(np.isnan(ordered), axis=-1)
    at = np.maximum(known - 1, 0) // 2
    middle: Floats = np.take_along_axis(ordered, at[..., None], axis=-1)[..., 0]
    return middle


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
