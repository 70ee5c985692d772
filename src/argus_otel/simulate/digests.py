"""A simulated run as its ranks would have sent it: digests, from the run's tables.

What comes back from a store after these have gone over the wire equals the tables (a contract test
says so), which is why a simulated run may skip the wire where millions of digests are wanted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from argus_otel.tables.kernels import read_sketch_column
from argus_otel.wire.codes import OPS, PHASES
from argus_otel.wire.digest import PhaseColumns, StepDigest, SyncColumns
from argus_otel.wire.identity import format_ranks
from argus_otel.wire.sketch import Sketch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from argus_otel.tables.schemas import RunTables

_GROUP_INFO_EVERY = 32


def digests_of(tables: RunTables) -> Iterator[StepDigest]:
    """One digest for each row of ``steps``, in its order."""
    operations: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in tables.collectives.to_pylist():
        operations[row["ordinal"], row["rank"]].append(row)
    infos = {
        row["group"]: f"{row['group']:016x}|{row['description']}|"
        f"{format_ranks(tuple(row['ranks']))}"
        for row in tables.groups.to_pylist()
    }
    kernels = dict(_sketches(tables.kernels))
    experts = {
        (row["ordinal"], row["rank"]): tuple(row["tokens"]) for row in tables.experts.to_pylist()
    }
    for row in tables.steps.to_pylist():
        step = (row["ordinal"], row["rank"])
        yield _digest(row, operations[step], infos, kernels.get(step), experts.get(step, ()))


def _digest(
    row: Mapping[str, Any],
    operations: list[Mapping[str, Any]],
    infos: Mapping[int, str],
    kernels: Sketch | None,
    expert_tokens: tuple[int, ...],
) -> StepDigest:
    counts = {count["group"]: count["count"] for count in row["boundary_counts"]}
    sync = _sync(row["rank"], operations, counts)
    told = row["ordinal"] % _GROUP_INFO_EVERY == 0
    return StepDigest(
        ordinal=row["ordinal"],
        rank=row["rank"],
        start_ns=row["start_ns"],
        end_ns=row["start_ns"] + round(row["step_s"] * 1e9),
        between_s=row["between_s"],
        end_rule=row["end_rule"],
        iteration=row["iteration"],
        busy_s=row["busy_s"],
        cpu_s=row["cpu_s"],
        run_delay_s=row["run_delay_s"],
        data_wait_s=row["data_wait_s"],
        gc_s=row["gc_s"],
        gc_count=row["gc_count"],
        tokens=row["tokens"],
        samples=row["samples"],
        sum_len2=row["sum_len2"],
        expert_tokens=expert_tokens,
        memory_bytes=row["memory_bytes"],
        phases=PhaseColumns(
            name=[PHASES.index(phase["name"]) for phase in row["phases"]],
            start_us=[round(phase["start_s"] * 1e6) for phase in row["phases"]],
            duration_us=[round(phase["host_s"] * 1e6) for phase in row["phases"]],
        ),
        sync=sync,
        kernels=kernels,
        group_info=tuple(infos[key] for key in sync.group_keys) if told else (),
    )


def _sketches(kernels: pa.Table) -> Iterator[tuple[tuple[int, int], Sketch]]:
    """The kernels of each (ordinal, rank), from rows that are sorted by it."""
    if not kernels.num_rows:
        return
    rows = read_sketch_column(kernels["sketch"])
    ordinal, rank = (kernels[name].to_numpy() for name in ("ordinal", "rank"))
    names = tuple(sorted(kernels["name"].unique().to_pylist()))
    name = np.array([names.index(name) for name in kernels["name"].to_pylist()])
    stream = kernels["stream"].to_numpy()
    phase = np.array(
        [-1 if name is None else PHASES.index(name) for name in kernels["phase"].to_pylist()]
    )
    first = np.flatnonzero(np.diff(ordinal, prepend=-1) | np.diff(rank, prepend=-1))
    entries = np.append(0, np.cumsum(rows.filled))
    for begin, end in zip(first.tolist(), [*first[1:].tolist(), rank.size], strict=True):
        of_step = slice(entries[begin], entries[end])
        yield (
            (int(ordinal[begin]), int(rank[begin])),
            Sketch(
                names=names,
                name=name[begin:end],
                stream=stream[begin:end],
                phase=phase[begin:end],
                row=np.repeat(np.arange(end - begin), rows.filled[begin:end]),
                bucket=rows.bucket[of_step],
                count=rows.count[of_step],
                place_sum=rows.place_sum[of_step],
                error_per_mille=rows.error_per_mille,
            ),
        )


def _sync(rank: int, operations: list[Mapping[str, Any]], counts: Mapping[int, int]) -> SyncColumns:
    places: dict[int, int] = {}
    channels: dict[tuple[int, int, int], int] = {}
    group, peer = [], []
    for operation in operations:
        place = places.setdefault(operation["group"], len(places))
        group.append(place)
        other = operation["peer"]
        peer.append(-1 if other is None else other)
        if other is not None:
            ends = (rank, other) if operation["op"] == "send" else (other, rank)
            channels.setdefault((place, *ends), operation["seq"])
    return SyncColumns(
        group_keys=list(places),
        start_counts=[counts.get(key, 0) for key in places],
        channels=[[*ends, before] for ends, before in channels.items()],
        group=group,
        op=[OPS.index(operation["op"]) for operation in operations],
        payload_bytes=[operation["payload_bytes"] for operation in operations],
        peer=peer,
        phase=[PHASES.index(operation["phase"]) for operation in operations],
        arrival_us=[round(operation["arrival_s"] * 1e6) for operation in operations],
        duration_us=[round(operation["duration_s"] * 1e6) for operation in operations],
    )
