"""Dumps of torch's flight recorder to tables: what each rank was in when a job hung.

One dump a rank, pickled or as JSON. Its entries become collectives: those that are not completed
have no duration. What each rank waits in, on each group the oldest of these, becomes its heartbeats,
the oldest of all first; a rank that waits in nothing has one without a group, and whose place it
is that peers wait for is for detectors to say.

A dump knows no steps. What it holds is of a step 0 that has not ended, so that the run has
heartbeats and collectives, and no steps.

Nor does it say when it was written. That is taken from the file's time where it fits what the
file holds; else from the timeout of what is waited in, for the watchdog dumps when that is over.

A pickle is a program: it is run with every name refused, so that it can build numbers, strings,
lists and mappings, and call nothing.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from argus_otel.convert.conversion import (
    DEVICE,
    Account,
    Conversion,
    GroupBook,
    RunName,
)
from argus_otel.convert.operations import element_bytes, operation
from argus_otel.convert.sources import (
    Source,
    SourceError,
    list_sources,
    name_of,
    source_error,
)
from argus_otel.tables.schemas import (
    COLLECTIVES,
    EVENTS,
    HEARTBEATS,
    RANKS,
    STEPS,
    RunSummary,
    RunTables,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from argus_otel.convert.sources import Advance

SERVICE: Final = "flight-recorder"
_MAX_BYTES: Final = 256 << 20
"""A ring of 20,000 entries with stacks is under 100 MB."""
_RANKS_A_BLOCK: Final = 256
_LATEST_NS: Final = 24 * 3600 * 10**9
"""A file that is younger than what it holds by more was copied or unpacked since."""
_MAX_FRAMES: Final = 64
_EXPECTED: Final = "a dump of torch's flight recorder (a pickle or JSON, one for each rank)"

# What unpickling raises for bytes that are no pickle, or one of something else.
_NOT_A_PICKLE: Final = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
_DIRECT: Final = re.compile(r"(?:\w+:)?(send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")
_RANK_IN_NAME: Final = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|bin))?(?:\.gz)?$")
_DUMP_NAME: Final = re.compile(r"(dump|trace|rank|flight|nccl|fr)[\w.-]*\d+(\.(json|pkl|pickle|bin))?(\.gz)?$", re.IGNORECASE)  # fmt: skip

_AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "tp": ("TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp"),
    "pp": ("PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp"),
    "cp": ("CONTEXT_PARALLEL_GROUP", "mesh_cp"),
    "ep": ("EXPERT_MODEL_PARALLEL_GROUP", "mesh_ep"),
    "dp": ("DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP", "mesh_dp"),
}
"""What Megatron and device meshes call the group of an axis; the first one that there is."""


def convert_flight_recorder(
    paths: Sequence[Path],
    *,
    run_id: str | None = None,
    keep_going: bool = False,
    advance: Advance | None = None,
) -> list[Conversion]:
    """All dumps together as one run.

    Args:
        paths: Dumps, or folders and archives of them.
        run_id: What to call the run; else the folder's name.
        keep_going: Leave out what cannot be read.
        advance: Told of bytes read.

    Raises:
        SourceError: Nothing there, a file is no such dump, or they are of different jobs.

    Cost:
        Memory for all dumps' entries.
    """
    account = Account()
    skip = account.skip if keep_going else None
    sources = list_sources(paths, lambda name: _DUMP_NAME.search(name) is not None, skip)
    dumps: dict[int, _Dump] = {}
    for source in sources:
        try:
            dump = _read(source, advance)
            _check_same_job(dump, dumps)
        except SourceError as error:
            if not keep_going:
                raise
            account.skip(error)
            continue
        account.files += 1
        dumps[dump.rank] = dump
    if not dumps:
        named = ", ".join(name for name, _ in account.skipped)
        raise source_error(named, "not readable, any of them", _EXPECTED)
    name = RunName.of(SERVICE, run_id or name_of(paths), sources)
    maker = _Maker([dumps[rank] for rank in sorted(dumps)], name, account)
    return [Conversion(maker.summary, maker.blocks(), account)]


# -- reading ------------------------------------------------------------------------------------


class _RefusedError(pickle.UnpicklingError):
    """A pickle asked for something by name."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain data and nothing else."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        msg = f"asks for {module_name[:60]}.{global_name[:60]}"
        raise _RefusedError(msg)

    @override
    def persistent_load(self, pid: Any) -> Any:
        msg = "asks for an object outside the file"
        raise _RefusedError(msg)


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One operation."""

    record: int
    group: _Group | None
    op: str
    seq: int | None
    """Own count of the group; null for point-to-point, which torch counts for both directions."""
    peer: int | None
    payload_bytes: int
    created_ns: int
    timeout_ns: int
    """0 where the dump does not say."""
    started_ns: int | None
    completed_ns: int | None
    duration_s: float | None
    completed: bool
    stack: str | None


@dataclass(frozen=True, slots=True)
class _Dump:
    source: Source
    rank: int
    groups: Mapping[str, _Group]
    entries: tuple[_Entry, ...]
    damaged: int
    """Entries that could not be read."""
    has_gpu: bool

    @property
    def world_size(self) -> int:
        """Ranks that this rank knows of."""
        return max((group.ranks[-1] + 1 for group in self.groups.values()), default=self.rank + 1)


def _read(source: Source, advance: Advance | None) -> _Dump:
    document = _load(source, source.read(_MAX_BYTES, advance))
    if not isinstance(document, dict) or not isinstance(document.get("entries"), (list, tuple)):
        raise source_error(source, "without entries", _EXPECTED)
    groups = _read_groups(document.get("pg_config"))
    rank = _rank_of(source, document, groups)
    entries = []
    damaged = 0
    for raw in document["entries"]:
        try:
            entries.append(_entry(raw, groups))
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
            damaged += 1
    has_gpu = "nccl_version" in document  # NCCL runs on nothing else
    return _Dump(source, rank, groups, tuple(entries), damaged, has_gpu)


def _load(source: Source, data: bytes) -> Any:  # noqa: ANN401 - whatever is in the file
    if data.lstrip()[:1] in (b"{", b"["):
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise source_error(source, f"not readable as JSON: {error}", _EXPECTED) from error
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _RefusedError as error:
        raise source_error(
            source,
            f"refused: the pickle {error}",
            _EXPECTED,
            "A dump is plain data; a pickle that asks for names would run code. Do not load it.",
        ) from error
    except _NOT_A_PICKLE as error:
        raise source_error(source, f"not readable as a pickle: {error}", _EXPECTED) from error


def _read_groups(config: object) -> dict[str, _Group]:
    """Groups by torch's name for them; one that is not understood is left out."""
    if not isinstance(config, dict):
        return {}
    found = {}
    for name, about in config.items():
        if isinstance(about, dict):
            ranks = _read_ranks(about.get("ranks"))
            if ranks:
                found[str(name)] = _Group(str(name), str(about.get("desc") or "undefined"), ranks)
    return found


