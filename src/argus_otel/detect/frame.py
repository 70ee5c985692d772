"""A run's steps as dense arrays, once for all detectors.

Shape legend: S = settled steps in order of appearance, R = ranks of the run.

Inside this package a value that is not known is NaN; the tables outside have nulls.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.detect.peers import Peers, find_peers
from argus_otel.detect.statistics import levels, lowest_mean, median_over, scatter
from argus_otel.detect.workload import normalised_logs

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from argus_otel.tables.schemas import RunTables

    Floats = NDArray[np.float64]

WARM_UP_STEPS: Final = 10
"""First steps of a run: allocators, autotuning and caches settle (DESIGN, detection)."""

COLUMNS: Final = (
    "step_s",
    "between_s",
    "busy_s",
    "cpu_s",
    "run_delay_s",
    "data_wait_s",
    "gc_s",
    "tokens",
    "samples",
    "sum_len2",
)
"""Columns of the steps table that detectors see."""

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

    run: str
    ordinals_S: NDArray[np.int64]
    ranks_R: NDArray[np.int64]
    hosts_R: tuple[str, ...]
    has_gpu_R: NDArray[np.bool_]
    world_size: int
    columns: dict[str, Floats]
    """Each [S, R], NaN unknown: the names in ``COLUMNS``."""
    row_SR: NDArray[np.int64]
    """Row in ``steps``, -1 where missing."""
    kept_SR: NDArray[np.bool_]
    """Whether the step's timeline was kept."""
    steps: pa.Table
    peers: Peers
    steps_seen: int
    """Distinct steps in the tables, warm-up and compilation included."""
    unaligned: int
    """Rows left out because no common step count was found."""
    cached: dict[str, Floats] = field(default_factory=dict, repr=False)
    compared: dict[str, list[Excess]] = field(default_factory=dict, repr=False)

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

    def trace_id(self, step: int, rank: int) -> str | None:
        """Trace id (hex) of a step index and rank index."""
        row = int(self.row_SR[step, rank])
        return None if row < 0 else str(self.steps["trace_id"][row].as_py())


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


def build_frame(tables: RunTables) -> Frame:
    """Lay a run's steps out densely, warm-up and compiling steps left out.

    Cost:
        Two passes over the steps table; 1.3 million rows (12,960 ranks, 100 steps) take a second.
    """
    steps = tables.steps
    ranks = tables.ranks.sort_by("rank").to_pydict()
    rank = steps["rank"].to_numpy().astype(np.int64)
    ordinal = steps["ordinal"].to_numpy()
    known = np.array(ranks["rank"], dtype=np.int64)
    ranks_R = np.union1d(known, rank)
    all_ordinals = np.unique(ordinal)
    ordinals_S = all_ordinals[all_ordinals >= WARM_UP_STEPS]
    ordinals_S = np.setdiff1d(ordinals_S, _compiling(tables.events))

    aligned = ~np.isin(_bools(steps["aligned"], default=True), [False])
    whole = ~_bools(steps["truncated"], default=False)
    settled = np.isin(ordinal, ordinals_S)
    use = np.flatnonzero(aligned & whole & settled)
    at = (np.searchsorted(ordinals_S, ordinal[use]), np.searchsorted(ranks_R, rank[use]))
    shape = (ordinals_S.size, ranks_R.size)
    columns = {}
    for name in COLUMNS:
        values = np.full(shape, np.nan)
        values[at] = steps[name].to_numpy(zero_copy_only=False)[use]
        columns[name] = values
    row_SR = np.full(shape, -1, dtype=np.int64)
    row_SR[at] = use
    kept_SR = np.zeros(shape, dtype=bool)
    kept_SR[at] = steps["keep"].is_valid().to_numpy()[use]

    details = {
        r: (h, g) for r, h, g in zip(known.tolist(), ranks["host"], ranks["gpu"], strict=True)
    }
    about = [details.get(r, ("", None)) for r in ranks_R.tolist()]
    return Frame(
        run=str(ranks["run"][0]) if ranks["run"] else "",
        ordinals_S=ordinals_S,
        ranks_R=ranks_R,
        hosts_R=tuple(host for host, _ in about),
        has_gpu_R=np.array([gpu is not None for _, gpu in about], dtype=bool),
        world_size=max([*ranks["world_size"], ranks_R.size]),
        columns=columns,
        row_SR=row_SR,
        kept_SR=kept_SR,
        steps=steps,
        peers=find_peers(tables, ranks_R, ordinals_S),
        steps_seen=int(all_ordinals.size),
        unaligned=int(np.count_nonzero(settled & ~aligned)),
    )


def _bools(column: pa.ChunkedArray, *, default: bool) -> NDArray[np.bool_]:
    filled: NDArray[np.bool_] = column.fill_null(default).to_numpy().astype(bool)
    return filled


def _compiling(events: pa.Table) -> NDArray[np.int64]:
    """Steps in which some rank compiled: everybody waited for it, and none is typical."""
    if events.num_rows == 0:
        return np.empty(0, dtype=np.int64)
    kinds = events["kind"].to_pylist()
    ordinals = events["ordinal"].to_numpy()
    return np.unique(ordinals[[kind.startswith("compil") for kind in kinds]])
