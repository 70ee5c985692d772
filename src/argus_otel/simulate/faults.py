"""Faults to plant: kind, place, size and time, as ``kind:key=value,...`` says them.

    compute:rank=4711,factor=1.6,from=40
    link:host=3,factor=4,from=20,to=60
    input:factor=1,extra_s=0.2,every=5

Shape legend: R = ranks, G = groups along an axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel._runtime.errors import ConfigError
from argus_otel.simulate.cluster import AXES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from argus_otel.simulate.cluster import Cluster

KERNEL_CLASSES: Final = {"attention": 0.4, "gemm": 0.4, "elementwise": 0.2}
"""Shares of a pass's compute."""

FAULT_HELP: Final = (
    "For example: --fault compute:rank=3,factor=1.6,from=40\n"
    "`argus simulate --list` shows the kinds of faults and what they take."
)
"""What to do about a fault that cannot be planted."""

_PLACES: Final = ("rank", "ranks", "host", "stage", "fraction", "axis", "group")
_TIMES: Final = ("from", "to", "every")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one kind of fault is, what it takes, and which cause a detector should name."""

    cause: str
    meaning: str
    sizes: Mapping[str, float]
    """Parameter → default."""
    texts: Mapping[str, str]
    everywhere: bool = False
    """Without a place it is on all ranks, and none is to blame."""


def _kind(
    cause: str, meaning: str, *, everywhere: bool = False, texts: Mapping[str, str] | None = None,
    **sizes: float,
) -> Kind:  # fmt: skip
    return Kind(cause=cause, meaning=meaning, sizes=sizes, texts=texts or {}, everywhere=everywhere)


KINDS: Final[Mapping[str, Kind]] = {
    "compute": _kind(
        "compute_straggler", "compute takes `factor` times as long; `kernel` limits it to a class",
        factor=1.5, texts={"kernel": ""},
    ),
    "link": _kind(
        "slow_link", "transfers through the place take `factor` times as long",
        factor=4.0, everywhere=True,
    ),
    "stage": _kind("pipeline_imbalance", "a stage holds `factor` times the work", factor=1.5),
    "micro_batch": _kind(
        "pipeline_imbalance", "one micro-batch a step is late by `extra_s` on its stage",
        extra_s=0.05, index=0,
    ),
    "jit": _kind(
        "jit_compile", "`function` is compiled, for `stall_s`, in each step that is hit",
        everywhere=True, stall_s=2.0, texts={"function": "attention_bwd", "reason": "new shape"},
    ),
    "sequence": _kind(
        "sequence_imbalance", "lengths vary between data-parallel ranks with sigma `variation`",
        everywhere=True, variation=0.3,
    ),
    "expert": _kind(
        "expert_imbalance", "a rank gets `factor` times its tokens, for its expert number `index`",
        factor=2.0, index=0,
    ),
    "input": _kind(
        "input_stall", "a batch comes `extra_s` late", everywhere=True, extra_s=0.1
    ),
    "gc": _kind(
        "gc_pause", "the collector pauses the host for `pause_s`; `synchronised` 1: all in one step",
        everywhere=True, pause_s=0.1, synchronised=0,
    ),
    "checkpoint": _kind(
        "checkpoint_stall", "saving takes `extra_s`", everywhere=True, extra_s=1.0
    ),
    "host_sync": _kind(
        "host_sync", "`count` reads of device values a step take the launch-ahead away, `gap_s` each",
        everywhere=True, count=50, gap_s=0.0005,
    ),
    "contention": _kind(
        "cpu_contention", "the training thread waits `delay_s` a step for a core", delay_s=0.05
    ),
    "throttle": _kind(
        "gpu_throttled", "clocks fall to 1/`factor` over `ramp_steps`; `reason` thermal or power",
        factor=1.4, ramp_steps=5, texts={"reason": "thermal"},
    ),
    "xid": _kind("gpu_fault", "the device reports an error (`code`) and slows down",
        factor=1.2, code=94),
    "allocator": _kind(
        "allocator_thrash", "`retries` cudaMalloc retries a step, `stall_s` each",
        everywhere=True, retries=4, stall_s=0.02,
    ),
    "leak": _kind(
        "memory_growth", "host memory grows by `bytes` a step", everywhere=True, bytes=200e6
    ),
    "comm": _kind(
        "comm_regression", "every transfer takes `factor` times as long", everywhere=True,
        factor=5.0,
    ),
    "hang": _kind("hang", "from this step on the rank never reaches its collective"),
    "mismatch": _kind("collective_mismatch", "the rank issues another collective than its group"),
    "silent": _kind("silent_rank", "the rank trains on and reports nothing"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault, its place resolved."""

    kind: str
    ranks: tuple[int, ...]
    """Culprits; empty where everybody is hit."""
    hosts: tuple[int, ...] = ()
    stage: int | None = None
    axis: str | None = None
    group: int | None = None
    sizes: Mapping[str, float]
    texts: Mapping[str, str]
    first: int = 0
    until: int | None = None
    every: int = 1

    @property
    def cause(self) -> str:
        """What a detector should call it."""
        return KINDS[self.kind].cause

    def is_on(self, step: int) -> bool:
        """Whether it acts in this step."""
        inside = step >= self.first and (self.until is None or step < self.until)
        return inside and (step - self.first) % self.every == 0

    def mask(self, ranks: int) -> NDArray[np.bool_]:
        """Ranks that it acts on [R]."""
        if not self.ranks:
            return np.ones(ranks, dtype=bool)
        hit = np.zeros(ranks, dtype=bool)
        hit[list(self.ranks)] = True
        return hit


