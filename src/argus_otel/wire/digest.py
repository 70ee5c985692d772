"""The digest of one step of one rank: what every detector needs, as attributes of ``rank.step``.

Plain numbers are plain attributes, for people who read the span in Jaeger. Columns (phases,
collectives) are packed: one stream of base-128 integers, base64, cut into attributes of at most
2,000 characters, because Tempo cuts values at 2,048 bytes.

Layout 1, all values unsigned base-128 integers, times in whole microseconds:

``argus.digest.phases``
    version, kind (0 in order, 1 folded by name), n, name[n], zigzag start difference[n],
    duration[n]. A name below ``len(PHASES)`` is an index into ``PHASES``; from there on into
    the attribute ``argus.phase.names``.

``argus.digest.sync``
    version, kind (0 vector, 1 folded),
    groups: n, then (key, count at the step's boundary)[n],
    channels: n, then (group, source, destination, count at the boundary)[n],
    signatures: n, then (group, op, bytes, peer + 1, phase + 1)[n],
    n, signature[n], zigzag arrival difference[n], then
    vector: duration + 1 [n] (0 is unknown);
    folded: count[n], last - first arrival[n], sum of known durations + 1 [n],
    least known duration + 1 [n].

A reader of a newer version must keep reading this one.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter, sub
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from argus_otel.semconv import names
from argus_otel.wire.codes import OPS, PHASES
from argus_otel.wire.packed import get_packed, put_packed
from argus_otel.wire.varints import (
    any_varint,
    decode_uvarints,
    pack,
    pack_differences,
    unzigzag,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from argus_otel.wire.packed import AttributeValue
    from argus_otel.wire.sketch import Sketch

    # Readers get arrays; ``Any``, because writers may hand in lists of integers instead.
    Column = NDArray[np.int64] | Any

VERSION: Final = 1

MAX_SYNC_BYTES: Final = 2048
"""A longer sync vector is folded by (group, operation, phase)."""

MAX_PHASES: Final = 64

_MOST_ROWS: Final = MAX_SYNC_BYTES // 3
"""A row of the vector takes a byte each for signature, arrival and duration at least."""

_VECTOR = 0
_FOLDED = 1


@dataclass(slots=True, kw_only=True)
class PhaseColumns:
    """Phases of a step; shape [P] each. ``names`` is the dictionary that ``name`` points into.

    A reader gets arrays. A writer may give lists, all of them lists.
    """

    name: Column
    start_us: Column
    """Relative to the step's start; negative for ``between``."""
    duration_us: Column
    names: tuple[str, ...] = PHASES
    folded: bool = False
    """One row per name, with its first start and its summed duration."""


@dataclass(slots=True, kw_only=True)
class SyncColumns:
    """Collectives and point-to-point operations of a step in order of arrival; shape [C] each.

    A reader gets arrays. A writer may give lists, all of them lists; ``channels`` then is a list
    of rows.
    """

    group_keys: Column
    """Shape [G]; identities of the groups that ``group`` points into."""
    start_counts: Column
    """Shape [G]; collectives this rank had issued on each group before the step began."""
    channels: Column = field(default_factory=lambda: np.empty((0, 4), np.int64))
    """Shape [K, 4]: group, source, destination, operations before the step, for each P2P pair."""
    group: Column
    op: Column
    payload_bytes: Column
    peer: Column
    """The other rank of a point-to-point operation, else -1."""
    phase: Column
    """Index into ``PHASES``, -1 where unknown."""
    arrival_us: Column
    """First arrival where folded. Relative to the step's start."""
    duration_us: Column
    """From arrival to end; -1 unknown. Sum of the known ones where folded."""
    count: Column | None = None
    """Folded only: how many operations the row stands for."""
    last_arrival_us: Column | None = None
    """Folded only."""
    min_duration_us: Column | None = None
    """Folded only; -1 unknown."""

    @property
    def folded(self) -> bool:
        """Whether rows are sums over (group, operation, phase)."""
        return self.count is not None


