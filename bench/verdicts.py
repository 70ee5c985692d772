"""Wrong verdicts on real jobs: what was planted against what ``argus detect`` says.

    python bench/verdicts.py [--quick] [--json] [--out bench/results/verdicts.json]

Each run is a real one: ``argus run --local -- torchrun …`` of an unchanged loop (bench/loops),
then ``argus detect --json --dry-run`` on the store that it leaves. Twenty runs are healthy, with
what healthy loops have: jitter, uneven batches, a slow start, evaluation, checkpoints. In twenty
one rank computes more, by 1.15 to 3 times, some from the middle of the run on.

What is planted is not what happens: on shared cores a rank's extra work slows its neighbours as
well, and a factor is of arithmetic that nobody disturbs. So each run also says its *realised*
ratio: the rank's own time (busy, less input, garbage collection and waiting for a core) over that
of the fastest other, median over the steps since the onset. A verdict is wrong where

- a healthy run has a finding above info,
- a rank that is realised at 1.25 or more is not named, alone and as a compute straggler (as info is
  enough: a mild fault that is young, or costs little, is said and not pressed),
- any run with a slow rank has a finding above info on another rank, or of another cause.

Exit code 1 if any verdict is wrong or a run failed. CI shares its machine with others and says
``--again``: a wrong verdict is tried once more, and both are shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from argus_otel import service
from argus_otel.store.opening import open_store
from jobs import LOOPS, JobError, argus, clean_environment, run, torchrun
from paired import as_json, describe_environment, write_results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CAUSE = "compute_straggler"
MIN_REALISED = 1.25
STEPS = 100
STEP_MS = 22
_AFTER_ONSET = 2
JOB_S = 300
"""After which a job is taken to hang."""
_EXIT_CODES = (0, 1, 3)
"""Of ``argus detect``: nothing above info, something, every detector abstained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Links between hosts, one to each, in Mbit/s."""

    megabit: float
    slow_megabit: float | None = None
    """Of the slow rank's host."""

    def __str__(self) -> str:
        """As a table says it."""
        slow = "" if self.slow_megabit is None else f", one at {self.slow_megabit:g}"
        return f"links of {self.megabit:g} Mbit/s{slow}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run."""

    loop: str
    ranks: int
    options: dict[str, float]
    slow_rank: int | None = None
    cause: str = CAUSE
    """What is planted, where a rank is slow."""
    hosts: Hosts | None = None
    """Each rank on a host of its own; None for all on this one."""

    @property
    def name(self) -> str:
        """What a table calls it."""
        said = [f"{key.replace('_', ' ')} {value:g}" for key, value in self.options.items()]
        where = f" hosts, {self.hosts}" if self.hosts else ""
        slow = [] if self.slow_rank is None else [f"slow rank {self.slow_rank}"]
        return ", ".join([f"{self.loop} × {self.ranks}{where}", *slow, *said])


def healthy(loop: str, ranks: int, **options: float) -> Scenario:
    """A run in which nothing is wrong."""
    return Scenario(loop=loop, ranks=ranks, options=options)


def slow(loop: str, ranks: int, rank: int, factor: float, **options: float) -> Scenario:
    """A run in which one rank computes ``factor`` times as much."""
    planted = {"slow_factor": factor}
    return Scenario(loop=loop, ranks=ranks, options=planted | options, slow_rank=rank)


