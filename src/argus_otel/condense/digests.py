"""The digest of each step, cut out of the batch's columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from argus_otel.wire import events
from argus_otel.wire.digest import MAX_PHASES, OPS, PHASES, PhaseColumns, StepDigest, SyncColumns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from argus_otel.condense.condenser import Costs
    from argus_otel.condense.steps import CollectiveRows, PhaseRows, StepColumns
    from argus_otel.wire.identity import Group, Identity

_SEND, _RECV = OPS.index("send"), OPS.index("recv")
_NO_CHANNELS = np.empty((0, 4), dtype=np.int64)


def make_digests(
    columns: StepColumns,
    phases: PhaseRows,
    collectives: CollectiveRows,
    *,
    identity: Identity,
    groups: Sequence[Group],
    group_info: Sequence[tuple[str, ...]],
    phase_names: Sequence[str],
    work: Mapping[int, Mapping[str, float]],
    keeps: Sequence[str | None],
    costs: Costs,
    truncated_first: bool,
    wall_offset_ns: int,
) -> list[StepDigest]:
    """One digest a step; see ``StepDigest`` for what each number means."""
    s = columns.ordinal.size
    steps = np.arange(s + 1)
    phase_cut = np.searchsorted(phases.step, steps).tolist()
    sync_cut = np.searchsorted(collectives.step, steps).tolist()
    phase_start_us = _whole_us(phases.start_ns - columns.start_ns[phases.step])
    phase_us = _whole_us(phases.end_ns - phases.start_ns)
    arrival_us = _whole_us(collectives.arrival_ns - columns.start_ns[collectives.step])
    ended = collectives.end_ns != events.NONE
    duration_us = np.where(
        ended, np.maximum(_whole_us(collectives.end_ns - collectives.arrival_ns), 0), -1
    )
    seconds = {
        name: (getattr(columns, f"{name}_ns") * 1e-9).tolist()
        for name in ("busy", "cpu", "run_delay", "data_wait", "gc")
    }
    unknown_below = events.NONE * 1e-9 / 2
    starts = (columns.start_ns + wall_offset_ns).tolist()
    ends = (columns.end_ns + wall_offset_ns).tolist()
    between_s = ((columns.start_ns - columns.previous_end_ns) * 1e-9).tolist()
    iterations, flags, rules = (
        columns.iteration.tolist(),
        columns.flags.tolist(),
        columns.rule.tolist(),
    )
    gc_count = columns.gc_count.tolist()

    def known(name: str, step: int) -> float | None:
        value: float = seconds[name][step]
        return None if value < unknown_below else value

    digests = []
    for step, ordinal in enumerate(columns.ordinal.tolist()):
        p = slice(phase_cut[step], phase_cut[step + 1])
        c = slice(sync_cut[step], sync_cut[step + 1])
        amounts = work.get(step, {})
        digests.append(
            StepDigest(
                ordinal=ordinal,
                rank=identity.rank,
                start_ns=starts[step],
                end_ns=ends[step],
                between_s=between_s[step],
                end_rule=events.RULES[rules[step]],
                iteration=None if iterations[step] == events.NONE else iterations[step],
                busy_s=known("busy", step),
                cpu_s=known("cpu", step),
                run_delay_s=known("run_delay", step),
                data_wait_s=seconds["data_wait"][step],
                gc_s=seconds["gc"][step],
                gc_count=gc_count[step],
                tokens=amounts.get("tokens"),
                samples=amounts.get("samples"),
                sum_len2=amounts.get("sum_len2"),
                memory_bytes=costs.memory_bytes,
                keep=keeps[step],
                drops=costs.drops if step == 0 else 0,
                self_cpu_s=costs.self_cpu_s / s,
                truncated=truncated_first and step == 0,
                ends_captured=bool(flags[step] & events.ENDS_CAPTURED),
                phases=_phase_columns(phases.name[p], phase_start_us[p], phase_us[p], phase_names),
                sync=_sync_columns(collectives, c, arrival_us, duration_us, groups, identity),
                group_info=group_info[step],
            )
        )
    return digests


def _whole_us(ns: NDArray[np.int64]) -> NDArray[np.int64]:
    return (ns + 500) // 1000


def _phase_columns(
    name: NDArray[np.int64],
    start_us: NDArray[np.int64],
    duration_us: NDArray[np.int64],
    phase_names: Sequence[str],
) -> PhaseColumns:
    folded = name.size > MAX_PHASES
    if folded:
        name, first, which = np.unique(name, return_index=True, return_inverse=True)
        duration_us = np.bincount(which, weights=duration_us).astype(np.int64)
        start_us = start_us[first]
        order = np.argsort(start_us, kind="stable")
        name, start_us, duration_us = name[order], start_us[order], duration_us[order]
    names = PHASES
    if name.size and int(name.max()) >= len(PHASES):
        used = np.unique(name[name >= len(PHASES)])
        names = PHASES + tuple(phase_names[index - len(PHASES)] for index in used.tolist())
        place = np.searchsorted(used, name) + len(PHASES)
        name = np.where(name >= len(PHASES), place, name)
    return PhaseColumns(
        name=name,
        start_us=start_us,
        duration_us=np.maximum(duration_us, 0),
        names=names,
        folded=folded,
    )


def _sync_columns(
    rows: CollectiveRows,
    c: slice,
    arrival_us: NDArray[np.int64],
    duration_us: NDArray[np.int64],
    groups: Sequence[Group],
    identity: Identity,
) -> SyncColumns:
    group, op, count, peer = rows.group[c], rows.op[c], rows.count[c], rows.peer[c]
    shape = _sync_shape(group.tobytes(), op.tobytes(), peer.tobytes(), identity.rank)
    channels = _NO_CHANNELS
    if shape.channel_at.size:
        channels = np.column_stack((shape.channels, count[shape.channel_at]))
    return SyncColumns(
        group_keys=np.array([groups[index].key for index in shape.groups], dtype=np.uint64),
        start_counts=np.where(shape.first_at >= 0, count[shape.first_at], 0)
        if count.size
        else shape.first_at,
        channels=channels,
        group=shape.local_group,
        op=op,
        payload_bytes=rows.payload_bytes[c],
        peer=peer,
        phase=rows.phase[c],
        arrival_us=arrival_us[c],
        duration_us=duration_us[c],
    )


@dataclass(frozen=True, slots=True)
class _SyncShape:
    """What follows from the kinds of operations alone: the same in every step of most loops."""

    groups: tuple[int, ...]
    """Groups in the order of their first use."""
    local_group: NDArray[np.int64]
    """For each row its place in ``groups``."""
    first_at: NDArray[np.int64]
    """For each group its first collective's row; -1 where it has only point-to-point ones."""
    channels: NDArray[np.int64]
    """Shape [K, 3]: place in ``groups``, source, destination."""
    channel_at: NDArray[np.int64]
    """For each channel its first row."""


@lru_cache(maxsize=16)  # a loop has a few kinds of steps; keys are 24 bytes a collective
def _sync_shape(group: bytes, op: bytes, peer: bytes, rank: int) -> _SyncShape:
    used: dict[int, int] = {}
    local: list[int] = []
    first_at: dict[int, int] = {}
    channels: dict[tuple[int, int, int], int] = {}
    columns = (np.frombuffer(column, dtype=np.int64).tolist() for column in (group, op, peer))
    for row, (index, code, other) in enumerate(zip(*columns, strict=True)):
        place = used.setdefault(index, len(used))
        local.append(place)
        if code == _SEND or code == _RECV:
            if other < 0:
                continue  # received from whoever came first: no channel that both ends know
            ends = (rank, other) if code == _SEND else (other, rank)
            channels.setdefault((place, *ends), row)
        else:
            first_at.setdefault(place, row)
    return _SyncShape(
        groups=tuple(used),
        local_group=np.array(local, dtype=np.int64),
        first_at=np.array([first_at.get(place, -1) for place in range(len(used))], dtype=np.int64),
        channels=np.array(list(channels), dtype=np.int64).reshape(-1, 3),
        channel_at=np.array(list(channels.values()), dtype=np.int64),
    )
