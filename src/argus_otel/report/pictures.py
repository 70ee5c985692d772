"""What the page draws, as plain numbers: who is slow when, one step over ranks, stages, what-if.

Shape legend: S = steps, R = ranks, C = operations of one step (rows).
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from argus_otel.tables.findings import Finding
    from argus_otel.tables.schemas import RunTables

MOST_RANKS: Final = 24
"""Rows of a step that fit a screen."""
_MOST_BARS: Final = 120
"""Of one rank, in each of its two rows; the shortest are left out."""
_MATES: Final = 16
"""A process group up to so large is shown whole beside a culprit: its pipeline, its tensor ranks."""

PASSES: Final = ("forward pass", "backward pass")
_SHOWN_AS_PASSES: Final = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """How long each rank takes for its own part of each step, against its fastest peers."""

    ordinals_S: NDArray[np.int64]
    ranks_R: NDArray[np.int64]
    hosts_R: tuple[str, ...]
    stage_R: NDArray[np.int64] | None
    ratio_SR: NDArray[np.float64]
    """1 is as fast as the fastest quarter of the peers; NaN unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that a rank did in the step, in seconds from the step's first start."""

    rank: int
    name: str
    start_s: float
    duration_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """One step over its ranks: own phases, and collectives with the wait in them."""

    ordinal: int
    ranks: tuple[int, ...]
    """Shown, ascending."""
    culprits: frozenset[int]
    ranks_in_step: int
    phases: tuple[Bar, ...]
    transfers: tuple[Bar, ...]
    waits: tuple[Bar, ...]
    arrivals: tuple[Bar, ...]
    """When a rank came to an operation whose end is not known; of no duration."""
    left_out: int
    """Bars too short to be shown among the others."""
    ends_known: bool
    """Whether it is known of any operation how long it took: waits cannot be told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """How a pipeline stage spends its step, as shares of it."""

    stage: int
    ranks: tuple[int, ...]
    own: float
    """Own work."""
    waiting: float
    """Waiting for others: the bubble, and whoever is late."""
    waiting_before: float | None
    """The same before the worst finding began; None where too little came before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfBar:
    """What the job would gain if one part of it were as it should be."""

    label: str
    gained_s: float
    """Seconds a step."""
    step_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Everything that is drawn; what could not be known is None or empty."""

    heat: Heat | None = None
    step: StepPicture | None = None
    stages: tuple[StageShare, ...] = ()
    stages_since: int | None = None
    """The shares of stages are of the steps from this one on; None: of all settled steps."""
    what_if: tuple[WhatIfBar, ...] = ()
    step_s: float | None = None
    """Median step of the job, seconds."""


def step_picture(
    tables: RunTables, ordinal: int, finding: Finding | None, offset_ns: Mapping[int, int]
) -> StepPicture | None:
    """Draw one step.

    Args:
        tables: Of that step at least.
        ordinal: Which.
        finding: Its ranks are shown first.
        offset_ns: How far the clock of each rank is ahead, where that is known.

    Returns:
        None where no rank has phases or operations in it.
    """
    here = pc.field("ordinal") == ordinal
    columns = ["rank", "start_ns", "phases"]
    rows = {row["rank"]: row for row in tables.steps.filter(here).select(columns).to_pylist()}
    if not rows:
        return None
    culprits = frozenset(() if finding is None else finding.ranks)
    look_at = None if finding is None else finding.evidence.get("look_at_rank")
    shown = _shown(sorted(rows), culprits, look_at, tables.groups)
    start_ns = {rank: int(rows[rank]["start_ns"]) - offset_ns.get(rank, 0) for rank in shown}
    first_ns = min(start_ns.values())
    begin_s = {rank: (time_ns - first_ns) * 1e-9 for rank, time_ns in start_ns.items()}
    in_view = pc.field("rank").isin(pa.array(shown, pa.int32()))
    passes = tables.micro_batches.filter(here & in_view).to_pylist()
    phases = [
        *_phases(rows, begin_s, hidden=_SHOWN_AS_PASSES if passes else ()),
        *(_pass(row, begin_s[row["rank"]]) for row in passes),
        *(_event(row, begin_s[row["rank"]]) for row in tables.events.filter(here & in_view).to_pylist()),
    ]  # fmt: skip
    operations = tables.collectives.filter(here)
    transfers, waits, known = _operations(operations, tables.groups, begin_s)
    arrivals = _arrivals(operations, tables.groups, begin_s)
    kept = [_longest(bars) for bars in (phases, transfers, waits, arrivals)]
    if not any(kept):
        return None
    return StepPicture(
        ordinal=ordinal,
        ranks=tuple(shown),
        culprits=culprits & set(shown),
        ranks_in_step=len(rows),
        phases=kept[0],
        transfers=kept[1],
        waits=kept[2],
        arrivals=kept[3],
        left_out=sum(map(len, (phases, transfers, waits, arrivals))) - sum(map(len, kept)),
        ends_known=known,
    )


def _shown(
    ranks: Sequence[int], culprits: frozenset[int], look_at: int | None, groups: pa.Table
) -> list[int]:
    """Up to two dozen ranks: the culprits, who works with them most closely, and some of the rest."""
    first = [rank for rank in (look_at, *sorted(culprits)[:8]) if rank is not None]
    mates: list[int] = []
    for members in groups["ranks"].to_pylist():
        if len(members) <= _MATES and first and first[0] in members:
            mates += members
    evenly = [ranks[at] for at in np.linspace(0, len(ranks) - 1, MOST_RANKS).astype(int).tolist()]
    there = set(ranks)
    wanted = dict.fromkeys(rank for rank in (*first, *mates, *evenly, *ranks) if rank in there)
    return sorted(list(wanted)[:MOST_RANKS])


def _phases(
    rows: Mapping[int, Mapping[str, Any]], begin_s: Mapping[int, float], hidden: Sequence[str]
) -> list[Bar]:
    return [
        Bar(
            rank=rank,
            name=phase["name"],
            start_s=start + phase["start_s"],
            duration_s=phase["host_s"],
        )
        for rank, start in begin_s.items()
        for phase in rows[rank]["phases"]
        if phase["name"] not in hidden
    ]


def _pass(row: Mapping[str, Any], begin_s: float) -> Bar:
    return Bar(
        rank=row["rank"],
        name=PASSES[bool(row["backward"])],
        start_s=begin_s + row["start_s"],
        duration_s=row["duration_s"],
        detail=f"micro-batch {row['micro_batch']}, chunk {row['chunk']}",
    )


def _event(row: Mapping[str, Any], begin_s: float) -> Bar:
    return Bar(
        rank=row["rank"],
        name=row["kind"],
        start_s=begin_s + row["start_s"],
        duration_s=row["duration_s"],
        detail=row["name"],
    )


def _operations(
    rows: pa.Table, groups: pa.Table, begin_s: Mapping[int, float]
) -> tuple[list[Bar], list[Bar], bool]:
    """Transfers, and the waits before them: who came last to one waits for the transfer alone."""
    rows = rows.filter(pc.field("seq").is_valid() & pc.field("duration_s").is_valid())
    if not rows.num_rows:
        return [], [], False
    transfer_C = transfers_of(rows)
    wanted = np.flatnonzero(np.isin(rows["rank"].to_numpy(), list(begin_s)))
    transfers, waits = [], []
    names = _descriptions(groups)
    for row, transfer_s in zip(
        rows.take(wanted).to_pylist(), transfer_C[wanted].tolist(), strict=True
    ):
        start_s = begin_s[row["rank"]] + row["arrival_s"]
        wait_s = max(row["duration_s"] - transfer_s, 0.0)
        about: dict[str, Any] = {
            "rank": row["rank"], "name": row["op"], "detail": _about(row, names)
        }  # fmt: skip
        if wait_s > 0:
            waits.append(Bar(start_s=start_s, duration_s=wait_s, **about))
        transfers.append(Bar(start_s=start_s + wait_s, duration_s=transfer_s, **about))
    return transfers, waits, True


def _arrivals(rows: pa.Table, groups: pa.Table, begin_s: Mapping[int, float]) -> list[Bar]:
    shown = pc.field("rank").isin(pa.array(list(begin_s), pa.int32()))
    rows = rows.filter(pc.field("seq").is_valid() & pc.field("duration_s").is_null() & shown)
    names = _descriptions(groups)
    return [
        Bar(
            rank=row["rank"],
            name=row["op"],
            start_s=begin_s[row["rank"]] + row["arrival_s"],
            duration_s=0.0,
            detail=_about(row, names),
        )
        for row in rows.to_pylist()
    ]


def _descriptions(groups: pa.Table) -> dict[int, str]:
    return dict(zip(groups["group"].to_pylist(), groups["description"].to_pylist(), strict=True))


def _about(row: Mapping[str, Any], names: Mapping[int, str]) -> str:
    """``all_reduce, dp #41, 25 MiB``."""
    peer = "" if row["peer"] is None else f" with rank {row['peer']}"
    group = names.get(row["group"], "group")
    return f"{row['op']}{peer}, {group} #{row['seq']}, {_size(row['payload_bytes'])}"