QUICK = (
    healthy("ddp", 2, jitter=0.1, evaluate_every=10),
    healthy("ddp", 2, uneven=0.2, checkpoint_every=15),
    healthy("ddp", 2, accumulate=4, warm_up_steps=8),
    healthy("fsdp", 2, jitter=0.05),
    slow("ddp", 2, 1, 1.75),
    slow("ddp", 2, 0, 2.0, onset=50, jitter=0.05),
    slow("fsdp", 2, 1, 2.0),
    slow("ddp", 4, 2, 3.0),
)
HEALTHY = (
    healthy("ddp", 2),
    healthy("ddp", 2, jitter=0.1),
    healthy("ddp", 2, jitter=0.2),
    healthy("ddp", 2, uneven=0.2),
    healthy("ddp", 2, warm_up_steps=15),
    healthy("ddp", 2, evaluate_every=10),
    healthy("ddp", 2, checkpoint_every=15),
    healthy("ddp", 2, jitter=0.1, uneven=0.1, evaluate_every=20, checkpoint_every=30),
    healthy("ddp", 2, accumulate=4),
    healthy("ddp", 2, accumulate=2, uneven=0.3, evaluate_every=15),
    healthy("fsdp", 2),
    healthy("fsdp", 2, jitter=0.1, uneven=0.1),
    healthy("fsdp", 2, evaluate_every=10, checkpoint_every=20),
    healthy("ddp", 4),
    healthy("ddp", 4, jitter=0.1),
    healthy("ddp", 4, uneven=0.2, evaluate_every=20),
    healthy("ddp", 4, warm_up_steps=10, checkpoint_every=25),
    healthy("ddp", 4, accumulate=4, jitter=0.1),
    healthy("fsdp", 4),
    healthy("fsdp", 4, uneven=0.1, checkpoint_every=25),
)
SLOW = (
    slow("ddp", 2, 1, 1.15),
    slow("ddp", 2, 0, 1.25),
    slow("ddp", 2, 1, 1.3, jitter=0.05),
    slow("ddp", 2, 0, 1.4, uneven=0.1),
    slow("ddp", 2, 1, 1.5, onset=50),
    slow("ddp", 2, 0, 1.6, evaluate_every=15),
    slow("ddp", 2, 1, 1.75, checkpoint_every=20),
    slow("ddp", 2, 0, 2.0, onset=50, jitter=0.1),
    slow("ddp", 2, 1, 3.0, warm_up_steps=8),
    slow("ddp", 2, 1, 1.5, accumulate=4),
    slow("ddp", 2, 0, 2.0, accumulate=2, uneven=0.2),
    slow("ddp", 3, 1, 1.5),
    slow("ddp", 3, 2, 2.0, onset=50),
    slow("ddp", 4, 2, 1.5),
    slow("ddp", 4, 0, 2.0, jitter=0.1),
    slow("ddp", 4, 3, 3.0, onset=50),
    slow("ddp", 4, 1, 2.0, accumulate=4),
    slow("fsdp", 2, 1, 1.5),
    slow("fsdp", 2, 0, 2.0, onset=50),
    slow("fsdp", 4, 2, 2.5),
)


def main() -> None:
    """Run all, print, and say by the exit code whether all verdicts are right."""
    sys.exit(judge_all(__doc__, QUICK, (*HEALTHY, *SLOW)))


def judge_all(
    description: str | None,
    quick: Sequence[Scenario],
    full: Sequence[Scenario],
    judged: Callable[[Scenario, int], dict[str, Any]] | None = None,
) -> int:
    """The command line of a benchmark that judges verdicts; 1 where one is wrong.

    Args:
        description: Its help.
        quick: What ``--quick`` runs.
        full: What runs without it.
        judged: Runs a scenario with a seed and has it judged; ``judge_run`` unless given.
    """
    judged = judged or judge_run
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{len(quick)} of {len(full)}, for CI")
    parser.add_argument(
        "--again", action="store_true", help="a wrong verdict counts when it is wrong twice (CI)"
    )
    parser.add_argument("--only", help="those whose name holds this")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    options = parser.parse_args()
    scenarios = quick if options.quick else full
    rows = []
    for seed, scenario in enumerate(scenarios):
        if options.only is None or options.only in scenario.name:
            row = judged(scenario, seed)
            if options.again and row["verdict"].startswith(("wrong", "failed")):
                print(_line(row), "  (once more)", file=sys.stderr, flush=True)
                row = judged(scenario, seed) | {"first_verdict": row["verdict"]}
            rows.append(row)
            print(_line(row), file=sys.stderr if options.json else sys.stdout, flush=True)
    results = {"runs": rows, "counts": dict(Counter(row["verdict"] for row in rows))}
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
    else:
        print("\n" + ", ".join(f"{count} {name}" for name, count in results["counts"].items()))
    return int(any(row["verdict"].startswith(("wrong", "failed")) for row in rows))


