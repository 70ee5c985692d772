"""One step count: do ranks mean the same step by the same ordinal?

Each digest says how many collectives its rank had issued on each group when the step began. All
members of a group issue the same collectives, so at one ordinal these counts are equal, or the
ranks do not count the same steps (an optimizer called once more, a framework's warm-up step).

Shape legend: S = rows of steps, B = (step, group) pairs, K = (group, ordinal) places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.tables.schemas import RunTables

_MIN_CONFIRMED: Final = 2
"""Steps that a shift must explain: one equal count may be chance."""
_TABLE_PER_ROW: Final = 4
"""A table over all groups and steps is looked up, not searched, if it is no larger than so many times
the rows; where ordinals lie far apart it would be."""
_ROWS_ASKED: Final = 32
_SHIFTS_TRIED: Final = 8
"""Bounds the work where thousands of ranks are off; a shift that holds explains most rows."""


def with_one_step_count(tables: RunTables) -> RunTables:
    """Fill ``aligned``, after shifting ranks whose count is off by a constant.

    ``aligned`` is true where every group's count agrees with the group's other members, false
    where one does not, and null where nothing could be compared (one rank, no collectives, a
    truncated step).
    Steps that a rank lacks change nothing for the others: each is compared with those present.
    """
    if tables.steps.num_rows == 0:
        return tables
    rank_S = tables.steps["rank"].to_numpy()
    ordinal_S = tables.steps["ordinal"].to_numpy()
    counts = _boundary_counts(tables.steps, ordinal_S, rank_S)
    aligned_S, known_S = _compare(counts, ordinal_S, rank_S)
    shifts = _find_shifts(counts, rank_S[~aligned_S & known_S])
    if shifts:
        tables = _shift(tables, shifts)
        rank_S = tables.steps["rank"].to_numpy()
        ordinal_S = tables.steps["ordinal"].to_numpy()
        counts = _boundary_counts(tables.steps, ordinal_S, rank_S)
        aligned_S, known_S = _compare(counts, ordinal_S, rank_S)
    place = tables.steps.schema.get_field_index("aligned")
    column = pa.array(aligned_S, mask=~known_S)
    steps = tables.steps.set_column(place, tables.steps.schema.field(place), column)
    return replace(tables, steps=steps)


@dataclass(slots=True, kw_only=True)
class _Counts:
    """Counts at step boundaries, shape [B], and at each (group, ordinal) what most say, [K]."""

    step: NDArray[np.int64]
    group: NDArray[np.int64]
    ordinal: NDArray[np.int64]
    rank: NDArray[np.int64]
    count: NDArray[np.int64]
    place_group: NDArray[np.int64]
    place_ordinal: NDArray[np.int64]
    place_count: NDArray[np.int64]
    place_ranks: NDArray[np.int64]
    """How many ranks gave a count."""
    place_key: NDArray[np.int64]
    """One sorted number for group and ordinal."""
    place_of: NDArray[np.int64] | None
    """Key → place, -1 for none; None where there are too many keys for a table."""
    low: int
    width: int
    """Of the ordinals: the lowest, and how many there may be."""

    def references(
        self, group: NDArray[np.int64], ordinal: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The group's count at an ordinal, and whether at least two ranks gave one."""
        inside = (ordinal >= self.low) & (ordinal < self.low + self.width)
        wanted = group * self.width + ordinal - self.low
        if self.place_of is not None:
            place = self.place_of[np.where(inside, wanted, 0)]
            return self.place_count[place], inside & (place >= 0) & (self.place_ranks[place] > 1)
        place = np.minimum(np.searchsorted(self.place_key, wanted), self.place_key.size - 1)
        known = inside & (self.place_key[place] == wanted) & (self.place_ranks[place] > 1)
        return self.place_count[place], known


