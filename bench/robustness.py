"""Faults of all kinds on real jobs: what was planted against what ``argus detect`` says.

    python bench/robustness.py [--quick] [--json] [--out bench/results/robustness.json]

As ``verdicts.py`` does it, with the detectors and thresholds that everybody has: unchanged loops
(bench/loops) under ``torchrun`` and gloo, judged by ``argus detect`` on what they send.

- **slow rank**: one rank computes more;
- **slow input**: one rank's batches take longer to read;
- **GC pauses**: one rank holds many small objects and collects garbage by itself;
- **compilation**: one rank's batches change shape, so that torch.compile compiles again;
- **slow link**: each rank on a host of its own (network namespaces joined by a bridge), the link of
  one shaped by ``tc tbf`` to a fraction of the others'. The loop is sharded and replicated, so that
  each rank is in two groups and a link can be told from its neighbours.

A verdict is right where a finding of the planted cause names the planted rank and nobody else, and
nothing else is accused above info. Beside each fault stands a healthy twin: the same loop with the
same loader, collections on all ranks together, one compilation at the start, links that are all
equally slow. It is right where nothing is accused above info. A plain data-parallel job has one
group only: a link that was slow from its first step on cannot be told there, and the twin shows that
then nobody is accused.

Slow links need root and iproute2; without them those runs are not made, and the table says so.
Nothing outlives this: interrupted, it ends its jobs and their hosts. About 10 minutes on two idle
cores, 4 with ``--quick``. Exit code 1 if any verdict is wrong or a run failed.
"""

from __future__ import annotations

import functools
import signal
import sys
import time
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any

from jobs import BIN, argus, clean_environment, run_together, started
from namespaces import BRIDGE_ADDRESS, LINK, missing, network
from verdicts import JOB_S, Hosts, Scenario, healthy, judge_all, judge_run, script, slow

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

_TELEMETRY_PORT = 4318
_RENDEZVOUS_PORT = 29500
_READY_S = 60
_STORES_S = 60
_HOSTS_STEPS = 60


def _planted(cause: str, loop: str, ranks: int, rank: int, **options: float) -> Scenario:
    return Scenario(loop=loop, ranks=ranks, options=options, slow_rank=rank, cause=cause)


def _hosts(megabit: float, *, loop: str = "fsdp", ranks: int = 4, slow: float | None = None,
           rank: int | None = None) -> Scenario:  # fmt: skip
    options: dict[str, float] = {"steps": _HOSTS_STEPS}
    if loop == "fsdp":
        options["replicas"] = ranks // 2
    links = Hosts(megabit=megabit, slow_megabit=slow)
    return Scenario(
        loop=loop, ranks=ranks, options=options, slow_rank=rank, cause="slow_link", hosts=links
    )


# A collection of 40,000 pairs of objects takes some 20 ms, the other ranks' next to nothing.
_GARBAGE = {"heap": 40, "collect_every": 4}
_SHAPES = {"compiled": 1, "new_shape_every": 10}

QUICK = (
    slow("ddp", 2, 1, 2.0, onset=40),
    _planted("input_stall", "ddp", 2, 1, slow_input_ms=25, onset=40),
    _planted("gc_pause", "ddp", 2, 1, onset=30, **_GARBAGE),
    _planted("jit_compile", "ddp", 2, 1, onset=30, **_SHAPES),
    _hosts(400, slow=100, rank=2),
    healthy("ddp", 2, collect_together=1, **_GARBAGE),
    healthy("ddp", 2, compiled=1),
    _hosts(400),
)
FULL = (
    *QUICK,
    slow("ddp", 4, 2, 3.0),
    _planted("input_stall", "ddp", 4, 3, slow_input_ms=40),
    _planted("gc_pause", "ddp", 4, 0, onset=30, heap=80, collect_every=3),
    _planted("jit_compile", "ddp", 4, 2, onset=30, **_SHAPES),
    _hosts(400, slow=100, rank=0),
    _hosts(200, slow=50, rank=3),
    healthy("ddp", 2),
    healthy("ddp", 4),
    healthy("ddp", 4, collect_together=1, **_GARBAGE),
    healthy("ddp", 4, compiled=1),
    _hosts(100),
    _hosts(400, loop="ddp", ranks=3, slow=100),
)


def main() -> None:
    """Run all, print, and say by the exit code whether all verdicts are right."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(judge_all(__doc__, QUICK, FULL, judge))
    except KeyboardInterrupt:
        sys.exit(130)  # everything is taken down by now


def judge(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Run a scenario, have it judged, and judge the judgement."""
    if scenario.hosts is None:
        return judge_run(scenario, seed)
    if without := _missing():
        print(f"no hosts of their own here: {without}", file=sys.stderr)
        return {
            "name": scenario.name, "planted_rank": scenario.slow_rank,
            "planted_cause": scenario.cause, "planted_factor": None,
            "realised_ratio": None, "findings": [], "abstained": [],
            "verdict": "not run", "missing": without, "took_s": 0.0,
        }  # fmt: skip
    return judge_run(scenario, seed, train_on_hosts)


_missing = functools.cache(missing)


def train_on_hosts(scenario: Scenario, seed: int, store: Path) -> None:
    """Run it with each rank on a host of its own, links as the scenario says."""
    links = scenario.hosts
    assert links is not None  # noqa: S101
    # A twin without a slow rank has the slow link on its last host.
    slow = scenario.ranks - 1 if scenario.slow_rank is None else scenario.slow_rank
    with network(scenario.ranks, links.megabit) as made:
        if links.slow_megabit is not None:
            made.set_rate(slow, links.slow_megabit)
        where = ("--host", BRIDGE_ADDRESS, "--port", str(_TELEMETRY_PORT))
        serve = made.bridge.inside(argus(), "serve", "--store", str(store), *where)
        with started(serve, clean_environment({}), DEVNULL, DEVNULL) as server:
            _wait_for(store)
            environment = clean_environment(
                {
                    "GLOO_SOCKET_IFNAME": LINK,
                    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{BRIDGE_ADDRESS}:{_TELEMETRY_PORT}",
                    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                    "NO_PROXY": "*",
                    "no_proxy": "*",
                }
            )
            run_together(
                [
                    host.inside(
                        argus(), "run", "--", str(BIN / "torchrun"),
                        "--nnodes", str(scenario.ranks), "--nproc-per-node", "1",
                        "--node-rank", str(rank), "--master-addr", made.hosts[0].address,
                        "--master-port", str(_RENDEZVOUS_PORT), *script(scenario, seed),
                    )
                    for rank, host in enumerate(made.hosts)
                ],
                environment,
                JOB_S,
            )  # fmt: skip
            server.terminate()
            server.wait(_STORES_S)


def _wait_for(store: Path) -> None:
    """Until whoever receives has its folder, which it makes before it listens."""
    until_s = time.monotonic() + _READY_S
    while not store.exists() and time.monotonic() < until_s:
        time.sleep(0.1)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM ends this as Ctrl-C does: what was begun is taken down first."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