@dataclass(slots=True, kw_only=True)
class StepDigest:
    """One rank's account of one step. Seconds; None means not known."""

    ordinal: int
    rank: int
    start_ns: int
    end_ns: int
    between_s: float
    """From the end of the step before to this step's start; not part of the step."""
    end_rule: str
    iteration: int | None = None
    busy_s: float | None = None
    """Time inside the step that nobody made this rank wait for (data wait included)."""
    cpu_s: float | None = None
    """CPU time of the training thread inside the step, waits for input left out."""
    run_delay_s: float | None = None
    """Time inside the step that the training thread was runnable but had no core, waits for
    input left out."""
    data_wait_s: float | None = None
    gc_s: float | None = None
    gc_count: int | None = None
    tokens: float | None = None
    samples: float | None = None
    sum_len2: float | None = None
    expert_tokens: tuple[int, ...] = ()
    """Tokens of each expert that this rank holds; empty where not known."""
    memory_bytes: int | None = None
    keep: str | None = None
    drops: int = 0
    self_cpu_s: float | None = None
    truncated: bool = False
    ends_captured: bool = False
    phases: PhaseColumns
    sync: SyncColumns
    kernels: Sketch | None = None
    """Kernel durations by (name, stream, phase); None without a GPU."""
    group_info: tuple[str, ...] = ()
    """``key|description|rank ranges`` of each group; on the first step that has it, then rarely."""

    @property
    def step_s(self) -> float:
        """The step's duration."""
        return (self.end_ns - self.start_ns) * 1e-9


class ChartedNumbers(NamedTuple):
    """Of a digest, what metrics sum up; see there."""

    step_s: float
    busy_s: float | None
    data_wait_s: float | None
    gc_s: float | None
    tokens: float | None
    self_cpu_s: float | None


def encode_digests(digests: Iterable[StepDigest]) -> list[dict[str, AttributeValue]]:
    """Turn digests into span attributes."""
    return [encode_digest(digest) for digest in digests]


def encode_digest(digest: StepDigest) -> dict[str, AttributeValue]:
    """Turn one digest into span attributes.

    Cost:
        Background thread. About 10 µs with 20 collectives in lists, 3 µs more in arrays; 0.2 µs
        for each further collective, until at ``MAX_SYNC_BYTES`` they are folded.
    """
    attributes = _plain_attributes(digest)
    put_packed(attributes, names.ARGUS_DIGEST_PHASES, _pack_phases(digest.phases))
    sync = digest.sync
    if sync.count is None and len(sync.group) > _MOST_ROWS:
        sync = fold_sync(sync)  # the vector can never fit, and is not built at all
    packed = _pack_sync(sync)
    if len(packed) > MAX_SYNC_BYTES and sync.count is None:
        packed = _pack_sync(fold_sync(sync))
    put_packed(attributes, names.ARGUS_DIGEST_SYNC, packed)
    if digest.kernels is not None:
        from argus_otel.wire.kernels import pack_kernels  # where there is no GPU, never loaded

        attributes.update(pack_kernels(digest.kernels, digest.phases.names))
    return attributes


