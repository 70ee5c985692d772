"""A run as dense arrays: everything that detectors see, built from its tables block by block.

Shape legend: A = all steps that were seen, R = ranks, M = passes of one direction (chunk and
micro-batch), L = lanes of collectives (see ``operations``).

Inside this package a number that is not known is NaN; the tables outside have nulls.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from argus_otel.detect.operations import Operations, OperationsBuilder
from argus_otel.detect.peers import SAMPLED_STEPS, TOPOLOGY, Peers, find_peers
from argus_otel.tables.schemas import EXPERTS, GROUPS, KERNELS, RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from argus_otel.tables.schemas import RunTables

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]
    ReadRows = Callable[[str, tuple[int, int], Sequence[int] | None], pa.Table]
    """Table, steps (first, and the one after the last), ranks or all."""

COLUMNS: Final = (
    "step_s",
    "between_s",
    "busy_s",
    "cpu_s",
    "run_delay_s",
    "data_wait_s",
    "gc_s",
    "tokens",
    "samples",
    "sum_len2",
    "memory_bytes",
)
"""Columns of the steps table that detectors see."""
PASS_COLUMNS: Final = (
    "ordinal",
    "rank",
    "chunk",
    "micro_batch",
    "backward",
    "start_s",
    "duration_s",
)
"""Columns of the micro-batches table that detectors see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a step of a rank."""

    ordinal: int
    rank: int
    """Index of the rank, not its number."""
    kind: str
    name: str
    start_s: float
    duration_s: float
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group, its members as rank indices."""

    key: int
    description: str
    members: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Compute of each micro-batch through each chunk of a rank's stage; NaN where none."""

    duration_ARM2: NDArray[np.float32]
    """Forward, then backward."""
    start_ARM2: NDArray[np.float32]
    chunk_M: Ints
    micro_batch_M: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one role."""

    run: str
    world_size: int
    ordinals_A: Ints
    ranks_R: Ints
    """Global ranks, ascending."""
    hosts_R: tuple[str, ...]
    has_gpu_R: Bools
    places: Mapping[str, Ints] | None
    """Axis (dp, tp, pp, ep, cp) → position [R]; None where the topology is not known."""
    columns: Mapping[str, Floats]
    """Each [A, R], NaN unknown; rows that are not aligned or not whole are unknown."""
    present_AR: Bools
    """Whether anything arrived of a rank in a step."""
    unaligned_AR: Bools
    kept_AR: Bools
    """Whether the step's timeline was kept."""
    end_ns_AR: Ints
    """Unix time; 0 where nothing arrived."""
    trace_code_AR: NDArray[np.int32]
    trace_ids: tuple[str, ...]
    groups: tuple[Group, ...]
    """Ascending by key, as ``operations.group_L`` counts them."""
    operations: Operations
    passes: Passes | None
    events: tuple[Event, ...]
    devices: pa.Table
    """Schema DEVICES, as received."""
    heartbeats: pa.Table
    """Schema HEARTBEATS, as received."""
    peers: Peers
    rows: ReadRows | None = None
    """Reads what is too large to be held, for a finding: rows of ``kernels`` or ``experts``."""
    cached: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What several detectors derive from it, such as ``transfers``."""

    def read_rows(
        self, table: str, ordinals: Ints, ranks: Sequence[int] | None = None
    ) -> pa.Table | None:
        """Rows of ``kernels`` or ``experts`` from the first of some steps to the last.

        A run that has none costs the reading of one step, once.

        Returns:
            None where there are none in the last of the steps, whose rank ever.
        """
        if self.rows is None or not ordinals.size:
            return None
        first, last = int(ordinals[0]), int(ordinals[-1])
        known = f"has {table}"
        if known not in self.cached:
            self.cached[known] = self.rows(table, (last, last + 1), None).num_rows > 0
        return self.rows(table, (first, last + 1), ranks) if self.cached[known] else None

    def trace_id(self, step: int, rank: int) -> str | None:
        """Trace id (hex) of a step index and rank index."""
        code = int(self.trace_code_AR[step, rank])
        return None if code < 0 else self.trace_ids[code]


@dataclass(slots=True)
class _Rows:
    """Rows of the steps table of one block."""

    ordinal: Ints
    rank: Ints
    columns: dict[str, Floats]
    usable: Bools
    unaligned: Bools
    kept: Bools
    end_ns: Ints
    trace_code: NDArray[np.int32]

    def without(self, first: int, after: int) -> _Rows:
        """Those of other steps."""
        kept = (self.ordinal < first) | (self.ordinal >= after)
        if kept.all():
            return self
        return _Rows(
            ordinal=self.ordinal[kept],
            rank=self.rank[kept],
            columns={name: values[kept] for name, values in self.columns.items()},
            usable=self.usable[kept],
            unaligned=self.unaligned[kept],
            kept=self.kept[kept],
            end_ns=self.end_ns[kept],
            trace_code=self.trace_code[kept],
        )


@dataclass(slots=True, kw_only=True)
class _PassBlock:
    """Passes of some steps: [step, rank, chunk, micro-batch, forward and backward], NaN none."""

    ordinals: Ints
    ranks: Ints
    duration: NDArray[np.float32]
    start: NDArray[np.float32]

    def without(self, first: int, after: int) -> _PassBlock:
        """Those of other steps."""
        kept = (self.ordinals < first) | (self.ordinals >= after)
        if kept.all():
            return self
        return _PassBlock(
            ordinals=self.ordinals[kept],
            ranks=self.ranks,
            duration=self.duration[kept],
            start=self.start[kept],
        )


_BLOCKS: Final = ("_rows", "_samples", "_passes", "_events", "_devices", "_heartbeats")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a ``RunBuilder`` was."""

    blocks: dict[str, list[Any]]
    operations: Any


