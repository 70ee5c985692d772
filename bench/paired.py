"""Paired measurements: two things in turn in one process, so that what disturbs one disturbs both.

A shared machine's speed wanders by tens of percent over seconds. A ratio inside one pair is
nearly free of that; the median over pairs and a bootstrap interval say how much is left.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_RESAMPLES = 2000
_PACKAGES = ("numpy", "torch", "opentelemetry-sdk", "protobuf", "argus-otel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median with its bootstrap interval (95 %) and its extremes, in the values' own unit."""

    median: float
    low: float
    high: float
    minimum: float
    maximum: float
    blocks: int

    def __str__(self) -> str:
        """``median (low to high)``, three significant digits."""
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def spread(values: Sequence[float]) -> Spread:
    """Summarise one value per block; the interval is that of the median."""
    data = np.asarray(values, dtype=np.float64)
    resampled = np.random.default_rng(0).choice(data, (_RESAMPLES, data.size))
    low, high = np.percentile(np.median(resampled, axis=1), (2.5, 97.5))
    return Spread(
        median=statistics.median(values),
        low=float(low),
        high=float(high),
        minimum=float(data.min()),
        maximum=float(data.max()),
        blocks=data.size,
    )


def run_pairs(
    first: Callable[[], float], second: Callable[[], float], *, pairs: int, warm_up: int = 1
) -> tuple[list[float], list[float]]:
    """Run both in turn, the order changing from pair to pair (A B, B A, …).

    Args:
        first: Runs one block and returns what it measured.
        second: The same of the other.
        pairs: Measured pairs.
        warm_up: Pairs before them that are thrown away.

    Returns:
        Measurements of the first and of the second, one per pair, pairs at the same index.
    """
    of_first: list[float] = []
    of_second: list[float] = []
    for index in range(warm_up + pairs):
        if index % 2 == 0:
            a = first()
            b = second()
        else:
            b = second()
            a = first()
        if index >= warm_up:
            of_first.append(a)
            of_second.append(b)
    return of_first, of_second


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """How many times ``below`` fits into ``above``, pair by pair."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def describe_environment() -> dict[str, Any]:
    """What a figure means nothing without."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "date": datetime.now(UTC).date().isoformat(),
    }


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write results with the environment they were measured in, as JSON with stable order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json({"environment": describe_environment(), **results}) + "\n")


def as_json(results: Mapping[str, Any]) -> str:
    """JSON of results that may hold ``Spread``; four significant digits are more than enough."""
    return json.dumps(_plain(results), indent=2)


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Spread):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
