"""Sketches of kernel durations against the published compression of ARGUS: size, error, time.

    python bench/sketch.py [--quick] [--json] [--out bench/results/sketch.json]

Kernels are real ones (the traces of torch.profiler in ``tests/data``) and simulated ones: ranks of
one job, some with one that takes 1.3 times as long. Per rank and step, both ways:

- **packed**: bytes of rows (kernel, stream) and what is kept of them, as base-128 integers in
  columns, both alike; names go in a dictionary that is sent rarely, and count for neither;
- **sent**: the same as base64, which attributes are, after gzip, which requests are; one step by
  itself, though a request holds many;
- **rebuilt**: Wasserstein-1 distance between the durations and what can be rebuilt of them;
- **distance**: how far the distance between this rank and the others pooled, which detectors use,
  is from that of the raw durations. Both as a share of the median of the raw durations; given are
  the mean and 95 % of rows weighted by their time, and the worst row;
- **time** to make the bytes from durations, in paired runs.

ARGUS's way is written from its description: group by (kernel, stream, rank); Gaussian kernel
density of the log durations, bandwidth 1.06 · sigma · n^(-1/5), on 256 points; cut at minima of the
density where at least 3 samples are on each side and the medians of the two sides are at least
0.15 apart in the logarithm (what the gap is between is not published; this is the reading that
cuts most); keep count, p50 and p99 of each part; rebuild as log-normal parts with
sigma = ln(p99 / p50) / 2.326. A window here is one step, so that many rows hold two to
ten kernels, from which no log-normal is fitted well; how long ARGUS's own are is not published.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
import json
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import norm, wasserstein_distance

from argus_otel.wire.sketch import (
    ERROR_PER_MILLE,
    Sketch,
    decode_sketch,
    distances_ns,
    encode_sketch,
    merge_sketches,
    sketch_durations,
)
from argus_otel.wire.varints import pack
from paired import as_json, describe_environment, ratios, run_pairs, spread, write_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

DATA = Path(__file__).parent.parent / "tests" / "data"
TARGET_BYTES = 2700
TARGET_ERROR = 0.02
SLOWER = 1.3

GRID = 256
LEAST_SAMPLES = 3
LEAST_GAP = 0.15
P99 = 2.326
REBUILT_POINTS = 256

Values = tuple["NDArray[np.float64]", "NDArray[np.float64]"]
"""Durations in nanoseconds, and the weight of each."""
Key = tuple[int, int]
"""Index of the name, stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Kernels of one rank in one step, shape [N] each."""

    name: NDArray[np.int64]
    stream: NDArray[np.int64]
    duration_ns: NDArray[np.int64]

    def rows(self) -> dict[Key, NDArray[np.int64]]:
        """Durations of each (name, stream)."""
        place = self.name * (int(self.stream.max()) + 1) + self.stream
        order = np.argsort(place, kind="stable")
        begins = np.flatnonzero(np.diff(place[order], prepend=-1))
        return {
            (int(self.name[order[begin]]), int(self.stream[order[begin]])): self.duration_ns[rows]
            for begin, rows in zip(begins, np.split(order, begins[1:]), strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parts that are peers of each other: ranks in a step, or steps of a rank."""

    title: str
    names: tuple[str, ...]
    parts: list[Part]


# -- what is compared --------------------------------------------------------------------------


def make_sketch(job: Job, part: Part) -> Sketch:
    """This project's."""
    return sketch_durations(
        part.duration_ns,
        part.name,
        part.stream,
        np.full(part.name.size, -1),
        names=job.names,
    )


Triples = dict[Key, list[tuple[int, int, int]]]
"""Count, p50 and p99 in nanoseconds of each part of each row."""


def make_triples(part: Part) -> Triples:
    """ARGUS's."""
    return {
        key: [
            (piece.size, *np.rint(np.percentile(piece, (50, 99))).astype(int).tolist())
            for piece in cut_at_minima(duration_ns)
        ]
        for key, duration_ns in part.rows().items()
    }


