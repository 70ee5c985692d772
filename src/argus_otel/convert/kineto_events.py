"""The events of one Kineto trace, sorted into what tables are made of, as they are read.

Times are as in the trace: microseconds since the trace's own base.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from argus_otel.convert.intervals import length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_STEP: Final = re.compile(r"ProfilerStep#(\d{1,15})$")
_AUTOGRAD: Final = "autograd::engine::evaluate_function"
_LOADER: Final = "enumerate(DataLoader)"
_NCCL_ANNOTATION: Final = "nccl:"
DATA_WAIT: Final = "data.wait"
_ENGINE: Final = "autograd engine"

_PHASES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("forward", "fwd", "forward pass", "model forward"), "forward"),
    **dict.fromkeys(("backward", "bwd", "backward pass", "loss backward"), "backward"),
    **dict.fromkeys(("optimizer", "optimizer step", "optim", "opt step"), "optimizer.step"),
    **dict.fromkeys(
        ("data", "data load", "data loading", "dataloader", "load batch", "next batch", "get batch",
         "wait for batch"),
        DATA_WAIT,
    ),
    **dict.fromkeys(("h2d", "to device", "copy batch to gpu", "copy to gpu"), "h2d"),
    **dict.fromkeys(("loss", "compute loss"), "loss"),
    **dict.fromkeys(("evaluation", "eval", "validation", "validate"), "evaluation"),
    **dict.fromkeys(("checkpoint", "save checkpoint", "checkpointing"), "checkpoint"),
}  # fmt: skip
"""What people call a phase of a step, in lower case without punctuation."""
_WORDS: Final = re.compile(r"[^a-z0-9]+")
_WRAPPERS: Final = (
    "DistributedDataParallel.forward",
    "FullyShardedDataParallel.forward",
)

_FURTHEST_US: Final = 4e15
"""Microseconds that, with a base, still fit 63 bits as nanoseconds: the year 2096."""
_KEPT: Final = (
    "Collective name",
    "In msg nelems",
    "dtype",
    "Group size",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Seq",
    "Dst Rank",
    "Src Rank",
)
"""What is looked at of an NCCL kernel's arguments."""
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "runtime", "driver")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the trace."""

    ordinal: int
    begin_us: float
    end_us: float
    named: bool
    """Whether the trace says that it is one."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels of a trace, by begin. Each array [K]."""

    begin_us: Floats
    end_us: Floats
    launch_us: Floats
    """When the host launched it; NaN where the trace does not say."""
    is_nccl: NDArray[np.bool_]
    row: NDArray[np.int64]
    """NCCL's: index into ``Reading.nccl``; else -1."""


