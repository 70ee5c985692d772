"""Ranks that take longer than their peers for their own part of a step.

Own time is busy time (nobody made the rank wait) less input, garbage collection and waiting for a
core. Where waiting for a core is not known, ranks that share cores look slow in turn, and CPU time
has to agree.

Shape legend: S = steps, R = ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from argus_otel.detect.api import (
    Diagnosis,
    Finding,
    Params,
    Run,
    Window,
    abstain,
    compare,
    compare_kernels,
    lowest_mean,
    make_finding,
    median_over,
    name_ranks,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.api import Comparison, KernelComparison


def detect(window: Window, params: Params) -> Diagnosis:
    """Name each rank whose own time is over its peers' and beyond chance, or say why not."""
    # Who is slow must be slow by time, and by time per unit of work where that is known.
    views = [compare(window, "own_work_s", excess) for excess in window.work_excess("own_work_s")]
    own = min(views, key=lambda view: float(np.nan_to_num(view.ratio_R).max(initial=0)))
    if not own.judged_R.any():
        return abstain(window, params, "missing_data", "busy time of two peers in the same steps")
    lasting_R = np.logical_and.reduce(
        [view.lasting(params["info_ratio"], params) for view in views]
    )
    if window.is_latest:
        # On cores that others use too, a few slow steps in a row are weather; so they are once others follow.
        begun_R = window.has_gpu_R & np.logical_and.reduce(
            [view.just_begun(params["info_ratio"], params) for view in views]
        )
        lasting_R |= begun_R
        size_R = np.where(begun_R, np.fmax(own.ratio_R, own.recent_ratio_R), own.ratio_R)
        own = replace(own, ratio_R=size_R)
    bursts_R = np.logical_and.reduce([view.intermittent(params) for view in views]) & ~lasting_R
    shared_R = _slow_as_a_group(window, lasting_R | bursts_R)
    if shared_R.any():
        # Nothing is wrong with ranks on several hosts that hold the same, larger, part of the work.
        others = _confirm(window, params, own, lasting_R & ~shared_R, bursts_R & ~shared_R)
        return abstain(
            window,
            params,
            "some_share_their_work",
            f"topology: {name_ranks(window, np.flatnonzero(shared_R).tolist())} are a group over "
            "several hosts and slow together; their part of the work may be larger (experts)",
            findings=others.findings,
        )
    if (lasting_R | bursts_R).any():
        return _confirm(window, params, own, lasting_R, bursts_R)
    if not own.judged_R.all():
        left_out = name_ranks(window, np.flatnonzero(~own.judged_R).tolist())
        return abstain(
            window, params, "some_ranks_not_judged", f"busy time, and a peer with it, of {left_out}"
        )
    return Diagnosis()