def cut_at_minima(duration_ns: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The modes of a row."""
    ordered = np.sort(np.maximum(duration_ns, 1))
    log = np.log(ordered)
    sigma = float(log.std())
    if ordered.size < 2 * LEAST_SAMPLES or sigma == 0:
        return [ordered]
    bandwidth = 1.06 * sigma * ordered.size**-0.2
    grid = np.linspace(log[0], log[-1], GRID)
    density = np.exp(-0.5 * ((grid[:, None] - log) / bandwidth) ** 2).sum(axis=1)
    inside = density[1:-1]
    minima = 1 + np.flatnonzero((inside < density[:-2]) & (inside <= density[2:]))
    pieces = []
    begin = 0
    for cut in np.searchsorted(log, grid[minima]).tolist():
        if (
            cut - begin >= LEAST_SAMPLES
            and ordered.size - cut >= LEAST_SAMPLES
            and np.median(log[cut:]) - np.median(log[begin:cut]) >= LEAST_GAP
        ):
            pieces.append(ordered[begin:cut])
            begin = cut
    return [*pieces, ordered[begin:]]


def pack_triples(triples: Triples) -> bytes:
    """In columns, as the sketch's rows are."""
    keys = sorted(triples)
    flat = [triple for key in keys for triple in triples[key]]
    return pack(
        [
            len(keys),
            *np.diff([name for name, _ in keys], prepend=0).tolist(),
            *(stream for _, stream in keys),
            *(len(triples[key]) for key in keys),
            *(count for count, _, _ in flat),
            *(p50 for _, p50, _ in flat),
            *(p99 - p50 for _, p50, p99 in flat),
        ]
    )


def rebuild_triples(rows: Sequence[tuple[int, int, int]]) -> Values:
    """Log-normal parts, each as many quantiles of equal weight."""
    count, p50, p99 = np.array(rows, dtype=np.float64).T
    z = norm.ppf((np.arange(REBUILT_POINTS) + 0.5) / REBUILT_POINTS)
    sigma = np.log(np.maximum(p99, p50) / p50) / P99
    values = p50[:, None] * np.exp(sigma[:, None] * z)
    return values.ravel(), np.repeat(count / REBUILT_POINTS, REBUILT_POINTS)


def rebuild_sketch(sketch: Sketch, row: int) -> Values:
    """The mean of each bucket."""
    here = sketch.row == row
    return sketch.means_ns[here], sketch.count[here].astype(np.float64)


# -- measuring ---------------------------------------------------------------------------------


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer ranks and pairs, for CI")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    options = parser.parse_args()
    results = measure(ranks=3 if options.quick else 8, pairs=3 if options.quick else 15)
    if options.out:
        write_results(options.out, results)
    if options.json:
        print(as_json({"environment": describe_environment(), **results}))
    else:
        print_table(results)


def measure(*, ranks: int, pairs: int) -> dict[str, Any]:
    """Everything."""
    return {
        "unit": "a rank and step",
        "error_per_mille": ERROR_PER_MILLE,
        "target_bytes": TARGET_BYTES,
        "target_error": TARGET_ERROR,
        "jobs": [measure_job(job, ranks, pairs) for job in all_jobs()],
    }


def measure_job(job: Job, ranks: int, pairs: int) -> dict[str, Any]:
    """Both ways, over the job's first ranks."""
    job = Job(title=job.title, names=job.names, parts=job.parts[:ranks])
    sketches = [make_sketch(job, part) for part in job.parts]
    triples = [make_triples(part) for part in job.parts]
    packed = [encode_sketch(sketch) for sketch in sketches]
    packed_triples = [pack_triples(of_part) for of_part in triples]
    errors = weigh_errors(job, [decode_sketch(data, job.names) for data in packed], triples)
    merged = merge_sketches(sketches)
    at_once = Part(
        name=np.concatenate([part.name for part in job.parts]),
        stream=np.concatenate([part.stream for part in job.parts]),
        duration_ns=np.concatenate([part.duration_ns for part in job.parts]),
    )
    same = encode_sketch(merged) == encode_sketch(make_sketch(job, at_once))
    part = job.parts[0]
    ours_s, theirs_s = run_pairs(
        timed(lambda: encode_sketch(make_sketch(job, part))),
        timed(lambda: pack_triples(make_triples(part))),
        pairs=pairs,
    )
    sketch_row = {
        **sizes(packed),
        **errors["sketch"],
        "build_ms": spread([1e3 * value for value in ours_s]),
        "mergeable": same,
        "merged_bytes": len(encode_sketch(merged)),
    }
    a_step, error = sketch_row["sent_bytes"], sketch_row["distance"]["p95"]
    return {
        "title": job.title,
        "parts": len(job.parts),
        "kernels": float(np.mean([part.name.size for part in job.parts])),
        "rows": float(np.mean([sketch.name.size for sketch in sketches])),
        "raw_bytes": float(np.mean([16 * part.name.size for part in job.parts])),
        "sketch": sketch_row,
        "argus": {
            **sizes(packed_triples),
            **errors["argus"],
            "build_ms": spread([1e3 * value for value in theirs_s]),
            "mergeable": False,
        },
        "argus_time_over_sketch": ratios(theirs_s, ours_s),
        "target_met": a_step <= TARGET_BYTES and error <= TARGET_ERROR,
    }


def sizes(packed: Sequence[bytes]) -> dict[str, float]:
    """Bytes of a part, and of one as it is sent: base64, by itself after gzip."""
    return {
        "bytes": float(np.mean([len(data) for data in packed])),
        "sent_bytes": float(
            np.mean([len(gzip.compress(base64.b64encode(data))) for data in packed])
        ),
    }


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """Seconds that one call takes."""

    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def weigh_errors(
    job: Job, sketches: Sequence[Sketch], triples: Sequence[Triples]
) -> dict[str, dict[str, dict[str, float]]]:
    """Of every row of every part: rebuilt, and its distance from all other parts."""
    raw = [part.rows() for part in job.parts]
    time_ns: list[float] = []
    errors: dict[tuple[str, str], list[float]] = {
        (way, what): [] for way in ("sketch", "argus") for what in ("rebuilt", "distance")
    }
    for index, sketch in enumerate(sketches):
        others = [at for at in range(len(sketches)) if at != index]
        peers = merge_sketches([sketches[at] for at in others])
        by_sketch_ns = distances_ns(sketch, peers)
        for row, key in enumerate(zip(sketch.name.tolist(), sketch.stream.tolist(), strict=True)):
            mine = raw[index][key]
            near = [at for at in others if key in raw[at]]
            median = median_of(mine)
            of_triples = rebuild_triples(triples[index][key])
            time_ns.append(float(mine.sum()))
            errors["sketch", "rebuilt"].append(
                distance(rebuild_sketch(sketch, row), evenly(mine)) / median
            )
            errors["argus", "rebuilt"].append(distance(of_triples, evenly(mine)) / median)
            if not near:
                errors["sketch", "distance"].append(np.nan)
                errors["argus", "distance"].append(np.nan)
                continue
            pooled = np.concatenate([raw[at][key] for at in near])
            scale = median_of(pooled)
            exact = distance(evenly(mine), evenly(pooled)) / scale
            # Not merged, which triples cannot be: all of them side by side.
            beside = rebuild_triples([one for at in near for one in triples[at][key]])
            errors["sketch", "distance"].append(abs(float(by_sketch_ns[row]) / scale - exact))
            errors["argus", "distance"].append(abs(distance(of_triples, beside) / scale - exact))
    return {
        way: {
            what: shares(np.array(errors[way, what]), np.array(time_ns))
            for what in ("rebuilt", "distance")
        }
        for way in ("sketch", "argus")
    }


def median_of(duration_ns: NDArray[np.int64]) -> float:
    """The lower of two, as the sketch's."""
    return max(float(np.quantile(duration_ns, 0.5, method="inverted_cdf")), 1.0)


def evenly(duration_ns: NDArray[np.int64]) -> Values:
    """Raw durations."""
    return duration_ns.astype(np.float64), np.ones(duration_ns.size)


def distance(a: Values, b: Values) -> float:
    """Wasserstein-1, nanoseconds."""
    return float(wasserstein_distance(a[0], b[0], a[1], b[1]))


def shares(error: NDArray[np.float64], time_ns: NDArray[np.float64]) -> dict[str, float]:
    """Mean and 95 % of the rows' errors by the time that they took, and the worst row's."""
    known = ~np.isnan(error)
    error, time_ns = error[known], time_ns[known]
    order = np.argsort(error)
    below = np.cumsum(time_ns[order]) / time_ns.sum()
    return {
        "mean": float((error * time_ns).sum() / time_ns.sum()),
        "p95": float(error[order][np.searchsorted(below, 0.95)]),
        "worst": float(error.max()),
        "rows": int(error.size),
    }


# -- kernels -----------------------------------------------------------------------------------


def all_jobs() -> Iterator[Job]:
    """Real ones, then simulated ones."""
    dlrm = read_dlrm()
    yield job_of("DLRM, V100, 8 ranks of a step", dlrm)
    yield with_slow("the same, rank 2 at 1.3", job_of("", dlrm), 2)
    steps = split_steps(read_gzip(DATA / "hta" / "a100_2ranks_rank0_nccl.json.gz"))
    yield job_of("A100 with NCCL, 3 steps of a rank", steps)
    yield with_slow("the same, last step at 1.3", job_of("", steps), 2)
    sampled = [read_gzip(DATA / "hta" / f"sampled_rank-{rank}.json.gz") for rank in (0, 1)]
    yield job_of("2 of 128 ranks, sampled", sampled)
    yield with_slow("log-normal, rank 2 at 1.3", simulate(modes=1), 2)
    yield with_slow("bimodal, rank 2 at 1.3", simulate(modes=2), 2)


Event = dict[str, Any]


def read_gzip(path: Path) -> list[Event]:
    """Events of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def read_dlrm() -> list[list[Event]]:
    """Events of each rank."""
    ranks = []
    with tarfile.open(DATA / "param" / "dlrm_kineto.tar.gz") as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            file = archive.extractfile(member) if member.isfile() else None
            if file is None or not member.name.endswith(".json"):
                continue
            ranks.append(json.load(io.TextIOWrapper(file, "utf-8"))["traceEvents"])
    return ranks


def is_kernel(event: Event) -> bool:
    """Whether it ran on the GPU."""
    return event.get("ph") == "X" and str(event.get("cat")).lower() == "kernel"


def split_steps(events: list[Event]) -> list[list[Event]]:
    """Kernels by the step that they ran in."""
    begins = sorted(
        event["ts"]
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep")
    )
    steps: list[list[Event]] = [[] for _ in begins]
    for event in filter(is_kernel, events):
        steps[max(int(np.searchsorted(begins, event["ts"], "right")) - 1, 0)].append(event)
    return steps


def job_of(title: str, parts: Sequence[list[Event]]) -> Job:
    """Kernels of traces, names numbered as they come."""
    code: dict[str, int] = {}
    columns = []
    for events in parts:
        rows = [
            (
                code.setdefault(event["name"], len(code)),
                int(event["args"].get("stream", event["tid"])),
                round(1000 * event["dur"]),
            )
            for event in filter(is_kernel, events)
        ]
        name, stream, duration_ns = np.array(rows, dtype=np.int64).T
        columns.append(Part(name=name, stream=stream, duration_ns=duration_ns))
    return Job(title=title, names=tuple(code), parts=columns)


def with_slow(title: str, job: Job, slow: int) -> Job:
    """One part takes longer in every kernel."""
    parts = [
        Part(
            name=part.name,
            stream=part.stream,
            duration_ns=np.rint(part.duration_ns * SLOWER).astype(np.int64)
            if at == slow
            else part.duration_ns,
        )
        for at, part in enumerate(job.parts)
    ]
    return Job(title=title, names=job.names, parts=parts)


def simulate(modes: int, ranks: int = 8, names: int = 100, kernels: int = 10_000) -> Job:
    """Kernels of a large model: from 2 µs to some milliseconds, spread by 2 to 20 %.

    With two modes a kernel runs on two sizes of tensors, the larger 1.2 to 5 times as long.
    """
    random = np.random.default_rng(modes)
    median_ns = np.exp(random.uniform(np.log(2e3), np.log(3e6), names))
    sigma = random.uniform(0.02, 0.2, names)
    apart = random.uniform(1.2, 5, names) if modes == 2 else np.ones(names)
    name = np.sort(random.choice(names, kernels, p=random.dirichlet(np.full(names, 1.0))))
    larger = random.random(kernels) < random.uniform(0.2, 0.8, names)[name]
    parts = [
        Part(
            name=name,
            stream=np.where(name < names // 10, 20, 7),
            duration_ns=np.rint(
                median_ns[name]
                * np.where(larger, apart[name], 1.0)
                * np.exp(sigma[name] * random.standard_normal(kernels))
            ).astype(np.int64),
        )
        for _ in range(ranks)
    ]
    return Job(title="", names=tuple(f"kernel_{at}" for at in range(names)), parts=parts)


def print_table(results: dict[str, Any]) -> None:
    """For people."""
    print(
        f"{results['unit']}; errors in % of the median duration: mean by time, 95 % of the time, "
        f"worst row; targets {results['target_bytes']} bytes, {results['target_error']:.0%} "
        "for the distance in 95 % of the time\n"
    )
    print(f"{'':<10}{'packed':>8}{'sent':>8}  {'rebuilt':<28}{'distance':<28}{'ms':>6}  merges")
    for job in results["jobs"]:
        met = "met" if job["target_met"] else "NOT met"
        print(
            f"{job['title']}: {job['kernels']:.0f} kernels, {job['rows']:.0f} rows; "
            f"ARGUS takes {job['argus_time_over_sketch']} times as long; target {met}"
        )
        for way in ("sketch", "argus"):
            row = job[way]
            print(
                f"  {way:<8}{row['bytes']:>8.0f}{row['sent_bytes']:>8.0f}  "
                f"{percent(row['rebuilt']):<28}{percent(row['distance']):<28}"
                f"{row['build_ms'].median:>6.2f}  {'yes' if row['mergeable'] else 'no'}"
            )


def percent(row: dict[str, float]) -> str:
    """Mean, 95 %, worst."""
    return " / ".join(f"{100 * row[name]:.2f}" for name in ("mean", "p95", "worst"))


if __name__ == "__main__":
    main()
