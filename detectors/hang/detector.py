"""Jobs in which no step ends, and the rank that has not entered what the others wait in.

Where each rank is comes from its heartbeats. No clock is needed: a collective is told by its group
and count.
"""

from __future__ import annotations

from typing import Final

from argus_otel.detect.api import (
    Beat,
    Diagnosis,
    Finding,
    Onset,
    Params,
    Run,
    join_numbers,
    latest_heartbeats,
    meeting_of,
)

_STACK_CHARS: Final = 600


def detect(run: Run, params: Params) -> Diagnosis:
    """Name who keeps the others waiting; nothing where steps go on."""
    beats = latest_heartbeats(run)
    if not beats:
        return Diagnosis()
    newest_ns = max(beat["time_ns"] for rows in beats.values() for beat in rows)
    fresh = {
        rank: rows
        for rank, rows in beats.items()
        if (newest_ns - rows[0]["time_ns"]) * 1e-9 <= params["fresh_s"]
    }
    waiting: dict[tuple[int, int], set[int]] = {}
    age_of: dict[tuple[int, int], float] = {}
    for rank, rows in fresh.items():
        for beat in rows:
            place = meeting_of(beat)
            if place is not None:
                waiting.setdefault(place, set()).add(rank)
                age_of[place] = max(age_of.get(place, 0.0), beat["age_s"] or 0.0)
    stuck = {place: ranks for place, ranks in waiting.items() if age_of[place] >= params["stuck_s"]}
    if not stuck:
        return Diagnosis()
    return Diagnosis(findings=tuple(_judge(run, params, fresh, stuck, age_of)))


def _judge(
    run: Run, params: Params, fresh: dict[int, list[Beat]], stuck: dict[tuple[int, int], set[int]],
    age_of: dict[tuple[int, int], float],
) -> list[Finding]:  # fmt: skip
    members = _members(run)
    missing: dict[tuple[int, int], set[int]] = {
        place: members.get(place[0], set()) - ranks for place, ranks in stuck.items()
    }
    outside = {rank for absent in missing.values() for rank in absent}
    # Who waits for somebody else is a victim, in whatever group.
    free = {rank for rank in outside if not any(rank in ranks for ranks in stuck.values())}
    behind = {
        rank
        for (group, seq), absent in missing.items()
        for rank in absent & fresh.keys()
        # Point-to-point operations have no number that all members share.
        if any(
            beat["group"] == group and beat["seq"] is not None and beat["seq"] < seq
            for beat in fresh[rank]
        )
    }
    culprits = free & fresh.keys() or behind or free
    if culprits:
        place = max(
            (place for place, absent in missing.items() if absent & culprits),
            key=lambda place: (len(missing[place] & culprits), len(stuck[place]), age_of[place]),
        )
    else:
        place = max(stuck, key=lambda place: (age_of[place], len(stuck[place])))
        if any(_disagree(fresh, place, ranks) for place, ranks in stuck.items()):
            return []  # the members do not agree on what it is; another detector says so
    waits = _operation(run, fresh, stuck[place], place)
    return [_finding(run, params, fresh, sorted(culprits), stuck, waits, age_of[place])]


def _disagree(fresh: dict[int, list[Beat]], place: tuple[int, int], ranks: set[int]) -> bool:
    operations = {
        beat["op"] for rank in ranks for beat in fresh[rank]
        if (beat["group"], beat["seq"]) == place
    }  # fmt: skip
    return len(operations) > 1


def _members(run: Run) -> dict[int, set[int]]:
    """Group key → rank numbers."""
    return {group.key: set(run.ranks_R[group.members].tolist()) for group in run.groups}


def _operation(
    run: Run, fresh: dict[int, list[Beat]], ranks: set[int], place: tuple[int, int]
) -> str:  # fmt: skip
    name = next(
        beat["op"] for rank in sorted(ranks) for beat in fresh[rank]
        if (beat["group"], beat["seq"]) == place
    )  # fmt: skip
    of = next((group.description for group in run.groups if group.key == place[0]), "")
    return f"{name} number {place[1]} of group {of or format(place[0], 'x')}"


def _finding(
    run: Run, params: Params, fresh: dict[int, list[Beat]], culprits: list[int],
    stuck: dict[tuple[int, int], set[int]], waits: str, stuck_s: float,
) -> Finding:  # fmt: skip
    waiters = sorted({rank for ranks in stuck.values() for rank in ranks} - set(culprits))
    told = [fresh[rank][0] for rank in culprits if rank in fresh]
    stack = next((beat["stack"] for beat in told if beat["stack"]), None)
    ordinal = min(beat["ordinal"] for rows in fresh.values() for beat in rows)
    who = f"Rank{'s' if len(culprits) > 1 else ''} {join_numbers(culprits)}"
    has = "have" if len(culprits) > 1 else "has"
    if not culprits:
        text = (
            f"All {len(waiters)} waiting ranks have entered {waits}, and it has not ended for "
            f"{stuck_s:.0f} s: nobody is missing, so look at the network."
        )
    else:
        text = (
            f"{who} {has} not entered {waits}, in which the others have waited for {stuck_s:.0f} s."
        )
        if told:
            phase = told[0]["phase"]
            where = f" ({stack.split(' > ')[-1].splitlines()[-1].strip()})" if stack else ""
            own = "their own code" if len(culprits) > 1 else "its own code"
            text += f" {who} {'are' if len(culprits) > 1 else 'is'} in {phase or own}{where}."
        else:
            text += f" {who} no longer send{'' if len(culprits) > 1 else 's'} heartbeats: dead, or stuck in C code."
    hosts = dict(zip(run.ranks_R.tolist(), run.hosts_R, strict=True))
    return Finding(
        detector=params.detector,
        cause="hang",
        ranks=tuple(culprits),
        hosts=tuple(sorted({hosts.get(rank, "") for rank in culprits} - {""})),
        first_step=ordinal,
        last_step=ordinal,
        onset=Onset(step=ordinal, exact=True),
        severity=params.severity(stuck_s=stuck_s) or "info",
        slowdown=1.0,
        summary=text,
        next_step=params.do,
        evidence={
            "pattern": "lasting",
            "collective": waits,
            "stuck_s": round(stuck_s, 1),
            "waiting_ranks": join_numbers(waiters),
            "stack": stack[-_STACK_CHARS:] if stack else None,
            "without_heartbeat": [rank for rank in culprits if rank not in fresh],
            # All ranks stand while it lasts; one step that never ends.
            "lost_s_per_step": round(stuck_s, 1),
            "steps_affected": 1,
            "look_at_step": ordinal,
            "look_at_rank": culprits[0] if culprits else waiters[0],
            "trace_id": None,
        },
    )