@dataclass(slots=True)
class RunBuilder:
    """Takes a run's tables, whole or in blocks of steps, and gives the dense arrays.

    Cost:
        For 12,960 ranks and 100 steps some seconds and about a gigabyte (bench/detect_scale).
    """

    rows: ReadRows | None = None
    """See ``Run.rows``; by default those of the tables that were added."""
    _late: dict[str, list[pa.Table]] = field(default_factory=dict)
    _ranks: pa.Table = field(default_factory=RANKS.empty_table)
    _groups: pa.Table = field(default_factory=GROUPS.empty_table)
    _rows: list[_Rows] = field(default_factory=list)
    _operations: OperationsBuilder = field(default_factory=OperationsBuilder)
    _samples: list[pa.Table] = field(default_factory=list)
    _passes: list[_PassBlock] = field(default_factory=list)
    _events: list[pa.Table] = field(default_factory=list)
    _devices: list[pa.Table] = field(default_factory=list)
    _heartbeats: list[pa.Table] = field(default_factory=list)
    _trace_codes: dict[str, int] = field(default_factory=dict)

    def add(self, tables: RunTables) -> None:
        """Take some whole steps; what they tell of ranks and groups goes with what was told before."""
        self._ranks = _with_later(self._ranks, tables.ranks, "rank")
        self._groups = _with_later(self._groups, tables.groups, "group")
        self._add_steps(tables.steps)
        self._operations.add(tables.collectives, self._groups)
        if tables.collectives.num_rows and not _topology_known(self._ranks):
            self._samples.append(_sample(tables.collectives))
        for name, table in (("kernels", tables.kernels), ("experts", tables.experts)):
            if table.num_rows and self.rows is None:
                self._late.setdefault(name, []).append(table)
        if tables.micro_batches.num_rows:
            self._passes.append(_pass_block(tables.micro_batches))
        for held, table in (
            (self._events, tables.events),
            (self._devices, tables.devices),
            (self._heartbeats, tables.heartbeats),
        ):
            if table.num_rows or not held:
                held.append(table)

    def mark(self) -> Mark:
        """What there is now, for ``rewind``: a look may add steps that are not whole yet."""
        held = {name: list(getattr(self, name)) for name in _BLOCKS}
        return Mark(blocks=held, operations=self._operations.mark())

    def rewind(self, mark: Mark) -> None:
        """Let go of what was added since."""
        for name, held in mark.blocks.items():
            setattr(self, name, held)
        self._operations.rewind(mark.operations)

    def forget(self, first: int, after: int) -> None:
        """Let go of the steps from the first to before the last."""
        outside = (pc.field("ordinal") < first) | (pc.field("ordinal") >= after)
        for name in ("_samples", "_events", "_devices", "_heartbeats"):
            held = [table.filter(outside) for table in getattr(self, name)]
            setattr(self, name, [table for table in held if table.num_rows] or held[:1])
        parts = [rows.without(first, after) for rows in self._rows]
        self._rows = [rows for rows in parts if rows.ordinal.size]
        self._passes = [
            block for block in (block.without(first, after) for block in self._passes)
            if block.ordinals.size
        ]  # fmt: skip
        self._operations.forget(first, after)
        self._forget_traces()

    def _forget_traces(self) -> None:
        """Number the traces anew that still have a step."""
        names = list(self._trace_codes)
        used = np.unique(
            np.concatenate([np.empty(0, np.int32), *(r.trace_code for r in self._rows)])
        )
        number = np.full(len(names), -1, dtype=np.int32)
        number[used] = np.arange(used.size)
        self._trace_codes = {names[code]: place for place, code in enumerate(used.tolist())}
        for rows in self._rows:
            rows.trace_code = number[rows.trace_code]

    def _add_steps(self, steps: pa.Table) -> None:
        aligned = _bools(steps["aligned"], default=True)
        end_ns = steps["start_ns"].to_numpy() + np.rint(
            steps["step_s"].to_numpy() * 1e9
        ).astype(np.int64)  # fmt: skip
        self._rows.append(
            _Rows(
                ordinal=steps["ordinal"].to_numpy(),
                rank=steps["rank"].to_numpy().astype(np.int64),
                columns={
                    name: steps[name].to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
                    for name in COLUMNS
                },
                usable=aligned & ~_bools(steps["truncated"], default=False),
                unaligned=~aligned,
                kept=steps["keep"].is_valid().to_numpy(zero_copy_only=False),
                end_ns=end_ns,
                trace_code=self._code_traces(steps["trace_id"]),
            )
        )

    def _code_traces(self, column: pa.ChunkedArray) -> NDArray[np.int32]:
        codes = []
        for chunk in column.chunks:
            encoded = chunk.dictionary_encode()
            numbers = [
                self._trace_codes.setdefault(name, len(self._trace_codes))
                for name in encoded.dictionary.to_pylist()
            ]
            codes.append(np.array(numbers, dtype=np.int32)[encoded.indices.to_numpy()])
        return np.concatenate(codes) if codes else np.empty(0, np.int32)

    def build(self) -> Run:
        """Everything taken so far, laid out."""
        known = self._ranks.sort_by("rank").to_pydict()
        rank_numbers = np.array(known["rank"], dtype=np.int64)
        seen = [_distinct(rows.rank) for rows in self._rows]
        ranks_R = np.unique(np.concatenate([rank_numbers, *seen]))
        ordinals_A = np.unique(np.concatenate([_distinct(rows.ordinal) for rows in self._rows]))
        places_of = [
            _places_in(ordinals_A, rows.ordinal) * ranks_R.size + _places_in(ranks_R, rows.rank)
            for rows in self._rows
        ]
        shape = (ordinals_A.size, ranks_R.size)

        def lay_out(name: str, empty: Any, kind: type[np.generic]) -> NDArray[Any]:  # noqa: ANN401
            laid = np.full(shape, empty, dtype=kind)
            for at, rows in zip(places_of, self._rows, strict=True):
                laid.reshape(-1)[at] = getattr(rows, name)
            return laid

        columns = {}
        for name in COLUMNS:
            laid = np.full(shape, np.nan)
            for at, rows in zip(places_of, self._rows, strict=True):
                laid.reshape(-1)[at] = np.where(rows.usable, rows.columns[name], np.nan)
            columns[name] = laid
        present = np.zeros(shape, dtype=bool)
        for at in places_of:
            present.reshape(-1)[at] = True

        details = {
            rank: (host, gpu)
            for rank, host, gpu in zip(known["rank"], known["host"], known["gpu"], strict=True)
        }
        about = [details.get(rank, ("", None)) for rank in ranks_R.tolist()]
        return Run(
            run=str(known["run"][0]) if known["run"] else "",
            world_size=max([*known["world_size"], ranks_R.size]),
            ordinals_A=ordinals_A,
            ranks_R=ranks_R,
            hosts_R=tuple(host for host, _ in about),
            has_gpu_R=np.array([gpu is not None for _, gpu in about], dtype=bool),
            places=_places(known, ranks_R),
            columns=columns,
            present_AR=present,
            unaligned_AR=lay_out("unaligned", False, np.bool_),
            kept_AR=lay_out("kept", False, np.bool_),
            end_ns_AR=lay_out("end_ns", 0, np.int64),
            trace_code_AR=lay_out("trace_code", -1, np.int32),
            trace_ids=tuple(self._trace_codes),
            groups=_group_members(self._groups, ranks_R),
            operations=self._operations.build(ordinals_A, ranks_R),
            passes=_lay_out_passes(self._passes, ordinals_A, ranks_R),
            events=_events(pa.concat_tables(self._events), ranks_R),
            devices=pa.concat_tables(self._devices),
            heartbeats=pa.concat_tables(self._heartbeats),
            rows=self.rows or _reader_of(self._late),
            peers=find_peers(self._ranks, self._groups, self._samples, ranks_R, ordinals_A),
        )


