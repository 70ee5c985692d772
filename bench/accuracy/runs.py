"""Draws the runs of ``design.yaml``: what is planted in each, and what should be said about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from argus_otel.simulate.cluster import PRESETS
from argus_otel.simulate.faults import KERNEL_CLASSES, parse_fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from argus_otel.simulate.cluster import Cluster
    from argus_otel.simulate.faults import Fault

DESIGN = Path(__file__).with_name("design.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One run: everything that it takes to simulate and score it."""

    id: str
    cluster: str
    changes: Mapping[str, Any]
    """What differs from the preset."""
    fault: str | None
    """None is a healthy run."""
    name: str
    """Row of the design."""
    size: float | None
    noise: float
    onset: int
    steps: int
    seed: int
    details: Mapping[str, Any] = field(default_factory=dict)

    def build_cluster(self) -> Cluster:
        """The cluster with its changes."""
        return replace(PRESETS[self.cluster], noise=self.noise, **self.changes)

    def build_faults(self) -> list[Fault]:
        """What is planted."""
        return [parse_fault(self.fault, self.build_cluster())] if self.fault else []

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def read_design() -> dict[str, Any]:
    """The design as it stands in the file."""
    design: dict[str, Any] = yaml.safe_load(DESIGN.read_text("utf-8"))
    return design


def draw(design: Mapping[str, Any], *, quick: bool = False) -> list[Drawn]:
    """Every run of the design, in a fixed order; the quick ones are some of them."""
    runs = [
        replace(run, seed=design["first_seed"] + index) for index, run in enumerate(_all(design))
    ]
    if not quick:
        return runs
    few = [run for run in runs if PRESETS[run.cluster].ranks <= design["quick"]["most_ranks"]]
    # Spread over the design: neighbours differ in little.
    return few[:: design["quick"]["one_in"]]


def _all(design: Mapping[str, Any]) -> Iterator[Drawn]:
    for name, row in design["sized"].items():
        for size in row.get("sizes", design["sizes"]):
            for noise in design["noise"]:
                for repeat in range(row["repeats"]):
                    yield _faulty(design, name, row, float(size), noise, repeat)
    for name, row in design["unsized"].items():
        for repeat in range(row["repeats"]):
            noise = design["noise"][repeat % len(design["noise"])]
            yield _faulty(design, name, row, None, noise, repeat)
    for name, row in design["healthy"].items():
        for repeat in range(row["count"]):
            yield _healthy(design, name, row, repeat)
    # Last, since they take as long as all others together.
    for large in design["large"]:
        row = {**design["sized"][large["name"]], "clusters": [large["cluster"]]}
        for repeat in range(large["count"]):
            size = float(design["sizes"][repeat % len(design["sizes"])])
            noise = design["noise"][repeat // len(design["sizes"]) % len(design["noise"])]
            yield _faulty(design, large["name"], row, size, noise, repeat)


def _random(*parts: object) -> np.random.Generator:
    text = "/".join(map(str, parts)).encode()
    return np.random.default_rng(np.frombuffer(text, dtype=np.uint8))


def _faulty(
    design: Mapping[str, Any],
    name: str,
    row: Mapping[str, Any],
    size: float | None,
    noise: float,
    repeat: int,
) -> Drawn:
    cluster_name = row["clusters"][repeat % len(row["clusters"])]
    cluster = PRESETS[cluster_name]
    random = _random(design["first_seed"], name, cluster_name, size, noise, repeat)
    fraction = str(random.choice(row.get("fractions", design["fractions"])))
    onset = int(random.choice(row.get("onsets", design["onsets"])))
    own_s = (cluster.forward_s + cluster.backward_s) * cluster.micro_batches * cluster.chunks
    delta_s = ((size or 1.0) - 1) * own_s
    fault = row["fault"].format(
        place=_place(cluster, fraction, random),
        host=f"host={random.integers(cluster.hosts)}",
        stage=f"stage={random.integers(cluster.pp)}",
        group=random.integers(cluster.group_of("edp").max() + 1),
        expert=_expert(cluster, random),
        size=size,
        kernel_size=round(1 + ((size or 1.0) - 1) / KERNEL_CLASSES["gemm"], 6),
        delta_s=round(delta_s, 6),
        gap_s=round(delta_s / 50, 8),
        pass_s=round(((size or 1.0) - 1) * (cluster.forward_s + cluster.backward_s), 6),
    )
    fault += f"{',' if ':' in fault else ':'}from={onset}"
    return Drawn(
        id=f"{name}-{cluster_name}-{size}-{noise}-{repeat}",
        cluster=cluster_name, changes={}, fault=fault, name=name, size=size, noise=noise,
        onset=onset, steps=row.get("steps", design["steps"]), seed=0,
        details={"fraction": fraction, "delay": row.get("delay", True)},
    )  # fmt: skip


def _place(cluster: Cluster, fraction: str, random: np.random.Generator) -> str:
    """Some ranks that do the same work: a share of the peers of a random one."""
    rank = int(random.integers(cluster.ranks))
    if fraction == "one":
        return f"rank={rank}"
    places = cluster.places
    peers = np.flatnonzero(
        np.logical_and.reduce([places[a] == places[a][rank] for a in ("pp", "tp", "ep", "cp")])
    )
    share = {"eighth": 8, "quarter": 4, "half": 2}[fraction]
    count = max(1, peers.size // share)
    chosen = sorted(random.permutation(peers)[:count].tolist())
    return "ranks=" + "+".join(map(str, chosen))


def _expert(cluster: Cluster, random: np.random.Generator) -> str:
    """All ranks that hold the same experts, in one stage."""
    places = cluster.places
    expert, stage = random.integers(cluster.ep), random.integers(cluster.pp)
    hit = np.flatnonzero((places["ep"] == expert) & (places["pp"] == stage))
    return "ranks=" + "+".join(map(str, hit.tolist()))


def _healthy(design: Mapping[str, Any], name: str, row: Mapping[str, Any], repeat: int) -> Drawn:
    cluster_name = row["clusters"][repeat % len(row["clusters"])]
    random = _random(design["first_seed"], "healthy", name, cluster_name, repeat)
    changes: dict[str, Any] = {}
    drawn: list[str] = []
    if name == "nasty":
        kinds = list(design["nastiness"])
        drawn = sorted(random.choice(kinds, size=random.integers(1, 5), replace=False).tolist())
        for kind in drawn:
            changes |= design["nastiness"][kind]
    return Drawn(
        id=f"{name}-{cluster_name}-{repeat}", cluster=cluster_name, changes=changes, fault=None,
        name=name, size=None, noise=float(random.choice(design["noise"])), onset=0,
        steps=design["steps"], seed=0, details={"nastiness": drawn},
    )  # fmt: skip
