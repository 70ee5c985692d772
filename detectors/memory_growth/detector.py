"""Ranks whose memory rises steadily and does not level off.

Shape legend: A = all steps, R = ranks, B = blocks of steps, P = pairs of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    WARM_UP_STEPS,
    Diagnosis,
    Finding,
    Params,
    Run,
    abstain_run,
    join_by_onset,
    make_run_finding,
    median_over,
    name_run_ranks,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_LEAST_STEPS_A_BLOCK = 3


def detect(run: Run, params: Params) -> Diagnosis:
    """Name the ranks that grow; all of them as one."""
    used_A = run.ordinals_A >= WARM_UP_STEPS
    bytes_AR, ordinals = run.columns["memory_bytes"][used_A], run.ordinals_A[used_A]
    blocks = int(params["blocks"])
    if ordinals.size < blocks * _LEAST_STEPS_A_BLOCK:
        return abstain_run(
            run, params, "too_few_steps",
            f"{blocks * _LEAST_STEPS_A_BLOCK} steps after the first {WARM_UP_STEPS}",
        )  # fmt: skip
    cuts = np.array_split(np.arange(ordinals.size), blocks)
    # NaN where a rank was silent for a whole block; fmin passes over single missing rows.
    low_BR = np.stack([np.fmin.reduce(bytes_AR[cut], axis=0) for cut in cuts])
    at_B = np.array([float(ordinals[cut].mean()) for cut in cuts])
    slope_R, grows_R = _grows(low_BR, at_B, params)
    # A leak that began later is judged by the rest alone: flat before, which no filling cache is.
    later = blocks // 3
    before_R, _ = _slope(low_BR[: later + 1], at_B[: later + 1])
    late_slope_R, late_R = _grows(low_BR[later:], at_B[later:], params)
    late_R &= np.abs(before_R) <= params["flat"] * late_slope_R
    slope_R = np.where(late_R & ~grows_R, late_slope_R, slope_R)
    grows_R |= late_R
    suspects = np.flatnonzero(grows_R)
    if not suspects.size:
        return Diagnosis()
    known = int(np.count_nonzero(~np.isnan(slope_R)))
    onset = {int(rank): _onset(low_BR[:, rank], slope_R[rank], at_B) for rank in suspects}
    if suspects.size >= params["all_ranks"] * known and known > 1:
        joined = [suspects.tolist()]
    else:
        joined = join_by_onset(onset, within=int(np.ceil(ordinals.size / blocks)))
    return Diagnosis(
        findings=tuple(
            _finding(
                run,
                params,
                ranks,
                slope_R,
                bytes_AR,
                since=min(onset[rank] for rank in ranks),
                everybody=len(ranks) >= params["all_ranks"] * known and known > 1,
            )
            for ranks in joined
        )
    )


def _grows(low_BR: Floats, at_B: Floats, params: Params) -> tuple[Floats, NDArray[np.bool_]]:
    """Slope [R] and whether it is a leak's: large enough, steady, and nearly without a fall."""
    slope_R, rising_R = _slope(low_BR, at_B)
    third = at_B.size // 3
    early_R, _ = _slope(low_BR[: third + 1], at_B[: third + 1])
    late_R, _ = _slope(low_BR[-third - 1 :], at_B[-third - 1 :])
    gained_R = slope_R * (at_B[-1] - at_B[0])
    grows_R = (slope_R >= params["bytes_per_step"]) & (gained_R >= params["growth"] * low_BR[0])
    grows_R &= rising_R >= params["rising"]
    grows_R &= late_R >= params["steady"] * np.maximum(early_R, slope_R)
    return slope_R, grows_R


def _slope(low_BR: Floats, at_B: Floats) -> tuple[Floats, Floats]:
    """Median slope [R] over all pairs of blocks, and the share of pairs that rise.

    Source:
        Theil (1950), Sen (1968): a slope that a quarter of wrong values does not move.
    """
    first, later = np.triu_indices(at_B.size, 1)
    slope_PR = (low_BR[later] - low_BR[first]) / (at_B[later] - at_B[first])[:, None]
    known_R = np.maximum(np.count_nonzero(~np.isnan(slope_PR), axis=0), 1)
    rising_R = np.count_nonzero(np.nan_to_num(slope_PR) > 0, axis=0) / known_R
    return median_over(slope_PR, axis=0), rising_R


def _onset(low_B: Floats, slope: float, at_B: Floats) -> int:
    """Ordinal of the block from which memory rises: the last one near the lowest level."""
    near = np.flatnonzero(low_B <= np.nanmin(low_B) + 0.5 * slope * (at_B[1] - at_B[0]))
    return int(at_B[near[-1]]) if near.size else int(at_B[0])


def _finding(
    run: Run, params: Params, ranks: list[int], slope_R: Floats, bytes_AR: Floats, *,
    since: int, everybody: bool,
) -> Finding:  # fmt: skip
    slope = float(np.max(slope_R[ranks]))
    worst = ranks[int(np.argmax(slope_R[ranks]))]
    known = bytes_AR[:, worst][~np.isnan(bytes_AR[:, worst])]
    now, begin = float(known[-1]), float(known[0])
    doubling = max(begin, 1.0) / slope
    who = "Every rank's memory" if everybody else f"{name_run_ranks(run, sorted(ranks))}: memory"
    return make_run_finding(
        run,
        params,
        cause="memory_growth",
        ranks=[] if everybody else [worst, *(rank for rank in ranks if rank != worst)],
        over_A=run.ordinals_A >= since,
        severity=params.severity(doublings_per_10000_steps=1e4 / doubling) or "info",
        slowdown=1.0,
        lost_s=0.0,
        summary=f"{who} grows by {slope / 1e6:.3g} MB a step, from {begin / 1e9:.3g} to "
        f"{now / 1e9:.3g} GB so far; at that rate it doubles every {doubling:.2g} steps.",
        evidence={
            "pattern": "all ranks" if everybody else "lasting",
            "growth_bytes_per_step": round(slope),
            "memory_bytes_first": round(begin),
            "memory_bytes_last": round(now),
            "steps_to_double": round(doubling),
        },
    )
