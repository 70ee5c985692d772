"""The numbers that people chart, kept as cumulative series and handed out as metric points."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from argus_otel.encode.metrics import Counter, Gauge, Histogram
from argus_otel.semconv import names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from argus_otel.wire.digest import ChartedNumbers, StepDigest

STEP_BOUNDS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0,
)  # fmt: skip
"""From a toy loop's milliseconds to a large job's minute, at most 2.5 apart."""


@dataclass(slots=True)
class _Buckets:
    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, value_s: float) -> None:
        self.counts[bisect_left(STEP_BOUNDS_S, value_s)] += 1
        self.sum_s += value_s


class Meters:
    """Totals of one process since it began to train."""

    def __init__(self) -> None:
        self._start_ns = time.time_ns()
        self._step = _Buckets()
        self._busy = _Buckets()
        self._data_wait = _Buckets()
        self._gc_s = 0.0
        self._wait_s = 0.0
        self._tokens = 0.0
        self._steps = 0
        self._self_cpu_s = 0.0
        self.spans = 0
        """Spans handed to the sender."""

    def add(self, digests: Sequence[StepDigest | ChartedNumbers], wait_s: float) -> None:
        """Count some steps in.

        Cost:
            Background thread. 1.5 µs a step.
        """
        self._steps += len(digests)
        self._wait_s += wait_s
        for digest in digests:
            self._step.add(digest.step_s)
            if digest.busy_s is not None:
                self._busy.add(digest.busy_s)
            if digest.data_wait_s is not None:
                self._data_wait.add(digest.data_wait_s)
            self._gc_s += digest.gc_s or 0.0
            self._tokens += digest.tokens or 0.0
            self._self_cpu_s += digest.self_cpu_s or 0.0

    def points(
        self, now_ns: int, *, sent_bytes: int, queue_bytes: int, drops: Mapping[str, int]
    ) -> list[Counter | Gauge | Histogram]:
        """Every series as it stands; nothing before the first step."""
        if not self._steps:
            return []
        start_ns = self._start_ns
        points: list[Counter | Gauge | Histogram] = [
            Histogram(
                name=name,
                unit="s",
                bounds=STEP_BOUNDS_S,
                bucket_counts=buckets.counts,
                sum=buckets.sum_s,
                start_ns=start_ns,
                time_ns=now_ns,
            )
            for name, buckets in (
                (names.METRIC_ARGUS_STEP_DURATION, self._step),
                (names.METRIC_ARGUS_STEP_BUSY, self._busy),
                (names.METRIC_ARGUS_DATA_WAIT, self._data_wait),
            )
        ]
        counters = (
            (names.METRIC_ARGUS_STEPS, "{step}", self._steps),
            (names.METRIC_ARGUS_GC_PAUSE, "s", self._gc_s),
            (names.METRIC_ARGUS_COLLECTIVE_WAIT, "s", self._wait_s),
            (names.METRIC_ARGUS_WORK_TOKENS, "{token}", self._tokens),
            (names.METRIC_ARGUS_SELF_CPU, "s", self._self_cpu_s),
            (names.METRIC_ARGUS_SELF_SPANS, "{span}", self.spans),
            (names.METRIC_ARGUS_SELF_SENT, "By", sent_bytes),
        )
        points += [
            Counter(name=name, unit=unit, value=value, start_ns=start_ns, time_ns=now_ns)
            for name, unit, value in counters
        ]
        points += [
            Counter(
                name=names.METRIC_ARGUS_SELF_DROPS,
                unit="{record}",
                value=count,
                start_ns=start_ns,
                time_ns=now_ns,
                attributes={names.METRIC_ATTRIBUTE_CAUSE: cause},
            )
            for cause, count in drops.items()
        ]
        points.append(
            Gauge(name=names.METRIC_ARGUS_SELF_QUEUE, unit="By", value=queue_bytes, time_ns=now_ns)
        )
        return points
