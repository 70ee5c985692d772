"""What a detector is given: some consecutive steps of a run, over all ranks.

Shape legend: S = steps of the window, R = ranks of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from argus_otel.detect.statistics import median_over

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argus_otel.detect.frame import Excess, Frame

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A view on consecutive steps. Unknown values are NaN; nothing is copied."""

    frame: Frame
    start: int
    """Index of the first step among the run's settled steps."""
    stop: int

    @property
    def ordinals_S(self) -> NDArray[np.int64]:  # noqa: N802 - shape suffix
        """Step ordinals, ascending."""
        return self.frame.ordinals_S[self.start : self.stop]

    @property
    def ranks_R(self) -> NDArray[np.int64]:  # noqa: N802 - shape suffix
        """Global ranks, ascending."""
        return self.frame.ranks_R

    @property
    def world_size(self) -> int:
        """Ranks of the job, silent ones included."""
        return self.frame.world_size

    @property
    def has_gpu_R(self) -> NDArray[np.bool_]:  # noqa: N802 - shape suffix
        """Whether a rank has a GPU."""
        return self.frame.has_gpu_R

    @property
    def hosts_R(self) -> tuple[str, ...]:  # noqa: N802 - shape suffix
        """Host of each rank; empty where not known."""
        return self.frame.hosts_R

    @property
    def job_step_s(self) -> Floats:
        """Step time of the job, seconds [S]."""
        return self.frame.job_step_s[self.start : self.stop]

    @property
    def usual_step_s(self) -> float:
        """Median step time of the job in this window, seconds."""
        return float(median_over(self.job_step_s, axis=0))

    @property
    def is_latest(self) -> bool:
        """Whether nothing is known after it: what has just begun may still last."""
        return self.stop == self.frame.ordinals_S.size

    def column(self, name: str) -> Floats:
        """A column [S, R], NaN unknown: one of ``frame.COLUMNS``, ``own_work_s``, ``cpu_work_s``."""
        return self.frame.column(name)[self.start : self.stop]

    def excess(self, name: str) -> Excess:
        """Each rank's ratio to its fastest peers in the same step."""
        return self.frame.excess(name).between(self.start, self.stop)

    def work_excess(self, name: str) -> list[Excess]:
        """As ``excess``, with the amount of work taken out where it is known.

        Several candidates where the data cannot tell how time follows work; who is slow must be
        slow by all of them.
        """
        return [part.between(self.start, self.stop) for part in self.frame.work_excess(name)]

    def host(self, rank: int) -> str:
        """Host of a rank index; empty where not known."""
        return self.frame.hosts_R[rank]

    def marked_step(self, over_S: NDArray[np.bool_], rank: int) -> tuple[int, str | None]:
        """The step to look at, and its trace id.

        The first one over that has its timeline kept, else the first one over: a choice that later
        data cannot change, so that a verdict is written into one trace only.

        Args:
            over_S: Which steps of the window show the fault.
            rank: Index of the rank.
        """
        over = np.flatnonzero(over_S)
        kept = np.flatnonzero(over_S & self.frame.kept_SR[self.start : self.stop, rank])
        step = int(kept[0] if kept.size else over[0] if over.size else 0)
        return int(self.ordinals_S[step]), self.frame.trace_id(self.start + step, rank)