def decode_digest(
    attributes: Mapping[str, AttributeValue],
    start_ns: int,
    end_ns: int,
    *,
    with_kernels: bool = True,
) -> StepDigest:
    """Read the digest back from a ``rank.step`` span.

    Args:
        attributes: Of the span.
        start_ns: Of the span.
        end_ns: Of the span.
        with_kernels: Read kernels too, which takes a third of the time; else they are as none.

    Raises:
        ValueError: A required attribute is missing, or a packed value is damaged or of a
            version that this reader does not know.
    """

    def number(name: str) -> float | None:
        value = attributes.get(name)
        if value is None:
            return None
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            msg = f"{name} is not a number: {value!r}"
            raise ValueError(msg) from error

    def whole(name: str) -> int | None:
        value = attributes.get(name)
        if value is None:
            return None
        try:
            return int(value)  # type: ignore[arg-type]
        except (OverflowError, TypeError, ValueError) as error:
            msg = f"{name} is not a whole number: {value!r}"
            raise ValueError(msg) from error

    def strings(name: str) -> tuple[str, ...]:
        value = attributes.get(name, ())
        if isinstance(value, str):
            return (value,)
        if isinstance(value, int | float):
            msg = f"{name} is not a list of strings: {value!r}"
            raise ValueError(msg)  # noqa: TRY004 - damaged input, as this function's caller sees it
        return tuple(map(str, value))

    def wholes(name: str) -> tuple[int, ...]:
        value = attributes.get(name, ())
        msg = f"{name} is not a list of whole numbers: {value!r}"
        if isinstance(value, str):  # whose digits would pass for such a list
            raise ValueError(msg)  # noqa: TRY004 - as above
        try:
            return tuple(map(int, value))  # type: ignore[arg-type]
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(msg) from error

    ordinal, rank = whole(names.ARGUS_STEP_ORDINAL), whole(names.DL_RANK)
    if ordinal is None or rank is None:
        msg = f"a digest needs {names.ARGUS_STEP_ORDINAL} and {names.DL_RANK}"
        raise ValueError(msg)
    keep = attributes.get(names.ARGUS_KEEP)
    kernels = None
    if with_kernels and names.ARGUS_DIGEST_KERNELS in attributes:
        from argus_otel.wire.kernels import read_kernels

        phases = PHASES + strings(names.ARGUS_PHASE_NAMES)
        kernels = read_kernels(attributes, strings(names.ARGUS_KERNEL_NAMES), phases)
    return StepDigest(
        ordinal=ordinal,
        rank=rank,
        start_ns=start_ns,
        end_ns=end_ns,
        between_s=number(names.ARGUS_STEP_BETWEEN) or 0.0,
        end_rule=str(attributes.get(names.ARGUS_STEP_END_RULE, "unknown")),
        iteration=whole(names.DL_ITERATION),
        busy_s=number(names.ARGUS_STEP_BUSY),
        cpu_s=number(names.ARGUS_STEP_CPU),
        run_delay_s=number(names.ARGUS_STEP_RUN_DELAY),
        data_wait_s=number(names.ARGUS_DATA_WAIT),
        gc_s=number(names.ARGUS_GC_PAUSE),
        gc_count=whole(names.ARGUS_GC_COUNT),
        tokens=number(names.ARGUS_WORK_TOKENS),
        samples=number(names.ARGUS_WORK_SAMPLES),
        sum_len2=number(names.ARGUS_WORK_SUM_LEN2),
        expert_tokens=wholes(names.ARGUS_WORK_EXPERT_TOKENS),
        memory_bytes=whole(names.ARGUS_MEMORY_RSS),
        keep=None if keep is None else str(keep),
        drops=whole(names.ARGUS_DROPS) or 0,
        self_cpu_s=number(names.ARGUS_SELF_CPU),
        truncated=bool(attributes.get(names.ARGUS_DIGEST_TRUNCATED, False)),
        ends_captured=bool(attributes.get(names.ARGUS_DIGEST_ENDS_CAPTURED, False)),
        phases=_read_phases(
            _get_packed(attributes, names.ARGUS_DIGEST_PHASES), strings(names.ARGUS_PHASE_NAMES)
        ),
        sync=_read_sync(_get_packed(attributes, names.ARGUS_DIGEST_SYNC)),
        kernels=kernels,
        group_info=strings(names.ARGUS_GROUPS),
    )


def fold_sync(sync: SyncColumns) -> SyncColumns:
    """Sum a sync vector over (group, operation, phase), for steps with too many collectives.

    Returns:
        Arrays, whatever was given.
    """
    group, op, phase, payload_bytes, arrival_us, duration_us = (
        np.asarray(column, dtype=np.int64)
        for column in (
            sync.group,
            sync.op,
            sync.phase,
            sync.payload_bytes,
            sync.arrival_us,
            sync.duration_us,
        )
    )
    key = (group * len(OPS) + op) * (len(PHASES) + 1) + phase + 1
    _, first, row = np.unique(key, return_index=True, return_inverse=True)
    rows = first.size
    known = duration_us >= 0
    count = np.bincount(row, minlength=rows)
    total = np.bincount(row[known], weights=duration_us[known], minlength=rows)
    has_known = np.bincount(row[known], minlength=rows) > 0
    far = np.iinfo(np.int64).max
    last = np.full(rows, -far)
    earliest = np.full(rows, far)
    least = np.full(rows, far)
    np.maximum.at(last, row, arrival_us)
    np.minimum.at(earliest, row, arrival_us)
    np.minimum.at(least, row[known], duration_us[known])
    return SyncColumns(
        group_keys=np.asarray(sync.group_keys, dtype=np.uint64),
        start_counts=np.asarray(sync.start_counts, dtype=np.int64),
        channels=np.asarray(sync.channels, dtype=np.int64).reshape(-1, 4),
        group=group[first],
        op=op[first],
        payload_bytes=np.bincount(row, weights=payload_bytes, minlength=rows).astype(np.int64),
        peer=np.full(rows, -1),
        phase=phase[first],
        arrival_us=earliest,
        duration_us=np.where(has_known, total, -1).astype(np.int64),
        count=count,
        last_arrival_us=last,
        min_duration_us=np.where(has_known, least, -1),
    )


