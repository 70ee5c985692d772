"""What the collectives of a run say: how long each transfers, who comes last, who waits how long.

Collectives are told by (group, own count), so no clock is needed: in one instance all members end
together, so that the member which waited least came last, and its duration is the transfer.

A *lane* is the n-th collective on one group in a step (or the n-th operation between two ranks); a
training loop has the same lanes in every step.

Shape legend: A = all steps, L = lanes, R = ranks, C = operations of one step (rows).
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.moments import Moments, MomentsBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Singles = NDArray[np.float32]
    Ints = NDArray[np.int64]

_PER_STEP: Final = 256
"""Lanes of one group in a step; what a step has beyond is not looked at."""
COLUMNS: Final = (
    "ordinal",
    "rank",
    "group",
    "op",
    "seq",
    "peer",
    "phase",
    "payload_bytes",
    "arrival_s",
    "duration_s",
)
"""Of the collectives table, all that is read here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Every collective of a run, by lane. NaN where no member's end is known."""

    group_L: Ints
    """Index into the run's groups; -1 where the group is not described."""
    nth_L: Ints
    op_L: tuple[str, ...]
    phase_L: tuple[str | None, ...]
    payload_bytes_L: Ints
    source_L: Ints
    """Point-to-point: the sender's rank index; else -1."""
    target_L: Ints
    transfer_AL: Singles
    """Seconds from the last arrival to the end."""
    longest_AL: Singles
    """Seconds that the first to arrive was in it."""
    last_AL: NDArray[np.int32]
    """Rank index of who came last; -1 unknown."""
    members_AL: NDArray[np.int32]
    """Members whose duration is known."""
    wait_AR: Floats
    """Seconds that each rank spent in collectives beyond their transfers."""
    transfer_AR: Floats
    """Seconds of transfers that each rank took part in."""
    known_AR: NDArray[np.bool_]
    """Whether the duration of each of a rank's operations in a step is known."""
    moments: Moments
    """When each rank came to each lane, for a replay."""

    @property
    def lanes(self) -> int:
        """How many there are."""
        return len(self.op_L)


@dataclass(slots=True)
class _Step:
    transfer: Singles
    longest: Singles
    last: NDArray[np.int32]
    members: NDArray[np.int32]
    wait: Floats
    """By rank number."""
    moved: Floats
    open: Ints


@dataclass(slots=True, kw_only=True)
class _Layout:
    """Who issued what in a step, and so on which lanes: a training loop does the same in the next.

    Rows are compared, not looked up, and put in the order of their lanes by one gather: what belongs
    together then lies together.
    """

    given: dict[str, NDArray[np.generic]]
    """Columns that lanes depend on, as they came."""
    numbered_C: NDArray[np.bool_]
    """Rows with a ``seq``."""
    first_C: Ints
    """Row of the first operation on the same group, or pair; the row itself where it has no lane."""
    nth_C: Ints
    """How many operations after that one."""
    rank: Ints
    """Of the rows that have a lane."""
    lane: Ints
    use_C: NDArray[np.bool_] | None
    """Which rows have a lane; None for all."""
    order: Ints = field(init=False)
    """Rows that have a lane: lanes of one size together, there the first row of each lane, then the
    second of each, …: so lanes are reduced side by side, and few have many rows."""
    ordered_rank: Ints = field(init=False)
    ordered_lane: Ints = field(init=False)
    sizes: list[tuple[slice, Ints, int]] = field(init=False)
    """Part of ``order``, its lanes, and the rows of each."""
    open: Ints = field(init=False)
    """Rows without a lane, by rank number."""

    def __post_init__(self) -> None:
        """Work out the order of lanes."""
        by_lane = np.argsort(self.lane, kind="stable")
        starts = np.flatnonzero(np.diff(self.lane[by_lane], prepend=-1))
        counts = np.diff(np.append(starts, by_lane.size))
        parts, self.sizes = [by_lane[:0]], []
        begin = 0
        for count in np.unique(counts).tolist():
            mine = by_lane[starts[counts == count] + np.arange(count)[:, None]]
            parts.append(mine.reshape(-1))
            where = slice(begin, begin + mine.size)
            self.sizes.append((where, self.lane[mine[0]], count))
            begin += mine.size
        self.order = np.concatenate(parts)
        self.ordered_rank, self.ordered_lane = self.rank[self.order], self.lane[self.order]
        given = self.given["rank"].astype(np.int64)
        ranks = int(given.max(initial=-1)) + 1
        left_out = given[:0] if self.use_C is None else given[~self.use_C]
        self.open = np.bincount(left_out, minlength=ranks)

    def holds(self, rows: dict[str, NDArray[np.generic]]) -> bool:
        """Whether another step's rows have the same lanes."""
        seq = rows["seq"].astype(np.int64, copy=False)
        return (
            seq.size == self.nth_C.size
            and all(np.array_equal(rows[name], column) for name, column in self.given.items())
            and np.array_equal(seq - seq[self.first_C], self.nth_C)
            and np.array_equal(seq >= 0, self.numbered_C)
        )