class Reading:
    """Takes events one by one."""

    def __init__(self) -> None:
        self.beside: dict[str, Any] = {}
        self.mapped: Counter[str] = Counter()
        self.unmapped: Counter[str] = Counter()
        self.spans = 0
        """Events that last."""
        self.nccl: list[dict[str, Any]] = []
        """Name of each of NCCL's kernels, and what its arguments say of the operation."""
        self._begin, self._duration = array("d"), array("d")
        self._correlation, self._row = array("q"), array("q")
        self._launch_at, self._launch_of = array("d"), array("q")
        self._first, self._last = math.inf, -math.inf
        self._named: dict[int, tuple[float, float]] = {}
        self._pid: int | None = None
        self._device: int | None = None
        self._annotated: dict[str, tuple[array[float], array[float]]] = {}
        self._operations: list[tuple[float, float, str]] = []

    def take(self, event: object) -> None:
        """One event, whatever it is."""
        if not isinstance(event, dict):
            self.unmapped["damaged event"] += 1
            return
        category = str(event.get("cat") or "")
        if event.get("ph") != "X":
            kind = {"M": "metadata", "s": "flow", "f": "flow", "i": "instant", "I": "instant"}
            label = kind.get(str(event.get("ph")), f"phase {str(event.get('ph'))[:8]}")
            self.unmapped[f"{label} {category}".strip()] += 1
            return
        begin, duration = _number(event.get("ts")), _number(event.get("dur", 0))
        name = event.get("name")
        if begin is None or duration is None or duration < 0 or not isinstance(name, str):
            self.unmapped["damaged event"] += 1
            return
        self.spans += 1
        arguments = event.get("args")
        known = self._take_span(
            category.lower(), name, begin, duration, arguments if isinstance(arguments, dict) else {},
            event.get("pid"),
        )  # fmt: skip
        (self.mapped if known else self.unmapped)[category or "without category"] += 1

    def _take_span(
        self,
        category: str,
        name: str,
        begin: float,
        duration: float,
        arguments: Mapping[str, Any],
        pid: object,
    ) -> bool:
        """Keep what tables need of an event; whether that is anything."""
        if category == "trace":
            return False  # the profiler's own span: longer than what it has of the job
        self._first, self._last = min(self._first, begin), max(self._last, begin + duration)
        if category == "kernel":
            self._take_kernel(name, begin, duration, arguments)
            return True
        if category in _LAUNCHES:
            correlation = arguments.get("correlation")
            if type(correlation) is int and 0 <= correlation < 2**62:
                self._launch_at.append(begin)
                self._launch_of.append(correlation)
                return True
            return False
        if category == "cpu_op":
            if name.startswith(_AUTOGRAD):
                self._annotate(_ENGINE, begin, duration)
                return True
            return False
        if category not in ("user_annotation", "gpu_user_annotation"):
            return False
        match = _STEP.search(name)
        if category == "gpu_user_annotation":
            return False  # the same as on the host, at the time of its kernels
        if match is not None:
            self._named[int(match[1])] = (begin, begin + duration)
            self._pid = pid if type(pid) is int and pid >= 0 else None
            return True
        if name.startswith(_NCCL_ANNOTATION):
            self._operations.append((begin, begin + duration, name))
            return True
        if name.startswith(_LOADER):
            self._annotate(DATA_WAIT, begin, duration)
            return True
        phase = _phase_of(name)
        if phase is not None:
            self._annotate(phase, begin, duration)
        return phase is not None

    def _take_kernel(
        self, name: str, begin: float, duration: float, arguments: Mapping[str, Any]
    ) -> None:
        row = -1
        if "nccl" in name.lower():
            row = len(self.nccl)
            kept = {key: arguments[key] for key in _KEPT if key in arguments}
            self.nccl.append({"name": name, **kept})
        correlation = arguments.get("correlation")
        known = type(correlation) is int and 0 <= correlation < 2**62
        self._begin.append(begin)
        self._duration.append(duration)
        self._correlation.append(correlation if known and correlation is not None else -1)
        self._row.append(row)
        device = arguments.get("device")
        if self._device is None and type(device) is int and device >= 0:
            self._device = device

    def _annotate(self, phase: str, begin: float, duration: float) -> None:
        begins, ends = self._annotated.setdefault(phase, (array("d"), array("d")))
        begins.append(begin)
        ends.append(begin + duration)

    # -- once everything was taken --------------------------------------------------------------

    def distributed(self, name: str) -> int | None:
        """A number of ``distributedInfo``."""
        about = self.beside.get("distributedInfo")
        value = about.get(name) if isinstance(about, dict) else None
        return value if type(value) is int else None

    def base_ns(self) -> int:
        """What times are relative to, Unix ns: 0 in older traces."""
        base = self.beside.get("baseTimeNanoseconds")
        return base if type(base) is int and 0 <= base < 4 * 10**18 else 0

    def pid(self) -> int | None:
        """The process that ran the steps."""
        return self._pid

    def gpu(self) -> str | None:
        """The model of the device, else which one it is; None without kernels."""
        if self._device is None:
            return None
        devices = self.beside.get("deviceProperties")
        if isinstance(devices, list):
            for device in devices:
                if isinstance(device, dict) and device.get("id") == self._device:
                    return str(device.get("name") or f"cuda:{self._device}")
        return f"cuda:{self._device}"

    def steps(self) -> list[Step]:
        """The steps that are named, in order of time; the whole trace where none is."""
        if not self._named:
            return [Step(0, self._first, max(self._last, self._first), named=False)]
        found = [Step(number, *times, named=True) for number, times in self._named.items()]
        return sorted(found, key=lambda step: step.begin_us)

    def kernels(self) -> Kernels:
        """All kernels, with when they were launched."""
        begin = np.array(self._begin)
        correlation = np.array(self._correlation)
        launch = np.full(begin.size, np.nan)
        if len(self._launch_of):
            of, at = np.array(self._launch_of), np.array(self._launch_at)
            order = np.argsort(of, kind="stable")
            of, at = of[order], at[order]
            place = np.minimum(np.searchsorted(of, correlation), of.size - 1)
            found = (of[place] == correlation) & (correlation >= 0)
            launch[found] = at[place][found]
        order = np.argsort(begin, kind="stable")
        row = np.array(self._row)[order]
        return Kernels(
            begin_us=begin[order],
            end_us=(begin + np.array(self._duration))[order],
            launch_us=launch[order],
            is_nccl=row >= 0,
            row=row,
        )

    def annotations(self) -> Annotations:
        """What the host said it was doing."""
        intervals = {
            phase: (np.array(begins), np.array(ends))
            for phase, (begins, ends) in self._annotated.items()
        }
        return Annotations(intervals, sorted(self._operations))


