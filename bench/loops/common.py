"""What the training loops share: the group, a model of many layers, batches sized by time.

Plain PyTorch; nothing here knows that it may be traced.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 192
"""One layer's weights are 144 KB: above the bucket size below, so each layer is reduced alone."""

BUCKET_MB = 0.1
_CALIBRATION_BATCH = 96


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every loop has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--results", type=Path, help="folder for rank<N>.json")
    options.add_argument("--steps", type=int, default=120)
    options.add_argument("--layers", type=int, default=8, help="about as many collectives a step")
    options.add_argument("--step-ms", type=float, default=25.0, help="time of a healthy step")
    options.add_argument("--seed", type=int, default=0)
    return options


def begin(seed: int) -> int:
    """Join the group with one thread of arithmetic; returns the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(seed * 1000 + rank)
    return rank


def make_model(layers: int) -> nn.Sequential:
    """Linear layers with something between them."""
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*blocks)


def batch_for(layers: int, step_ms: float) -> int:
    """Rows with which forward and backward take about ``step_ms`` while all ranks compute.

    The slowest of a few tries of each rank is no use on a busy machine; the fastest is what the
    arithmetic takes. Rank 0's figure holds for all, so that all have the same work.
    """
    model = make_model(layers)
    rows = torch.randn(_CALIBRATION_BATCH, WIDTH)
    dist.barrier()
    best_s = float("inf")
    for _ in range(9):
        began_s = time.perf_counter()
        model(rows).sum().backward()
        best_s = min(best_s, time.perf_counter() - began_s)
    batch = torch.tensor([max(16, round(_CALIBRATION_BATCH * step_ms / 1000 / best_s))])
    dist.broadcast(batch, 0)
    return int(batch)


class MatrixWork:
    """Arithmetic that takes a given time on this machine when nobody disturbs it."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
        best_s = min(self._time(40) for _ in range(9))
        self._a_second = 40 / best_s

    def _time(self, count: int) -> float:
        began_s = time.perf_counter()
        self._multiply(count)
        return time.perf_counter() - began_s

    def _multiply(self, count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                torch.mm(self._left, self._right)

    def do(self, seconds: float) -> None:
        """Compute as much as takes ``seconds`` undisturbed."""
        self._multiply(round(seconds * self._a_second))


def write_results(folder: Path | None, rank: int, results: dict[str, Any]) -> None:
    """For whoever started the job."""
    if folder is not None:
        (folder / f"rank{rank}.json").write_text(json.dumps(results))


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