def _pack_phases(phases: PhaseColumns) -> bytes:
    name, start_us, duration_us = _as_lists(phases.name, phases.start_us, phases.duration_us)
    head = _phase_head(_FOLDED if phases.folded else _VECTOR, *name)
    return head + pack_differences(start_us) + pack(duration_us)


@lru_cache(maxsize=64)
def _sync_head(kind: int, groups: int) -> bytes:
    return pack((VERSION, kind, groups))


@lru_cache(maxsize=64)  # a loop has a few kinds of steps
def _phase_head(kind: int, *name: int) -> bytes:
    return pack((VERSION, kind, len(name), *name))


def _pack_sync(sync: SyncColumns) -> bytes:
    keys, counts, channels, arrival_us, duration_us, *signature = _as_lists(
        sync.group_keys,
        sync.start_counts,
        sync.channels,
        sync.arrival_us,
        sync.duration_us,
        sync.group,
        sync.op,
        sync.payload_bytes,
        sync.peer,
        sync.phase,
    )
    parts = [_sync_head(_VECTOR if sync.count is None else _FOLDED, len(keys))]
    for key_and_count in zip(keys, counts, strict=True):
        parts += map(any_varint, key_and_count)
    parts.append(any_varint(len(channels)))
    for channel in channels:
        parts.append(pack(channel))
    parts += (_pack_signatures(signature), pack_differences(arrival_us))
    if (
        sync.count is not None
        and sync.last_arrival_us is not None
        and sync.min_duration_us is not None
    ):
        count, last_us, least_us = _as_lists(sync.count, sync.last_arrival_us, sync.min_duration_us)
        parts += [
            pack(count),
            pack(map(sub, last_us, arrival_us)),
            pack([duration + 1 for duration in duration_us]),
            pack([duration + 1 for duration in least_us]),
        ]
    elif duration_us.count(-1) == len(duration_us):  # collectives that block nobody: none is known
        parts.append(bytes(len(duration_us)))
    else:
        parts.append(pack([duration + 1 for duration in duration_us]))
    return b"".join(parts)


def _as_lists(*columns: Column) -> Sequence[Any]:
    """Columns of arrays as lists; those that are lists already as they are."""
    if type(columns[0]) is list:
        return columns
    return [column.tolist() for column in columns]


class _LastSignatures:
    """Signatures as they are packed; those of the step before are compared, not hashed.

    A training loop issues the same collectives in every step, so the answer is nearly always
    the one of the step before. To hash a hundred numbers takes four times as long.
    """

    def __init__(self) -> None:
        self._last: tuple[list[list[int]], bytes] = [], b""

    def __call__(self, columns: list[list[int]]) -> bytes:
        last_columns, packed = self._last
        if columns != last_columns:
            packed = _signatures(*map(tuple, columns))
            self._last = [column[:] for column in columns], packed
        return packed


_pack_signatures = _LastSignatures()


@lru_cache(maxsize=16)  # a loop has a few kinds of steps; keys and answers are kilobytes each
def _signatures(*columns: tuple[int, ...]) -> bytes:
    """The table of distinct operations, the number of rows, and which of them each row is.

    Args:
        columns: Group, operation, bytes, peer and phase, shape [C] each.
    """
    distinct: dict[tuple[int, ...], int] = {}
    group, op, payload_bytes, peer, phase = columns
    which = [
        # Peer and phase are -1 where unknown.
        distinct.setdefault((*row, other + 1, code + 1), len(distinct))
        for *row, other, code in zip(group, op, payload_bytes, peer, phase, strict=True)
    ]
    flat = [value for row in distinct for value in row]
    return pack((len(distinct), *flat, len(which), *which))