class Annotations:
    """Phases and operations of the host, by time."""

    def __init__(
        self,
        intervals: Mapping[str, tuple[Floats, Floats]],
        operations: Sequence[tuple[float, float, str]],
    ) -> None:
        self._intervals, self._operations = intervals, operations
        self._operation_begins = np.array([begin for begin, _, _ in operations])
        self._phases: dict[int, dict[str, tuple[Floats, Floats]]] = {}

    def phases(self, step: Step) -> dict[str, tuple[Floats, Floats]]:
        """Phase → the intervals of it that begin in a step."""
        found = self._phases.get(step.ordinal)
        if found is not None:
            return found
        found = self._phases[step.ordinal] = {}
        for phase, (begin, end) in self._intervals.items():
            here = (begin >= step.begin_us) & (begin <= step.end_us)
            if here.any():
                found[phase] = (begin[here], end[here])
        engine = found.pop(_ENGINE, None)
        if engine is not None and "backward" not in found:
            # The engine's functions follow each other with gaps between: together they are it.
            found["backward"] = (engine[0].min(keepdims=True), engine[1].max(keepdims=True))
        return found

    def phase_at(self, step: Step, at_us: float) -> str | None:
        """The phase that the host was in; of several the one that began last."""
        best, name = -math.inf, None
        for phase, (begin, end) in self.phases(step).items():
            here = begin[(begin <= at_us) & (at_us < end)]
            if here.size and float(here.max()) > best:
                best, name = float(here.max()), phase
        return name

    def data_wait_us(self, step: Step) -> float:
        """Time in a step that went into waiting for input; NaN where no loader was seen at all."""
        if DATA_WAIT not in self._intervals:
            return math.nan
        found = self.phases(step).get(DATA_WAIT)
        return 0.0 if found is None else length(*found)

    def operation_at(self, launch_us: float) -> str | None:
        """Name of the ``nccl:`` annotation that something was launched in."""
        if math.isnan(launch_us):
            return None
        place = int(np.searchsorted(self._operation_begins, launch_us, side="right")) - 1
        if place < 0:
            return None
        _, end, name = self._operations[place]
        return name if launch_us <= end else None


def _phase_of(name: str) -> str | None:
    if name.startswith("Optimizer.step#"):
        return "optimizer.step"
    if name in _WRAPPERS:
        return "forward"
    return _PHASES.get(_WORDS.sub(" ", name.lower()).strip())


def _number(value: object) -> float | None:
    """A number that can be a time, also where it is written as a string."""
    if type(value) is float and -_FURTHEST_US < value < _FURTHEST_US:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < _FURTHEST_US else None