def _boundary_counts(
    steps: pa.Table, ordinal_S: NDArray[np.int64], rank_S: NDArray[np.int64]
) -> _Counts:
    lists = steps["boundary_counts"].combine_chunks()
    step_B = pc.list_parent_indices(lists).to_numpy()
    pairs = lists.flatten()
    # Where the buffer overflowed, the count is that of the first operation which was kept.
    whole_B = ~steps["truncated"].to_numpy()[step_B]
    step_B = step_B[whole_B]
    group_B = _numbered(pairs.field("group"))[whole_B]
    count_B = pairs.field("count").to_numpy()[whole_B]
    ordinal_B, rank_B = ordinal_S[step_B], rank_S[step_B]
    low = int(ordinal_B.min()) if step_B.size else 0
    width = int(ordinal_B.max()) - low + 1 if step_B.size else 1
    places = _places(group_B, ordinal_B - low, count_B, rank_B, width)
    key = places.group * width + places.ordinal
    most = (int(group_B.max(initial=-1)) + 1) * width
    place_of = None
    if most <= _TABLE_PER_ROW * step_B.size:
        place_of = np.full(most, -1, dtype=np.int64)
        place_of[key] = np.arange(key.size)
    return _Counts(
        step=step_B,
        group=group_B,
        ordinal=ordinal_B,
        rank=rank_B,
        count=count_B,
        place_group=places.group,
        place_ordinal=places.ordinal + low,
        place_count=places.said,
        place_ranks=places.ranks,
        place_key=key,
        place_of=place_of,
        low=low,
        width=width,
    )


def _numbered(groups: pa.Array) -> NDArray[np.int64]:
    """Each group's number among the ascending ones."""
    encoded = groups.dictionary_encode()
    ascending = np.argsort(encoded.dictionary.to_numpy())
    number = np.empty(ascending.size, np.int64)
    number[ascending] = np.arange(ascending.size)
    numbered: NDArray[np.int64] = number[encoded.indices.to_numpy()]
    return numbered


class _Places(NamedTuple):
    """What most ranks say at each (group, ordinal), ascending, [K]."""

    group: NDArray[np.int64]
    ordinal: NDArray[np.int64]
    said: NDArray[np.int64]
    ranks: NDArray[np.int64]