def _read_ranks(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return ()
    if not isinstance(value, (list, tuple)) or not all(type(rank) is int for rank in value):
        return ()
    return tuple(sorted(rank for rank in value if 0 <= rank < 2**31))


def _rank_of(source: Source, document: Mapping[str, Any], groups: Mapping[str, _Group]) -> int:
    told = document.get("rank")
    if type(told) is int and 0 <= told < 2**31:
        return told
    common = set.intersection(*(set(g.ranks) for g in groups.values())) if groups else set()
    match = _RANK_IN_NAME.search(source.file_name)
    if match is not None:
        rank = int(match[1])
        if common and rank not in common:
            raise source_error(
                source,
                f"named after rank {rank}, which is not in its process groups",
                "a name that ends in the rank, such as nccl_trace_rank_12",
                "Give it the name that torch had given it.",
            )
        return rank
    if len(common) == 1:
        return common.pop()
    raise source_error(
        source,
        "without a rank",
        "a name that ends in the rank, such as nccl_trace_rank_12",
        "Give it the name that torch had given it.",
    )


def _check_same_job(dump: _Dump, dumps: Mapping[int, _Dump]) -> None:
    if dump.rank in dumps:
        raise source_error(
            dump.source,
            f"a second dump of rank {dump.rank}, after {dumps[dump.rank].source.name}",
            "one dump for each rank of one job",
        )
    first = next(iter(dumps.values()), None)
    if first is not None and first.groups and dump.groups and first.world_size != dump.world_size:
        raise source_error(
            dump.source,
            f"of a job with {dump.world_size} ranks, and {first.source.name} of {first.world_size}",
            "dumps of one job",
        )


def _entry(raw: Mapping[str, Any], groups: Mapping[str, _Group]) -> _Entry:
    name, description = (str(part) for part in raw["process_group"])
    group = groups.get(name)
    if group is not None and group.description != description:
        group = None
    op, peer = operation(str(raw["profiling_name"])), None
    direct = _DIRECT.match(str(raw["profiling_name"]))
    is_direct = bool(raw.get("is_p2p")) or direct is not None
    if direct is not None:
        op, other = direct[1], int(direct[3])
        # Ranks within the group; on the group of all ranks that is the same.
        peer = group.ranks[other] if group is not None and other < len(group.ranks) else None
    duration_ms = raw.get("duration_ms")
    seq = raw.get("collective_seq_id", raw.get("seq_id"))
    state = str(raw["state"])
    return _Entry(
        record=_whole(raw.get("record_id", raw.get("id", 0))),
        group=group,
        op=op,
        seq=None if is_direct or seq is None else _whole(seq),
        peer=peer,
        payload_bytes=_payload_bytes(raw),
        created_ns=_whole(raw["time_created_ns"]),
        timeout_ns=_whole((raw.get("timeout_ms") or 0) * 1_000_000),
        started_ns=_time(raw.get("time_discovered_started_ns")),
        completed_ns=_time(raw.get("time_discovered_completed_ns")),
        duration_s=_seconds(duration_ms),
        completed=state == "completed",
        stack=_stack(raw.get("frames")),
    )


def _whole(value: Any) -> int:  # noqa: ANN401 - whatever is in the file
    """A number that fits the tables.

    Raises:
        ValueError: It does not.
    """
    number = int(value)
    if not 0 <= number < 2**62:
        msg = f"out of range: {number}"
        raise ValueError(msg)
    return number


def _time(value: Any) -> int | None:  # noqa: ANN401 - whatever is in the file
    return (_whole(value) or None) if isinstance(value, (int, float)) else None


def _seconds(duration_ms: Any) -> float | None:  # noqa: ANN401 - whatever is in the file
    """A duration; None where there is none, or none that can be."""
    if duration_ms is None:
        return None
    seconds = float(duration_ms) / 1e3
    return seconds if 0 <= seconds < math.inf else None


def _payload_bytes(raw: Mapping[str, Any]) -> int:
    """Bytes of the inputs, as far as their types are known."""
    sizes = raw.get("input_sizes") or ()
    kinds = raw.get("input_dtypes") or ()
    total = sum(
        math.prod(int(n) for n in shape) * element_bytes(str(kind))
        for shape, kind in zip(sizes, kinds, strict=False)
    )
    return max(min(total, 2**62), 0)


def _stack(frames: object) -> str | None:
    """Outermost frame first, as heartbeats have it; torch has the innermost first."""
    if not isinstance(frames, (list, tuple)) or not frames:
        return None
    lines = [
        f"{frame.get('filename', '?')}:{frame.get('line', '?')} {frame.get('name', '?')}"
        for frame in frames[:_MAX_FRAMES]
        if isinstance(frame, dict)
    ]
    return " > ".join(reversed(lines)) or None


# -- tables -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Maker:
    """Makes the tables of one job's dumps."""

    dumps: Sequence[_Dump]
    name: RunName
    account: Account
    _groups: GroupBook = field(init=False)
    _keys: dict[str, int] = field(init=False)
    _first_ns: int = field(init=False)
    _dumped_ns: int = field(init=False)

    @property
    def summary(self) -> RunSummary:
        """Who the run is, and its time, which no step tells."""
        return replace(self.name.summary(), first_ns=self._first_ns, last_ns=self._dumped_ns)

    def __post_init__(self) -> None:
        self._groups = GroupBook(self.name)
        self._keys = self._number_groups()
        self._first_ns = min((e.created_ns for d in self.dumps for e in d.entries), default=0)
        last_ns = max((_latest_ns(e) for d in self.dumps for e in d.entries), default=0)
        self._dumped_ns, when = _dumped_ns(self.dumps, last_ns)
        self._say(when)

    def _number_groups(self) -> dict[str, int]:
        """Torch's name → our key. Groups alike in purpose and members are told apart by order."""
        named = {g.name: g for dump in self.dumps for g in dump.groups.values()}
        alike: dict[tuple[str, tuple[int, ...]], int] = {}
        keys = {}
        for name in sorted(named, key=lambda n: (len(n), n)):  # torch names them 0, 1, 2 …
            group = named[name]
            nth = alike.get((group.description, group.ranks), 0)
            alike[group.description, group.ranks] = nth + 1
            keys[name] = self._groups.key(group.description, group.ranks, nth)
        return keys

    def _say(self, when: str) -> None:
        account = self.account
        for dump in self.dumps:
            account.unmapped["damaged entry"] += dump.damaged
            for entry in dump.entries:
                state = "completed" if entry.completed else "not completed"
                if entry.group is None:
                    account.unmapped[f"{state}, of a group that the dump does not describe"] += 1
                else:
                    account.mapped[state] += 1
        account.unmapped += type(account.unmapped)()  # leaves out zeros
        account.note("a dump knows no steps: what it holds is of a step 0 that has not ended")
        world = max(dump.world_size for dump in self.dumps)
        if len(self.dumps) < world:
            account.note(f"{len(self.dumps)} of {world} ranks left a dump")
        account.note(when)

    def blocks(self) -> Iterator[RunTables]:
        """The job, some ranks at a time."""
        for begin in range(0, len(self.dumps), _RANKS_A_BLOCK):
            dumps = self.dumps[begin : begin + _RANKS_A_BLOCK]
            rank = np.array([dump.rank for dump in dumps])
            yield RunTables(
                ranks=self._ranks(dumps, rank),
                steps=STEPS.empty_table(),
                collectives=self._collectives(dumps),
                groups=self._groups.table(),
                events=EVENTS.empty_table(),
                heartbeats=self._heartbeats(dumps),
            )

    def _ranks(self, dumps: Sequence[_Dump], rank: np.ndarray) -> pa.Table:
        columns: dict[str, Any] = {
            "rank": rank,
            "world_size": max(dump.world_size for dump in self.dumps),
            "host": "",
            "gpu": pa.array([DEVICE if dump.has_gpu else None for dump in dumps], pa.string()),
            "nonce_local": False,
        }
        for axis, descriptions in _AXES.items():
            columns[axis] = pa.array([_place(d, descriptions) for d in dumps], pa.int32())
        return self.name.table(RANKS, columns, rank.size)

    def _collectives(self, dumps: Sequence[_Dump]) -> pa.Table:
        rows = []
        for dump in dumps:
            known = [entry for entry in dump.entries if entry.group is not None]
            for entry in sorted(known, key=_arrival_ns):
                arrival = (_arrival_ns(entry) - self._first_ns) * 1e-9
                duration = _duration_s(entry)
                rows.append(
                    {
                        "rank": dump.rank,
                        "group": self._keys[entry.group.name] if entry.group else 0,
                        "op": entry.op,
                        "seq": entry.seq,
                        "peer": entry.peer,
                        "payload_bytes": entry.payload_bytes,
                        "arrival_s": arrival,
                        "last_arrival_s": arrival,
                        "duration_s": duration,
                        "min_duration_s": duration,
                    }
                )
        columns: dict[str, Any] = {
            name: pa.array([row[name] for row in rows], COLLECTIVES.field(name).type)
            for name in (rows[0] if rows else ())
        }
        return self.name.table(COLLECTIVES, {**columns, "ordinal": 0, "count": 1}, len(rows))

    def _heartbeats(self, dumps: Sequence[_Dump]) -> pa.Table:
        rows: list[dict[str, Any]] = []
        for dump in dumps:
            waits = _waiting(dump)
            if not waits:
                rows.append({"rank": dump.rank})
            for entry, group in waits:
                rows.append(
                    {
                        "rank": dump.rank,
                        "group": self._keys[group.name],
                        "op": entry.op,
                        "seq": entry.seq,
                        "age_s": max((self._dumped_ns - entry.created_ns) * 1e-9, 0.0),
                        "stack": entry.stack,
                    }
                )
        columns: dict[str, Any] = {
            name: pa.array([row.get(name) for row in rows], HEARTBEATS.field(name).type)
            for name in ("rank", "group", "op", "seq", "age_s", "stack")
        }
        columns |= {"time_ns": self._dumped_ns, "ordinal": 0}
        return self.name.table(HEARTBEATS, columns, len(rows))


def _waiting(dump: _Dump) -> list[tuple[_Entry, _Group]]:
    """What a rank entered and did not leave: the first on each group, and the first of all first."""
    found: dict[str, tuple[_Entry, _Group]] = {}
    for entry in sorted(dump.entries, key=lambda e: (e.created_ns, e.record)):
        if not entry.completed and entry.group is not None:
            found.setdefault(entry.group.name, (entry, entry.group))
    return list(found.values())


def _dumped_ns(dumps: Sequence[_Dump], last_ns: int) -> tuple[int, str]:
    """When the job's dumps were written, and how that is known."""
    written_ns = max(dump.source.modified_ns for dump in dumps)
    if 0 <= written_ns - last_ns <= _LATEST_NS:
        return written_ns, "the files' time is taken for when they were written"
    over_ns = [
        entry.created_ns + entry.timeout_ns
        for dump in dumps
        for entry in dump.entries
        if not entry.completed and entry.timeout_ns
    ]
    if over_ns:
        return (
            max(min(over_ns), last_ns),
            "the files' times do not fit: the first timeout is taken for when they were written",
        )
    return last_ns, "the files' times do not fit: the last thing in them is taken instead"


def _latest_ns(entry: _Entry) -> int:
    return max(entry.created_ns, entry.started_ns or 0, entry.completed_ns or 0)


def _arrival_ns(entry: _Entry) -> int:
    return entry.started_ns or entry.created_ns


def _duration_s(entry: _Entry) -> float | None:
    """How long it took: torch's own measure, else what its watchdog saw."""
    if not entry.completed:
        return None
    if entry.duration_s is not None:
        return entry.duration_s
    if entry.completed_ns is None:
        return None
    return max((entry.completed_ns - _arrival_ns(entry)) * 1e-9, 0.0)


def _place(dump: _Dump, descriptions: Sequence[str]) -> int | None:
    for description in descriptions:
        found = [g for g in dump.groups.values() if g.description == description]
        if len(found) == 1 and dump.rank in found[0].ranks:
            return found[0].ranks.index(dump.rank)
    return None
