"""A run's steps as dense arrays, once for all detectors.

Shape legend: S = settled steps in order of appearance, R = ranks of the run.

Inside this package a value that is not known is NaN; the tables outside have nulls.
"""

# ruff: noqa: N802, N815 - names carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from argus_otel.detect.run import COLUMNS
from argus_otel.detect.statistics import levels, lowest_mean, median_over, scatter
from argus_otel.detect.workload import normalised_logs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.peers import Peers
    from argus_otel.detect.replay import Graph
    from argus_otel.detect.run import Run

    Floats = NDArray[np.float64]

WARM_UP_STEPS: Final = 10
"""First steps of a run: allocators, autotuning and caches settle (DESIGN, detection)."""

PEERS_PRESENT: Final = 0.9
"""A step counts for a group of peers when this share of them has data (DESIGN, detection)."""

_BLOCK_STEPS: Final = 10
"""Scatter is measured in blocks, and the middle one taken (the lesser of two): an onset spoils one
block, and the shortest run has two."""

_LEAST_OWN_SHARE: Final = 0.02
"""Own work never falls below this share of busy time: the parts that are taken out are measured
by other clocks, and a ratio to nearly nothing would be noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """How each rank's time compares with its peers', step by step."""

    log_SR: Floats
    """Log ratio to the fastest quarter of the peers in the same step; NaN unknown."""
    sigma_R: Floats
    """Scatter of one value, pooled over the run in blocks: steadier than one window's."""

    def between(self, start: int, stop: int) -> Excess:
        """The same for some of the steps."""
        return Excess(log_SR=self.log_SR[start:stop], sigma_R=self.sigma_R)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Dense columns of one run. Derived arrays are computed once and shared by all windows."""

    whole: Run
    """The run, warm-up and compilation included."""
    index_S: NDArray[np.int64]
    """Place of each settled step among all."""
    columns: dict[str, Floats]
    """Each [S, R], NaN unknown: the names in ``run.COLUMNS``."""
    cached: dict[str, Floats] = field(default_factory=dict, repr=False)
    compared: dict[str, list[Excess]] = field(default_factory=dict, repr=False)
    graphs: dict[tuple[int, ...], Graph | None] = field(default_factory=dict, repr=False)
    """By the steps that were asked for: findings of the same steps are weighed on one graph."""
    building: Lock = field(default_factory=Lock, repr=False)
    """Held while one is built."""

    @property
    def run(self) -> str:
        """The run's nonce in hex."""
        return self.whole.run

    @cached_property
    def ordinals_S(self) -> NDArray[np.int64]:
        """Ordinals of the settled steps."""
        return self.whole.ordinals_A[self.index_S]

    @property
    def ranks_R(self) -> NDArray[np.int64]:
        """Global ranks, ascending."""
        return self.whole.ranks_R

    @property
    def hosts_R(self) -> tuple[str, ...]:
        """Host of each rank; empty where not known."""
        return self.whole.hosts_R

    @property
    def has_gpu_R(self) -> NDArray[np.bool_]:
        """Whether a rank has a GPU."""
        return self.whole.has_gpu_R

    @property
    def world_size(self) -> int:
        """Ranks of the job, silent ones included."""
        return self.whole.world_size

    @property
    def peers(self) -> Peers:
        """Who does the same work."""
        return self.whole.peers

    @property
    def steps_seen(self) -> int:
        """Distinct steps in the tables, warm-up and compilation included."""
        return int(self.whole.ordinals_A.size)

    @cached_property
    def unaligned(self) -> int:
        """Rows left out because no common step count was found."""
        return int(np.count_nonzero(self.whole.unaligned_AR[self.index_S]))

    @cached_property
    def kept_SR(self) -> NDArray[np.bool_]:
        """Whether the step's timeline was kept."""
        return self.whole.kept_AR[self.index_S]

    def column(self, name: str) -> Floats:
        """A column [S, R], given or derived (``own_work_s``, ``cpu_work_s``)."""
        if name in self.columns:
            return self.columns[name]
        if name not in self.cached:
            self.cached[name] = _DERIVED[name](self)
        return self.cached[name]

    def excess(self, name: str) -> Excess:
        """Each rank's ratio to its fastest peers in the same step."""
        if name not in self.compared:
            log_SR = np.log(np.maximum(self.column(name), 1e-9))
            self.compared[name] = [_excess(log_SR, self.peers)]
        return self.compared[name][0]

    def work_excess(self, name: str) -> list[Excess]:
        """As ``excess``, with the amount of work taken out; see ``Window.work_excess``."""
        key = f"{name} by work"
        if key not in self.compared:
            log_SR = np.log(np.maximum(self.column(name), 1e-9))
            logs = normalised_logs(log_SR, self.columns, self.peers)
            self.compared[key] = [_excess(values, self.peers) for values in logs]
        return self.compared[key]

    @property
    def job_step_s(self) -> Floats:
        """The job's step time [S]: the median over its ranks, which wait for each other."""
        if "job step" not in self.cached:
            self.cached["job step"] = median_over(self.columns["step_s"], axis=1)
        return self.cached["job step"]

    def usual_share_R(self, name: str) -> Floats:
        """A column's median share of the job's step over the whole run, by rank."""
        key = f"usual share of {name}"
        if key not in self.cached:
            self.cached[key] = median_over(
                self.column(name) / self.job_step_s[:, None], axis=0
            )  # fmt: skip
        return self.cached[key]

    def trace_id(self, step: int, rank: int) -> str | None:
        """Trace id (hex) of a step index and rank index."""
        return self.whole.trace_id(int(self.index_S[step]), rank)


