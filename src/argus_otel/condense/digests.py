"""The digest of a step, from its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.codes import PHASES
from argus_otel.wire.digest import (
    MAX_PHASES,
    PhaseColumns,
    StepDigest,
    SyncColumns,
    encode_digest,
)
from argus_otel.wire.spans import ShapedSpan, Span, SpanShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from argus_otel.condense.steps import Collectives, Phase, StepRecord
    from argus_otel.wire.identity import Group, Identity

_ROOT: Final = SpanShape(scopes.DIGEST, names.SPAN_TRAIN_STEP, {}, ints=(names.ARGUS_STEP_ORDINAL,))
_NO_PARENT: Final = bytes(8)


def root_shape(identity: Identity) -> SpanShape | None:
    """Of the step's own span, the root, where it is this rank that writes it."""
    # Ranks that share no traces have roots of their own.
    alone = identity.nonce_local or identity.world_size == 1
    return _ROOT if alone or identity.rank % ids.RANKS_PER_SHARD == 0 else None


def digest_spans(
    digest: StepDigest, trace_id: bytes, step_id: bytes, identity: Identity
) -> tuple[Span, list[ShapedSpan]]:
    """The rank's span of a step, and on one rank the step's own, the root."""
    root_id = ids.span_id(trace_id, ids.ROOT, 0)
    start_ns, end_ns = digest.start_ns, digest.end_ns
    roots = []
    if (shape := root_shape(identity)) is not None:
        values = (digest.ordinal,)
        roots = [ShapedSpan(shape, trace_id, root_id, _NO_PARENT, start_ns, end_ns, values)]
    span = Span(
        scope=scopes.DIGEST,
        name=names.SPAN_RANK_STEP,
        trace_id=trace_id,
        span_id=step_id,
        parent_id=root_id,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=encode_digest(digest),
    )
    return span, roots


def make_digest(
    step: StepRecord,
    *,
    rank: int,
    groups: Sequence[Group],
    group_info: tuple[str, ...],
    phase_names: Sequence[str],
    keep: str | None,
    self_cpu_s: float,
    memory_bytes: int | None,
    wall_offset_ns: int,
    pause: Callable[[], None],
) -> StepDigest:
    """See ``StepDigest`` for what each number means; drops and losses are for the caller to add."""
    amounts = step.work
    return StepDigest(
        ordinal=step.ordinal,
        rank=rank,
        start_ns=step.start_ns + wall_offset_ns,
        end_ns=step.end_ns + wall_offset_ns,
        between_s=(step.start_ns - step.previous_end_ns) * 1e-9,
        end_rule=events.RULES[step.rule],
        iteration=None if step.iteration == events.NONE else step.iteration,
        busy_s=_seconds(step.busy_ns),
        cpu_s=_seconds(step.cpu_ns),
        run_delay_s=_seconds(step.run_delay_ns),
        data_wait_s=step.data_wait_ns * 1e-9,
        gc_s=step.gc_ns * 1e-9,
        gc_count=len(step.pauses),
        tokens=amounts.get("tokens"),
        samples=amounts.get("samples"),
        sum_len2=amounts.get("sum_len2"),
        memory_bytes=memory_bytes,
        keep=keep,
        self_cpu_s=self_cpu_s,
        ends_captured=bool(step.flags & events.ENDS_CAPTURED),
        phases=_phase_columns(step.phases, step.start_ns, phase_names),
        sync=_NO_SYNC
        if step.collectives is None
        else _sync_columns(step.collectives, step.start_ns, groups, pause),
        kernels=step.kernels,
        group_info=group_info,
    )


def _seconds(ns: int) -> float | None:
    return None if ns == events.NONE else ns * 1e-9


def _phase_columns(
    phases: Sequence[Phase], step_start_ns: int, phase_names: Sequence[str]
) -> PhaseColumns:
    zero_ns = step_start_ns - 500  # rounds to the nearest
    code = [row[2] for row in phases]
    start_us = [(row[0] - zero_ns) // 1000 for row in phases]
    duration_us = [(row[1] - row[0] + 500) // 1000 for row in phases]
    folded = len(code) > MAX_PHASES
    if folded:
        start_us, duration_us, code = _fold_by_name(start_us, duration_us, code)
    names: tuple[str, ...] = PHASES
    if code and max(code) >= len(PHASES):
        used = sorted({name for name in code if name >= len(PHASES)})
        names = PHASES + tuple([phase_names[name - len(PHASES)] for name in used])
        place = {name: len(PHASES) + index for index, name in enumerate(used)}
        code = [place.get(name, name) for name in code]
    return PhaseColumns(
        name=code, start_us=start_us, duration_us=duration_us, names=names, folded=folded
    )


def _fold_by_name(
    start_us: list[int], duration_us: list[int], code: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """One row a name, with its first start and its summed duration, in order of start."""
    first_us: dict[int, int] = {}
    total_us: dict[int, int] = {}
    for start, duration, name in zip(start_us, duration_us, code, strict=True):
        first_us.setdefault(name, start)
        total_us[name] = total_us.get(name, 0) + duration
    order = sorted(first_us, key=lambda name: (first_us[name], name))
    return [first_us[name] for name in order], [total_us[name] for name in order], order


def _sync_columns(
    rows: Collectives,
    step_start_ns: int,
    groups: Sequence[Group],
    pause: Callable[[], None],
) -> SyncColumns:
    kinds, count = rows.operations, rows.count
    zero_ns = step_start_ns - 500  # rounds to the nearest
    arrival_us = [(time_ns - zero_ns) // 1000 for time_ns in rows.arrival_ns]
    if rows.end_ns is None:
        duration_us = [-1] * len(arrival_us)
    else:
        duration_us = [
            -1 if end_ns == events.NONE else max((end_ns - time_ns + 500) // 1000, 0)
            for time_ns, end_ns in zip(rows.arrival_ns, rows.end_ns, strict=True)
        ]
    pause()
    return SyncColumns(
        group_keys=[groups[index].key for index in kinds.groups],
        start_counts=[count[row] if row >= 0 else 0 for row in kinds.first_at],
        channels=[(*channel, count[row]) for *channel, row in kinds.channels],
        group=kinds.local_group,
        op=kinds.op,
        payload_bytes=rows.payload_bytes,
        peer=kinds.peer,
        phase=rows.phase,
        arrival_us=arrival_us,
        duration_us=duration_us,
    )


_NO_SYNC = SyncColumns(
    group_keys=[], start_counts=[], channels=[], group=[], op=[], payload_bytes=[],
    peer=[], phase=[], arrival_us=[], duration_us=[],
)  # fmt: skip
