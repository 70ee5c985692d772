"""Errors that devices report: Xids and ECC counts, what they mean, and what they cost.

Shape legend: A = all steps, R = ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Finding,
    Params,
    Run,
    abstain_run,
    device_values,
    join_by_onset,
    make_run_finding,
    median_over,
    name_run_ranks,
    own_time,
    ratio_to_peers,
    settled_steps,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INFO, _WARNING, _CRITICAL = 1, 2, 3

XIDS: Final = {
    13: ("a kernel failed (often an access out of bounds)", _WARNING),
    31: ("a kernel touched memory that is not mapped", _WARNING),
    43: ("a kernel was stopped; the program has to end", _WARNING),
    45: ("work was cleaned up after another error", _INFO),
    48: ("memory lost data: an ECC error of two bits", _CRITICAL),
    63: ("a bad row or page of memory was set aside", _WARNING),
    64: ("a bad row or page of memory could not be set aside", _CRITICAL),
    74: ("NVLink failed", _CRITICAL),
    79: ("the GPU fell off the bus", _CRITICAL),
    92: ("many single-bit ECC errors", _WARNING),
    94: ("a memory error, contained: one program lost", _WARNING),
    95: ("a memory error that was not contained: all programs on the GPU are hit", _CRITICAL),
    119: ("the GPU's own system processor does not answer", _CRITICAL),
}
"""Code → meaning, weight. Source: NVIDIA's list of Xid errors."""


def detect(run: Run, params: Params) -> Diagnosis:
    """Name each rank whose device reported an error, with others that did so at the same time."""
    if not run.devices.num_rows:
        if run.has_gpu_R.any():
            return abstain_run(run, params, "missing_data", "readings of any device")
        return Diagnosis()
    findings: list[Finding] = []
    xid_AR = device_values(run, "xid")
    for code in np.unique(xid_AR[xid_AR > 0]).astype(int).tolist():
        meaning, weight = XIDS.get(code, ("not on our list", _WARNING))
        bad_AR = xid_AR == code
        findings += _by_onset(run, params, bad_AR, weight, f"Xid {code}: {meaning}", xid=code)
    ecc_AR = device_values(run, "ecc_errors")
    known_AR = ~np.isnan(ecc_AR)
    first_R = np.take_along_axis(ecc_AR, np.argmax(known_AR, axis=0)[None, :], axis=0)[0]
    risen_AR = known_AR & (ecc_AR > np.nan_to_num(first_R))
    old_AR = known_AR & (ecc_AR > 0) & ~risen_AR.any(axis=0)
    findings += _by_onset(run, params, risen_AR, _WARNING, "more memory (ECC) errors")
    findings += _by_onset(run, params, old_AR, _INFO, "memory (ECC) errors, none of them new")
    return Diagnosis(findings=tuple(findings))


def _by_onset(
    run: Run, params: Params, bad_AR: NDArray[np.bool_], weight: int, what: str, *,
    xid: int | None = None,
) -> list[Finding]:  # fmt: skip
    first_of = {
        int(rank): int(np.argmax(bad_AR[:, rank])) for rank in np.flatnonzero(bad_AR.any(0))
    }
    return [
        _finding(run, params, ranks, bad_AR, weight, what, xid)
        for ranks in join_by_onset(first_of, within=int(params["onset_steps"]))
    ]


def _finding(
    run: Run, params: Params, ranks: list[int], bad_AR: NDArray[np.bool_], weight: int,
    what: str, xid: int | None,
) -> Finding:  # fmt: skip
    reported_A = np.any(bad_AR[:, ranks], axis=1)
    # A device that failed once may be slow ever after, without another word.
    since_A = np.arange(reported_A.size) >= int(np.argmax(reported_A))
    own_AR = own_time(run)
    ratio_R = median_over(ratio_to_peers(run, own_AR)[since_A], axis=0)[ranks]
    against = "its peers'"
    if _peers_report_too(run, ranks, bad_AR):
        against = "as long as before,"
        ratio_R = _against_before(run, own_AR, since_A)[ranks]
    slowdown = float(np.nanmax(np.append(ratio_R, 1.0)))
    slow = slowdown >= 1.05  # as info in compute_straggler
    worst = ranks[int(np.nanargmax(np.append(ratio_R, 0.0)[: len(ranks)]))] if slow else ranks[0]
    own_s = float(median_over(own_AR[since_A, worst], axis=0))
    slower = (
        f" Its own part of the step takes {slowdown:.2f} times {against} since." if slow else ""
    )
    gpu = "the GPU reports" if len(ranks) == 1 else "their GPUs report"
    return make_run_finding(
        run,
        params,
        cause="gpu_fault",
        ranks=[worst, *(rank for rank in ranks if rank != worst)],
        over_A=since_A if slow else reported_A,
        severity=params.severity(weight=weight) or "info",
        slowdown=slowdown if slow else 1.0,
        lost_s=own_s * (1 - 1 / slowdown) if slow and np.isfinite(own_s) else 0.0,
        summary=f"{name_run_ranks(run, sorted(ranks))}: {gpu} {what}.{slower}",
        evidence={
            "pattern": "lasting",
            "xid": xid,
            "reports": int(bad_AR[:, ranks].sum()),
            "own_work_ratio": round(slowdown, 3),
        },
    )


def _peers_report_too(run: Run, ranks: list[int], bad_AR: NDArray[np.bool_]) -> bool:
    """Whether whoever does the same work as these ranks has errors as well."""
    labels = run.peers.label_R
    return bool(np.any(bad_AR, axis=0)[np.isin(labels, labels[ranks])].all())


def _against_before(
    run: Run, own_AR: NDArray[np.float64], since_A: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Own time [R] since then over that before; NaN where too few steps were before."""
    settled_A = settled_steps(run)
    if np.count_nonzero(settled_A & ~since_A) < 5:  # too few to say what is usual
        return np.full(run.ranks_R.size, np.nan)
    ratio_R: NDArray[np.float64] = median_over(own_AR[settled_A & since_A], axis=0) / median_over(
        own_AR[settled_A & ~since_A], axis=0
    )
    return ratio_R
