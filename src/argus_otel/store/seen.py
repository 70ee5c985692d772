"""Which (step, rank) pairs have been stored, at a few bytes a rank however long the run."""

from __future__ import annotations

from bisect import bisect_right


class SeenSteps:
    """A set of (ordinal, rank). Ordinals of a rank come nearly in order, so runs of them merge."""

    def __init__(self) -> None:
        self._intervals: dict[int, list[list[int]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, step: tuple[int, int]) -> bool:
        ordinal, rank = step
        intervals = self._intervals.get(rank, [])
        place = bisect_right(intervals, [ordinal + 1]) - 1
        return place >= 0 and intervals[place][0] <= ordinal < intervals[place][1]

    def add(self, ordinal: int, rank: int) -> None:
        """Note one step of one rank."""
        intervals = self._intervals.setdefault(rank, [])
        # [o + 1] sorts before [o + 1, end]: what starts at or before the ordinal is on the left.
        place = bisect_right(intervals, [ordinal + 1])
        before = intervals[place - 1] if place else None
        after = intervals[place] if place < len(intervals) else None
        if before is not None and before[0] <= ordinal < before[1]:
            return
        self._size += 1
        joins_before = before is not None and before[1] == ordinal
        joins_after = after is not None and after[0] == ordinal + 1
        if joins_before and joins_after and before is not None and after is not None:
            before[1] = after[1]
            del intervals[place]
        elif joins_before and before is not None:
            before[1] = ordinal + 1
        elif joins_after and after is not None:
            after[0] = ordinal
        else:
            intervals.insert(place, [ordinal, ordinal + 1])
