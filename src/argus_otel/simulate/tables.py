"""A simulated job's tables, with nothing in them that the wire could not carry.

Times go through the digest's units (whole microseconds) and layout; what a real digest would fold
is refused, so that a score on simulated runs is a score on what detectors get.

Shape legend: B = steps of a block, R = ranks, K = operations of a rank in a step, P = phases,
M = passes of one direction, D = reported (step, rank) pairs, C = reported operations.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from argus_otel.simulate.kernels import KernelMaker, key_columns
from argus_otel.simulate.model import PHASES
from argus_otel.tables.kernels import sketch_column
from argus_otel.tables.schemas import (
    COLLECTIVES,
    DEVICES,
    EVENTS,
    EXPERTS,
    GROUPS,
    HEARTBEATS,
    KERNELS,
    MICRO_BATCHES,
    RANKS,
    STEPS,
    RunTables,
)
from argus_otel.wire import ids
from argus_otel.wire.digest import MAX_SYNC_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from argus_otel.simulate.model import Model, StepArrays

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

START_NS: Final = 1_700_000_000_000_000_000
DEVICES_EVERY: Final = 5
"""Steps between device rows of healthy ranks."""
_BYTES_PER_OPERATION: Final = 7
"""Signature, arrival difference and duration of an operation at most, packed, for the jobs here."""
_CPU_SHARE_BESIDE_GPU: Final = 0.4
"""Of busy time: the host launches, and waits for the device without a core."""
_OPS_SEND: Final = "send"


@dataclass(frozen=True, slots=True)
class RunName:
    """Who a simulated run is."""

    run_id: str
    nonce: bytes

    @classmethod
    def of(cls, run_id: str, seed: int) -> RunName:
        """A nonce that the same arguments give again."""
        digest = hashlib.blake2b(f"{run_id}\0{seed}".encode(), digest_size=8)
        return cls(run_id, digest.digest())


class TableMaker:
    """Turns the steps of a model into tables, block by block.

    Args:
        model: The job.
        name: Who the run is.
        start_ns: Unix time of its beginning.
    """

    def __init__(self, model: Model, name: RunName, start_ns: int = START_NS) -> None:
        self._model, self._name, self._start_ns = model, name, start_ns
        self._cluster = model.cluster
        if model.operations * _BYTES_PER_OPERATION > MAX_SYNC_BYTES:
            msg = (
                f"cluster {self._cluster.name} has {model.operations} operations a step, which a "
                "digest would fold; take fewer micro-batches or buckets"
            )
            raise ValueError(msg)
        self._kernels = KernelMaker(model, model.seed)
        self._keys: dict[str, NDArray[np.uint64]] = {}
        self._groups: list[dict[str, Any]] = []
        self._lay_out_slots()

    # -- what does not change from step to step -----------------------------------------------

    def _lay_out_slots(self) -> None:
        """Group key, operation, bytes, peer and numbering of each rank's slots [R, K]."""
        c, k = self._cluster, self._model.operations
        shape = (c.ranks, k)
        self._used_RK = np.zeros(shape, dtype=bool)
        self._group_RK = np.zeros(shape, dtype=np.uint64)
        self._bytes_RK = np.zeros(shape, dtype=np.int64)
        self._peer_RK = np.full(shape, -1, dtype=np.int64)
        self._op_RK, self._phase_RK = np.zeros(shape, np.int8), np.zeros(shape, np.int8)
        self._nth_RK, self._per_step_RK = np.zeros(shape, np.int64), np.ones(shape, np.int64)
        self._ops: dict[str, int] = {}
        self._phases: dict[str, int] = {}
        n = c.ranks // c.pp
        for stage, slots in enumerate(self._model.slots):
            where = slice(stage * n, (stage + 1) * n)
            own = np.arange(c.ranks)[where]
            seen: dict[tuple[str, int | None, bool], int] = {}
            for slot, kind in enumerate(slots):
                # Collectives count per group, point-to-point per (group, source, destination).
                counter = (kind.axis, kind.peer_stages, kind.op == _OPS_SEND)
                self._nth_RK[where, slot] = seen.get(counter, 0)
                seen[counter] = seen.get(counter, 0) + 1
                self._used_RK[where, slot] = True
                self._group_RK[where, slot] = self._key_of(kind.axis)[where]
                self._bytes_RK[where, slot] = kind.payload_bytes
                self._op_RK[where, slot] = self._ops.setdefault(kind.op, len(self._ops))
                code = self._phases.setdefault(kind.phase, len(self._phases))
                self._phase_RK[where, slot] = code
                if kind.peer_stages is not None:
                    self._peer_RK[where, slot] = own + kind.peer_stages * n
            for slot, kind in enumerate(slots):
                counter = (kind.axis, kind.peer_stages, kind.op == _OPS_SEND)
                self._per_step_RK[where, slot] = seen[counter]

    def _key_of(self, axis: str) -> NDArray[np.uint64]:
        """Group key of each rank along an axis [R]; the group is listed once."""
        if axis in self._keys:
            return self._keys[axis]
        c = self._cluster
        if axis == "pp":
            n = c.ranks // c.pp
            index_R = np.arange(c.ranks) % n
        else:
            index_R = c.group_of(axis)
        order = np.argsort(index_R, kind="stable")
        cuts = np.flatnonzero(np.diff(index_R[order])) + 1
        keys = []
        for members in np.split(order, cuts):
            ranks = members.tolist()
            key = ids.group_key(axis, ranks, 0)
            keys.append(key)
            self._groups.append({"group": key, "description": axis, "ranks": ranks})
        self._keys[axis] = np.array(keys, dtype=np.uint64)[index_R]
        return self._keys[axis]

    def ranks(self) -> pa.Table:
        """The ranks table."""
        c = self._cluster
        r = c.ranks
        columns: dict[str, Any] = {
            "run_id": [self._name.run_id] * r,
            "rank": np.arange(r),
            "world_size": np.full(r, r),
            "role": ["trainer"] * r,
            "host": [f"host-{host:04d}" for host in c.host.tolist()],
            "local_rank": np.arange(r) % c.ranks_per_host,
            "pid": np.arange(r) + 1000,
            "gpu": [f"gpu-{rank}" for rank in range(r)] if c.gpu else None,
            "nonce_local": np.zeros(r, dtype=bool),
        }
        if c.topology_known:
            columns |= {axis: c.places[axis] for axis in ("dp", "tp", "pp", "ep", "cp")}
        return self._table(RANKS, columns, r)

    def groups(self) -> pa.Table:
        """The groups table."""
        columns = {name: [group[name] for group in self._groups]
                   for name in ("group", "description", "ranks")}  # fmt: skip
        return self._table(GROUPS, columns, len(self._groups)).sort_by("group")

    # -- blocks of steps ----------------------------------------------------------------------

    def blocks(self, steps: int, *, block: int = 16) -> Iterator[RunTables]:
        """The run in pieces of ``block`` steps: every table in each, ranks and groups repeated."""
        ranks, groups = self.ranks(), self.groups()
        held: list[StepArrays] = []
        for arrays in self._model.steps(steps):
            held.append(arrays)
            if len(held) == block:
                yield self._block(held, ranks, groups)
                held = []
        if held:
            yield self._block(held, ranks, groups)

    def whole(self, steps: int) -> RunTables:
        """The run in one piece."""
        return next(self.blocks(steps, block=steps))

    def _block(self, held: Sequence[StepArrays], ranks: pa.Table, groups: pa.Table) -> RunTables:
        return RunTables(
            ranks=ranks,
            steps=self._steps(held),
            collectives=self._collectives(held),
            groups=groups,
            events=self._events(held),
            micro_batches=self._micro_batches(held),
            devices=self._devices(held),
            heartbeats=self._heartbeats(held),
            kernels=self._kernel_rows(held),
            experts=self._expert_rows(held),
        )

    def _steps(self, held: Sequence[StepArrays]) -> pa.Table:
        c, model = self._cluster, self._model
        told_BR = np.stack([a.reported_R for a in held])
        step_D, rank_D = np.nonzero(told_BR)

        def pick(name: str) -> Any:  # noqa: ANN401 - numpy, of either kind
            return np.stack([getattr(a, name) for a in held])[step_D, rank_D]

        start_D, end_D, wait_D = pick("start_R"), pick("end_R"), pick("wait_R")
        drift = 1 + model.clock_drift_R[rank_D]
        start_ns = np.rint(
            (start_D * drift + model.clock_offset_R[rank_D]) * 1e9
        ).astype(np.int64) + self._start_ns  # fmt: skip
        step_s = np.rint((end_D - start_D) * 1e9) * 1e-9
        busy_s = np.maximum(step_s - wait_D, 0.0)
        own_cpu = busy_s - pick("data_wait_R") - pick("run_delay_R")
        ordinal = np.array([a.ordinal for a in held])
        tokens = pick("tokens_R")
        columns: dict[str, Any] = {
            "ordinal": ordinal[step_D],
            "rank": rank_D,
            "start_ns": start_ns,
            "step_s": step_s,
            "between_s": pick("between_R"),
            "busy_s": busy_s,
            "cpu_s": np.maximum(own_cpu, 0) * (_CPU_SHARE_BESIDE_GPU if c.gpu else 1.0),
            "run_delay_s": pick("run_delay_R"),
            "data_wait_s": pick("data_wait_R"),
            "gc_s": pick("gc_R"),
            "gc_count": pick("gc_count_R"),
            "phases": self._phase_lists(held, step_D, rank_D, start_D),
            "tokens": tokens if c.tokens else None,
            "sum_len2": pick("sum_len2_R") if c.tokens else None,
            "memory_bytes": pick("memory_bytes_R").astype(np.int64),
            "boundary_counts": self._boundary_counts(ordinal[step_D], rank_D),
            "end_rule": pa.DictionaryArray.from_arrays(
                np.zeros(step_D.size, np.int8), ["optimizer"]
            ),
            "truncated": np.zeros(step_D.size, dtype=bool),
            "drops": np.zeros(step_D.size, dtype=np.int64),
            "trace_id": self._trace_ids(ordinal, step_D, rank_D),
        }
        return self._table(STEPS, columns, step_D.size)

    def _trace_ids(self, ordinal: Ints, step_D: Ints, rank_D: Ints) -> pa.Array:
        shards = ids.shard_count(self._cluster.ranks)
        names = [
            ids.step_trace_id(self._name.nonce, 0, number, shard).hex()
            for number in ordinal.tolist()
            for shard in range(shards)
        ]
        code = step_D * shards + rank_D // ids.RANKS_PER_SHARD
        return pa.DictionaryArray.from_arrays(code.astype(np.int32), names)

    def _phase_lists(
        self, held: Sequence[StepArrays], step_D: Ints, rank_D: Ints, start_D: Floats
    ) -> pa.Array:
        p = len(PHASES)
        start = np.stack([a.phase_start_PR for a in held])[step_D, :, rank_D] - start_D[:, None]
        took = np.stack([a.phase_PR for a in held])[step_D, :, rank_D]
        code = np.tile(np.arange(p, dtype=np.int8), step_D.size)
        rows = pa.StructArray.from_arrays(
            [
                pa.DictionaryArray.from_arrays(code, list(PHASES)).cast(pa.string()),
                pa.array(_whole_us(start).reshape(-1)),
                pa.array(_whole_us(took).reshape(-1)),
                pa.nulls(code.size, pa.float64()),
            ],
            fields=list(STEPS.field("phases").type.value_type),
        )
        offsets = np.arange(0, code.size + 1, p, dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), rows)

    def _boundary_counts(self, ordinal_D: Ints, rank_D: Ints) -> pa.Array:
        axes = sorted({slot.axis for slots in self._model.slots for slot in slots})
        per_step = []
        for stage_slots in self._model.slots:
            collective = [slot.axis for slot in stage_slots if slot.peer_stages is None]
            per_step.append([collective.count(axis) for axis in axes])
        stage_D = self._cluster.places["pp"][rank_D]
        count = np.array(per_step, dtype=np.int64)[stage_D] * ordinal_D[:, None]
        key = np.stack([self._key_of(axis) for axis in axes], axis=1)[rank_D]
        rows = pa.StructArray.from_arrays(
            [pa.array(key.reshape(-1)), pa.array(count.reshape(-1))],
            fields=list(STEPS.field("boundary_counts").type.value_type),
        )
        offsets = np.arange(0, key.size + 1, len(axes), dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), rows)

    def _collectives(self, held: Sequence[StepArrays]) -> pa.Table:
        parts = [self._of_step(arrays) for arrays in held]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for name, values in (("op", self._ops), ("phase", self._phases)):
            columns[name] = pa.DictionaryArray.from_arrays(columns[name], list(values))
        peer = columns["peer"]
        columns["peer"] = pa.array(peer, mask=peer < 0)
        duration = columns["duration_s"]
        columns["min_duration_s"] = duration
        columns["last_arrival_s"] = columns["arrival_s"]
        columns["count"] = np.ones(duration.size, dtype=np.int64)
        return self._table(COLLECTIVES, columns, duration.size)

    def _of_step(self, arrays: StepArrays) -> dict[str, Any]:
        told_RK = self._used_RK & arrays.reported_R[:, None] & ~np.isnan(arrays.arrival_RK)
        rank, slot = np.nonzero(told_RK)
        arrival = arrays.arrival_RK[rank, slot] - arrays.start_R[rank]
        # As a digest lists them: in order of arrival, and of issue where two arrive at once.
        order = np.lexsort((slot, arrival, rank))
        rank, slot, arrival = rank[order], slot[order], arrival[order]
        at = (rank, slot)
        count = self._per_step_RK[at] * arrays.ordinal + self._nth_RK[at]
        duration = arrays.end_RK[at] - arrays.start_R[rank] - arrival
        return {
            "ordinal": np.full(rank.size, arrays.ordinal),
            "rank": rank,
            "group": self._group_RK[at],
            "op": self._op_RK[at],
            "seq": count,
            "peer": self._peer_RK[at],
            "phase": self._phase_RK[at],
            "payload_bytes": self._bytes_RK[at],
            "arrival_s": _whole_us(arrival),
            "duration_s": np.maximum(_whole_us(duration), 0.0),
        }

    def _events(self, held: Sequence[StepArrays]) -> pa.Table:
        rows = [
            {"ordinal": arrays.ordinal, "rank": int(rank), "start_s": 0.0, "detail": None, **event}
            for arrays in held
            for event in arrays.events
            for rank in event["ranks"]
            if arrays.reported_R[rank]
        ]
        return self._rows(EVENTS, rows)

    def _micro_batches(self, held: Sequence[StepArrays]) -> pa.Table:
        c = self._cluster
        passes = c.micro_batches * c.chunks
        if c.pp == 1 and passes == 1:
            return MICRO_BATCHES.empty_table()
        told_BR = np.stack([a.reported_R for a in held])
        took = np.stack([a.pass_RM2 for a in held])
        begun = np.stack([a.pass_start_RM2 - a.start_R[:, None, None] for a in held])
        step, rank, at, backward = np.nonzero(~np.isnan(took) & told_BR[:, :, None, None])
        where = (step, rank, at, backward)
        columns = {
            "ordinal": np.array([a.ordinal for a in held])[step],
            "rank": rank,
            "chunk": at // c.micro_batches,
            "micro_batch": at % c.micro_batches,
            "backward": backward.astype(bool),
            "start_s": _whole_us(begun[where]),
            "duration_s": _whole_us(took[where]),
        }
        return self._table(MICRO_BATCHES, columns, step.size)

    def _devices(self, held: Sequence[StepArrays]) -> pa.Table:
        if not self._cluster.gpu:
            return DEVICES.empty_table()
        rows: list[dict[str, Any]] = []
        for arrays in held:
            odd = {rank for rank in arrays.devices if arrays.reported_R[rank]}
            if arrays.ordinal % DEVICES_EVERY == 0:
                odd |= set(np.flatnonzero(arrays.reported_R).tolist())
            healthy = {"throttle_reasons": "", "ecc_errors": 0, "allocator_retries": 0}
            rows += [
                {**healthy, "ordinal": arrays.ordinal, "rank": rank,
                 "clock_ratio": float(arrays.clock_ratio_R[rank]), **arrays.devices.get(rank, {})}
                for rank in sorted(odd)
            ]  # fmt: skip
        return self._rows(DEVICES, rows)

    def _expert_rows(self, held: Sequence[StepArrays]) -> pa.Table:
        tokens = [a.expert_tokens_RX for a in held if a.expert_tokens_RX is not None]
        if not tokens:
            return EXPERTS.empty_table()
        step, rank = np.nonzero(np.stack([a.reported_R for a in held]))
        of_row = np.stack(tokens)[step, rank]
        offsets = np.arange(0, of_row.size + 1, of_row.shape[1], dtype=np.int32)
        columns = {
            "ordinal": np.array([a.ordinal for a in held])[step],
            "rank": rank,
            "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(of_row.reshape(-1))),
        }
        return self._table(EXPERTS, columns, rank.size)

    def _kernel_rows(self, held: Sequence[StepArrays]) -> pa.Table:
        if not self._cluster.gpu:
            return KERNELS.empty_table()
        columns = key_columns(self._kernels.keys)
        parts = []
        for arrays in held:  # a step at a time: its numbers fit a cache
            rank, key, rows = self._kernels.rows(arrays)
            taken = {name: column.take(pa.array(key)) for name, column in columns.items()}
            taken["ordinal"] = np.full(rank.size, arrays.ordinal)
            taken |= {"rank": rank, "sketch": sketch_column(rows)}
            parts.append(self._table(KERNELS, taken, rank.size))
        return pa.concat_tables(parts)

    def _heartbeats(self, held: Sequence[StepArrays]) -> pa.Table:
        rows = []
        for arrays in held:
            stuck_ns = self._start_ns + int(arrays.end_R.max() * 1e9)
            for beat in arrays.heartbeats:
                rank, slot = beat["rank"], beat["slot"]
                entered = slot is not None
                at = (rank, slot if entered else 0)
                seq = int(self._per_step_RK[at] * arrays.ordinal + self._nth_RK[at])
                for age_s in (10.0, 15.0, 20.0):
                    rows.append(
                        {"time_ns": stuck_ns + int(age_s * 1e9), "rank": rank,
                         "ordinal": arrays.ordinal, "phase": beat["phase"],
                         "group": int(self._group_RK[at]) if entered else None,
                         "op": beat["op"], "seq": seq if entered else None,
                         "age_s": age_s if entered else None, "stack": beat["stack"]}
                    )  # fmt: skip
        return self._rows(HEARTBEATS, rows)

    def _rows(self, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        columns = {name: [row.get(name) for row in rows] for name in schema.names}
        return self._table(schema, columns, len(rows))

    def _table(self, schema: pa.Schema, columns: Mapping[str, Any], rows: int) -> pa.Table:
        nothing = np.zeros(rows, np.int8)
        fixed = {
            "run": pa.DictionaryArray.from_arrays(nothing, [self._name.nonce.hex()]),
            "attempt": nothing,
        }
        arrays = []
        for field in schema:
            values = fixed.get(field.name) if field.name in fixed else columns.get(field.name)
            if values is None:
                arrays.append(pa.nulls(rows, field.type))
                continue
            if isinstance(values, list):
                arrays.append(pa.array(values, field.type))
                continue
            array = values if isinstance(values, pa.Array) else pa.array(values)
            arrays.append(array if array.type == field.type else array.cast(field.type))
        return pa.Table.from_arrays(arrays, schema=schema)


def _whole_us(seconds: Floats) -> Floats:
    """Seconds in the digest's unit: rounded to a whole microsecond, halves up."""
    whole: Floats = np.floor(seconds * 1e6 + 0.5) / 1e6
    return whole
