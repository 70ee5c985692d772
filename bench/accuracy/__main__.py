"""How often the detectors are right, on simulated runs with known truth.

    python bench/accuracy [--quick] [--json] [--fresh] [--score] [--workers N]

Runs are drawn from design.yaml and judged one by one; a run that is in the record already is not
judged again, so that an interrupted score goes on where it stopped. ``--fresh`` begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process a core is enough

from rich.progress import track

from accuracy.calibration import calibrate, findings_of, reliability
from accuracy.judging import judge
from accuracy.page import write_page
from accuracy.runs import draw, read_design
from accuracy.score import score
from argus_otel.simulate.cluster import PRESETS
from paired import as_json, describe_environment, write_results

_LARGE = 1000
RESULTS = Path(__file__).parents[1] / "results"
RECORDS = Path(__file__).with_name("records")
"""Of what was judged so far. Not in .cache, which building the documentation empties."""


def main() -> int:
    """Judge what is missing, then score; 1 where the quick score misses what it must hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample of three minutes, for CI")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--fresh", action="store_true", help="judge every run anew")
    parser.add_argument("--score", action="store_true", help="judge nothing, score the record")
    parser.add_argument(
        "--calibrate", action="store_true", help="judge nothing, write the detectors' confidence"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # medians of nothing, in the baselines
    kept = RECORDS / ("quick.jsonl" if options.quick else "whole.jsonl")
    kept.parent.mkdir(exist_ok=True)
    if options.fresh or options.quick:
        kept.unlink(missing_ok=True)
    done = _read(kept)
    design = draw(read_design(), quick=options.quick)
    # A record of other seeds, or of a design since changed, says nothing of these runs.
    wanted = {run.id: (run.seed, run.fault) for run in design}
    done = {key: row for key, row in done.items() if wanted.get(key) == (row["seed"], row["fault"])}
    runs = (
        [] if options.score or options.calibrate else [run for run in design if run.id not in done]
    )
    # In no order of the design, so that a part of it is a sample of all; the largest last.
    runs.sort(key=lambda run: (PRESETS[run.cluster].ranks > _LARGE, _shuffled(run.id)))
    with (
        kept.open("a", encoding="utf-8") as record,
        # Ctrl-C reaches the whole group of processes, and ends those that judge where they are.
        ProcessPoolExecutor(
            options.workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)
        ) as workers,
    ):
        waiting = [workers.submit(judge, run) for run in runs]
        finished = track(as_completed(waiting), "judging", total=len(waiting), disable=options.json)
        try:
            for future in finished:
                outcome = future.result()
                record.write(json.dumps(outcome) + "\n")
                record.flush()
                done[outcome["id"]] = outcome
        except (KeyboardInterrupt, BrokenProcessPool) as error:
            workers.shutdown(wait=False, cancel_futures=True)
            interrupted = isinstance(error, KeyboardInterrupt)
            why = "" if interrupted else f" ({error})"
            print(f"Stopped{why}: {len(done)} of {len(design)} runs are judged and kept in {kept}. "
                  "The same command goes on from there.", file=sys.stderr)  # fmt: skip
            return 130 if interrupted else 1
    said = list(findings_of(list(done.values()), design))
    if options.calibrate:
        calibrate(said)
    results = {
        "runs_of_design": len(design),
        **score(list(done.values())),
        "reliability": reliability(said),
    }
    if not options.quick:
        write_results(RESULTS / "accuracy.json", results)
        write_page(RESULTS / "accuracy.json")
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
    else:
        _print(results)
    missed = results["false_alarms"]["hits"] or (results["right"]["share"] or 0) < 0.9
    return int(options.quick and bool(missed))


def _shuffled(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _read(path: Path) -> dict[str, dict]:
    if not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text("utf-8").splitlines() if line)
    return {row["id"]: row for row in rows}


def _print(results: dict) -> None:
    print(f"{results['runs']['faulty']} faulty runs, {results['runs']['healthy']} healthy ones")
    for name in (
        "detected",
        "right",
        "warned",
        "small_right",
        "informed_healthy",
        "false_alarms",
        "accused_others",
    ):
        part = results[name]
        if part["of"]:
            print(f"{name:<16}{part['hits']:>5} of {part['of']:<5} {part['share']:.2%} "
                  f"({part['low']:.2%} to {part['high']:.2%})")  # fmt: skip
    print("delay", results["delay_steps"])
    for failure in [*results["failures"], *results["accusations"]]:
        said = "; ".join(f"{s['cause']} {s['ranks'][:6]} {s['severity']}" for s in failure["said"])
        print(f"  wrong: {failure['id']}: {failure['fault']}: {said or 'nothing'}")


if __name__ == "__main__":
    raise SystemExit(main())
