"""When each rank came to each of its collectives, kept small: what a replay is built from.

Steps of a training loop have the same operations, so who takes part in what is kept once for all
steps that agree. Of a run too large for that, every second step is kept, or every fourth, …

Shape legend: C = operations of one step (a rank in a lane), ascending by rank and lane.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Singles = NDArray[np.float32]

MOST_KEPT: Final = 24_000_000
"""Operations kept at most, 8 bytes each: all of 100 steps of 4,096 ranks, every second step of
12,960 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who takes part in what, in a step."""

    rank_C: NDArray[np.int32]
    """Rank numbers."""
    lane_C: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Arrival and duration of each operation, by ordinal of the step."""

    layouts: tuple[Layout, ...] = ()
    layout_of: dict[int, int] = field(default_factory=dict)
    """Ordinal → index into ``layouts``; steps without are not kept."""
    arrival_s: dict[int, Singles] = field(default_factory=dict)
    """Ordinal → seconds since the rank's own start of the step [C]."""
    duration_s: dict[int, Singles] = field(default_factory=dict)
    """Ordinal → seconds until the rank is out of it [C]; NaN unknown."""

    def ordinals(self) -> Ints:
        """The steps that are kept, ascending."""
        return np.array(sorted(self.layout_of), dtype=np.int64)


def _same(one: Ints, other: Ints) -> bool:
    return one is other or np.array_equal(one, other)


@dataclass(slots=True)
class MomentsBuilder:
    """Takes steps one by one."""

    most_kept: int = MOST_KEPT
    _layouts: list[Layout] = field(default_factory=list)
    _layout_of: dict[int, int] = field(default_factory=dict)
    _arrival: dict[int, Singles] = field(default_factory=dict)
    _duration: dict[int, Singles] = field(default_factory=dict)
    _given: tuple[Ints, Ints, Ints] | None = None
    """Ranks and lanes of the last step as they came, and how they are put in order."""
    _every: int = 1
    _taken: int = 0
    _held: int = 0

    def add(
        self, ordinal: int, rank_C: Ints, lane_C: Ints, arrival_s_C: Floats, duration_s_C: Floats
    ) -> None:
        """Take one whole step, its operations in any order (the same in every step is cheapest)."""
        self._taken += 1
        if (self._taken - 1) % self._every:
            return
        given = self._given
        if given is None or not (_same(given[0], rank_C) and _same(given[1], lane_C)):
            given = (rank_C, lane_C, np.lexsort((lane_C, rank_C)))
            self._given = given
            self._adopt(given)
        order = given[2]
        self._layout_of[ordinal] = len(self._layouts) - 1
        self._arrival[ordinal] = arrival_s_C.astype(np.float32)[order]
        self._duration[ordinal] = duration_s_C.astype(np.float32)[order]
        self._held += order.size
        while self._held > self.most_kept and len(self._layout_of) > 1:
            self._thin_out()

    def _adopt(self, given: tuple[Ints, Ints, Ints]) -> None:
        rank, lane, order = given
        layout = Layout(
            rank_C=rank[order].astype(np.int32), lane_C=lane[order].astype(np.int32)
        )  # fmt: skip
        last = self._layouts[-1] if self._layouts else None
        same = last is not None and (
            np.array_equal(last.rank_C, layout.rank_C)
            and np.array_equal(last.lane_C, layout.lane_C)
        )
        if not same:
            self._layouts.append(layout)

    def _thin_out(self) -> None:
        self._every *= 2
        for ordinal in list(self._layout_of)[1::2]:
            self._held -= self._arrival[ordinal].size
            del self._layout_of[ordinal], self._arrival[ordinal], self._duration[ordinal]

    def copy(self) -> MomentsBuilder:
        """As it is now; what is added to the one is not in the other."""
        return replace(
            self,
            _layouts=list(self._layouts),
            _layout_of=dict(self._layout_of),
            _arrival=dict(self._arrival),
            _duration=dict(self._duration),
        )

    def forget(self, first: int, after: int) -> None:
        """Let go of the steps from the first to before the last."""
        for ordinal in [o for o in self._layout_of if first <= o < after]:
            self._held -= self._arrival[ordinal].size
            del self._layout_of[ordinal], self._arrival[ordinal], self._duration[ordinal]
        used = sorted(set(self._layout_of.values()))
        self._layout_of = {o: used.index(number) for o, number in self._layout_of.items()}
        self._layouts, self._given = [self._layouts[number] for number in used], None

    def build(self) -> Moments:
        """What was kept so far."""
        return Moments(
            layouts=tuple(self._layouts),
            layout_of=dict(self._layout_of),
            arrival_s=dict(self._arrival),
            duration_s=dict(self._duration),
        )
