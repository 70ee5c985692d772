"""What a detector says: the schema ``argus.findings/1``."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

SCHEMA: Final = "argus.findings/1"

Severity = Literal["info", "warning", "critical"]

CAUSES: Final = (
    "compute_straggler",
    "slow_link",
    "comm_regression",
    "pipeline_imbalance",
    "sequence_imbalance",
    "expert_imbalance",
    "jit_compile",
    "input_stall",
    "gc_pause",
    "checkpoint_stall",
    "host_sync",
    "cpu_contention",
    "gpu_throttled",
    "gpu_fault",
    "allocator_thrash",
    "memory_growth",
    "collective_mismatch",
    "hang",
    "silent_rank",
    "regression_unexplained",
)
"""The closed list. A detector with another cause is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """Since when. ``exact`` is false where the window began with the fault already there."""

    step: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressed:
    """A symptom that a finding explains, listed under it rather than beside it."""

    cause: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One verdict: who, what, since when, at what cost, and what to do now."""

    detector: str
    cause: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    first_step: int
    last_step: int
    onset: Onset
    severity: Severity
    confidence: float | None = None
    """0 to 1: how many findings of this detector and severity were right on the scoreboard, where three of
    four jobs have a fault; None where it had too few."""
    slowdown: float
    """Ratio of the culprits' own time to the healthy reference, 1 or more."""
    step_slowdown: float | None = None
    """Ratio of the whole job's step time to what it would have been."""
    cost_gpu_hours: float | None = None
    """Rank-hours where the ranks have no GPU."""
    summary: str
    next_step: str
    evidence: dict[str, Any] = field(default_factory=dict)
    """Numbers with units in their names, and trace ids."""
    suppressed: tuple[Suppressed, ...] = ()
    state: Literal["open", "ended"] = "open"
    id: str = ""

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            msg = f"{self.cause!r} is not one of the causes that the schema lists"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abstention:
    """Why a detector says nothing, which is not the same as saying that all is well."""

    detector: str
    code: str
    """``no_steps``, ``too_few_peers``, ``too_few_steps``, ``missing_data``, ``not_aligned``, …"""
    steps: tuple[int, int] | None = None
    missing: str
    """What would have been needed, in plain words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What one detector, or all of them, say about a window or a run."""

    findings: tuple[Finding, ...] = ()
    abstentions: tuple[Abstention, ...] = ()


def finding_id(run: str, cause: str, ranks: tuple[int, ...], groups: tuple[str, ...] = ()) -> str:
    """Same run, cause and place: same id, however often the detector runs."""
    body = "\0".join((run, cause, ",".join(map(str, ranks)), ",".join(groups)))
    return hashlib.blake2b(body.encode(), digest_size=8).hexdigest()


def diagnosis_document(run: str | None, diagnosis: Diagnosis) -> dict[str, Any]:
    """The JSON document that ``argus detect --json`` prints."""
    return {
        "schema": SCHEMA,
        "run": run,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "abstained": [asdict(abstention) for abstention in diagnosis.abstentions],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LastToArrive:
    """The rank that others waited for most, in a run that is too short for a verdict."""

    rank: int
    collectives: int
    """In how many it came last."""
    of: int
    """Collectives of which it is known who came last."""
    waited_s: float
    """What the first to arrive waited for it, summed over those and divided by the steps."""
