"""Operation traces of ByteDance's straggler study to tables: Megatron jobs, ranks by operation.

One Parquet file a job with a row an operation, and beside ``trace-NAME.parquet`` a
``meta-NAME.yaml`` with the sizes of the parallel axes. Times are relative to the step's start, the
same for all ranks; when a step was is not said, so that steps follow each other from 1970 on.

What each operation runs over was found from which ranks end together: parameters and gradients
over the data-parallel group of a stage, embeddings over the first and last stage, the clip over
the world, layernorm gradients over neither, which leaves the tensor-parallel group.

One thing in spite of its length: what becomes of each kind of record.

Shape legend: N = operations of the trace, D = (step, rank) pairs, R = traced ranks.

Source:
    Wu et al., Understanding Stragglers in Large Model Training Using What-if Analysis, 2025;
    data of github.com/ByteDance-Seed/StragglerAnalysis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from argus_otel.convert.bytedance_trace import EXPECTED, Trace, read_trace
from argus_otel.convert.conversion import (
    DEVICE,
    Account,
    Conversion,
    GroupBook,
    RunName,
    boundary_counts,
    phase_lists,
)
from argus_otel.convert.intervals import length_outside
from argus_otel.convert.sources import Source, SourceError, list_sources, none_left, source_error
from argus_otel.semconv import names
from argus_otel.tables.schemas import COLLECTIVES, EVENTS, MICRO_BATCHES, RANKS, STEPS, RunTables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from argus_otel.convert.sources import Advance

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

SERVICE: Final = "bytedance-trace"
_BLOCK_ROWS: Final = 1_000_000

_PASSES: Final = {"forward-compute": "forward", "backward-compute": "backward"}
_OPTIMIZER: Final = "optimizer"
_GC: Final = "gc"
_DIRECT: Final[Mapping[str, tuple[str, str, int]]] = {
    "forward-send": ("send", "forward", 1),
    "forward-recv": ("recv", "forward", -1),
    "backward-send": ("send", "backward", -1),
    "backward-recv": ("recv", "backward", 1),
}
"""Operation, phase, and how many stages further the other end is."""
_COLLECTIVE: Final[Mapping[str, tuple[str, str, str]]] = {
    "params-all-gather": ("all_gather", "prepare", "dp"),
    "grads-reduce-scatter": ("reduce_scatter", "backward", "dp"),
    "grads-all-reduce": ("all_reduce", "backward", "dp"),
    "layernorm-grads-all-reduce": ("all_reduce", "backward", "tp"),
    "embedding-grads-all-reduce": ("all_reduce", "backward", "embedding"),
    "optimizer-clip-main-grad": ("all_reduce", "optimizer.step", "world"),
}
"""Operation, phase, and what it runs over."""


def convert_bytedance(
    paths: Sequence[Path],
    *,
    run_id: str | None = None,
    keep_going: bool = False,
    advance: Advance | None = None,
) -> list[Conversion]:
    """Operation traces as runs, one a Parquet file.

    Args:
        paths: Parquet files, or folders and archives of them.
        run_id: What to call the run; else what the trace calls itself.
        keep_going: Leave out what cannot be read.
        advance: Told of bytes read.

    Raises:
        SourceError: Nothing there, or a file is not such a trace.

    Cost:
        A trace is held in memory as a whole, about 80 bytes an operation.
    """
    account = Account()
    skip = account.skip if keep_going else None
    sources = list_sources(paths, lambda name: name.endswith(".parquet"), skip)
    if run_id is not None and len(sources) > 1:
        raise source_error(
            f"--run-id {run_id}",
            f"one name for {len(sources)} traces",
            "one trace, which is one run",
            "Leave it out, or convert them one by one.",
        )
    conversions = []
    for source in sources:
        try:
            trace = read_trace(source, advance)
        except SourceError as error:
            if not keep_going:
                raise
            account.skip(error)
            continue
        account.files += 1
        conversions.append(_conversion(trace, source, run_id, account))
        account = Account()
    if not conversions:
        raise none_left(account.skipped, EXPECTED)
    # What was left out after the last trace that could be read.
    conversions[-1].account.skipped.extend(account.skipped)
    return conversions


def _conversion(trace: Trace, source: Source, run_id: str | None, account: Account) -> Conversion:
    called = trace.meta.get("trial_name")
    name = RunName.of(
        SERVICE, run_id or (str(called) if called else source.file_name.split(".")[0]), [source]
    )
    maker = _Maker(trace, name, account)
    return Conversion(name.summary(), maker.blocks(), account)


class _Maker:
    """Makes the tables of one trace."""

    def __init__(self, trace: Trace, name: RunName, account: Account) -> None:
        self._trace, self._name, self._account = trace, name, account
        self._groups = GroupBook(name)
        self._stages = 1 + max(stage for stage, _ in trace.ranks)
        self._dp = 1 + max(dp for _, dp in trace.ranks)
        self._tp = trace.size("tp", 1)
        self._world = trace.size("world", max(trace.ranks.values()) + 1)
        # Megatron counts tensor-parallel ranks first, then data-parallel ones, then stages.
        self._laid_out = all(
            rank // self._tp == stage * trace.size("dp", self._dp) + dp
            for (stage, dp), rank in trace.ranks.items()
        )
        self._count_operations()
        self._say()

    def _say(self) -> None:
        if not self._trace.meta:
            self._account.note("no meta file: sizes of the axes are the least that the ranks allow")
        self._account.note("the trace does not say when steps were: they follow each other from 0")
        self._account.note("payloads are not known and shown as 0 bytes")
        traced = len(self._trace.ranks)
        if traced < self._world:
            self._account.note(
                f"{traced} of {self._world} ranks were traced, one for each stage and place along the "
                f"data axis: the run is given as one of {traced}"
            )

    def _count_operations(self) -> None:
        """What a step has of each operation at most: own counts go on from step to step."""
        c, op = self._trace.columns, self._trace.op
        triple = np.stack([c["step"], c["rank"], op], axis=1)
        found, count = np.unique(triple, axis=0, return_counts=True)
        self._per_step = np.zeros(len(self._trace.ops), np.int64)
        np.maximum.at(self._per_step, found[:, 2], count)

    def blocks(self) -> Iterator[RunTables]:
        """The run, some whole steps at a time."""
        step = self._trace.columns["step"]
        cuts = [0, *(np.flatnonzero(np.diff(step)) + 1).tolist(), step.size]
        begin, start_ns = 0, 0
        for k, end in enumerate(cuts[1:], 1):
            if k + 1 == len(cuts) or cuts[k + 1] - begin > _BLOCK_ROWS:
                tables, start_ns = self._block(slice(begin, end), start_ns)
                yield tables
                begin = end

    def _block(self, rows: slice, start_ns: int) -> tuple[RunTables, int]:
        c = {name: values[rows] for name, values in self._trace.columns.items()}
        op = self._trace.op[rows]
        steps, origin_s, after_ns = self._steps(c, op, start_ns)
        is_op = {code: op == code for code in range(len(self._trace.ops))}
        relative = c["start_ts"] - origin_s
        collectives = self._collectives(c, is_op, relative)
        tables = RunTables(
            ranks=self._ranks(),
            steps=steps,
            collectives=collectives,
            groups=self._groups.table(),
            events=self._events(c, is_op, relative),
            micro_batches=self._micro_batches(c, is_op, relative),
        )
        return tables, after_ns

    def _ranks(self) -> pa.Table:
        by_rank = sorted((rank, stage, dp) for (stage, dp), rank in self._trace.ranks.items())
        rank, stage, dp = (np.array(column) for column in zip(*by_rank, strict=True))
        columns = {
            "rank": rank,
            # The others were not traced, which is something else than silent.
            "world_size": rank.size,
            "host": "",
            "gpu": DEVICE,
            "dp": dp,
            "pp": stage,
            "tp": rank % self._tp if self._laid_out else None,
            "nonce_local": False,
        }
        return self._name.table(RANKS, columns, rank.size)

    def _steps(self, c: Mapping[str, Any], op: Ints, start_ns: int) -> tuple[pa.Table, Floats, int]:
        """Steps; when each operation's step began [N]; where the next block begins."""
        pair = np.flatnonzero(np.diff(c["step"]) | np.diff(c["rank"])) + 1
        begins, ends = np.r_[0, pair], np.r_[pair, op.size]
        end_s = c["start_ts"] + c["duration"]
        first_D = c["start_ts"][begins]  # sorted by start
        last_D = np.maximum.reduceat(end_s, begins)
        ordinal, rank = c["step"][begins], c["rank"][begins]
        number, step_D = np.unique(ordinal, return_inverse=True)
        longest = np.zeros(number.size)
        np.maximum.at(longest, step_D, last_D)
        base = start_ns + np.rint(np.r_[0, np.cumsum(longest)] * 1e9).astype(np.int64)
        busy, phases, collections, gc_s = [], [], [], []
        for begin, end, first, last in zip(begins, ends, first_D, last_D, strict=True):
            at = slice(int(begin), int(end))
            busy.append((last - first) - self._waited(c["start_ts"][at], end_s[at], op[at]))
            phases.append(self._phases(c["start_ts"][at] - first, c["duration"][at], op[at]))
            is_gc = np.isin(op[at], self._codes([_GC]))
            collections.append(int(is_gc.sum()))
            took = float(c["duration"][at][is_gc].sum())
            # A collection of no length is a mark: it says when, and not how long.
            gc_s.append(took if took > 0 or not is_gc.any() else math.nan)
        columns = {
            "ordinal": ordinal,
            "rank": rank,
            "start_ns": base[step_D] + np.rint(first_D * 1e9).astype(np.int64),
            "step_s": last_D - first_D,
            "between_s": 0.0,
            "busy_s": np.array(busy),
            "gc_s": np.array(gc_s),
            "gc_count": np.array(collections),
            "phases": phase_lists(phases),
            "boundary_counts": self._boundary_counts(ordinal, rank),
            "end_rule": "trace",
            "truncated": False,
            "drops": 0,
            "trace_id": self._name.trace_ids(ordinal, rank),
        }
        table = self._name.table(STEPS, columns, ordinal.size)
        return table, np.repeat(first_D, ends - begins), int(base[-1])

    def _codes(self, optypes: Iterable[str]) -> list[int]:
        return [self._trace.ops.index(name) for name in optypes if name in self._trace.ops]

    def _waited(self, begin_s: Floats, end_s: Floats, op: Ints) -> float:
        """Seconds in which a rank of one step communicated and did not compute.

        Between its last pass and the first of the operations on gradients a rank is in something
        that was not traced, and leaves it when its pipeline is done, and at the last stage all of
        the stage (a reduction of the losses). That is waiting too: in trace AR, which has one slow
        worker, it is 22 of 47 s on three ranks that are as fast as the others.
        """
        waits = np.isin(op, self._codes([*_DIRECT, *_COLLECTIVE]))
        works = np.isin(op, self._codes([*_PASSES, _OPTIMIZER]))
        passing = np.isin(op, self._codes([*_DIRECT, *_PASSES]))
        reducing = np.isin(op, self._codes(o for o, a in _COLLECTIVE.items() if a[1] == "backward"))
        wait_begin, wait_end = begin_s[waits], end_s[waits]
        if passing.any() and reducing.any():
            left, right = end_s[passing].max(), begin_s[reducing].min()
            if left < right:
                wait_begin, wait_end = np.r_[wait_begin, left], np.r_[wait_end, right]
        return length_outside(wait_begin, wait_end, begin_s[works], end_s[works])

    def _phases(self, start_s: Floats, duration_s: Floats, op: Ints) -> list[dict[str, Any]]:
        found = []
        for optype, phase in (*_PASSES.items(), (_OPTIMIZER, "optimizer.step")):
            if optype in self._trace.ops:
                here = op == self._trace.ops.index(optype)
                if here.any():
                    about = {"name": phase, "start_s": float(start_s[here].min()),
                             "host_s": float(duration_s[here].sum()), "gpu_s": None}  # fmt: skip
                    found.append(about)
        return sorted(found, key=lambda phase: phase["start_s"])

    # -- communication --------------------------------------------------------------------------

    def _collectives(
        self, c: Mapping[str, Any], is_op: Mapping[int, NDArray[np.bool_]], relative: Floats
    ) -> pa.Table:
        parts: list[dict[str, Any]] = []
        for code, optype in enumerate(self._trace.ops):
            at = np.flatnonzero(is_op[code])
            if not at.size:
                continue
            if optype in _DIRECT:
                parts.append(self._direct(c, code, at))
            elif optype in _COLLECTIVE:
                parts.append(self._grouped(c, code, at))
            elif optype in _PASSES or optype in (_GC, _OPTIMIZER):
                self._account.mapped[optype] += at.size
                continue
            else:
                self._account.unmapped[optype] += at.size
                continue
            kept = parts[-1]["at"]
            self._account.mapped[optype] += kept.size
            if kept.size < at.size:
                self._account.unmapped[f"{optype} to an untraced rank"] += at.size - kept.size
        if not parts:
            return COLLECTIVES.empty_table()
        joined = {
            name: np.concatenate([np.broadcast_to(part[name], part["at"].shape) for part in parts])
            for name in ("at", "group", "op", "seq", "peer", "phase")
        }
        order = np.argsort(joined["at"], kind="stable")  # by step, rank and start
        joined = {name: values[order] for name, values in joined.items()}
        at = joined.pop("at")
        peer = joined.pop("peer")
        columns = {
            **joined,
            "peer": pa.array(peer, mask=peer < 0),
            "op": pa.array(joined["op"].tolist()),
            "phase": pa.array(joined["phase"].tolist()),
            "ordinal": c["step"][at],
            "rank": c["rank"][at],
            "payload_bytes": 0,
            "arrival_s": relative[at],
            "last_arrival_s": relative[at],
            "duration_s": c["duration"][at],
            "min_duration_s": c["duration"][at],
            "count": 1,
        }
        return self._name.table(COLLECTIVES, columns, at.size)

    def _direct(self, c: Mapping[str, Any], code: int, at: Ints) -> dict[str, Any]:
        """Sends and receives: between a rank and the same place of a stage beside it."""
        optype = self._trace.ops[code]
        op, phase, further = _DIRECT[optype]
        place = list(zip(c["stage"][at].tolist(), c["dp_rank"][at].tolist(), strict=True))
        about = {p: self._end(p, further) for p in set(place)}
        peer = np.array([about[p][0] for p in place], np.int64)
        group = np.array([about[p][1] for p in place], np.uint64)
        known = peer >= 0
        at, peer, group = at[known], peer[known], group[known]
        # With two stages that are linked in a ring, both directions share a pair of ranks: the
        # forward ones are counted first, on both ends.
        per_pass = self._of_direction("forward"), self._of_direction("backward")
        per_step = sum(per_pass) if self._shared else per_pass[phase == "backward"]
        before = per_pass[0] if self._shared and phase == "backward" else 0
        seq = c["step"][at] * per_step + before + c["seq_id"][at]
        return {"at": at, "group": group, "op": op, "seq": seq, "peer": peer, "phase": phase}

    @property
    def _shared(self) -> bool:
        return self._stages == 2 and self._trace.size("vpp", 1) > 1

    def _of_direction(self, phase: str) -> int:
        counts = [
            int(self._per_step[code])
            for code, optype in enumerate(self._trace.ops)
            if optype in _DIRECT and _DIRECT[optype][1] == phase
        ]
        return max(counts, default=0)

    def _end(self, place: tuple[int, int], further: int) -> tuple[int, int]:
        """Rank at the other end (-1 untraced), and the pipeline's group."""
        stage, dp = place
        ring = [self._trace.ranks.get((s, dp), -1) for s in range(self._stages)]
        peer = ring[(stage + further) % self._stages]
        return peer, self._groups.key("pp", [rank for rank in ring if rank >= 0])

    def _grouped(self, c: Mapping[str, Any], code: int, at: Ints) -> dict[str, Any]:
        optype = self._trace.ops[code]
        op, phase, axis = _COLLECTIVE[optype]
        place = list(zip(c["stage"][at].tolist(), c["dp_rank"][at].tolist(), strict=True))
        about = {p: self._members(axis, p) for p in set(place)}
        group = np.array([self._groups.key(axis, about[p]) for p in place], np.uint64)
        # Own counts on a group: the operations of a step that share it, in the order of the step.
        sharing = [o for o in _COLLECTIVE if o in self._trace.ops and _COLLECTIVE[o][2] == axis]
        sizes = [int(self._per_step[self._trace.ops.index(o)]) for o in sharing]
        before = sum(sizes[: sharing.index(optype)])
        nth = _nth_of_step(c["step"][at], c["rank"][at])
        seq = c["step"][at] * sum(sizes) + before + nth
        return {"at": at, "group": group, "op": op, "seq": seq, "peer": -1, "phase": phase}

    def _members(self, axis: str, place: tuple[int, int]) -> list[int]:
        stage, dp = place
        ranks = self._trace.ranks
        if axis == "dp":
            return sorted(rank for (s, _), rank in ranks.items() if s == stage)
        if axis == "embedding":
            ends = [ranks.get((s, dp), -1) for s in (0, self._stages - 1)]
            return sorted({rank for rank in ends if rank >= 0})
        if axis == "tp":
            first = ranks[place] - ranks[place] % self._tp
            return [*range(first, first + self._tp)] if self._laid_out else [ranks[place]]
        return list(range(self._world))

    def _boundary_counts(self, ordinal: Ints, rank: Ints) -> pa.Array:
        """How often each collective group had been used before a step, at as many a step."""
        place_of = {number: place for place, number in self._trace.ranks.items()}
        per_step: dict[str, int] = {}
        for code, optype in enumerate(self._trace.ops):
            if optype in _COLLECTIVE:
                axis = _COLLECTIVE[optype][2]
                per_step[axis] = per_step.get(axis, 0) + int(self._per_step[code])
        ends = (0, self._stages - 1)
        keys = {
            number: {
                self._groups.key(axis, self._members(axis, place)): count
                for axis, count in per_step.items()
                if axis != "embedding" or place[0] in ends
            }
            for number, place in place_of.items()
        }
        return boundary_counts(
            [
                {key: count * step for key, count in keys[number].items()}
                for step, number in zip(ordinal.tolist(), rank.tolist(), strict=True)
            ]
        )

    # -- the rest -------------------------------------------------------------------------------

    def _micro_batches(
        self, c: Mapping[str, Any], is_op: Mapping[int, NDArray[np.bool_]], relative: Floats
    ) -> pa.Table:
        wanted = [code for code, optype in enumerate(self._trace.ops) if optype in _PASSES]
        chosen = np.zeros(relative.size, bool)
        backward = np.zeros(relative.size, bool)
        for code in wanted:
            chosen |= is_op[code]
            if _PASSES[self._trace.ops[code]] == "backward":
                backward |= is_op[code]
        at = np.flatnonzero(chosen)
        columns = {
            "ordinal": c["step"][at],
            "rank": c["rank"][at],
            "chunk": np.maximum(c["mc"][at], 0),
            "micro_batch": np.maximum(c["mb_id"][at], 0),
            "backward": backward[at],
            "start_s": relative[at],
            "duration_s": c["duration"][at],
        }
        return self._name.table(MICRO_BATCHES, columns, at.size)

    def _events(
        self, c: Mapping[str, Any], is_op: Mapping[int, NDArray[np.bool_]], relative: Floats
    ) -> pa.Table:
        if _GC not in self._trace.ops:
            return EVENTS.empty_table()
        at = np.flatnonzero(is_op[self._trace.ops.index(_GC)])
        columns = {
            "ordinal": c["step"][at],
            "rank": c["rank"][at],
            "kind": names.SPAN_GC,
            "name": names.SPAN_GC,
            "start_s": relative[at],
            "duration_s": c["duration"][at],
        }
        return self._name.table(EVENTS, columns, at.size)


def _nth_of_step(step: Ints, rank: Ints) -> Ints:
    """Which one of its (step, rank) each row is; rows are sorted by both."""
    new = np.r_[True, (np.diff(step) != 0) | (np.diff(rank) != 0)]
    first = np.flatnonzero(new)
    return np.arange(step.size) - np.repeat(first, np.diff(np.r_[first, step.size]))