_OPTIONAL: Final = (
    (names.DL_ITERATION, "iteration"),
    (names.ARGUS_STEP_BUSY, "busy_s"),
    (names.ARGUS_STEP_CPU, "cpu_s"),
    (names.ARGUS_STEP_RUN_DELAY, "run_delay_s"),
    (names.ARGUS_DATA_WAIT, "data_wait_s"),
    (names.ARGUS_GC_PAUSE, "gc_s"),
    (names.ARGUS_GC_COUNT, "gc_count"),
    (names.ARGUS_WORK_TOKENS, "tokens"),
    (names.ARGUS_WORK_SAMPLES, "samples"),
    (names.ARGUS_WORK_SUM_LEN2, "sum_len2"),
    (names.ARGUS_MEMORY_RSS, "memory_bytes"),
    (names.ARGUS_KEEP, "keep"),
    (names.ARGUS_SELF_CPU, "self_cpu_s"),
)
"""Attributes that are absent where the field is None."""
_OPTIONAL_NAMES: Final = tuple(name for name, _ in _OPTIONAL)
_optional_values = attrgetter(*[field_name for _, field_name in _OPTIONAL])


def _plain_attributes(digest: StepDigest) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.ARGUS_DIGEST_VERSION: VERSION,
        names.ARGUS_STEP_ORDINAL: digest.ordinal,
        names.DL_RANK: digest.rank,
        names.ARGUS_STEP_DURATION: digest.step_s,
        names.ARGUS_STEP_BETWEEN: digest.between_s,
        names.ARGUS_STEP_END_RULE: digest.end_rule,
    }
    for name, value in zip(_OPTIONAL_NAMES, _optional_values(digest)):
        if value is not None:
            attributes[name] = value
    if digest.drops:
        attributes[names.ARGUS_DROPS] = digest.drops
    if digest.expert_tokens:
        attributes[names.ARGUS_WORK_EXPERT_TOKENS] = digest.expert_tokens
    if digest.truncated:
        attributes[names.ARGUS_DIGEST_TRUNCATED] = True
    if digest.ends_captured:
        attributes[names.ARGUS_DIGEST_ENDS_CAPTURED] = True
    if digest.group_info:
        attributes[names.ARGUS_GROUPS] = digest.group_info
    if len(digest.phases.names) > len(PHASES):
        attributes[names.ARGUS_PHASE_NAMES] = digest.phases.names[len(PHASES) :]
    return attributes


class RepeatedColumns:
    """Packs the columns of steps that differ from one another in times and counts alone.

    What does not depend on these is packed once.

    Args:
        phases: Of one of these steps, in lists.
        sync: Likewise.
    """

    def __init__(self, phases: PhaseColumns, sync: SyncColumns) -> None:
        self._phase_head = _phase_head(_VECTOR, *phases.name)
        # What lies before each of the counts, and after the last.
        constant = [_sync_head(_VECTOR, len(sync.group_keys))]
        for key in sync.group_keys:
            constant[-1] += any_varint(key)
            constant.append(b"")
        constant[-1] += any_varint(len(sync.channels))
        for channel in sync.channels:
            constant[-1] += pack(channel[:3])
            constant.append(b"")
        constant[-1] += _signatures(
            *map(tuple, (sync.group, sync.op, sync.payload_bytes, sync.peer, sync.phase))
        )
        self._constant = constant
        self._unknown = bytes(len(sync.group))

    def pack(
        self,
        start_us: Sequence[int],
        duration_us: Sequence[int],
        arrival_us: Sequence[int],
        counts: Sequence[int],
        waited: Sequence[int],
    ) -> tuple[bytes, bytes]:
        """The attributes of the phases and of the vector of one step, as ASCII.

        Args:
            start_us: Of each phase.
            duration_us: Of each phase.
            arrival_us: Of each collective.
            counts: At the step's boundary; of each group, then of each channel.
            waited: Duration + 1 of each collective, 0 where it is not known; empty where none is.

        Cost:
            Background thread. 5 µs with 20 collectives.
        """
        phases = self._phase_head + pack_differences(start_us) + pack(duration_us)
        first, *constant = self._constant
        parts = [first]
        for count, after in zip(counts, constant, strict=True):
            parts += (any_varint(count), after)
        parts += (pack_differences(arrival_us), pack(waited) if waited else self._unknown)
        return (
            binascii.b2a_base64(phases, newline=False),
            binascii.b2a_base64(b"".join(parts), newline=False),
        )


