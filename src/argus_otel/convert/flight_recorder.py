"""Dumps of torch's flight recorder to tables: what each rank was in when a job hung.

One dump a rank, pickled or as JSON. Its entries become collectives: those that are not completed
have no duration. What each rank waits in, on each group the oldest of these, becomes its heartbeats,
the oldest of all first; a rank that waits in nothing has one without a group, and whose place it
is that peers wait for is for detectors to say.

A dump knows no steps. What it holds is of a step 0 that has not ended, so that the run has
heartbeats and collectives, and no steps.

Nor does it say when it was written. That is taken from the file's time where it fits what the
file holds; else from the timeout of what is waited in, for the watchdog dumps when that is over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from argus_otel.convert.conversion import (
    DEVICE,
    Account,
    Conversion,
    GroupBook,
    RunName,
)
from argus_otel.convert.flight_recorder_dump import EXPECTED, Dump, Entry, Group, read_dump
from argus_otel.convert.sources import (
    SourceError,
    list_sources,
    name_of,
    none_left,
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
_RANKS_A_BLOCK: Final = 256
_LATEST_NS: Final = 24 * 3600 * 10**9
"""A file that is younger than what it holds by more was copied or unpacked since."""

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
    dumps: dict[int, Dump] = {}
    for source in sources:
        try:
            dump = read_dump(source, advance)
            _check_same_job(dump, dumps)
        except SourceError as error:
            if not keep_going:
                raise
            account.skip(error)
            continue
        account.files += 1
        dumps[dump.rank] = dump
    if not dumps:
        raise none_left(account.skipped, EXPECTED)
    name = RunName.of(SERVICE, run_id or name_of(paths), sources)
    maker = _Maker([dumps[rank] for rank in sorted(dumps)], name, account)
    return [Conversion(maker.summary, maker.blocks(), account)]


def _check_same_job(dump: Dump, dumps: Mapping[int, Dump]) -> None:
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


@dataclass(slots=True)
class _Maker:
    """Makes the tables of one job's dumps."""

    dumps: Sequence[Dump]
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

    def _ranks(self, dumps: Sequence[Dump], rank: np.ndarray) -> pa.Table:
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

    def _collectives(self, dumps: Sequence[Dump]) -> pa.Table:
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

    def _heartbeats(self, dumps: Sequence[Dump]) -> pa.Table:
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


def _waiting(dump: Dump) -> list[tuple[Entry, Group]]:
    """What a rank entered and did not leave: the first on each group, and the first of all first."""
    found: dict[str, tuple[Entry, Group]] = {}
    for entry in sorted(dump.entries, key=lambda e: (e.created_ns, e.record)):
        if not entry.completed and entry.group is not None:
            found.setdefault(entry.group.name, (entry, entry.group))
    return list(found.values())


def _dumped_ns(dumps: Sequence[Dump], last_ns: int) -> tuple[int, str]:
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


def _latest_ns(entry: Entry) -> int:
    return max(entry.created_ns, entry.started_ns or 0, entry.completed_ns or 0)


def _arrival_ns(entry: Entry) -> int:
    return entry.started_ns or entry.created_ns


def _duration_s(entry: Entry) -> float | None:
    """How long it took: torch's own measure, else what its watchdog saw."""
    if not entry.completed:
        return None
    if entry.duration_s is not None:
        return entry.duration_s
    if entry.completed_ns is None:
        return None
    return max((entry.completed_ns - _arrival_ns(entry)) * 1e-9, 0.0)


def _place(dump: Dump, descriptions: Sequence[str]) -> int | None:
    for description in descriptions:
        found = [g for g in dump.groups.values() if g.description == description]
        if len(found) == 1 and dump.rank in found[0].ranks:
            return found[0].ranks.index(dump.rank)
    return None
