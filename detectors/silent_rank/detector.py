"""Ranks from which nothing comes while others go on.

Shape legend: A = all steps, R = ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Finding,
    Params,
    Run,
    join_by_onset,
    join_numbers,
    make_run_finding,
    name_run_ranks,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def detect(run: Run, params: Params) -> Diagnosis:
    """Name the ranks that stopped reporting, those that never did, and gaps that are over."""
    present_AR = run.present_AR
    # A step counts where most of those that report at all do: a lone late row is no step.
    reporting = max(int(np.count_nonzero(present_AR.any(axis=0))), 1)
    count_A = np.count_nonzero(present_AR, axis=1)
    usual_A = np.flatnonzero(count_A * 2 >= reporting)
    if usual_A.size < params["steps"]:
        # Too many are silent for "the others" to mean anything.
        return Diagnosis()
    end_ns_A = run.end_ns_AR[usual_A].max(axis=1)
    seen_AR = present_AR[usual_A]
    alive_R = _stuck(run)
    last_R = np.where(seen_AR.any(axis=0), usual_A.size - 1 - seen_AR[::-1].argmax(axis=0), -1)
    quiet_s_R = (end_ns_A[-1] - end_ns_A[np.maximum(last_R, 0)]) * 1e-9
    gone_R = (usual_A.size - 1 - last_R >= params["steps"]) & ~alive_R
    gone_R &= quiet_s_R >= params["silent_s"]
    stopped = {
        int(rank): int(usual_A[last_R[rank]]) for rank in np.flatnonzero(gone_R & (last_R >= 0))
    }
    findings = [
        _stopped(run, params, ranks, quiet_s_R) for ranks in join_by_onset(stopped, within=10)
    ]  # fmt: skip
    findings += _never(run, params, np.flatnonzero(gone_R & (last_R < 0)).tolist())
    findings += _gaps(run, params, seen_AR, usual_A, end_ns_A)
    return Diagnosis(findings=tuple(findings))


def _stuck(run: Run) -> NDArray[np.bool_]:
    """Ranks [R] that sent heartbeats after their last step."""
    alive_R = np.zeros(run.ranks_R.size, dtype=bool)
    last_ns_R = run.end_ns_AR.max(axis=0, initial=0)
    rank, time_ns = run.heartbeats["rank"].to_numpy(), run.heartbeats["time_ns"].to_numpy()
    for index, number in enumerate(run.ranks_R.tolist() if rank.size else []):
        alive_R[index] = bool((time_ns[rank == number] > last_ns_R[index]).any())
    return alive_R


def _stopped(run: Run, params: Params, ranks: list[int], quiet_s_R: NDArray[np.float64]) -> Finding:
    silent_A = ~np.any(run.present_AR[:, ranks], axis=1)
    silent_A[: int(np.flatnonzero(run.present_AR[:, ranks].any(axis=1))[-1])] = False
    first = int(run.ordinals_A[np.argmax(silent_A)])
    quiet_s = float(quiet_s_R[ranks].max())
    verb = "has" if len(ranks) == 1 else "have"
    return _finding(
        run, params, ranks, silent_A, "gone",
        f"{name_run_ranks(run, sorted(ranks))} {verb} reported nothing since step {first}, "
        f"for {quiet_s:.1f} s; the other ranks go on.",
        quiet_s,
    )  # fmt: skip


def _never(run: Run, params: Params, silent: list[int]) -> list[Finding]:
    """One finding for the ranks that never sent a step; some are known by the world size alone."""
    seen = set(run.ranks_R.tolist())
    # A converted trace may hold some ranks of a job under their own numbers.
    absent = set(range(run.world_size)) - seen if max(seen, default=0) < run.world_size else set()
    numbers = sorted({int(run.ranks_R[rank]) for rank in silent} | absent)
    span_ns = run.end_ns_AR.max() - run.end_ns_AR[run.end_ns_AR > 0].min(
        initial=np.iinfo(np.int64).max
    )
    if not numbers or span_ns * 1e-9 < params["silent_s"]:
        return []
    few = len(numbers) < params["gone_share"] * run.world_size
    named = join_numbers(numbers)
    finding = _finding(
        run, params, silent, np.any(run.present_AR, axis=1), "gone" if few else "back",
        f"Rank{'s' if len(numbers) > 1 else ''} {named} of {run.world_size} never reported a step.",
        float(span_ns * 1e-9),
    )  # fmt: skip
    return [replace(finding, ranks=tuple(numbers))]


def _gaps(
    run: Run, params: Params, seen_AR: NDArray[np.bool_], usual_A: NDArray[np.int64],
    end_ns_A: NDArray[np.int64],
) -> list[Finding]:  # fmt: skip
    """Ranks that were silent and came back: information."""
    steps, found = int(params["steps"]), {}
    # Cheap first: twice the steps that may be late, without a row.
    total = np.cumsum(np.vstack([np.zeros(seen_AR.shape[1], np.int64), seen_AR]), axis=0)
    empty_AR = total[2 * steps :] == total[: -2 * steps] if total.shape[0] > 2 * steps else None
    for rank in np.flatnonzero(empty_AR.any(axis=0)).tolist() if empty_AR is not None else []:
        here = np.flatnonzero(seen_AR[:, rank])
        if here.size < 2:  # a gap has two ends
            continue
        gap = int(np.argmax(np.diff(here)))
        begin, end = int(here[gap]), int(here[gap + 1])
        long_s = (end_ns_A[end] - end_ns_A[begin]) * 1e-9
        if end - begin > 2 * steps and long_s >= params["silent_s"]:
            found[rank] = (begin, end, float(long_s))
    findings = []
    for ranks in join_by_onset({rank: gap[0] for rank, gap in found.items()}, within=steps):
        begin, end, long_s = found[ranks[0]]
        silent_A = np.zeros(run.ordinals_A.size, dtype=bool)
        silent_A[usual_A[begin] + 1 : usual_A[end]] = True
        findings.append(
            _finding(
                run,
                params,
                ranks,
                silent_A,
                "back",
                f"{name_run_ranks(run, sorted(ranks))} reported nothing for {end - begin - 1} steps "
                f"({long_s:.1f} s), and then went on.",
                long_s,
            )
        )
    return findings


def _finding(
    run: Run, params: Params, ranks: list[int], over_A: NDArray[np.bool_], what: str,
    summary: str, quiet_s: float,
) -> Finding:  # fmt: skip
    return make_run_finding(
        run,
        params,
        cause="silent_rank",
        ranks=ranks,
        over_A=over_A,
        severity=params.severity(**{what: 1.0}) or "info",
        slowdown=1.0,
        lost_s=0.0,
        summary=summary,
        evidence={"pattern": "lasting", "silent_s": round(quiet_s, 3)},
    )