def judge_run(
    scenario: Scenario,
    seed: int,
    train: Callable[[Scenario, int, Path], None] | None = None,
) -> dict[str, Any]:
    """Run it, have it judged, and judge the judgement.

    Args:
        scenario: What to run.
        seed: Of its randomness.
        train: Leaves a store of the run behind; ``train_here`` unless given.
    """
    began_s = time.monotonic()
    row: dict[str, Any] = {
        "name": scenario.name,
        "planted_rank": scenario.slow_rank,
        "planted_cause": None if scenario.slow_rank is None else scenario.cause,
        "planted_factor": scenario.options.get("slow_factor"),
        "realised_ratio": None,
        "findings": [],
        "abstained": [],
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            (train or train_here)(scenario, seed, store)
            said = detect(store)
            if scenario.slow_rank is not None and scenario.cause == CAUSE:
                row["realised_ratio"] = realised(scenario, store)
    except JobError as error:
        print(error, file=sys.stderr)
        return {**row, "verdict": "failed", "took_s": time.monotonic() - began_s}
    for finding in said["findings"]:
        kept = ("cause", "ranks", "hosts", "severity", "slowdown", "first_step", "onset", "summary")
        row["findings"].append({name: finding.get(name) for name in kept})
    row["abstained"] = sorted({(one["detector"], one["code"]) for one in said["abstained"]})
    row["verdict"] = verdict_on(scenario, row)
    row["took_s"] = time.monotonic() - began_s
    return row


def train_here(scenario: Scenario, seed: int, store: Path) -> None:
    """Run it, all ranks on this host."""
    command = [*torchrun(scenario.ranks), *script(scenario, seed)]
    local = [argus(), "run", "--local", "--store", str(store), "--", *command]
    run(local, clean_environment({}), JOB_S)


def script(scenario: Scenario, seed: int) -> list[str]:
    """The training script with its options."""
    options = {"steps": STEPS, "step_ms": STEP_MS, "seed": seed, **scenario.options}
    if scenario.slow_rank is not None:
        options["slow_rank"] = scenario.slow_rank
    arguments = [
        f"--{name.replace('_', '-')}={value:g}" for name, value in options.items()
    ]  # whole numbers print as such
    return [str(LOOPS / f"{scenario.loop}.py"), *arguments]


def detect(store: Path) -> dict[str, Any]:
    """What ``argus detect`` says of the run in a store."""
    command = [argus(), "detect", "--json", "--dry-run", "--store", str(store)]
    said = run(command, clean_environment({}), JOB_S, accept=_EXIT_CODES)
    document: dict[str, Any] = json.loads(said)
    return document


def realised(scenario: Scenario, store: Path) -> float | None:
    """Own time of the slow rank over the fastest other's; None where it is not known."""
    frame = service.judge(open_store(str(store)), "latest").verdict.frame
    onset = int(scenario.options.get("onset", 0))
    own_SR = frame.column("own_work_s")[frame.ordinals_S >= onset + _AFTER_ONSET]
    if not own_SR.size or np.isnan(own_SR).all(axis=0).any():
        return None
    own_R = np.nanmedian(own_SR, axis=0)
    is_slow_R = frame.ranks_R == scenario.slow_rank
    return float(own_R[is_slow_R][0] / own_R[~is_slow_R].min())


def verdict_on(scenario: Scenario, row: dict[str, Any]) -> str:
    """``right``, ``wrong: …``, or that nothing was asked of it."""
    serious = [finding for finding in row["findings"] if finding["severity"] != "info"]
    if scenario.slow_rank is None:
        return "wrong: healthy" if serious else "right"
    for finding in serious:
        if finding["cause"] != scenario.cause:
            return "wrong: cause"
        if list(finding["ranks"]) != [scenario.slow_rank]:
            return "wrong: rank"
    if serious:
        return "right"
    named = [f for f in row["findings"] if f["cause"] == scenario.cause]
    if named and all(list(finding["ranks"]) == [scenario.slow_rank] for finding in named):
        return "right, as info"  # mild and young, or costing little: said, but not pressed
    if scenario.cause != CAUSE:
        return "wrong: missed"
    ratio = row["realised_ratio"]
    if ratio is None:
        return "wrong: not known"
    return "wrong: missed" if ratio >= MIN_REALISED else "right: below the bar"


def _line(row: dict[str, Any]) -> str:
    ratio = row["realised_ratio"]
    planted = "" if row["planted_factor"] is None else f"realised {ratio or float('nan'):.2f}"
    found = "; ".join(
        f"{finding['severity']} {finding['cause']} {finding['ranks']} {finding['slowdown']:.2f}"
        for finding in row["findings"]
    )
    if not found and row["abstained"]:
        found = "abstained: " + ", ".join(f"{name} {code}" for name, code in row["abstained"])
    return f"{row['verdict']:<21}{row['took_s']:>5.0f} s  {row['name']:<58}{planted:<15} {found}"


if __name__ == "__main__":
    main()