def _get_packed(attributes: Mapping[str, AttributeValue], name: str) -> NDArray[np.uint64]:
    data = get_packed(attributes, name)
    try:
        values = decode_uvarints(data)
    except ValueError as error:
        msg = f"{name} is damaged: {error}"
        raise ValueError(msg) from error
    if values.size < 2 or int(values[0]) != VERSION:
        version = int(values[0]) if values.size else "none"
        msg = f"{name} has layout version {version}; this reader knows {VERSION}"
        raise ValueError(msg)
    return values


class _Columns:
    """Takes columns off a stream of integers, and refuses to run past its end."""

    def __init__(self, values: NDArray[np.uint64]) -> None:
        self._values = values
        self._at = 1  # the version has been checked

    def one(self) -> int:
        return int(self.take(1)[0])

    def kind(self) -> int:
        value = self.one()
        if value not in {_VECTOR, _FOLDED}:
            msg = f"packed digest is of kind {value}; this reader knows {_VECTOR} and {_FOLDED}"
            raise ValueError(msg)
        return value

    def indices(self, count: int, size: int, what: str) -> NDArray[np.int64]:
        part = self.take(count)
        if count and int(part.max()) >= size:
            msg = f"packed digest names a {what} that is not there"
            raise ValueError(msg)
        return part.astype(np.int64)

    def end(self) -> None:
        if self._at != self._values.size:
            msg = "packed digest goes on after its end"
            raise ValueError(msg)

    def take(self, count: int) -> NDArray[np.uint64]:
        part = self._values[self._at : self._at + count]
        if part.size != count:
            msg = "packed digest is cut short"
            raise ValueError(msg)
        self._at += count
        return part

    def signed(self, count: int) -> NDArray[np.int64]:
        return self.take(count).astype(np.int64)

    def running(self, count: int) -> NDArray[np.int64]:
        return np.cumsum(unzigzag(self.take(count)))


def _read_phases(values: NDArray[np.uint64], extra_names: tuple[str, ...]) -> PhaseColumns:
    columns = _Columns(values)
    folded = columns.kind() == _FOLDED
    n = columns.one()
    name = columns.indices(n, len(PHASES) + len(extra_names), "phase")
    start_us, duration_us = columns.running(n), columns.signed(n)
    columns.end()
    return PhaseColumns(
        name=name,
        start_us=start_us,
        duration_us=duration_us,
        names=PHASES + extra_names,
        folded=folded,
    )


def _read_sync(values: NDArray[np.uint64]) -> SyncColumns:
    columns = _Columns(values)
    folded = columns.kind() == _FOLDED
    groups = columns.one()
    table = columns.take(2 * groups).reshape(groups, 2)
    n_channels = columns.one()
    channels = columns.signed(4 * n_channels).reshape(n_channels, 4)
    n_signatures = columns.one()
    signatures = columns.signed(5 * n_signatures).reshape(n_signatures, 5)
    for group_column in (channels[:, 0], signatures[:, 0]):
        if bool(((group_column < 0) | (group_column >= groups)).any()):
            msg = "packed digest names a group that is not there"
            raise ValueError(msg)
    n = columns.one()
    rows = signatures[columns.indices(n, n_signatures, "signature")]
    arrival_us = columns.running(n)
    count = columns.signed(n) if folded else None
    last_arrival_us = columns.signed(n) + arrival_us if folded else None
    duration_us = columns.signed(n) - 1
    min_duration_us = columns.signed(n) - 1 if folded else None
    columns.end()
    # The lists of names only grow: what a newer writer added is "other" or unknown to this reader.
    op, phase = rows[:, 1], rows[:, 4] - 1
    return SyncColumns(
        group_keys=table[:, 0].copy(),
        start_counts=table[:, 1].astype(np.int64),
        channels=channels,
        group=rows[:, 0],
        op=np.where((op >= 0) & (op < len(OPS)), op, 0),
        payload_bytes=rows[:, 2],
        peer=rows[:, 3] - 1,
        phase=np.where((phase >= -1) & (phase < len(PHASES)), phase, -1),
        arrival_us=arrival_us,
        duration_us=duration_us,
        count=count,
        last_arrival_us=last_arrival_us,
        min_duration_us=min_duration_us,
    )
