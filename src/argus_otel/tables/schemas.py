"""Arrow tables of one run: what a store yields, align completes, and detectors read.

Null means unknown, never 0 or NaN; a missing row means nothing was received. Rows are sorted by
ordinal, then rank. ``run`` is the run's nonce in hex: the identity, where ``run_id`` is what
people call it. Times in seconds are relative to the step's start unless the name says ``_ns``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

_COUNT = pa.struct([("group", pa.uint64()), ("count", pa.int64())])
_PHASE = pa.struct(
    [
        ("name", pa.string()),
        ("start_s", pa.float64()),
        ("host_s", pa.float64()),
        ("gpu_s", pa.float64()),
    ]
)


def _schema(*fields: tuple[str, pa.DataType, bool]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=nullable) for name, kind, nullable in fields])


RANKS = _schema(
    ("run", pa.string(), False),
    ("run_id", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("rank", pa.int32(), False),
    ("world_size", pa.int32(), False),
    ("role", pa.string(), False),
    ("host", pa.string(), False),
    ("local_rank", pa.int32(), True),
    ("pid", pa.int64(), True),
    ("gpu", pa.string(), True),
    ("dp", pa.int32(), True),
    ("tp", pa.int32(), True),
    ("pp", pa.int32(), True),
    ("ep", pa.int32(), True),
    ("cp", pa.int32(), True),
    ("nonce_local", pa.bool_(), False),
)
"""One row a rank."""

STEPS = _schema(
    ("run", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("ordinal", pa.int64(), False),
    ("rank", pa.int32(), False),
    ("iteration", pa.int64(), True),
    ("start_ns", pa.int64(), False),
    ("step_s", pa.float64(), False),
    ("between_s", pa.float64(), False),
    ("busy_s", pa.float64(), True),
    ("cpu_s", pa.float64(), True),
    ("run_delay_s", pa.float64(), True),
    ("data_wait_s", pa.float64(), True),
    ("gc_s", pa.float64(), True),
    ("gc_count", pa.int32(), True),
    ("phases", pa.list_(_PHASE), False),
    ("tokens", pa.float64(), True),
    ("samples", pa.float64(), True),
    ("sum_len2", pa.float64(), True),
    ("memory_bytes", pa.int64(), True),
    ("boundary_counts", pa.list_(_COUNT), False),
    ("end_rule", pa.string(), False),
    ("keep", pa.string(), True),
    ("truncated", pa.bool_(), False),
    ("drops", pa.int64(), False),
    ("self_cpu_s", pa.float64(), True),
    ("aligned", pa.bool_(), True),
    ("clock_offset_ns", pa.int64(), True),
    ("clock_error_ns", pa.int64(), True),
    ("trace_id", pa.string(), False),
)
"""One row a rank and step. ``aligned`` and the clock columns are null until ``align/`` fills them."""

COLLECTIVES = _schema(
    ("run", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("ordinal", pa.int64(), False),
    ("rank", pa.int32(), False),
    ("group", pa.uint64(), False),
    ("op", pa.string(), False),
    ("seq", pa.int64(), True),
    ("peer", pa.int32(), True),
    ("phase", pa.string(), True),
    ("payload_bytes", pa.int64(), False),
    ("arrival_s", pa.float64(), False),
    ("duration_s", pa.float64(), True),
    ("count", pa.int64(), False),
    ("last_arrival_s", pa.float64(), False),
    ("min_duration_s", pa.float64(), True),
)
"""One row an operation (``count`` 1, ``seq`` known), or where the digest was folded one row a
(group, operation, phase) with ``seq`` null and ``duration_s`` the sum of the known ones. Where
the step's buffer overflowed (``steps.truncated``) ``seq`` is null as well.
``seq`` counts collectives per group, and point-to-point operations per (group, source,
destination), from the group's creation."""

