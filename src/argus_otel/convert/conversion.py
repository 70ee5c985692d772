"""What a converter gives: a run as tables, and an account of what was and was not understood."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from argus_otel.tables.schemas import GROUPS, STEPS, RunSummary
from argus_otel.wire import ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from argus_otel.convert.sources import Source, SourceError
    from argus_otel.tables.schemas import RunTables

ATTEMPT: Final = 0
ROLE: Final = "trainer"
MAX_RANKS: Final = 1 << 22
"""More than any job has: what says more is damaged, and would be listed rank by rank."""
DEVICE: Final = "GPU"
"""The GPU of a rank that has one, where the source does not say which."""


@dataclass(slots=True)
class Account:
    """What became of everything that was read. Complete once the blocks have been taken."""

    files: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Name of a file that was left out, and why."""
    mapped: Counter[str] = field(default_factory=Counter)
    """Kind of record → how many became rows, or part of some."""
    unmapped: Counter[str] = field(default_factory=Counter)
    """Kind of record → how many our tables have no place for."""
    notes: list[str] = field(default_factory=list)
    """What was assumed, and what is not known."""

    @property
    def read(self) -> int:
        """Records read."""
        return self.mapped.total() + self.unmapped.total()

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def skip(self, error: SourceError) -> None:
        """Leave a file out."""
        self.skipped.append((error.where, f"{error.got}; expected {error.expected}"))


@dataclass(frozen=True, slots=True)
class Conversion:
    """One run. The blocks are made while they are taken."""

    summary: RunSummary
    blocks: Iterator[RunTables]
    account: Account


@dataclass(frozen=True, slots=True)
class RunName:
    """Who a converted run is: the same for the same files under the same name."""

    run_id: str
    nonce: bytes
    service: str

    @classmethod
    def of(cls, service: str, run_id: str, sources: Sequence[Source]) -> RunName:
        """A nonce from what was given, so that converting again replaces and does not add."""
        files = sorted(f"{source.file_name}\0{source.size}" for source in sources)
        told = "\0".join([service, run_id, *files]).encode()
        return cls(run_id, hashlib.blake2b(told, digest_size=8).digest(), service)

    def summary(self) -> RunSummary:
        """As much as is known beforehand; whoever writes the rows counts them."""
        return RunSummary(
            run=self.nonce.hex(),
            run_id=self.run_id,
            attempt=ATTEMPT,
            role=ROLE,
            service=self.service,
            world_size=0,
            ranks_seen=0,
            first_ns=0,
            last_ns=0,
            steps=0,
        )

    def table(self, schema: pa.Schema, columns: Mapping[str, Any], rows: int) -> pa.Table:
        """A table of this run: columns that are not given are null, whoever the run is filled in.

        Args:
            schema: One of ``tables.schemas``.
            columns: Arrays, lists, or one value for all rows. NaN becomes null.
            rows: How many.
        """
        fixed = {"run": self.nonce.hex(), "run_id": self.run_id, "attempt": ATTEMPT, "role": ROLE}
        arrays = []
        for about in schema:
            values = columns.get(about.name, fixed.get(about.name))
            if values is None:
                arrays.append(pa.nulls(rows, about.type))
                continue
            if isinstance(values, (str, int, float, bool)):
                arrays.append(pa.repeat(pa.scalar(values, about.type), rows))
                continue
            array = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
            arrays.append(array if array.type == about.type else array.cast(about.type))
        return pa.Table.from_arrays(arrays, schema=schema)

    def trace_ids(self, ordinal: np.ndarray, rank: np.ndarray) -> pa.Array:
        """The trace that each (step, rank) would have had."""
        shard = rank // ids.RANKS_PER_SHARD
        pairs, code = np.unique(np.stack([ordinal, shard]), axis=1, return_inverse=True)
        traces = [
            ids.step_trace_id(self.nonce, ATTEMPT, int(step), int(part)).hex()
            for step, part in pairs.T
        ]
        return pa.array(traces, pa.string()).take(pa.array(code.reshape(-1)))


class GroupBook:
    """The groups of a run, each once."""

    def __init__(self, name: RunName) -> None:
        self._name = name
        self._keys: dict[tuple[str, tuple[int, ...], int], int] = {}

    def key(self, description: str, ranks: Sequence[int], nth: int = 0) -> int:
        """Key of a group.

        Args:
            description: What it is for.
            ranks: Members, in order.
            nth: Which one of those with the same description and members.
        """
        about = (description, tuple(ranks), nth)
        if about not in self._keys:
            self._keys[about] = ids.group_key(description, ranks, nth)
        return self._keys[about]

    def table(self) -> pa.Table:
        """All groups so far."""
        by_key = sorted((key, about) for about, key in self._keys.items())
        columns = {
            "group": np.array([key for key, _ in by_key], np.uint64),
            "description": [about[0] for _, about in by_key],
            "ranks": pa.array([about[1] for _, about in by_key], GROUPS.field("ranks").type),
        }
        return self._name.table(GROUPS, columns, len(by_key))


def phase_lists(phases: Sequence[Sequence[Mapping[str, Any]]]) -> pa.Array:
    """The ``phases`` column of steps: name, start_s, host_s, gpu_s of each."""
    return pa.array([list(row) for row in phases], STEPS.field("phases").type)


def boundary_counts(counts: Sequence[Mapping[int, int]]) -> pa.Array:
    """The ``boundary_counts`` column of steps: group → count."""
    rows = [[{"group": key, "count": n} for key, n in sorted(row.items())] for row in counts]
    return pa.array(rows, STEPS.field("boundary_counts").type)