def _slow_as_a_group(window: Window, slow_R: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Ranks [R] of groups over several hosts that are slow to the last member, while others are not.

    Where the topology is known such ranks are peers, and are not compared with others.
    """
    shared_R = np.zeros_like(slow_R)
    if window.frame.peers.source == "topology":
        return shared_R
    label_R = window.frame.peers.label_R
    for group in window.frame.whole.groups:
        members = group.members
        if not 2 <= members.size < slow_R.size or not slow_R[members].all():
            continue
        # A group of stages, or of all peers, says nothing about their work.
        label = label_R[members[0]]
        alike = bool((label_R[members] == label).all())
        if alike and not slow_R[label_R == label].all():
            shared_R[members] = len({window.host(rank) for rank in members.tolist()}) > 1
    return shared_R


def _confirm(
    window: Window,
    params: Params,
    own: Comparison,
    lasting_R: NDArray[np.bool_],
    bursts_R: NDArray[np.bool_],
) -> Diagnosis:
    """Hold the suspects against CPU time, which sharing cores does not change."""
    on_cpu_R = ~window.has_gpu_R
    size_R = _sizes(own, own, bursts_R, params)
    cpu_size_R, delay_share_R = np.full((2, size_R.size), np.nan)
    cpu_known_R = np.zeros_like(on_cpu_R)
    # Waiting for a GPU burns no CPU or all of it, whatever the rank does: no evidence there.
    if on_cpu_R.any():
        cpu = compare(window, "cpu_work_s")
        cpu_known_R = cpu.judged_R & on_cpu_R
        cpu_size_R = np.where(on_cpu_R, _sizes(cpu, own, bursts_R, params), np.nan)
        delay, busy = (window.column(name)[:, on_cpu_R] for name in ("run_delay_s", "busy_s"))
        delay_share_R[on_cpu_R] = median_over(delay / busy, axis=0)
    agrees_R = np.nan_to_num(cpu_size_R - 1) >= params["cpu_agreement"] * (size_R - 1)
    delay_known_R = ~np.isnan(delay_share_R) | window.has_gpu_R
    crowded = float(np.nanmax(np.append(delay_share_R[on_cpu_R], 0.0))) > params["contended_share"]

    found_R = (own.ratio_R >= params["ratio"]) & lasting_R | bursts_R
    minor_R = lasting_R & ~found_R & (agrees_R & cpu_known_R | window.has_gpu_R)
    if crowded:
        # Ranks that share cores share caches and execution units too: their CPU time stretches
        # with their work, so that it is no second witness.
        found_R &= ~on_cpu_R | (size_R >= params["contended_ratio"])

    guess_R = found_R & ~delay_known_R
    findings_R = (found_R & delay_known_R) | (guess_R & agrees_R & cpu_known_R) | minor_R
    open_R = guess_R & ~agrees_R & cpu_known_R
    blind_R = guess_R & ~cpu_known_R
    # A few stand out although CPU time says no: sleep, or a crowded host? If half of the
    # ranks stand out it is the crowd, and CPU time has answered; beside a confirmed rank it is its
    # neighbours.
    few = np.count_nonzero(guess_R) * 2 < np.count_nonzero(own.judged_R) + 1
    findings = tuple(
        _finding(
            window,
            params,
            own,
            int(rank),
            float(size_R[rank]),
            float(cpu_size_R[rank]),
            burst=bool(bursts_R[rank]),
            agrees=bool(agrees_R[rank]),
        )
        for rank in np.flatnonzero(findings_R)
    )
    if not findings and few and open_R.any():
        return abstain(
            window,
            params,
            "contradicting_evidence",
            f"run-queue delay: {name_ranks(window, np.flatnonzero(open_R).tolist())} may sleep or "
            "may share a core; busy time is high and CPU time is not",
        )
    if not findings and blind_R.any():
        return abstain(
            window,
            params,
            "missing_data",
            f"CPU time or run-queue delay of {name_ranks(window, np.flatnonzero(blind_R).tolist())}",
        )
    return Diagnosis(findings=findings)


def _sizes(
    of: Comparison, own: Comparison, bursts_R: NDArray[np.bool_], params: Params
) -> NDArray[np.float64]:
    """Median ratio [R]; of ranks with bursts, over the steps in which their own time is far over."""
    size_R, bursting = of.ratio_R.copy(), np.flatnonzero(bursts_R)
    burst_SR = own.step_ratio(bursting) >= params["burst_ratio"]
    size_R[bursting] = median_over(np.where(burst_SR, of.step_ratio(bursting), np.nan), axis=0)
    return size_R


def _finding(
    window: Window, params: Params, own: Comparison, rank: int, ratio: float, cpu_ratio: float,
    *, burst: bool, agrees: bool,
) -> Finding:  # fmt: skip
    # Half of the way, as ratios go, from healthy to faulty: tells slow steps from others. The
    # latest steps know the fault's size where the window still holds healthy ones.
    ratio_S = own.step_ratio([rank])[:, 0]
    recent = 1.0 if burst else float(median_over(ratio_S[-int(params["recent_steps"]) :], axis=0))
    over_S = np.nan_to_num(ratio_S) >= np.fmax(ratio, recent) ** 0.5
    own_s = window.column("own_work_s")[:, rank]
    usual_s = float(median_over(own_s[over_S], axis=0))
    share = float(over_S.mean()) if burst else 1.0
    evidence: dict[str, Any] = {
        "pattern": "intermittent" if burst else "lasting",
        "own_work_s": round(usual_s, 6),
        "reference_own_work_s": round(usual_s / ratio, 6),
        "own_work_ratio": round(ratio, 3),
        "healthy_ratio_up_to": round(max(float(own.bar([rank])[0]), params["ratio"]), 3),
        "peers": int(own.peers_R[rank]),
        "peers_by": window.frame.peers.source,
        "reference": "fastest quarter of the peers",
        "steps_over": int(over_S.sum()),
        "steps_in_window": int(over_S.size),
    }
    who = name_ranks(window, [rank])
    often = f" in {int(over_S.sum())} of {over_S.size} steps" if burst else ""
    peers = int(own.peers_R[rank])
    than = f"its {peers} peers" if peers > 1 else "its only peer"
    why, todo = "", None
    if not np.isnan(cpu_ratio):
        evidence["cpu_ratio"] = round(cpu_ratio, 3)
        evidence["cpu_higher"] = agrees
        if agrees:
            why = (
                f" Its CPU time is higher too ({cpu_ratio:.2f} times): more work, or a slower core."
            )
            todo = (
                "Compare this rank's input and code path with a peer's (batch, rank-0-only work, "
                "logging). If they are equal, move the rank to another core or host and see "
                "whether the slowness stays behind."
            )
        else:
            why = (
                f" Its CPU time is not higher ({cpu_ratio:.2f} times): it waits on something that "
                "is not CPU (sleep, I/O, a lock, a device sync)."
            )
            todo = (
                "Look at what this rank waits for: `py-spy dump --pid` on its process, or the "
                "longest phase of its trace; suspect file I/O, locks, sleeps, device syncs."
            )
    victims = _victims(window, rank, over_S)
    evidence.update(victims)
    waiting = " The others wait for it in {others_waited_in}.".format(**victims) if victims else ""
    delay_s = float(lowest_mean(window.column("run_delay_s")[over_S, rank], axis=0))
    if not np.isnan(delay_s):
        evidence["run_delay_s"] = round(delay_s, 6)
    return make_finding(
        window,
        params,
        cause="compute_straggler",
        ranks=[rank],
        over_S=over_S,
        lasting=not burst,
        severity=params.severity(slowdown=ratio) or "info",
        slowdown=ratio,
        lost_s=usual_s * (1 - 1 / ratio) * share,
        summary=f"{who} takes {ratio:.2f} times as long as {than} for its own part of the step"
        f"{often}.{why}{waiting}",
        next_step=todo,
        evidence=evidence,
    )


def complete(finding: Finding, run: Run, params: Params, named: frozenset[int]) -> Finding:
    """Say which of the rank's kernels are slow, where there are kernels."""
    rank = int(np.searchsorted(run.ranks_R, finding.evidence["look_at_rank"]))
    ill = np.flatnonzero(np.isin(run.ranks_R, sorted(named)))
    seen = compare_kernels(
        run, rank, (finding.first_step, finding.last_step), leave_out=ill.tolist()
    )
    if seen is None:
        return finding
    if isinstance(seen, str):
        return replace(finding, evidence={**finding.evidence, "kernels_not_judged": seen})
    lost_s = finding.evidence["own_work_s"] - finding.evidence["reference_own_work_s"]
    said, todo, slow = _kernel_verdict(seen, params, lost_s)
    worst = int(np.argmax(seen.ratio_N))
    evidence: dict[str, Any] = {
        "kernels": said or "no kernel stands out",
        "kernels_slow": sorted(slow),
        "kernel_ratio_by_name": {
            name: round(float(ratio), 3)
            for name, ratio in zip(seen.names, seen.ratio_N, strict=True)
        },
        "kernel_distance": round(float(seen.distance_N[worst]), 3),
        "kernel_distance_of_usual_peer": round(float(seen.usual_distance_N[worst]), 3),
        "kernels_extra_s": round(seen.total_extra_s, 6),
        "kernel_peers": seen.peers,
        "kernel_steps": seen.steps,
    }
    return replace(
        finding,
        evidence={**finding.evidence, **evidence},
        summary=f"{finding.summary} {said}." if said else finding.summary,
        next_step=f"{said}: {todo}" if said else finding.next_step,
    )


_DEVICE: Final = (
    "unless its batches are larger, it is the device, not one kernel. Look at its clocks, power and temperature "
    "(`nvidia-smi -q -d PERFORMANCE,CLOCK,POWER`), compare them with a peer's, and put another rank "
    "on it: if the slowness stays, take the device out."
)
_SOFTWARE: Final = (
    "it is not the device as a whole. Compare shapes (batch, sequence, padding), data type and the "
    "versions of library and driver with a peer's, and whether an autotuner chose another variant."
)
_MORE_WORK: Final = (
    "it does more work. Compare its batch and its code path (logging, evaluation, recomputation) "
    "with a peer's."
)
_HOST: Final = (
    "it is the host, not the device. Look at what keeps it from launching: `py-spy dump --pid` on "
    "its process, synchronisation with the device, a busy or slow core."
)


def _kernel_verdict(
    seen: KernelComparison, params: Params, lost_s: float
) -> tuple[str, str, list[str]]:
    """A sentence without its end, what to do, and the names; empty where kernels do not tell."""
    floor = 1 + params["kernel_floor"]
    beyond_N = seen.distance_N >= np.maximum(
        params["kernel_floor"], params["kernel_spread"] * seen.usual_distance_N
    )
    # What costs the step nothing is no reason, however slow it is.
    costs_N = seen.extra_s_N >= params["kernel_share"] * lost_s
    slow_N = (seen.ratio_N >= floor) & beyond_N & costs_N
    more_N = (seen.launches_ratio_N >= floor) & costs_N & ~slow_N
    than = f"its {seen.peers} peers" if seen.peers > 1 else "its peer"
    slow = [name for name, is_slow in zip(seen.names, slow_N, strict=True) if is_slow]
    most = float(seen.ratio_N[slow_N].max(initial=1.0))
    # All alike: nobody is less slow than half of the worst, as ratios go.
    if len(slow) > 1 and bool((seen.ratio_N >= most**0.5).all()):
        times = float(np.median(seen.ratio_N))
        return f"All its kernels take {times:.2f} times as long as on {than}", _DEVICE, slow
    if slow:
        ratios = [f"{float(ratio):.2f}" for ratio in seen.ratio_N[slow_N]]
        others = "; its other kernels do not" if len(slow) < len(seen.names) else ""
        which = f"{_listed(slow)} kernels take {_listed(ratios)} times"
        return f"Its {which} as long as on {than}{others}", _SOFTWARE, slow
    if more_N.any():
        more = [name for name, is_more in zip(seen.names, more_N, strict=True) if is_more]
        times = float(seen.launches_ratio_N[more_N].max())
        return f"It runs {times:.2f} times as many {_listed(more)} kernels", _MORE_WORK, []
    strange = {
        name: s for name, s in seen.only_here.items() if s >= params["kernel_share"] * lost_s
    }
    if strange and seen.total_extra_s >= params["kernel_explained"] * lost_s:
        # An autotuner's other choice has another name, and cannot be compared.
        return f"It runs {_listed([*strange])} kernels, which {than} do not", _SOFTWARE, []
    if seen.total_extra_s < params["kernel_explained"] * lost_s:
        return f"Its kernels are as fast as on {than}; the time passes between them", _HOST, []
    return "", "", []


def _listed(texts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([*([", ".join(texts[:-1])] if len(texts) > 1 else []), texts[-1]])


def _victims(window: Window, rank: int, over_S: NDArray[np.bool_]) -> dict[str, Any]:
    """Where the others wait for this rank: what looks like a slow network on their side.

    Whoever comes last to a collective hardly waits in it; the others wait for all its lateness.
    """
    run = window.frame.whole
    seen = run.operations
    steps = window.frame.index_S[window.start : window.stop][over_S]
    late_SL = seen.last_AL[steps] == rank
    lanes = np.flatnonzero(late_SL.any(axis=0) & (seen.group_L >= 0))
    waited_SL = (seen.longest_AL[:, lanes] - seen.transfer_AL[:, lanes])[steps]
    waited_SL = np.nan_to_num(np.where(late_SL[:, lanes], waited_SL, 0.0))
    # Without the ends of an operation nobody knows who waited in it: most steps, on CPU hosts.
    waited_SL = waited_SL[waited_SL.any(axis=1)]
    if not waited_SL.size:
        return {}
    most = int(np.bincount(waited_SL.argmax(axis=1)).argmax())
    lane, waited_s = int(lanes[most]), float(median_over(waited_SL[:, most].astype(float), axis=0))
    group = run.groups[int(seen.group_L[lane])]
    return {
        "others_waited_s": round(waited_s, 6),
        "others_waited_in": f"{seen.op_L[lane]} of {group.description}",
        "others_waiting": int(group.members.size) - 1,
    }
