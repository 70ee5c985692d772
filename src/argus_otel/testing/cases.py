"""Cases of a detector: small YAML files that describe a run and what must be said about it.

A case gives a healthy job (``ranks``, ``steps``, ``base``) and what differs (``changes``: ranks,
steps, and which quantity). The run is built from it the way the digest defines its numbers: busy is
the rank's own time with input, collection and waiting for a core; a step lasts as long as its
slowest rank. Or it names a cluster for the simulator, with what differs from it, and faults:

    simulate: {cluster: ddp-8, noise: 0.04, steps: 60, seed: 3, faults: ["link:rank=3,factor=4"]}

``unknown`` lists columns of the steps that nobody measured; of a simulated run also ``ends`` (of all
collectives), ``passes`` (of micro-batches), ``kernels`` and ``experts``; ``without_kernels`` lists
ranks that sent no kernels.

Rows of ``events``, ``devices`` and ``heartbeats`` may be added to either: ``rank`` may be
a list, and ``steps: [first, before]`` (with ``every``) stands for many an ``ordinal``.

Shape legend: S = steps, R = ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from argus_otel._runtime.errors import ConfigError
from argus_otel.align import align
from argus_otel.detect.engine import diagnose
from argus_otel.simulate.cluster import PRESETS
from argus_otel.simulate.faults import parse_fault
from argus_otel.simulate.model import Model
from argus_otel.simulate.tables import RunName, TableMaker
from argus_otel.tables.schemas import (
    COLLECTIVES,
    DEVICES,
    EVENTS,
    GROUPS,
    HEARTBEATS,
    RANKS,
    STEPS,
    RunTables,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from argus_otel.detect.definition import Detector
    from argus_otel.detect.engine import Verdict

    Floats = NDArray[np.float64]

_BASE: Final = {
    "own_s": 0.050,
    "sleep_s": 0.0,
    "jitter": 0.02,
    "common_jitter": 0.02,
    "data_wait_s": 0.0002,
    "gc_s": 0.0,
    "run_delay_s": 0.0,
    "communication_s": 0.010,
    "between_s": 0.001,
    "tokens": 0.0,
    "tokens_jitter": 0.0,
}
"""Seconds, and ratios for the jitters. ``tokens`` 0: not known. A rank with twice the tokens takes
twice as long."""

_KEYS: Final = {
    "why",
    "simulate",
    "events",
    "devices",
    "heartbeats",
    "ranks",
    "steps",
    "seed",
    "ranks_per_host",
    "gpu",
    "base",
    "topology",
    "stage_factor",
    "changes",
    "missing",
    "unknown",
    "without_kernels",
    "unaligned",
    "collectives",
    "world_size",
    "expect",
    "abstain",
}
_CHANGE_KEYS: Final = {"ranks", "steps", "every", "offset", *_BASE, "own_times", "tokens_times"}

_ADDED: Final = {"events": EVENTS, "devices": DEVICES, "heartbeats": HEARTBEATS}

_START_NS: Final = 1_700_000_000_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case, as read."""

    name: str
    why: str
    data: Mapping[str, Any]

    def build(self) -> RunTables:
        """The run that the case describes."""
        return build_run(self.data)

    def differences(self, detector: Detector) -> list[str]:
        """What the detector says other than expected; empty where it is right."""
        verdict = diagnose(self.build(), [detector])
        return list(_differences(self.data, verdict))


def read_cases(folder: Path) -> list[Case]:
    """Read ``cases/*.yaml`` of a detector's folder.

    Raises:
        ConfigError: A file has an unknown key, or says nothing of what it expects.
    """
    cases = []
    for path in sorted((folder / "cases").glob("*.yaml")):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        strange = sorted(set(data) - _KEYS)
        for change in data.get("changes", ()):
            strange += sorted(set(change) - _CHANGE_KEYS)
        if strange or "why" not in data or "expect" not in data:
            raise ConfigError(
                str(path),
                got=f"using {strange}" if strange else "without why or expect",
                expected=f"the keys {sorted(_KEYS)}, and in changes {sorted(_CHANGE_KEYS)}",
                fix="Correct that file.",
            )
        cases.append(Case(name=path.stem, why=str(data["why"]), data=data))
    return cases


def build_run(data: Mapping[str, Any]) -> RunTables:
    """Build the tables of a run from a case's description.

    Args:
        data: See the module; ``ranks`` and ``steps``, or ``simulate``, are required.
    """
    tables = _simulated(data) if "simulate" in data else _described(data)
    more = {
        name: pa.concat_tables([getattr(tables, name), _rows_of(data[name], schema)])
        for name, schema in _ADDED.items()
        if name in data
    }
    return replace(tables, **more)