def run_of(*blocks: RunTables, rows: ReadRows | None = None) -> Run:
    """A run from its tables, in order of steps; ``rows`` as ``Run.rows``."""
    builder = RunBuilder(rows=rows)
    for tables in blocks:
        builder.add(tables)
    return builder.build()


def _reader_of(late: Mapping[str, Sequence[pa.Table]]) -> ReadRows:
    whole = {"kernels": KERNELS.empty_table(), "experts": EXPERTS.empty_table()}
    whole |= {name: pa.concat_tables(parts) for name, parts in late.items()}

    def read(table: str, steps: tuple[int, int], ranks: Sequence[int] | None) -> pa.Table:
        wanted = (pc.field("ordinal") >= steps[0]) & (pc.field("ordinal") < steps[1])
        if ranks is not None:
            wanted &= pc.field("rank").isin(pa.array(ranks, pa.int32()))
        return whole[table].filter(wanted)

    return read


def _with_later(known: pa.Table, later: pa.Table, key: str) -> pa.Table:
    """Ranks, or groups, told so far: digests name their groups only now and then."""
    before = known.filter(pc.invert(pc.is_in(known[key], value_set=later[key])))
    return pa.concat_tables([before, later]) if before.num_rows else later


def _topology_known(ranks: pa.Table) -> bool:
    return any(ranks[name].null_count < ranks.num_rows for name in ("dp", *TOPOLOGY))


