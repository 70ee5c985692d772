"""The digest of a step, from its record."""

from __future__ import annotations

from itertools import repeat
from operator import floordiv, itemgetter, sub
from typing import TYPE_CHECKING, Any, Final

from argus_otel.semconv import names
from argus_otel.wire import events, ids, scopes
from argus_otel.wire.digest import (
    MAX_PHASES,
    PHASES,
    PhaseColumns,
    StepDigest,
    SyncColumns,
    encode_digest,
)
from argus_otel.wire.spans import ShapedSpan, Span, SpanShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from argus_otel.condense.steps import Collectives, Phase, StepRecord
    from argus_otel.wire.identity import Group, Identity

_MAX_SHAPES: Final = 64
_ROOT: Final = SpanShape(scopes.DIGEST, names.SPAN_TRAIN_STEP, {}, ints=(names.ARGUS_STEP_ORDINAL,))
_NO_PARENT: Final = bytes(8)

_CONSTANTS: Final = (names.ARGUS_DIGEST_VERSION, names.DL_RANK, names.ARGUS_STEP_END_RULE)
"""Attributes that hardly ever change."""
_constants_of = itemgetter(*_CONSTANTS)


class DigestSpans:
    """Lays digests out as spans; remembers which attributes they have had so far."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[object, ...], tuple[SpanShape, Callable[..., Any]] | None] = {}

    def spans(
        self, digest: StepDigest, trace_id: bytes, step_id: bytes, identity: Identity
    ) -> tuple[list[ShapedSpan], list[Span]]:
        """The rank's span of a step, and on one rank the step's own, the root.

        Returns:
            Those of a shape that recurs, and those with attributes that a shape cannot have.
        """
        root_id = ids.span_id(trace_id, ids.ROOT, 0)
        start_ns, end_ns = digest.start_ns, digest.end_ns
        shaped: list[ShapedSpan] = []
        # Ranks that share no traces have roots of their own.
        alone = identity.nonce_local or identity.world_size == 1
        if alone or identity.rank % ids.RANKS_PER_SHARD == 0:
            values = (digest.ordinal,)
            shaped.append(
                ShapedSpan(_ROOT, trace_id, root_id, _NO_PARENT, start_ns, end_ns, values)
            )
        attributes = encode_digest(digest)
        known = self._known(attributes)
        if known is not None:
            shape, values_of = known
            values = values_of(attributes)
            shaped.append(ShapedSpan(shape, trace_id, step_id, root_id, start_ns, end_ns, values))
            return shaped, []
        odd = Span(
            scope=scopes.DIGEST,
            name=names.SPAN_RANK_STEP,
            trace_id=trace_id,
            span_id=step_id,
            parent_id=root_id,
            start_ns=start_ns,
            end_ns=end_ns,
            attributes=attributes,
        )
        return shaped, [odd]

    def _known(
        self, attributes: Mapping[str, object]
    ) -> tuple[SpanShape, Callable[..., Any]] | None:
        """The shape that has these attributes, and what picks its values from them."""
        constants = _constants_of(attributes)
        key = (*attributes, *map(type, attributes.values()), *constants)
        try:
            return self._shapes[key]
        except KeyError:
            pass
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        of_type: dict[type, list[str]] = {int: [], float: [], str: []}
        made = None
        if of_type.keys() >= set(map(type, attributes.values())):
            fixed = dict(zip(_CONSTANTS, constants, strict=True))
            for name, value in attributes.items():
                if name not in fixed:
                    of_type[type(value)].append(name)
            ints, doubles, texts = map(tuple, of_type.values())
            shape = SpanShape(scopes.DIGEST, names.SPAN_RANK_STEP, fixed, ints, doubles, texts)
            made = shape, itemgetter(*ints, *doubles, *texts)
        self._shapes[key] = made
        return made


def make_digest(
    step: StepRecord,
    *,
    rank: int,
    groups: Sequence[Group],
    group_info: tuple[str, ...],
    phase_names: Sequence[str],
    keep: str | None,
    drops: int,
    self_cpu_s: float,
    memory_bytes: int | None,
    truncated: bool,
    wall_offset_ns: int,
    pause: Callable[[], None],
) -> StepDigest:
    """See ``StepDigest`` for what each number means."""
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
        drops=drops,
        self_cpu_s=self_cpu_s,
        truncated=truncated,
        ends_captured=bool(step.flags & events.ENDS_CAPTURED),
        phases=_phase_columns(step.phases, step.start_ns, phase_names),
        sync=_NO_SYNC
        if step.collectives is None
        else _sync_columns(step.collectives, step.start_ns, groups, pause),
        kernels=step.kernels,
        group_info=group_info,
    )


def _microseconds(times_ns: Iterable[int], zero_ns: int) -> list[int]:
    """To the nearest, since a moment."""
    # In C from end to end; the same as a comprehension takes three times as long.
    return list(map(floordiv, map(sub, times_ns, repeat(zero_ns - 500)), repeat(1000)))


def _seconds(ns: int) -> float | None:
    return None if ns == events.NONE else ns * 1e-9


def _phase_columns(
    phases: Sequence[Phase], step_start_ns: int, phase_names: Sequence[str]
) -> PhaseColumns:
    starts_ns, ends_ns, code = map(list, zip(*phases)) if phases else ([], [], [])
    start_us = _microseconds(starts_ns, step_start_ns)
    duration_us = _microseconds(map(sub, ends_ns, starts_ns), 0)
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
    arrival_us = _microseconds(rows.arrival_ns, step_start_ns)
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
