"""Traces of torch.profiler (Kineto's chrome JSON) to tables: one file a rank, or several.

What is taken from where:
- steps from ``ProfilerStep#N``; one step for all of a file that has none;
- collectives from NCCL's kernels: arrival and end are the kernel's. Newer traces say operation,
  group and bytes on the kernel; in older ones the operation is that of the annotation it was
  launched in, and the group is not known, so that all go on one group "unknown";
- phases from annotations that say what they are, from ``Optimizer.step`` and the autograd engine;
  the GPU's part of a phase is the union of the kernels that were launched in it;
- waiting for input from ``enumerate(DataLoader)``;
- busy time is the step less the time in which only NCCL ran: what the others made it wait for.

A kernel belongs to the step that it was launched in, however much later it ran.

One thing in spite of its length: what becomes of each kind of record.

Shape legend: K = kernels, S = steps of a file, A = annotations.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from argus_otel.convert.conversion import (
    MAX_RANKS,
    Account,
    Conversion,
    GroupBook,
    RunName,
    boundary_counts,
    phase_lists,
)
from argus_otel.convert.intervals import inside, length, length_outside
from argus_otel.convert.json_stream import JsonStream, JsonStreamError
from argus_otel.convert.kineto_events import Kernels, Reading, Step
from argus_otel.convert.operations import element_bytes, operation, operation_of_kernel
from argus_otel.convert.sources import (
    NOTHING_OF_THAT_KIND,
    Source,
    SourceError,
    list_sources,
    name_of,
    none_left,
    source_error,
)
from argus_otel.tables.schemas import COLLECTIVES, EVENTS, RANKS, STEPS, RunTables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from argus_otel.convert.sources import Advance

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

SERVICE: Final = "kineto"
_EXPECTED: Final = "a trace that torch.profiler has exported (chrome JSON, possibly gzip)"
_NAMES: Final = re.compile(r"\.json(\.gz)?$", re.IGNORECASE)
_RANK_IN_NAME: Final = re.compile(r"(?:rank|worker|gpu)[-_.]?(\d{1,10})", re.IGNORECASE)
_PICKLE_MAGIC: Final = b"\x80"
_RANKS: Final = re.compile(r"\d{1,9}")
_STRIDE: Final = 1 << 20
"""Between the counts of two steps where a trace has none: more than a step has collectives."""
_UNKNOWN: Final = "unknown"


def convert_kineto(
    paths: Sequence[Path],
    *,
    run_id: str | None = None,
    keep_going: bool = False,
    advance: Advance | None = None,
) -> list[Conversion]:
    """All traces together as one run.

    Files are read while the blocks are taken, one after the other.

    Args:
        paths: Traces, or folders and archives of them.
        run_id: What to call the run; else the name of the file or folder.
        keep_going: Leave out what cannot be read.
        advance: Told of bytes read.

    Raises:
        SourceError: Nothing there; and, while blocks are taken, a file is no such trace, or they
            are of different jobs.

    Cost:
        About 25 MB/s of JSON; memory for the kernels of one file, about 100 bytes each.
    """
    account = Account()
    skip = account.skip if keep_going else None
    sources = _list_traces(paths, skip)
    name = RunName.of(SERVICE, run_id or name_of(paths), sources)
    maker = _Job(sources, name, account, keep_going, advance)
    return [Conversion(name.summary(), maker.blocks(), account)]


def _list_traces(paths: Sequence[Path], skip: Callable[[SourceError], None] | None) -> list[Source]:
    try:
        return list_sources(paths, lambda name: _NAMES.search(name) is not None, skip)
    except SourceError as error:
        if error.got != NOTHING_OF_THAT_KIND:
            raise
        first = next(iter(list_sources(paths, lambda _: True)))
        if not _is_pickle(first):
            raise
        raise _a_dump(first) from error


def _is_pickle(source: Source) -> bool:
    with source.open() as file:
        return file.read(1) == _PICKLE_MAGIC


def _a_dump(source: Source) -> SourceError:
    return source_error(
        source,
        "a pickle, as torch's flight recorder writes them",
        _EXPECTED,
        "For flight-recorder dumps: argus convert flight-recorder",
    )


class _Job:
    """Goes through the files of one job."""

    def __init__(
        self,
        sources: Sequence[Source],
        name: RunName,
        account: Account,
        keep_going: bool,
        advance: Advance | None,
    ) -> None:
        self._sources, self._name, self._account = sources, name, account
        self._keep_going, self._advance = keep_going, advance
        self._groups = GroupBook(name)
        self._world: tuple[int, Source] | None = None
        self._told: dict[tuple[int, int], Source] = {}
        """(rank, step) → the file that it came from."""
        self._ranks: set[int] = set()

    def blocks(self) -> Iterator[RunTables]:
        for source in self._sources:
            try:
                yield self._convert(source)
            except SourceError as error:
                if not self._keep_going:
                    raise
                self._account.skip(error)
        if not self._account.files:
            raise none_left(self._account.skipped, _EXPECTED)
        world = self._world[0] if self._world else 1
        if len(self._ranks) < world:
            self._account.note(f"{len(self._ranks)} of {world} ranks were traced")

    def _convert(self, source: Source) -> RunTables:
        reading = self._read(source)
        rank = self._rank_of(source, reading)
        steps = reading.steps()
        for step in steps:
            other = self._told.get((rank, step.ordinal))
            if other is not None:
                raise source_error(
                    source,
                    f"a second trace of step {step.ordinal} of rank {rank}, after {other.name}",
                    "each step of each rank once",
                )
        self._told.update({(rank, step.ordinal): source for step in steps})
        file = _File(reading, rank, steps, self._name, self._groups, self._world_size(reading))
        tables = file.tables()
        self._ranks.add(rank)
        self._account.files += 1
        self._account.mapped += file.mapped
        self._account.unmapped += file.unmapped
        for note in file.notes:
            self._account.note(note)
        return tables

    def _read(self, source: Source) -> Reading:
        reading = Reading()
        with source.open(self._advance) as file:
            stream = JsonStream(file, "traceEvents")
            try:
                for event in stream.elements():
                    reading.take(event)
            except JsonStreamError as error:
                if _is_pickle(source):
                    raise _a_dump(source) from error
                raise source_error(source, f"not readable {error}", _EXPECTED) from error
        reading.beside = stream.beside
        if not reading.spans:
            raise source_error(source, "without an event that lasts", _EXPECTED)
        return reading

    def _world_size(self, reading: Reading) -> int:
        size = reading.distributed("world_size")
        return size if size is not None and size > 0 else 1

    def _rank_of(self, source: Source, reading: Reading) -> int:
        size = reading.distributed("world_size")
        if size is not None and not 0 < size <= MAX_RANKS:
            raise source_error(source, f"of a job with {size} ranks", "a number that can be")
        if size is not None:
            if self._world is None:
                self._world = size, source
            elif self._world[0] != size:
                raise source_error(
                    source,
                    f"of a job with {size} ranks, and {self._world[1].name} of {self._world[0]}",
                    "traces of one job",
                )
        rank = reading.distributed("rank")
        if rank is None:
            match = _RANK_IN_NAME.search(source.file_name)
            if match is None and len(self._sources) > 1:
                raise source_error(
                    source,
                    "without a rank: it has no distributedInfo, and its name says none",
                    "a name with rank0, rank_1 or the like, where there are several traces",
                    "Give it a name with its rank.",
                )
            rank = int(match[1]) if match else 0
        if not 0 <= rank < MAX_RANKS or (size is not None and rank >= size):
            raise source_error(source, f"of rank {rank} of {size}", "a rank of the job")
        return rank


class _File:
    """Makes the tables of one file."""

    def __init__(
        self,
        reading: Reading,
        rank: int,
        steps: Sequence[Step],
        name: RunName,
        groups: GroupBook,
        world: int,
    ) -> None:
        self._reading, self._rank, self._steps = reading, rank, steps
        self._name, self._groups = name, groups
        self._world = max(world, rank + 1)
        self.mapped: Counter[str] = Counter(reading.mapped)
        self.unmapped: Counter[str] = Counter(reading.unmapped)
        self.notes: list[str] = []
        self._annotations = reading.annotations()
        self._known_groups = _groups_of(reading)

    def tables(self) -> RunTables:
        kernels = self._reading.kernels()
        step_K = self._step_of(kernels.launch_us, kernels.begin_us)
        outside = int(np.count_nonzero(step_K < 0))
        if outside:
            self.mapped["kernel"] -= outside
            self.unmapped["kernel outside the steps"] += outside
        collectives, counts = self._collectives(kernels, step_K)
        return RunTables(
            ranks=self._rank_row(),
            steps=self._step_rows(kernels, step_K, counts),
            collectives=collectives,
            groups=self._groups.table(),
            events=EVENTS.empty_table(),
        )

    def _step_of(self, launch_us: Floats, begin_us: Floats) -> Ints:
        """Which step each kernel belongs to [K]; -1 for none."""
        begins = np.array([step.begin_us for step in self._steps])
        ends = np.array([step.end_us for step in self._steps])
        # Where the launch is not in the trace, the kernel's own start has to do.
        at = np.where(np.isnan(launch_us), begin_us, launch_us)
        place = np.searchsorted(begins, at, side="right") - 1
        # What is launched between two steps belongs to the one before it.
        reach = np.r_[begins[1:], ends[-1:]]
        return np.where((place >= 0) & (at <= reach[np.maximum(place, 0)]), place, -1)

    def _rank_row(self) -> pa.Table:
        columns = {
            "rank": [self._rank],
            "world_size": self._world,
            "host": "",
            "pid": self._reading.pid(),
            "gpu": self._reading.gpu(),
            "nonce_local": False,
        }
        return self._name.table(RANKS, columns, 1)

    # -- steps ----------------------------------------------------------------------------------

    def _step_rows(
        self, kernels: Kernels, step_K: Ints, counts: Sequence[Mapping[int, int]]
    ) -> pa.Table:
        reading, steps = self._reading, self._steps
        base_ns = reading.base_ns()
        busy, phases, waits = [], [], []
        is_comm_K = kernels.is_nccl
        has_kernels = bool(step_K.size)
        for number, step in enumerate(steps):
            of_step = step_K == number
            begin, end = kernels.begin_us, kernels.end_us
            comm, work = of_step & is_comm_K, of_step & ~is_comm_K
            exposed_us = length_outside(begin[comm], end[comm], begin[work], end[work])
            # Kernels run later than their step, so that waiting may reach beyond its end.
            step_us = step.end_us - step.begin_us
            busy.append(max(step_us - exposed_us, 0.0) * 1e-6 if has_kernels else math.nan)
            phases.append(self._phases(step, kernels, work))
            waits.append(self._annotations.data_wait_us(step) * 1e-6)
        begin_us = np.array([step.begin_us for step in steps])
        end_us = np.array([step.end_us for step in steps])
        between = np.maximum(np.r_[0.0, begin_us[1:] - end_us[:-1]], 0.0)
        consecutive = np.r_[False, np.diff([step.ordinal for step in steps]) == 1]
        columns = {
            "ordinal": np.array([step.ordinal for step in steps]),
            "rank": self._rank,
            "start_ns": _to_ns(base_ns, begin_us),
            "step_s": (end_us - begin_us) * 1e-6,
            "between_s": np.where(consecutive, between * 1e-6, 0.0),
            "busy_s": np.array(busy),
            "data_wait_s": np.array(waits),
            "phases": phase_lists(phases),
            "boundary_counts": boundary_counts(counts),
            "end_rule": "profiler_step" if steps[0].named else "trace",
            "truncated": False,
            "drops": 0,
            "trace_id": self._name.trace_ids(
                np.array([step.ordinal for step in steps]), np.full(len(steps), self._rank)
            ),
        }
        return self._name.table(STEPS, columns, len(steps))

    def _phases(
        self, step: Step, kernels: Kernels, work_K: NDArray[np.bool_]
    ) -> list[dict[str, Any]]:
        found = []
        for name, (begin, end) in self._annotations.phases(step).items():
            launched = work_K & inside(kernels.launch_us, begin, end)
            gpu_us = length(kernels.begin_us[launched], kernels.end_us[launched])
            found.append(
                {
                    "name": name,
                    "start_s": (float(begin.min()) - step.begin_us) * 1e-6,
                    "host_s": length(begin, end) * 1e-6,
                    "gpu_s": gpu_us * 1e-6 if work_K.any() else None,
                }
            )
        return sorted(found, key=lambda phase: phase["start_s"])

    # -- collectives ----------------------------------------------------------------------------

    def _collectives(self, kernels: Kernels, step_K: Ints) -> tuple[pa.Table, list[dict[int, int]]]:
        """Rows, and each group's count at the beginning of each step."""
        rows: list[dict[str, Any]] = []
        seen: dict[tuple[int, int, int], int] = {}
        for k in np.flatnonzero(kernels.is_nccl & (step_K >= 0)).tolist():
            step = self._steps[int(step_K[k])]
            about = self._reading.nccl[int(kernels.row[k])]
            op, group, peer, payload = self._describe(about, float(kernels.launch_us[k]))
            place = (step.ordinal, group, -1 if peer is None else peer * 2 + (op == "send"))
            nth = seen.get(place, 0)
            seen[place] = nth + 1
            arrival = (float(kernels.begin_us[k]) - step.begin_us) * 1e-6
            duration = float(kernels.end_us[k] - kernels.begin_us[k]) * 1e-6
            told = about.get("Seq")
            rows.append(
                {
                    "ordinal": step.ordinal,
                    "group": group,
                    "op": op,
                    "seq": told
                    if type(told) is int and 0 <= told < 2**62
                    else step.ordinal * _STRIDE + nth,
                    "peer": peer,
                    "payload_bytes": payload,
                    "arrival_s": arrival,
                    "last_arrival_s": arrival,
                    "duration_s": duration,
                    "min_duration_s": duration,
                    "phase": self._annotations.phase_at(step, float(kernels.launch_us[k])),
                }
            )
        if rows:
            self.notes.append(
                "collectives are counted from the beginning of each step: a trace has no count"
            )
        columns: dict[str, Any] = {
            name: pa.array([row[name] for row in rows], COLLECTIVES.field(name).type)
            for name in (rows[0] if rows else ())
        }
        columns |= {"rank": self._rank, "count": 1}
        # That counts begin anew in each step says nothing about whether steps are the same.
        return self._name.table(COLLECTIVES, columns, len(rows)), [{} for _ in self._steps]

    def _describe(
        self, about: Mapping[str, Any], launch_us: float
    ) -> tuple[str, int, int | None, int]:
        """Operation, group key, peer and bytes of a kernel."""
        told = about.get("Collective name")
        if told:
            op = operation(str(told))
        else:
            op = operation(self._annotations.operation_at(launch_us) or "")
            if op == "other":
                op = operation_of_kernel(str(about["name"]))
        elements = about.get("In msg nelems")
        payload = 0
        if type(elements) is int and 0 <= elements < 2**48:
            payload = elements * element_bytes(str(about.get("dtype", "")))
        peer = None
        if op in ("send", "recv"):
            peer = about.get("Dst Rank" if op == "send" else "Src Rank")
            peer = peer if type(peer) is int and 0 <= peer < MAX_RANKS else None
        return op, self._group_of(about), peer, payload

    def _group_of(self, about: Mapping[str, Any]) -> int:
        name = str(about.get("Process Group Name", ""))
        description = str(about.get("Process Group Description") or "undefined")
        known = self._known_groups.get(name)
        if known is not None:
            return self._groups.key(*known)
        listed = str(about.get("Process Group Ranks", ""))
        ranks = sorted({int(rank) for rank in _RANKS.findall(listed)})
        if ranks and "..." not in listed:
            return self._groups.key(description, ranks)
        if about.get("Group size") == self._world:
            return self._groups.key(description, range(self._world))
        if name:
            # Long lists of members are cut in the trace: its name is all that is known.
            return self._groups.key(f"{description} {name}", ())
        self.notes.append("collectives whose group is not said are all on one group, of all ranks")
        return self._groups.key(f"{_UNKNOWN} of {self._world}", range(self._world))


def _to_ns(base_ns: int, at_us: Floats) -> Ints:
    """Unix time. Whole microseconds apart: Unix time in ns does not fit a float."""
    whole = np.floor(at_us)
    return base_ns + whole.astype(np.int64) * 1000 + np.rint((at_us - whole) * 1e3).astype(np.int64)


def _groups_of(reading: Reading) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Groups by torch's name: description, ranks, and which one of its like."""
    about = reading.beside.get("distributedInfo")
    configured = about.get("pg_config") if isinstance(about, dict) else None
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    alike: Counter[tuple[str, tuple[int, ...]]] = Counter()
    if not isinstance(configured, list):
        return found
    for group in configured:
        if not isinstance(group, dict) or not isinstance(group.get("ranks"), list):
            continue
        ranks = tuple(sorted(r for r in group["ranks"] if type(r) is int and 0 <= r < MAX_RANKS))
        key = (str(group.get("pg_desc") or "undefined"), ranks)
        if ranks:
            found[str(group.get("pg_name"))] = (*key, alike[key])
            alike[key] += 1
    return found