def _sample(collectives: pa.Table) -> pa.Table:
    """Some whole steps, spread over the block, to take work signatures from."""
    ordinals = np.unique(collectives["ordinal"].to_numpy())
    picks = ordinals[np.linspace(0, ordinals.size - 1, SAMPLED_STEPS).astype(int)]
    wanted = pc.is_in(collectives["ordinal"], value_set=pa.array(np.unique(picks)))
    return collectives.filter(wanted)


def _bools(column: pa.ChunkedArray, *, default: bool) -> Bools:
    filled: Bools = column.fill_null(default).to_numpy().astype(bool)
    return filled


def _places(known: Mapping[str, list[Any]], ranks_R: Ints) -> dict[str, Ints] | None:
    """Positions along the axes that are known of every rank."""
    if len(known["rank"]) != ranks_R.size:
        return None
    axes = {
        axis: np.array(known[axis], dtype=np.int64)
        for axis in ("dp", *TOPOLOGY)
        if known[axis] and None not in known[axis]
    }
    return axes or None


def _group_members(groups: pa.Table, ranks_R: Ints) -> tuple[Group, ...]:
    rows = groups.sort_by("group")
    keys, descriptions = rows["group"].to_pylist(), rows["description"].to_pylist()
    # All groups' ranks are looked up at once: a large job has thousands of groups.
    lists = rows["ranks"].combine_chunks()
    ranks = lists.flatten().to_numpy().astype(np.int64)
    ends = np.cumsum(pc.list_value_length(lists).to_numpy()).tolist()
    there = np.zeros(ranks.size, dtype=bool)
    place = np.searchsorted(ranks_R, ranks)
    if ranks_R.size:
        there = ranks_R[np.minimum(place, ranks_R.size - 1)] == ranks
    found = []
    for at, key in enumerate(keys):
        if at and key == keys[at - 1]:
            continue
        mine = slice(ends[at - 1] if at else 0, ends[at])
        members = place[mine][there[mine]]
        if (members[1:] <= members[:-1]).any():
            members = np.unique(members)
        found.append(Group(key=key, description=descriptions[at], members=members))
    return tuple(found)