GROUPS = _schema(
    ("run", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("group", pa.uint64(), False),
    ("description", pa.string(), False),
    ("ranks", pa.list_(pa.int32()), False),
)
"""One row a process group."""

EVENTS = _schema(
    ("run", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("ordinal", pa.int64(), False),
    ("rank", pa.int32(), False),
    ("kind", pa.string(), False),
    ("name", pa.string(), False),
    ("start_s", pa.float64(), False),
    ("duration_s", pa.float64(), False),
    ("detail", pa.string(), True),
)
"""From timeline spans (GC pauses, compilation, checkpoints, host synchronisation, exceptions), so only
for kept steps where a Collector samples."""

MICRO_BATCHES = _schema(
    ("run", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("ordinal", pa.int64(), False),
    ("rank", pa.int32(), False),
    ("chunk", pa.int32(), False),
    ("micro_batch", pa.int32(), False),
    ("backward", pa.bool_(), False),
    ("start_s", pa.float64(), False),
    ("duration_s", pa.float64(), False),
)
"""One row a pass of a micro-batch through a chunk of a stage: compute, without waiting."""

DEVICES = _schema(
    ("run", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("ordinal", pa.int64(), False),
    ("rank", pa.int32(), False),
    ("clock_ratio", pa.float64(), True),
    ("throttle_reasons", pa.string(), True),
    ("xid", pa.int64(), True),
    ("ecc_errors", pa.int64(), True),
    ("allocator_retries", pa.int64(), True),
)
"""What a GPU says at the end of a step. ``clock_ratio`` is the SM clock against the highest that
this device has shown; ``throttle_reasons`` are joined by commas, empty for none. A rank that reports
only every few steps has rows for those."""

KERNELS = _schema(
    ("run", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("ordinal", pa.int64(), False),
    ("rank", pa.int32(), False),
    ("name", pa.string(), False),
    ("stream", pa.int64(), True),
    ("phase", pa.string(), True),
    ("sketch", pa.binary(), False),
)
"""Durations of a step's kernels: a row each of the largest (name, stream, phase), and one of the
rest, without stream and phase. ``sketch`` is read by ``wire.sketch``."""

EXPERTS = _schema(
    ("run", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("ordinal", pa.int64(), False),
    ("rank", pa.int32(), False),
    ("tokens", pa.list_(pa.int64()), False),
)
"""Tokens of each expert that a rank holds, in their order; a row a rank and step that knows them."""

HEARTBEATS = _schema(
    ("run", pa.string(), False),
    ("attempt", pa.int32(), False),
    ("time_ns", pa.int64(), False),
    ("rank", pa.int32(), False),
    ("ordinal", pa.int64(), False),
    ("phase", pa.string(), True),
    ("group", pa.uint64(), True),
    ("op", pa.string(), True),
    ("seq", pa.int64(), True),
    ("age_s", pa.float64(), True),
    ("stack", pa.string(), True),
)
"""Sent while no step ends: the step under way, and the collective that was entered and not left
(``group`` null: none). ``stack`` is where the training thread's Python is, outermost first."""

SPANS = _schema(
    ("run", pa.string(), True),
    ("attempt", pa.int32(), True),
    ("trace_id", pa.string(), False),
    ("span_id", pa.string(), False),
    ("parent_id", pa.string(), True),
    ("name", pa.string(), False),
    ("scope", pa.string(), False),
    ("service", pa.string(), False),
    ("rank", pa.int32(), True),
    ("ordinal", pa.int64(), True),
    ("start_ns", pa.int64(), False),
    ("end_ns", pa.int64(), False),
    ("status", pa.string(), False),
    ("status_message", pa.string(), True),
    ("attributes", pa.string(), False),
    ("span_events", pa.string(), True),
    ("links", pa.string(), True),
)
"""Every span of every scope, to draw timelines from. Ids are lower-case hex; ``status`` is unset,
ok or error; ``attributes`` is a JSON object, ``span_events`` and ``links`` are JSON arrays. The
packed values of a digest that could be read are left out: steps and collectives hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTables:
    """Everything known of one run. Each table has its schema above, rows sorted."""

    ranks: pa.Table
    steps: pa.Table
    collectives: pa.Table
    groups: pa.Table
    events: pa.Table
    micro_batches: pa.Table = field(default_factory=MICRO_BATCHES.empty_table)
    devices: pa.Table = field(default_factory=DEVICES.empty_table)
    heartbeats: pa.Table = field(default_factory=HEARTBEATS.empty_table)
    kernels: pa.Table = field(default_factory=KERNELS.empty_table)
    """From who makes a run; a store leaves it empty, for it is the largest table by far, and is asked
    for the few rows that a finding needs (``Store.rows``)."""
    experts: pa.Table = field(default_factory=EXPERTS.empty_table)
    """As ``kernels``."""
    damaged_digests: int = 0
    """Digests that were received but could not be read, so have no row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of ``argus runs``."""

    run: str
    """Nonce in hex: the identity."""
    run_id: str
    attempt: int
    role: str
    service: str
    world_size: int
    ranks_seen: int
    first_ns: int
    last_ns: int
    steps: int