@dataclass(slots=True)
class OperationsBuilder:
    """Takes collectives step by step and keeps what ``Operations`` holds."""

    _group_keys: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    _lane_of: dict[str, Ints] = field(default_factory=dict)
    _edges: dict[int, Ints] = field(default_factory=dict)
    """Distance (target less source) → number of the pair, by source; -1 for none."""
    _edge_count: int = 0
    _codes: dict[str, dict[str | None, int]] = field(
        default_factory=lambda: {"op": {}, "phase": {}}
    )
    """Names of operations, and of phases, as numbers."""
    _about: list[tuple[int, int, str, str | None, int, int, int]] = field(default_factory=list)
    _others: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(group key, nth, op) → lane, where the nth operation of a group is not always the same: the first
    step of a job has what sets it up as well."""
    _layout: _Layout | None = None
    """Of the last step."""
    _steps: dict[int, _Step] = field(default_factory=dict)
    _moments: MomentsBuilder = field(default_factory=MomentsBuilder)

    def add(self, collectives: pa.Table, groups: pa.Table) -> None:
        """Take the operations of some whole steps.

        Args:
            collectives: Sorted by ordinal; folded rows (without ``seq``) are passed over.
            groups: All groups known so far.
        """
        keys = np.unique(groups["group"].to_numpy())
        if keys.size != self._group_keys.size:
            self._adopt(keys)
        for ordinal, step in self._by_step(collectives):
            self._steps[ordinal] = self._reduce(step, ordinal)

    def mark(self) -> tuple[dict[int, _Step], MomentsBuilder]:
        """What there is now, for ``rewind``."""
        return dict(self._steps), self._moments.copy()

    def rewind(self, mark: tuple[dict[int, _Step], MomentsBuilder]) -> None:
        """Let go of what was added since; lanes that were met stay known."""
        self._steps, self._moments = mark

    def forget(self, first: int, after: int) -> None:
        """Let go of the steps from the first to before the last."""
        self._steps = {o: step for o, step in self._steps.items() if not first <= o < after}
        self._moments.forget(first, after)

    def _adopt(self, keys: NDArray[np.uint64]) -> None:
        """More groups are known now: lanes that exist keep their numbers."""
        self._layout = None
        before, table = self._group_keys, self._lane_of.get("group")
        moved = np.full(keys.size * _PER_STEP, -1, dtype=np.int64)
        if table is not None:
            place = np.searchsorted(keys, before)
            moved.reshape(-1, _PER_STEP)[place] = table.reshape(-1, _PER_STEP)
            self._about = [
                (int(place[about[0]]) if about[0] >= 0 else -1, *about[1:]) for about in self._about
            ]
        self._group_keys, self._lane_of["group"] = keys, moved

    def _reduce(self, rows: dict[str, NDArray[np.generic]], ordinal: int) -> _Step:
        layout = self._layout
        if layout is None or not layout.holds(rows):
            layout = self._layout = self._lanes(rows)
        duration, arrival = (
            rows[name].astype(np.float64, copy=False) for name in ("duration_s", "arrival_s")
        )
        if layout.use_C is not None:
            duration, arrival = duration[layout.use_C], arrival[layout.use_C]
        self._moments.add(ordinal, layout.rank, layout.lane, arrival, duration)
        count, ranks = len(self._about), layout.open.size
        transfer = np.full(count, np.nan, dtype=np.float32)
        longest = transfer.copy()
        last = np.full(count, -1, dtype=np.int32)
        members = np.zeros(count, dtype=np.int32)
        took = duration[layout.order]
        moved = np.empty(took.size)
        unknown = np.isnan(took)
        gaps = bool(unknown.any())
        for where, lanes, size in layout.sizes:
            part = took[where].reshape(size, -1)
            shortest = np.fmin.reduce(part, axis=0)
            transfer[lanes] = shortest
            longest[lanes] = np.fmax.reduce(part, axis=0)
            moved[where].reshape(size, -1)[:] = shortest
            members[lanes] = size
            if gaps:
                members[lanes] -= np.count_nonzero(unknown[where].reshape(size, -1), axis=0)
        # Of several that waited least, the last row counts.
        least = np.flatnonzero(took <= moved)
        last[layout.ordered_lane[least]] = layout.ordered_rank[least]
        waited = took - moved
        missing, rank = layout.open, layout.ordered_rank
        if gaps:
            moved[unknown] = waited[unknown] = 0.0
            missing = missing + np.bincount(rank[unknown], minlength=ranks)
        return _Step(
            transfer=transfer,
            longest=longest,
            last=last,
            members=members,
            wait=np.bincount(rank, weights=waited, minlength=ranks).astype(np.float64, copy=False),
            moved=np.bincount(rank, weights=moved, minlength=ranks).astype(np.float64, copy=False),
            open=missing,
        )

    def _lanes(self, rows: dict[str, NDArray[np.generic]]) -> _Layout:
        """Find the lane of each row."""
        seq, peer = rows["seq"].astype(np.int64), rows["peer"].astype(np.int64)
        lane = np.full(seq.size, -1, dtype=np.int64)
        first_C = np.arange(seq.size)
        direct = peer >= 0
        place = np.searchsorted(self._group_keys, rows["group"])
        place = np.minimum(place, max(self._group_keys.size - 1, 0))
        described = np.zeros(seq.size, dtype=bool)
        if self._group_keys.size:
            described = self._group_keys[place] == rows["group"]
        collective = described & ~direct & (seq >= 0)
        self._number(rows, (lane, first_C), collective, "group", place)
        pairs = direct & (seq >= 0)
        if pairs.any():
            self._number(rows, (lane, first_C), pairs, "pair", self._edge(rows, pairs, peer))
        use: NDArray[np.bool_] | None = lane >= 0
        rank = rows["rank"].astype(np.int64)
        if use is not None and use.all():
            use = None
        return _Layout(
            # Copies: a view would keep the whole block that the step came in.
            given={name: rows[name].copy() for name in ("rank", "group", "op", "peer")},
            numbered_C=seq >= 0,
            first_C=first_C,
            nth_C=seq - seq[first_C],
            rank=rank if use is None else rank[use],
            lane=lane if use is None else lane[use],
            use_C=use,
        )

    def _edge(
        self, rows: dict[str, NDArray[np.generic]], pairs: NDArray[np.bool_], peer: Ints
    ) -> Ints:
        """Number of each row's (source, target) pair [C]; -1 elsewhere.

        Partners lie a few fixed distances apart (a stage's width), so pairs are looked up by
        distance and source.
        """
        rank = rows["rank"].astype(np.int64)
        sends = rows["op"] == self._codes["op"].get("send", -1)
        source, target = np.where(sends, rank, peer), np.where(sends, peer, rank)
        distance = np.where(pairs, target - source, 0)
        edge = np.full(peer.size, -1, dtype=np.int64)
        left = pairs.copy()
        while left.any():
            apart = int(distance[np.argmax(left)])
            at = np.flatnonzero(left & (distance == apart))
            left[at] = False
            table = self._edges.get(apart, np.empty(0, dtype=np.int64))
            least = int(source[at].max()) + 1
            if least > table.size:
                table = np.append(table, np.full(least - table.size, -1, dtype=np.int64))
            fresh = np.unique(source[at][table[source[at]] < 0])
            table[fresh] = self._edge_count + np.arange(fresh.size)
            self._edge_count += fresh.size
            self._edges[apart] = table
            edge[at] = table[source[at]]
        lanes = self._lane_of.get("pair", np.empty(0, dtype=np.int64))
        more = self._edge_count * _PER_STEP - lanes.size
        if more > 0:
            lanes = np.append(lanes, np.full(more, -1, dtype=np.int64))
        self._lane_of["pair"] = lanes
        return edge

    def _number(
        self,
        rows: dict[str, NDArray[np.generic]],
        filled: tuple[Ints, Ints],
        chosen: NDArray[np.bool_],
        kind: str,
        place: Ints,
    ) -> None:
        """Fill in the lanes of some rows: those of one group, or pair, count from the step's first.

        Which row that is, is filled in too.
        """
        at = np.flatnonzero(chosen)
        if not at.size:
            return
        lane, first_C = filled
        table, seq = self._lane_of[kind], rows["seq"]
        first = np.full(table.size // _PER_STEP, np.iinfo(np.int64).max)
        np.minimum.at(first, place[at], seq[at])
        nth = seq[at] - first[place[at]]
        first_row = np.empty(first.size, dtype=np.int64)
        first_row[place[at[nth == 0]]] = at[nth == 0]
        first_C[at] = first_row[place[at]]
        fits = nth < _PER_STEP
        at, nth = at[fits], nth[fits]
        code = place[at] * _PER_STEP + nth
        fresh = table[code] < 0
        if fresh.any():
            codes, which = np.unique(code[fresh], return_index=True)
            table[codes] = len(self._about) + np.arange(codes.size)
            self._register(rows, kind, at[fresh][which], place, nth[fresh][which])
        lane[at] = table[code]
        if kind == "group":
            self._tell_apart(rows, lane, at, place, nth)

    def _tell_apart(
        self, rows: dict[str, NDArray[np.generic]], lane: Ints, at: Ints, place: Ints, nth: Ints
    ) -> None:
        """Give rows whose lane is of another operation than theirs a lane of their own."""
        codes = self._codes["op"]  # "send", which names pairs, need not be among them
        op_L = np.array([codes.get(about[2], -1) for about in self._about], dtype=np.int64)
        odd = op_L[lane[at]] != rows["op"][at]
        if not odd.any():
            return
        at, nth = at[odd], nth[odd]
        op = rows["op"][at].astype(np.int64)
        alike = (place[at] * _PER_STEP + nth) * len(self._codes["op"]) + op
        _, which, kind_C = np.unique(alike, return_index=True, return_inverse=True)
        lanes = []
        for row, n in zip(at[which].tolist(), nth[which].tolist(), strict=True):
            key = (int(self._group_keys[place[row]]), n, int(rows["op"][row]))
            if key not in self._others:
                self._others[key] = len(self._about)
                self._register(rows, "group", np.array([row]), place, np.array([n]))
            lanes.append(self._others[key])
        lane[at] = np.array(lanes)[kind_C]

    def _register(
        self, rows: dict[str, NDArray[np.generic]], kind: str, new: Ints, place: Ints, nth: Ints
    ) -> None:
        """Say what new lanes are, by one row of each."""
        ops, phases = list(self._codes["op"]), list(self._codes["phase"])
        columns = [rows[name][new].tolist() for name in ("op", "phase", "payload_bytes")]
        if kind == "group":
            for group, n, op, phase, payload in zip(
                place[new].tolist(), nth.tolist(), *columns, strict=True
            ):
                self._about.append((group, n, str(ops[op]), phases[phase], payload, -1, -1))
            return
        ends = [rows[name][new].tolist() for name in ("rank", "peer")]
        for n, op, phase, payload, rank, peer in zip(nth.tolist(), *columns, *ends, strict=True):
            source, target = (rank, peer) if ops[op] == "send" else (peer, rank)
            self._about.append((-1, n, "send", phases[phase], payload, source, target))

    def build(self, ordinals_A: Ints, ranks_R: Ints) -> Operations:
        """Lay out what was taken, for these steps and ranks."""
        a, lanes, r = ordinals_A.size, len(self._about), ranks_R.size
        transfer = np.full((a, lanes), np.nan, dtype=np.float32)
        longest = np.full((a, lanes), np.nan, dtype=np.float32)
        last = np.full((a, lanes), -1, dtype=np.int32)
        members = np.zeros((a, lanes), dtype=np.int32)
        wait, moved = np.zeros((a, r)), np.zeros((a, r))
        known = np.zeros((a, r), dtype=bool)
        # Whoever came last is among the ranks of its step.
        most = max((step.open.size - 1 for step in self._steps.values()), default=-1)
        # One more than there are ranks: -1, nobody, reads the last one.
        place_of = np.full(max(most, int(ranks_R.max(initial=-1))) + 2, -1, dtype=np.int32)
        place_of[ranks_R] = np.arange(r)
        for index, ordinal in enumerate(ordinals_A.tolist()):
            step = self._steps.get(ordinal)
            if step is None:
                continue
            had = step.transfer.size
            transfer[index, :had], longest[index, :had] = step.transfer, step.longest
            last[index, :had] = place_of[step.last]
            members[index, :had] = step.members
            here = ranks_R < step.wait.size
            wait[index, here] = step.wait[ranks_R[here]]
            moved[index, here] = step.moved[ranks_R[here]]
            known[index, here] = step.open[ranks_R[here]] == 0
        ends = [np.array([about[k] for about in self._about], dtype=np.int64) for k in (5, 6)]
        source, target = (np.where(x >= 0, np.searchsorted(ranks_R, x), -1) for x in ends)
        return Operations(
            group_L=np.array([about[0] for about in self._about], dtype=np.int64),
            nth_L=np.array([about[1] for about in self._about], dtype=np.int64),
            op_L=tuple(about[2] for about in self._about),
            phase_L=tuple(about[3] for about in self._about),
            payload_bytes_L=np.array([about[4] for about in self._about], dtype=np.int64),
            source_L=source,
            target_L=target,
            transfer_AL=transfer,
            longest_AL=longest,
            last_AL=last,
            members_AL=members,
            wait_AR=wait,
            transfer_AR=moved,
            known_AR=known,
            moments=self._moments.build(),
        )

    def _by_step(
        self, collectives: pa.Table
    ) -> Iterator[tuple[int, dict[str, NDArray[np.generic]]]]:
        """Ordinal and columns of each step of a table that is sorted by ordinal."""
        if not collectives.num_rows:
            return
        columns = {}
        for name in COLUMNS:
            column = collectives[name]
            if name in ("op", "phase"):
                columns[name] = _coded(column, self._codes[name])
            elif name in ("seq", "peer"):
                columns[name] = (column.fill_null(-1) if column.null_count else column).to_numpy()
            else:
                columns[name] = column.to_numpy()
        ordinal = columns["ordinal"]
        cuts = np.flatnonzero(ordinal[1:] != ordinal[:-1]) + 1
        if (ordinal[cuts] < ordinal[cuts - 1]).any():
            order = np.argsort(ordinal, kind="stable")
            columns = {name: values[order] for name, values in columns.items()}
            ordinal = columns["ordinal"]
            cuts = np.flatnonzero(ordinal[1:] != ordinal[:-1]) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), ordinal.size], strict=True):
            yield int(ordinal[begin]), {name: values[begin:end] for name, values in columns.items()}


def _coded(column: pa.ChunkedArray, codes: dict[str | None, int]) -> NDArray[np.int32]:
    """Strings as numbers, which go on from those that there are."""
    parts = []
    for chunk in column.chunks:
        encoded = chunk if hasattr(chunk, "dictionary") else chunk.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        indices = encoded.indices
        if indices.null_count:
            indices = indices.fill_null(len(names))
            names.append(None)
        numbers = np.array([codes.setdefault(name, len(codes)) for name in names], dtype=np.int32)
        given = indices.to_numpy(zero_copy_only=False)
        # Mostly what the file calls a name is what it is called here.
        same = given.dtype == np.int32 and np.array_equal(numbers, np.arange(numbers.size))
        parts.append(given if same else numbers[given])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
