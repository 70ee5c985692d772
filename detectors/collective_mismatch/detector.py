"""Ranks of one group that are in different operations at the same count: they never meet."""

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
    """Name the odd ranks of each group whose members do not agree on the operation."""
    places: dict[tuple[int, int], list[Beat]] = {}
    for beat in (beat for rows in latest_heartbeats(run).values() for beat in rows):
        place = meeting_of(beat)
        if place is not None:
            places.setdefault(place, []).append(beat)
    findings = []
    for (group, seq), beats in sorted(places.items()):
        by_op: dict[str, list[Beat]] = {}
        for beat in beats:
            by_op.setdefault(beat["op"], []).append(beat)
        stuck_s = max(beat["age_s"] or 0.0 for beat in beats)
        if len(by_op) > 1 and stuck_s >= params["stuck_s"]:
            findings.append(_finding(run, params, group, seq, by_op, stuck_s))
    return Diagnosis(findings=tuple(findings))


def _finding(
    run: Run, params: Params, group: int, seq: int, by_op: dict[str, list[Beat]], stuck_s: float
) -> Finding:  # fmt: skip
    by_size = sorted(by_op.items(), key=lambda item: (-len(item[1]), item[0]))
    (usual, agreed), *others = by_size
    tie = len(agreed) == len(others[0][1])
    # Two against two: nothing says who is right.
    odd = [beat for _, beats in (by_size if tie else others) for beat in beats]
    ranks = sorted({int(beat["rank"]) for beat in odd})
    description = next((g.description for g in run.groups if g.key == group), "") or format(
        group, "x"
    )
    said = "; ".join(
        f"rank{'s' if len(beats) > 1 else ''} {join_numbers(sorted(b['rank'] for b in beats))} "
        f"{'are' if len(beats) > 1 else 'is'} in {op}"
        for op, beats in by_size
    )
    ordinal = min(int(beat["ordinal"]) for beats in by_op.values() for beat in beats)
    hosts = dict(zip(run.ranks_R.tolist(), run.hosts_R, strict=True))
    stacks = {op: (beats[0]["stack"] or "")[-_STACK_CHARS:] for op, beats in by_size}
    return Finding(
        detector=params.detector,
        cause="collective_mismatch",
        ranks=tuple(ranks),
        hosts=tuple(sorted({hosts.get(rank, "") for rank in ranks} - {""})),
        groups=(description,),
        first_step=ordinal,
        last_step=ordinal,
        onset=Onset(step=ordinal, exact=True),
        severity=params.severity(stuck_s=stuck_s) or "info",
        slowdown=1.0,
        summary=f"Number {seq} of group {description} is not the same collective on all ranks: "
        f"{said}. They have waited for each other for {stuck_s:.0f} s, and will for ever.",
        next_step=params.do,
        evidence={
            "pattern": "lasting",
            "seq": seq,
            "usual_operation": usual,
            "operations": {
                op: join_numbers(sorted(b["rank"] for b in beats)) for op, beats in by_size
            },
            "stacks": stacks,
            "stuck_s": round(stuck_s, 1),
            "lost_s_per_step": round(stuck_s, 1),
            "steps_affected": 1,
            "look_at_step": ordinal,
            "look_at_rank": ranks[0],
            "trace_id": None,
        },
    )
