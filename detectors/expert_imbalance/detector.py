"""Which expert position works longer than the others, in all expert-parallel groups alike.

Shape legend: A = all steps, R = ranks, E = expert positions of one stage.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from argus_otel.detect.api import (
    WARM_UP_STEPS,
    Diagnosis,
    Finding,
    Params,
    Run,
    abstain_run,
    expert_tokens,
    join_numbers,
    lasting_or_sudden,
    lowest_mean,
    luck_of_fastest_quarter,
    luck_of_slowest,
    make_run_finding,
    median_over,
    own_time,
    step_scatter,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def detect(run: Run, params: Params) -> Diagnosis:
    """Name each expert position that is slow wherever it is held."""
    if run.places is None:
        return abstain_run(run, params, "no_topology", "the expert position of each rank")
    experts = run.places.get("ep")
    if experts is None or experts.max(initial=0) == 0:
        return Diagnosis()  # no expert parallelism
    work_AR = _compute(run)
    work_AR[run.ordinals_A < WARM_UP_STEPS] = np.nan
    if np.isnan(work_AR).all():
        return abstain_run(run, params, "missing_data", "compute or busy time of each rank")
    found: list[Finding] = []
    unexplained: list[str] = []
    single = False
    for stage, held_E in _positions(run, experts):
        if min(held.size for held in held_E) < 2:
            single = True
            continue
        for finding in _of_stage(run, params, work_AR, stage, held_E):
            if isinstance(finding, str):
                unexplained.append(finding)
            else:
                found.append(finding)
    if unexplained:
        said = abstain_run(run, params, "some_tokens_do_not_explain", "; ".join(unexplained))
        return Diagnosis(findings=tuple(found), abstentions=said.abstentions)
    if not found and single:
        return abstain_run(
            run,
            params,
            "too_few_replicas",
            "a second expert-parallel group; with one, a busy expert looks like a slow rank",
        )
    return Diagnosis(findings=tuple(found))


def _compute(run: Run) -> Floats:
    """Seconds of compute of each rank in a step: of its passes, or its own time."""
    if run.passes is None:
        return own_time(run).copy()
    took_ARM2 = run.passes.duration_ARM2.astype(np.float64)
    # The middle micro-batch: pauses of the host fall into the first one.
    middle: Floats = median_over(took_ARM2, axis=2).sum(axis=-1)
    return middle


def _positions(
    run: Run, experts: NDArray[np.int64]
) -> Iterator[tuple[int, list[NDArray[np.int64]]]]:
    """Each stage (and tensor and context position) with the ranks of each expert position."""
    places = run.places or {}
    nothing = np.zeros_like(experts)
    rest = np.stack([places.get(axis, nothing) for axis in ("pp", "tp", "cp")])
    for place in np.unique(rest, axis=1).T:
        here = (rest == place[:, None]).all(axis=0)
        held = [np.flatnonzero(here & (experts == at)) for at in np.unique(experts[here])]
        if len(held) > 1:
            yield int(place[0]), held


def _of_stage(
    run: Run, params: Params, work_AR: Floats, stage: int, held_E: list[NDArray[np.int64]]
) -> Iterator[Finding | str]:
    """Positions that are slow, or in words those whose tokens say that it is something else."""
    middle_AE = np.stack([median_over(work_AR[:, held], axis=1) for held in held_E], axis=1)
    log_AE = np.log(middle_AE)
    above_AE = log_AE - lowest_mean(log_AE, axis=1)[:, None]
    # In a single step some position is always lucky; the reference is who is fastest as a rule.
    above_AE -= lowest_mean(median_over(above_AE, axis=0), axis=0)
    sigma = step_scatter(above_AE)
    luck = luck_of_slowest(len(held_E)) + luck_of_fastest_quarter(len(held_E))
    # Over 20 steps, and a median errs by a quarter more than a mean.
    bar = 1.25 * luck * sigma / np.sqrt(20)
    over_AE = lasting_or_sudden(above_AE, log(params["ratio"]), bar)
    for position in np.flatnonzero(over_AE.any(axis=0)).tolist():
        held, over_A = held_E[position], over_AE[:, position]
        ratio = float(np.exp(median_over(above_AE[over_A, position], axis=0)))
        usual_s = float(median_over(middle_AE[over_A, position], axis=0))
        each_R = median_over(work_AR[over_A][:, held], axis=0) / (usual_s / ratio)
        if float(lowest_mean(each_R, axis=0)) < ratio ** params["alike"]:
            continue
        tokens = _tokens(run, over_A, held_E, position)
        ranks = join_numbers([int(run.ranks_R[rank]) for rank in held])
        if tokens is not None and tokens.ratio < ratio ** params["explained"]:
            yield (
                f"what else keeps position {position} of stage {stage} (ranks {ranks}): it takes "
                f"{ratio:.2f} times as long with {tokens.ratio:.2f} times the tokens of the others"
            )
            continue
        passes = 1 if run.passes is None else run.passes.chunk_M.size
        yield make_run_finding(
            run,
            params,
            cause="expert_imbalance",
            ranks=held.tolist(),
            over_A=over_A,
            severity=params.severity(slowdown=ratio) or "info",
            slowdown=ratio,
            lost_s=passes * usual_s * (1 - 1 / ratio),
            summary=f"The experts at position {position} of stage {stage} take {ratio:.2f} times as "
            f"long as the others, on all ranks that hold them ({ranks}): "
            f"{_hot_words(tokens)}; no node is bad.",
            evidence={
                "pattern": "expert",
                "expert_position": position,
                "stage": stage,
                "positions": len(held_E),
                "replicas": int(held.size),
                "work_s": round(usual_s, 6),
                "reference_work_s": round(usual_s / ratio, 6),
                **_token_evidence(tokens),
            },
        )


class _Tokens(NamedTuple):
    """What the router sends to one position, in a usual step that shows it."""

    ratio: float
    """Tokens of a rank of this position over those of the quarter with fewest."""
    expert: int
    """Number in the stage of the busiest expert here: positions hold them in blocks."""
    tokens: float
    usual: float
    """Of an expert of those."""


def _tokens(
    run: Run, over_A: NDArray[np.bool_], held_E: list[NDArray[np.int64]], position: int
) -> _Tokens | None:
    """None where tokens of experts are not known of every position."""
    tokens_RX = expert_tokens(run, over_A)
    if tokens_RX is None:
        return None
    # Replicas route alike; the middle of them is what a position gets.
    tokens_EX = np.stack([median_over(tokens_RX[held], axis=0) for held in held_E])
    experts = tokens_EX.shape[1]
    if np.isnan(tokens_EX).any():
        return None
    total_E = tokens_EX.sum(axis=1)
    reference = max(float(lowest_mean(total_E, axis=0)), 1.0)
    hot = int(tokens_EX[position].argmax())
    return _Tokens(
        ratio=float(total_E[position]) / reference,
        expert=position * experts + hot,
        tokens=float(tokens_EX[position, hot]),
        usual=reference / experts,
    )


def _hot_words(tokens: _Tokens | None) -> str:
    if tokens is None:
        return "more tokens go there"
    times = tokens.tokens / max(tokens.usual, 1.0)
    return f"expert {tokens.expert} gets {times:.2f} times the tokens of a usual one"


def _token_evidence(tokens: _Tokens | None) -> dict[str, Any]:
    if tokens is None:
        return {"tokens_ratio": None}
    return {
        "tokens_ratio": round(tokens.ratio, 3),
        "hot_expert": tokens.expert,
        "hot_expert_tokens": round(tokens.tokens),
        "usual_expert_tokens": round(tokens.usual),
    }