def parse_fault(text: str, cluster: Cluster) -> Fault:
    """Read ``kind:key=value,...``.

    Raises:
        ConfigError: Unknown kind or key, a value that is no number or makes no sense (a factor of
            0, a time below 0), a place that does not exist.
    """
    name, _, rest = text.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise _bad(text, f"of the unknown kind {name!r}", f"one of {', '.join(KINDS)}")
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in {*_PLACES, *_TIMES, *kind.sizes, *kind.texts}:
            allowed = sorted({*_PLACES, *_TIMES, *kind.sizes, *kind.texts})
            raise _bad(text, f"saying {part!r}", f"key=value with a key among {', '.join(allowed)}")
        given[key] = value
    sizes = {key: _number(text, key, given.get(key), value) for key, value in kind.sizes.items()}
    for key, size in sizes.items():
        if key == "bytes":  # a negative leak is memory given back
            continue
        if size < 0 or (size == 0 and key == "factor"):
            least = "more than 0" if key == "factor" else "0 or more"
            raise _bad(text, f"saying {key}={given[key]}", f"{key} to be {least}")
    if given.get("kernel") and given["kernel"] not in KERNEL_CLASSES:
        raise _bad(text, f"saying kernel={given['kernel']}", f"one of {', '.join(KERNEL_CLASSES)}")
    what, count = "a micro-batch", cluster.micro_batches
    if name == "expert":
        what, count = "an expert", cluster.local_experts
    if sizes.get("index", 0) >= count:
        raise _bad(text, f"with index={sizes['index']:g}", f"{what} from 0 to {count - 1}")
    first = _whole(text, "from", given.get("from", "0"))
    until = _whole(text, "to", given["to"]) if "to" in given else None
    if until is not None and until <= first:
        raise _bad(text, f"over before it begins (from={first}, to={until})", "to above from")
    where = _place(text, given, cluster, needed=not kind.everywhere)
    return Fault(
        kind=name,
        sizes=sizes,
        texts={key: given.get(key, value) for key, value in kind.texts.items()},
        first=first,
        until=until,
        every=_whole(text, "every", given.get("every", "1"), least=1),
        **where,
    )


def _place(text: str, given: Mapping[str, str], cluster: Cluster, *, needed: bool) -> dict:  # type: ignore[type-arg]
    ranks: list[int] = []
    if "rank" in given or "ranks" in given:
        for part in given.get("rank", given.get("ranks", "")).split("+"):
            low, _, high = part.partition("-")
            first, last = _whole(text, "rank", low), _whole(text, "rank", high or low)
            if last >= cluster.ranks:
                raise _bad(text, f"on rank {last}", f"ranks from 0 to {cluster.ranks - 1}")
            if last < first:
                raise _bad(text, f"on ranks {part}", "the lower rank first")
            ranks += range(first, last + 1)
    elif "host" in given:
        host = _whole(text, "host", given["host"])
        ranks = np.flatnonzero(cluster.host == host).tolist()
        if not ranks:
            raise _bad(text, f"on host {host}", f"a host from 0 to {cluster.hosts - 1}")
    elif "stage" in given:
        stage = _whole(text, "stage", given["stage"])
        ranks = np.flatnonzero(cluster.places["pp"] == stage).tolist()
        if not ranks:
            raise _bad(text, f"on stage {stage}", f"a stage from 0 to {cluster.pp - 1}")
    elif "fraction" in given:
        fraction = _number(text, "fraction", given["fraction"], 0)
        if not 0 < fraction <= 1:
            raise _bad(text, f"on a fraction of {fraction:g}", "a fraction above 0, up to 1")
        count = round(fraction * cluster.ranks)
        ranks = np.linspace(0, cluster.ranks - 1, max(count, 1)).astype(int).tolist()
    elif "axis" in given:
        ranks = _group(text, given, cluster)
    if needed and not ranks:
        raise _bad(text, "without a place", "rank=, ranks=a-b+c, host=, stage= or fraction=")
    hosts = (_whole(text, "host", given["host"]),) if "host" in given else ()
    return {
        "ranks": tuple(sorted(set(ranks))),
        "hosts": hosts,
        "stage": _whole(text, "stage", given["stage"]) if "stage" in given else None,
        "axis": given.get("axis"),
        "group": _whole(text, "group", given["group"]) if "group" in given else None,
    }


def _group(text: str, given: Mapping[str, str], cluster: Cluster) -> list[int]:
    axis = given["axis"]
    if axis not in AXES:
        raise _bad(text, f"along the axis {axis!r}", f"one of {', '.join(AXES)}")
    groups = cluster.group_of(axis)
    group = _whole(text, "group", given.get("group", "0"))
    ranks: list[int] = np.flatnonzero(groups == group).tolist()
    if not ranks:
        raise _bad(text, f"on group {group} of {axis}", f"a group from 0 to {groups.max()}")
    return ranks


def _number(text: str, key: str, value: str | None, default: float) -> float:
    try:
        number = default if value is None else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _bad(text, f"saying {key}={value}", f"a number for {key}")
    return number


def _whole(text: str, key: str, value: str, *, least: int = 0) -> int:
    number = _number(text, key, value, 0)
    if number < least or number != int(number):
        raise _bad(text, f"saying {key}={value}", f"a whole number of {least} or more for {key}")
    return int(number)


def _bad(text: str, got: str, expected: str) -> ConfigError:
    return ConfigError(
        f"the fault {text!r}",
        got=got,
        expected=expected,
        fix=FAULT_HELP,
    )