def _excess(log_SR: Floats, peers: Peers) -> Excess:
    ratio_SR = np.full(log_SR.shape, np.nan)
    sigma_R = np.full(log_SR.shape[1], np.nan)
    blocks = log_SR.shape[0] // _BLOCK_STEPS
    for bucket in peers.buckets:
        part = log_SR[:, bucket]
        present = np.count_nonzero(~np.isnan(part), axis=-1)
        enough = (present >= PEERS_PRESENT * bucket.shape[1]) & (present > 1)
        ratio = part - lowest_mean(part, axis=-1)[..., None]
        ratio = np.where(enough[..., None], ratio, np.nan)
        ratio_SR[:, bucket] = ratio
        if blocks:
            whole = ratio[: blocks * _BLOCK_STEPS].reshape(blocks, _BLOCK_STEPS, *bucket.shape)
            _, rest = levels(np.swapaxes(whole, 1, 2))
            by_block = np.sort(scatter(rest, blocks), axis=0)
            sigma_R[bucket] = by_block[(blocks - 1) // 2][:, None]
    return Excess(log_SR=ratio_SR, sigma_R=sigma_R)


def _own_work(frame: Frame) -> Floats:
    """Busy time less waiting for a core, for input and for the garbage collector.

    What is not known is not taken out; a detector that cares asks for the column itself. Waiting
    for a core counts for the whole step, also for the wake-ups after others were waited for: on a
    crowded host more is taken out than was in. CPU time is work all the same, so own time is no
    less than that, except beside a GPU, where waiting for the device may spin.
    """
    columns = frame.columns
    busy = columns["busy_s"]
    aside = np.nan_to_num(columns["data_wait_s"]) + np.nan_to_num(columns["gc_s"])
    worked = np.where(
        frame.has_gpu_R, 0.0, np.nan_to_num(columns["cpu_s"]) - np.nan_to_num(columns["gc_s"])
    )
    unhindered = busy - aside - np.nan_to_num(columns["run_delay_s"])
    least = np.minimum(np.maximum(worked, _LEAST_OWN_SHARE * busy), busy)
    own: Floats = np.maximum(unhindered, least)
    return own


def _cpu_work(frame: Frame) -> Floats:
    """CPU time of the training thread less garbage collection, which is CPU time too."""
    cpu = frame.columns["cpu_s"]
    work: Floats = np.maximum(cpu - np.nan_to_num(frame.columns["gc_s"]), _LEAST_OWN_SHARE * cpu)
    return work


_DERIVED: Final = {"own_work_s": _own_work, "cpu_work_s": _cpu_work}


def build_frame(run: Run) -> Frame:
    """The settled steps of a run: warm-up and compiling steps left out."""
    compiling = {event.ordinal for event in run.events if event.kind.startswith("compil")}
    settled_A = run.ordinals_A >= WARM_UP_STEPS
    settled_A &= ~np.isin(run.ordinals_A, sorted(compiling))
    at = np.flatnonzero(settled_A)
    # Mostly one block, and then a view: a copy of a large run costs as much as the run.
    whole = at.size and at[-1] - at[0] + 1 == at.size
    steps: Any = slice(int(at[0]), int(at[-1]) + 1) if whole else at
    return Frame(
        whole=run,
        index_S=at,
        columns={name: run.columns[name][steps] for name in COLUMNS},
    )
