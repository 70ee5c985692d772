"""What follows from the kinds of a step's collectives alone: the same in every step of most loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import TYPE_CHECKING, Final, TypeVar

from argus_otel.wire import events
from argus_otel.wire.codes import OPS, PHASES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_T = TypeVar("_T")

_SEND, _RECV = OPS.index("send"), OPS.index("recv")

_LARGE: Final = 1024
"""Collectives of a step of which few are remembered: ten thousand take a megabyte that is the
user's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operations:
    """Shared between steps: none of the lists is ever changed. Compared by identity."""

    groups: tuple[int, ...]
    """Groups in the order of their first use, as indices into the process's table."""
    group: list[int]
    """For each row, as an index into the process's table."""
    local_group: list[int]
    """For each row its place in ``groups``."""
    op: list[int]
    peer: list[int]
    is_async: list[bool]
    async_rows: list[int]
    kind: list[int]
    """For each row a number that tells (group, operation) apart, with room for the phase."""
    first_at: tuple[int, ...]
    """For each group its first collective's row; -1 where it has only point-to-point ones."""
    channels: tuple[tuple[int, int, int, int], ...]
    """Place in ``groups``, source, destination, first row."""


def operations(packed: tuple[int, ...], rank: int) -> Operations:
    """Unpack the operations of one step.

    Args:
        packed: Field ``a`` of each COLLECTIVE.
        rank: Whose they are, for the channels.
    """
    work_out = _large_operations if len(packed) > _LARGE else remembered_operations
    return work_out(packed, rank)


def folded(kinds: Operations, phase: tuple[int, ...]) -> list[tuple[int, int, int, Sequence[int]]]:
    """The rows of each (group, operation, phase), those with the most rows first.

    Args:
        kinds: Of one step.
        phase: Of each row.
    """
    work_out = _large_folds if len(phase) > _LARGE else _remembered_folds
    return work_out(kinds, phase)


def _operations(packed: tuple[int, ...], rank: int) -> Operations:
    # Few kinds make up many rows, so all but the last lines work on kinds, in order of first use.
    last = len(packed) - 1
    first_row = dict(zip(reversed(packed), range(last, -1, -1), strict=True))
    kinds = sorted(first_row, key=first_row.__getitem__)
    unpacked = {a: events.unpack_collective(a) for a in kinds}
    places: dict[int, int] = {}
    first_at: dict[int, int] = {}
    channels: dict[tuple[int, int, int], int] = {}
    for a in kinds:
        group, op, _, other = unpacked[a]
        place = places.setdefault(group, len(places))
        if op == _SEND or op == _RECV:
            if other < 0:
                continue  # received from whoever came first: no channel that both ends know
            ends = (rank, other) if op == _SEND else (other, rank)
            channels.setdefault((place, *ends), first_row[a])
        else:
            first_at.setdefault(place, first_row[a])
    is_async = _of_each(packed, {a: unpacked[a][2] for a in kinds})
    return Operations(
        groups=tuple(places),
        group=_of_each(packed, {a: unpacked[a][0] for a in kinds}),
        local_group=_of_each(packed, {a: places[unpacked[a][0]] for a in kinds}),
        op=_of_each(packed, {a: unpacked[a][1] for a in kinds}),
        peer=_of_each(packed, {a: unpacked[a][3] for a in kinds}),
        is_async=is_async,
        async_rows=[row for row, later in enumerate(is_async) if later],
        kind=_of_each(
            packed,
            {a: (unpacked[a][0] * len(OPS) + unpacked[a][1]) * (len(PHASES) + 1) for a in kinds},
        ),
        first_at=tuple(first_at.get(place, -1) for place in range(len(places))),
        channels=tuple((*channel, row) for channel, row in channels.items()),
    )


def _of_each(packed: tuple[int, ...], answers: Mapping[int, _T]) -> list[_T]:
    return list(map(answers.__getitem__, packed))


def _folded(kinds: Operations, phase: tuple[int, ...]) -> list[tuple[int, int, int, Sequence[int]]]:
    keys = list(map(add, kinds.kind, phase))  # they sort like (group, operation, phase)
    found: dict[int, list[int]] = {key: [] for key in set(keys)}
    for row, key in enumerate(keys):
        found[key].append(row)
    order = sorted(found, key=lambda key: (-len(found[key]), key))
    firsts = [(found[key][0], found[key]) for key in order]
    return [(kinds.group[first], kinds.op[first], phase[first], rows) for first, rows in firsts]


# A loop has a few kinds of steps.
remembered_operations = lru_cache(maxsize=16)(_operations)
_large_operations = lru_cache(maxsize=2)(_operations)
_remembered_folds = lru_cache(maxsize=16)(_folded)
_large_folds = lru_cache(maxsize=2)(_folded)