def _places(
    group_B: NDArray[np.int64],
    ordinal_B: NDArray[np.int64],
    count_B: NDArray[np.int64],
    rank_B: NDArray[np.int64],
    width: int,
) -> _Places:
    """Where all members agree, as they do in all but a few runs, nothing is sorted."""
    most = (int(group_B.max(initial=-1)) + 1) * width
    if most <= _TABLE_PER_ROW * group_B.size:
        key_B = group_B * width + ordinal_B
        said = np.zeros(most, dtype=np.int64)
        said[key_B] = count_B
        if (said[key_B] == count_B).all():
            ranks = np.bincount(key_B, minlength=most)
            key = np.flatnonzero(ranks)
            return _Places(key // width, key % width, said[key], ranks[key])
    order = np.lexsort((rank_B, count_B, ordinal_B, group_B))
    group, ordinal, count = group_B[order], ordinal_B[order], count_B[order]
    same_place = (group[1:] == group[:-1]) & (ordinal[1:] == ordinal[:-1])
    begins = np.flatnonzero(np.r_[True, ~(same_place & (count[1:] == count[:-1]))][: order.size])
    votes = np.diff(np.r_[begins, order.size])
    # Most votes win; in a draw the lowest rank's count does. Which one it is does not matter, for
    # a shift renames steps: it must only be the same one at all ordinals.
    lowest = rank_B[order][begins]
    best = np.lexsort((lowest, -votes, ordinal[begins], group[begins]))
    at = begins[best]
    first = np.r_[True, (group[at][1:] != group[at][:-1]) | (ordinal[at][1:] != ordinal[at][:-1])]
    first = np.flatnonzero(first[: at.size])
    ranks = np.add.reduceat(votes[best], first) if first.size else np.empty(0, np.int64)
    return _Places(group[at][first], ordinal[at][first], count[at][first], ranks)


def _compare(
    counts: _Counts, ordinal_S: NDArray[np.int64], rank_S: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each step agrees with its peers' (S), and whether that can be said (S)."""
    agrees_S = np.ones(ordinal_S.size, bool)
    known_S = np.zeros(ordinal_S.size, bool)
    if counts.count.size == 0:
        return agrees_S, known_S
    reference_B, compared_B = counts.references(counts.group, counts.ordinal)
    differs_B = compared_B & (reference_B != counts.count)
    agrees_S[counts.step[differs_B]] = False
    # A group that was used once, at the start, agrees at any ordinal and proves nothing: a rank's
    # agreement counts if some group's count moves over its steps.
    moving = np.zeros(int(counts.group.max()) + 1, bool)
    changed = np.diff(counts.place_count) != 0
    moving[counts.place_group[1:][changed & (np.diff(counts.place_group) == 0)]] = True
    proving = np.zeros(int(rank_S.max()) + 1, bool)
    proving[counts.rank[compared_B & moving[counts.group]]] = True
    compared_S = np.zeros(ordinal_S.size, bool)
    compared_S[counts.step[compared_B]] = True
    known_S[:] = compared_S & (proving[rank_S] | ~agrees_S)
    return agrees_S, known_S


def _find_shifts(counts: _Counts, suspects: NDArray[np.int64]) -> dict[int, int]:
    """By rank: what to add to its ordinals so that every count that can be compared agrees."""
    shifts = {}
    by_rank = np.argsort(counts.rank, kind="stable")
    ranks = counts.rank[by_rank]
    for rank in np.unique(suspects).tolist():
        mine = by_rank[slice(*np.searchsorted(ranks, [rank, rank + 1]))]
        group, count = counts.group[mine], counts.count[mine]
        for shift in _candidates(counts, mine):
            ordinal = counts.ordinal[mine] + shift
            reference, known = counts.references(group, ordinal)
            confirmed = np.unique(ordinal[known]).size
            if (reference[known] == count[known]).all() and confirmed >= _MIN_CONFIRMED:
                shifts[rank] = shift
                break
    return shifts


def _candidates(counts: _Counts, mine: NDArray[np.int64]) -> list[int]:
    """Shifts that explain some of a rank's counts, the one that explains most first."""
    votes: dict[int, int] = {}
    # Ends, not a stride: a stride might meet one and the same group of every step.
    asked = np.r_[mine[: _ROWS_ASKED // 2], mine[_ROWS_ASKED // 2 :][-_ROWS_ASKED // 2 :]]
    for row in asked.tolist():
        group = counts.group[row]
        low, high = np.searchsorted(counts.place_group, [group, group + 1])
        at = low + np.flatnonzero(counts.place_count[low:high] == counts.count[row])
        for shift in (counts.place_ordinal[at] - counts.ordinal[row]).tolist():
            votes[shift] = votes.get(shift, 0) + 1
    votes.pop(0, None)
    return sorted(votes, key=lambda shift: (-votes[shift], abs(shift)))[:_SHIFTS_TRIED]


def _shift(tables: RunTables, shifts: dict[int, int]) -> RunTables:
    return replace(
        tables,
        steps=_shifted(tables.steps, shifts),
        collectives=_shifted(tables.collectives, shifts),
        events=_shifted(tables.events, shifts),
    )


def _shifted(rows: pa.Table, shifts: dict[int, int]) -> pa.Table:
    rank = rows["rank"].to_numpy()
    by_rank = np.zeros(max(int(rank.max(initial=0)), *shifts) + 1, np.int64)
    by_rank[list(shifts)] = list(shifts.values())
    ordinal = rows["ordinal"].to_numpy() + by_rank[rank]
    place = rows.schema.get_field_index("ordinal")
    rows = rows.set_column(place, rows.schema.field(place), pa.array(ordinal))
    return rows.sort_by([("ordinal", "ascending"), ("rank", "ascending")])  # stable