def transfers_of(rows: pa.Table) -> NDArray[np.float64]:
    """Seconds of each operation's transfer alone [C]: what the member that came last spent in it.

    Args:
        rows: ``tables.COLLECTIVES`` of one step, ``seq`` and ``duration_s`` known.
    """
    rank, seq = rows["rank"].to_numpy().astype(np.int64), rows["seq"].to_numpy()
    peer = rows["peer"].fill_null(-1).to_numpy().astype(np.int64)
    sends = pc.equal(rows["op"], "send").to_numpy(zero_copy_only=False)
    source = np.where(peer < 0, -1, np.where(sends, rank, peer))
    target = np.where(peer < 0, -1, np.where(sends, peer, rank))
    key = np.stack([rows["group"].to_numpy().view(np.int64), seq, source, target])
    _, which = np.unique(key, axis=1, return_inverse=True)
    which = which.reshape(-1)
    least = np.full(int(which.max()) + 1, np.inf)
    duration = rows["duration_s"].to_numpy()
    np.minimum.at(least, which, duration)
    shortest: NDArray[np.float64] = least[which]
    return shortest


def _longest(bars: Sequence[Bar]) -> tuple[Bar, ...]:
    by_rank: dict[int, list[Bar]] = {}
    for bar in bars:
        by_rank.setdefault(bar.rank, []).append(bar)
    return tuple(
        bar
        for some in by_rank.values()
        for bar in sorted(some, key=lambda bar: -bar.duration_s)[:_MOST_BARS]
    )


def _size(payload_bytes: int) -> str:
    size = float(payload_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
