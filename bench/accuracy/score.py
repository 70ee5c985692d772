"""From judged runs to the score: shares with Wilson intervals, by size, cause, cluster and method."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import binomtest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Outcome = Mapping[str, Any]

TARGETS = {
    "detected": (0.998, "at least 1.25 and at most 4 % noise"),
    "right": (0.98, "at least 1.25 and at most 4 % noise"),
    "small_right": (0.97, "1.1 and at most 2 % noise"),
    "delay_median": (3.0, "steps"),
    "delay_p95": (5.0, "steps"),
    "false_alarms": (0.0, "healthy runs"),
}


def share(hits: Iterable[bool]) -> dict[str, Any]:
    """How many, of how many, with the 95 % Wilson interval."""
    values = list(hits)
    count = sum(values)
    if not values:
        return {"hits": 0, "of": 0, "share": None, "low": None, "high": None}
    interval = binomtest(count, len(values)).proportion_ci(method="wilson")
    return {
        "hits": count,
        "of": len(values),
        "share": count / len(values),
        "low": float(interval.low),
        "high": float(interval.high),
    }


def score(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The whole score."""
    faulty = [o for o in outcomes if o["fault"]]
    healthy = [o for o in outcomes if not o["fault"]]
    large = [o for o in faulty if _is_large(o)]
    small = [o for o in faulty if o["size"] == 1.1 and o["noise"] <= 0.02]
    delays = [o["delay_steps"] for o in large if "delay_steps" in o]
    # Not within the steps that are looked at is later than any of them, and counts as such.
    ordered = [np.inf if delay is None else float(delay) for delay in delays]
    return {
        "runs": {"faulty": len(faulty), "healthy": len(healthy)},
        "targets": TARGETS,
        "detected": share(o["detected"] for o in large),
        "right": share(o["right"] for o in large),
        "warned": share(o["warned"] for o in large),
        "small_right": share(o["right"] for o in small),
        "informed_healthy": share(o["informed"] for o in healthy),
        "false_alarms": share(not o["right"] for o in healthy),
        "accused_others": share(bool(o["accused_others"]) for o in faulty),
        "delay_steps": {
            "median": _quantile(ordered, 0.5),
            "p95": _quantile(ordered, 0.95),
            "of": len(delays),
            "later": sum(delay is None for delay in delays),
        },
        "by_size_and_noise": _by(faulty, lambda o: f"{o['size']}|{o['noise']}"),
        "by_name": _by(large, lambda o: o["name"]),
        "by_cluster": _by(large, lambda o: o["cluster"]),
        "healthy_by_cluster": _by(healthy, lambda o: o["cluster"]),
        "methods": _methods(large, small, healthy),
        "accusations": [_failure(o) for o in faulty if o["accused_others"]],
        "failures": [_failure(o) for o in [*large, *small, *healthy] if not o["right"]],
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The value that so many do not exceed; None where there is none, or it is later than looked at."""
    if not values:
        return None
    value = float(np.quantile(values, share, method="higher"))
    return value if np.isfinite(value) else None


def _is_large(outcome: Outcome) -> bool:
    return (outcome["size"] is None or outcome["size"] >= 1.25) and outcome["noise"] <= 0.04


def _by(outcomes: Sequence[Outcome], key: Callable[[Outcome], str]) -> dict[str, Any]:
    parts: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        parts[key(outcome)].append(outcome)
    return {
        name: {
            "detected": share(o["detected"] for o in some),
            "right": share(o["right"] for o in some),
        }
        for name, some in parts.items()
    }


def _methods(
    large: Sequence[Outcome], small: Sequence[Outcome], healthy: Sequence[Outcome]
) -> dict[str, Any]:
    """Ours and the others', each with the same columns. Others name no cause: ranks alone count."""
    names = list(large[0]["baselines"]) if large else []
    on_ranks = [o for o in large if o["cause"] == "compute_straggler"]

    def columns(of: Callable[[Outcome], Outcome]) -> dict[str, Any]:
        return {
            "detected": share(of(o)["detected"] for o in large),
            "right": share(of(o)["right"] for o in large),
            "straggler_right": share(of(o)["right"] for o in on_ranks),
            "small_right": share(of(o)["right"] for o in small),
            "false_alarms": share(of(o)["detected"] for o in healthy),
        }

    methods = {"argus-otel": columns(lambda o: o)}
    for name in names:
        methods[name] = columns(lambda o, name=name: o["baselines"][name])
    return methods


def _failure(outcome: Outcome) -> dict[str, Any]:
    return {key: outcome[key] for key in ("id", "fault", "noise", "seed", "detected", "said")}
