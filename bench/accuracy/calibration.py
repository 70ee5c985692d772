"""How sure a finding is: how often findings like it were right on the scoreboard.

Findings are alike that come from one detector at one severity. A finding is right if it names the planted
cause, and no rank that was not hit; one in a healthy run is wrong whatever its severity. Half of the
runs (even seeds) make the detectors' ``confidence.json``; how well that holds is looked up on the other half.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accuracy.score import share
from argus_otel._runtime.bundled import bundled_path
from argus_otel.detect.definition import CONFIDENCE_FILE, load_detectors
from argus_otel.simulate.cluster import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accuracy.runs import Drawn

_NAMES_NO_CAUSE = "slow_steps"
"""It says that steps are slower and that nothing else accounts for it: neither right nor wrong here."""
_BINS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.01)


class Said(NamedTuple):
    """One finding of a judged run."""

    detector: str
    severity: str
    right: bool
    seed: int


def findings_of(rows: Sequence[Mapping[str, Any]], design: Sequence[Drawn]) -> Iterator[Said]:
    """Every finding of the record that names a cause, and whether it is right."""
    drawn = {run.id: run for run in design}
    for row in rows:
        planted = drawn[row["id"]].build_faults()
        for one in row["said"]:
            if one["detector"] == _NAMES_NO_CAUSE:
                continue
            named = set(one["ranks"])
            right = any(
                one["cause"] == fault.cause
                and (
                    named <= set(fault.ranks)
                    if fault.ranks
                    else len(named) in (0, min(PRESETS[row["cluster"]].ranks, 64))
                )
                for fault in planted
            )
            yield Said(one["detector"], one["severity"], right, row["seed"])


def calibrate(said: Sequence[Said]) -> None:
    """Write each detector's ``confidence.json`` from the runs with even seeds."""
    counts: defaultdict[str, Counter[tuple[str, bool]]] = defaultdict(Counter)
    for one in said:
        if one.seed % 2 == 0:
            counts[one.detector][one.severity, one.right] += 1
    for detector in load_detectors(bundled_path("detectors")):
        of = counts[detector.id]
        table = {
            level: {"right": of[level, True], "of": of[level, True] + of[level, False]}
            for level in sorted({level for level, _ in of})
        }
        path = detector.folder / CONFIDENCE_FILE
        if table:
            path.write_text(json.dumps(table, indent=2) + "\n", "utf-8")
        else:
            path.unlink(missing_ok=True)


def reliability(said: Sequence[Said]) -> list[dict[str, Any]]:
    """Expected against observed, over the runs with odd seeds."""
    known = {
        detector.id: detector.confidence for detector in load_detectors(bundled_path("detectors"))
    }
    pairs = [
        (confidence, one.right)
        for one in said
        if one.seed % 2 and (confidence := known[one.detector].get(one.severity)) is not None
    ]
    rows = []
    for low, high in itertools.pairwise(_BINS):
        inside = [(confidence, right) for confidence, right in pairs if low <= confidence < high]
        if inside:
            expected = float(np.mean([confidence for confidence, _ in inside]))
            rows.append(
                {"from": low, "to": min(high, 1.0), "expected": expected,
                 "observed": share(right for _, right in inside)}
            )  # fmt: skip
    return rows