def _rows_of(listed: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows of a table from a case, one for each of the steps and ranks that an entry names."""
    rows: list[dict[str, Any]] = []
    for entry in listed:
        about = dict(entry)
        ranks, every = about.pop("rank"), int(about.pop("every", 1))
        first, before = about.pop("steps", None) or (about["ordinal"], about["ordinal"] + 1)
        rows += [
            _identity(**{**about, "ordinal": ordinal, "rank": rank})
            for ordinal in range(int(first), int(before), every)
            for rank in (ranks if isinstance(ranks, list) else [ranks])
        ]
    return pa.Table.from_pylist(rows, schema)


def _described(data: Mapping[str, Any]) -> RunTables:
    """The tables of a run of so many ranks and steps, with changes."""
    ranks, steps = int(data["ranks"]), int(data["steps"])
    base = {**_BASE, **data.get("base", {})}
    random = np.random.default_rng(int(data.get("seed", 0)))
    shape = (steps, ranks)
    value = {name: np.full(shape, float(base[name])) for name in _BASE}
    own_times, tokens_times = np.ones(shape), np.ones(shape)
    own_times *= np.array(data.get("stage_factor", [1.0] * ranks))[None, :]
    for change in data.get("changes", ()):
        where = np.ix_(_steps_of(change, steps), change.get("ranks", range(ranks)))
        for name, amount in change.items():
            if name == "own_times":
                own_times[where] *= amount
            elif name == "tokens_times":
                tokens_times[where] *= amount
            elif name in _BASE:
                value[name][where] = amount

    common = np.exp(random.normal(0.0, base["common_jitter"], (steps, 1)))
    jitter = np.exp(random.normal(0.0, 1.0, shape) * value["jitter"])
    tokens_times *= np.exp(random.normal(0.0, 1.0, shape) * value["tokens_jitter"])
    work = value["own_s"] * own_times * tokens_times * common * jitter
    busy = work + value["sleep_s"] + value["data_wait_s"] + value["gc_s"] + value["run_delay_s"]
    columns = {
        "busy_s": busy,
        "cpu_s": 0.95 * work + value["gc_s"],
        "run_delay_s": value["run_delay_s"],
        "data_wait_s": value["data_wait_s"],
        "gc_s": value["gc_s"],
        "step_s": np.broadcast_to((busy + value["communication_s"]).max(1, keepdims=True), shape),
        "between_s": value["between_s"],
        "tokens": value["tokens"] * tokens_times,
    }
    missing = np.zeros(shape, dtype=bool)
    for gap in data.get("missing", ()):
        missing[np.ix_(_steps_of(gap, steps), gap["ranks"])] = True
    aligned = np.ones(shape, dtype=bool)
    aligned[:, list(data.get("unaligned", ()))] = False
    unknown = set(data.get("unknown", ())) | (set() if base["tokens"] else {"tokens"})
    return RunTables(
        ranks=_ranks_table(data, [r for r in range(ranks) if not missing[:, r].all()]),
        steps=_steps_table(columns, missing, aligned, unknown),
        collectives=_collectives_table(data, missing),
        groups=pa.Table.from_pylist(
            [_identity(group=7, description="dp", ranks=list(range(ranks)))], GROUPS
        ),
        events=EVENTS.empty_table(),
    )


def _simulated(data: Mapping[str, Any]) -> RunTables:
    """The tables of a simulated run, aligned as a store's are, without what is ``unknown``."""
    options = dict(data["simulate"])
    cluster = PRESETS[options.pop("cluster")]
    steps, seed = int(options.pop("steps")), int(options.pop("seed", 0))
    faults = options.pop("faults", ())
    cluster = replace(cluster, **options)
    model = Model(cluster, [parse_fault(fault, cluster) for fault in faults], seed)
    tables = align(TableMaker(model, RunName.of("case", seed)).whole(steps))
    unknown = set(data.get("unknown", ()))
    if "ends" in unknown:
        ends = ("duration_s", "min_duration_s")
        tables = replace(tables, collectives=_without(tables.collectives, ends))
    if "passes" in unknown:
        tables = replace(tables, micro_batches=tables.micro_batches.slice(0, 0))
    silent = data.get("without_kernels", ())
    for name in unknown & {"kernels", "experts"}:
        tables = replace(tables, **{name: getattr(tables, name).slice(0, 0)})
    if silent:
        kept = ~pc.field("rank").isin(pa.array(silent, pa.int32()))
        tables = replace(tables, kernels=tables.kernels.filter(kept))
    return replace(tables, steps=_without(tables.steps, unknown & set(STEPS.names)))


def _without(table: pa.Table, names: Collection[str]) -> pa.Table:
    """A table in which some columns are not known."""
    for name in names:
        at = table.schema.get_field_index(name)
        field = table.schema.field(at)
        table = table.set_column(at, field, pa.nulls(table.num_rows, field.type))
    return table


def _steps_of(change: Mapping[str, Any], steps: int) -> NDArray[np.int64]:
    first, last = change.get("steps", [0, steps])
    chosen = np.arange(first + change.get("offset", 0), min(last, steps), change.get("every", 1))
    return chosen


def _identity(**more: object) -> dict[str, object]:
    return {"run": "ca5e", "attempt": 0, **more}


def _ranks_table(data: Mapping[str, Any], seen: Sequence[int]) -> pa.Table:
    per_host = int(data.get("ranks_per_host", data["ranks"]))
    topology = data.get("topology", {})
    rows = [
        _identity(
            run_id="case",
            rank=rank,
            world_size=int(data.get("world_size", data["ranks"])),
            role="trainer",
            host=f"host-{rank // per_host}",
            local_rank=rank % per_host,
            gpu="gpu" if data.get("gpu") else None,
            nonce_local=False,
            **{axis: places[rank] for axis, places in topology.items()},
        )
        for rank in seen
    ]
    return pa.Table.from_pylist(rows, RANKS)


def _steps_table(
    columns: Mapping[str, Floats],
    missing: NDArray[np.bool_],
    aligned: NDArray[np.bool_],
    unknown: set[str],
) -> pa.Table:
    step, rank = np.nonzero(~missing)
    at = (step, rank)
    step_ns = (columns["step_s"][:, 0] * 1e9).astype(np.int64)
    starts = _START_NS + np.concatenate(([0], np.cumsum(step_ns)[:-1]))
    count = step.size
    arrays = {
        "run": pa.array(["ca5e"] * count),
        "attempt": pa.array(np.zeros(count, np.int32)),
        "ordinal": pa.array(step.astype(np.int64)),
        "rank": pa.array(rank.astype(np.int32)),
        "start_ns": pa.array(starts[step]),
        "phases": pa.array([[]] * count, STEPS.field("phases").type),
        "boundary_counts": pa.array([[]] * count, STEPS.field("boundary_counts").type),
        "end_rule": pa.array(["optimizer"] * count),
        "truncated": pa.array(np.zeros(count, bool)),
        "drops": pa.array(np.zeros(count, np.int64)),
        "aligned": pa.array(aligned[at]),
        "trace_id": pa.array([f"{s + 1:032x}" for s in step.tolist()]),
    }
    for name, values in columns.items():
        if name not in unknown:
            arrays[name] = pa.array(np.ascontiguousarray(values)[at])
    return pa.Table.from_arrays(
        [arrays.get(field.name, pa.nulls(count, field.type)).cast(field.type) for field in STEPS],
        schema=STEPS,
    )


def _collectives_table(data: Mapping[str, Any], missing: NDArray[np.bool_]) -> pa.Table:
    """One all-reduce a step for everybody, or what ``collectives`` lists: rank → operations."""
    listed = data.get("collectives")
    if data.get("topology") and listed is None:
        return COLLECTIVES.empty_table()
    rows = [
        _identity(
            ordinal=step,
            rank=rank,
            group=7,
            op=operation.get("op", "all_reduce"),
            seq=step,
            peer=operation.get("peer"),
            payload_bytes=operation.get("bytes", 1 << 20),
            arrival_s=0.05,
            count=1,
            last_arrival_s=0.05,
        )
        for step, rank in zip(*(part.tolist() for part in np.nonzero(~missing)), strict=True)
        for operation in ([{}] if listed is None else listed.get(rank, []))
    ]
    return pa.Table.from_pylist(rows, COLLECTIVES)


def _differences(data: Mapping[str, Any], verdict: Verdict) -> Iterator[str]:
    found = list(verdict.diagnosis.findings)
    for wanted in data["expect"]:
        match = next(
            (f for f in found if f.cause == wanted["cause"] and list(f.ranks) == wanted["ranks"]),
            None,
        )
        if match is None:
            yield f"did not find {wanted}"
            continue
        found.remove(match)
        for key, want in wanted.items():
            if key in ("cause", "ranks"):
                continue
            have = match.evidence[key] if key in match.evidence else getattr(match, key)
            if isinstance(have, tuple):
                have = list(have)
            if isinstance(want, list) and not isinstance(have, list):
                if not want[0] <= have <= want[1]:
                    yield f"{key} is {have}, expected {want[0]} to {want[1]}"
            elif have != want:
                yield f"{key} is {have!r}, expected {want!r}"
    for finding in found:
        yield f"found unasked: {finding.cause} on {finding.ranks}: {finding.summary}"
    codes = sorted({abstention.code for abstention in verdict.diagnosis.abstentions})
    if codes != sorted(data.get("abstain", [])):
        said = [f"{a.code}: {a.missing}" for a in verdict.diagnosis.abstentions]
        yield f"abstained with {said}, expected {data.get('abstain', [])}"