def _distinct(numbers: Ints) -> Ints:
    """The different numbers, ascending; marked in a table where they lie close together."""
    if not numbers.size:
        return numbers.astype(np.int64)
    low = int(numbers.min())
    width = int(numbers.max()) - low + 1
    if width > numbers.size:
        return np.unique(numbers).astype(np.int64)
    there = np.zeros(width, dtype=bool)
    there[numbers - low] = True
    found: Ints = np.flatnonzero(there) + low
    return found


def _places_in(numbers: Ints, wanted: Ints) -> Ints:
    """Index of each number among ascending ones, all of which are there."""
    if numbers.size and numbers[-1] - numbers[0] + 1 == numbers.size:  # no search where no gap is
        places: Ints = wanted.astype(np.int64) - numbers[0]
    else:
        places = np.searchsorted(numbers, wanted)
    return places


def _pass_block(table: pa.Table) -> _PassBlock:
    """Passes of some steps as dense arrays: a fifth of the rows' size."""
    column = {name: table[name].to_numpy(zero_copy_only=False) for name in PASS_COLUMNS}
    ordinals, ranks = _distinct(column["ordinal"]), _distinct(column["rank"])
    width = int(column["micro_batch"].max()) + 1
    chunks = int(column["chunk"].max()) + 1
    at = _places_in(ordinals, column["ordinal"]) * ranks.size
    at += _places_in(ranks, column["rank"])
    for size, index in ((chunks, "chunk"), (width, "micro_batch"), (2, "backward")):
        at *= size
        at += column[index]
    shape = (ordinals.size, ranks.size, chunks, width, 2)
    duration, start = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    duration.reshape(-1)[at] = column["duration_s"]
    start.reshape(-1)[at] = column["start_s"]
    return _PassBlock(ordinals=ordinals, ranks=ranks, duration=duration, start=start)


def _lay_out_passes(blocks: Sequence[_PassBlock], ordinals_A: Ints, ranks_R: Ints) -> Passes | None:
    if not blocks:
        return None
    chunks = max(block.duration.shape[2] for block in blocks)
    width = max(block.duration.shape[3] for block in blocks)
    shape = (ordinals_A.size, ranks_R.size, chunks, width, 2)
    duration, start = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for block in blocks:
        # A pass may have come of a step, or a rank, that sent no digest.
        mine = np.isin(block.ordinals, ordinals_A)
        ranks = np.isin(block.ranks, ranks_R)
        to_R = np.searchsorted(ranks_R, block.ranks[ranks])
        whole = ranks.all() and to_R.size == ranks_R.size
        part = np.s_[..., : block.duration.shape[2], : block.duration.shape[3], :]
        for step in np.flatnonzero(mine).tolist():
            to = int(np.searchsorted(ordinals_A, block.ordinals[step]))
            for laid, given in ((duration, block.duration), (start, block.start)):
                there = laid[to][part]
                fresh = given[step] if whole else given[step][ranks]
                if whole:
                    np.copyto(there, fresh, where=~np.isnan(fresh))
                else:
                    there[to_R] = np.where(np.isnan(fresh), there[to_R], fresh)
    number = np.arange(chunks * width)
    passes = (ordinals_A.size, ranks_R.size, chunks * width, 2)
    return Passes(
        duration_ARM2=duration.reshape(passes),
        start_ARM2=start.reshape(passes),
        chunk_M=number // width,
        micro_batch_M=number % width,
    )


def _events(table: pa.Table, ranks_R: Ints) -> tuple[Event, ...]:
    rows = table.to_pydict()
    index = {rank: place for place, rank in enumerate(ranks_R.tolist())}
    return tuple(
        Event(
            ordinal=rows["ordinal"][k],
            rank=index[rank],
            kind=rows["kind"][k],
            name=rows["name"][k],
            start_s=rows["start_s"][k],
            duration_s=rows["duration_s"][k],
            detail=rows["detail"][k],
        )
        for k, rank in enumerate(rows["rank"])
        if rank in index
    )
