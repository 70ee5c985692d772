"""What the training loops share: the group, a model of many layers, batches sized by time.

Plain PyTorch; nothing here knows that it may be traced.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

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


class Batches(Dataset[torch.Tensor]):
    """Ready batches, a little larger or smaller from step to step, alike on average on all ranks.

    Args:
        rows: Mean size of a batch.
        count: How many.
        uneven: Largest deviation of a batch's size, as a share.
        seed: Of this rank's sizes.
        slow_s: Seconds that reading a batch takes longer ...
        slow_from: ... from this one on.
    """

    def __init__(
        self, rows: int, count: int, uneven: float, seed: int, *, slow_s: float, slow_from: int
    ) -> None:
        self._rows, self._count = rows, count
        self._slow_s, self._slow_from = slow_s, slow_from
        self._uneven, self._source = uneven, random.Random(seed)  # noqa: S311
        self._values = torch.randn(round(rows * (1 + uneven)) + 1, WIDTH)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self._count:
            raise IndexError(index)
        if self._slow_s and index >= self._slow_from:
            time.sleep(self._slow_s)
        share = 1 + self._source.uniform(-self._uneven, self._uneven)
        return self._values[: max(1, round(self._rows * share))]


class Disturbed(nn.Module):
    """A model with more arithmetic in some of its forwards: jitter, warm-up, or a slow rank."""

    def __init__(self, inner: nn.Module, given: argparse.Namespace, rank: int) -> None:
        super().__init__()
        self.inner = inner
        self._work = MatrixWork()
        self._source = random.Random(given.seed * 100 + rank)  # noqa: S311
        self._given = given
        self._slow = rank == given.slow_rank
        self._head: Callable[[torch.Tensor], torch.Tensor] | None = None
        if given.compiled:
            # DDP's buckets are too small here for what Dynamo does with them.
            torch._dynamo.config.optimize_ddp = False  # noqa: SLF001 - where torch documents it
            # Each new shape is compiled anew, as nobody has marked a dimension as dynamic.
            self._head = torch.compile(_head, backend="aot_eager", dynamic=False)
        self._heap: list[Any] = []
        if given.collect_every and (self._slow or given.collect_together):
            gc.collect()
            gc.freeze()  # torch's own objects would take longer to walk than those
            make_garbage(self._heap, 1000 * given.heap)
        self._own_s = given.step_ms / 1000 / given.accumulate
        self.at_step = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The inner model's, after the extra work of this step."""
        if self.training:
            share = self._source.uniform(0, 2 * self._given.jitter)
            if self.at_step < self._given.warm_up_steps:
                share += 2.0
            if self._slow and self.at_step >= self._given.onset:
                share += self._given.slow_factor - 1
            if share:
                self._work.do(share * self._own_s)
            since = self.at_step - self._given.onset
            if self._heap and since >= 0 and self.at_step % self._given.collect_every == 0:
                gc.collect()
        rows = self.inner(rows)
        if self._head is not None and self.training:
            rows = self._head(rows[: rows.shape[0] - self._cut()])
        return rows

    def _cut(self) -> int:
        """How many rows this step is short of; another number makes another shape."""
        every, past = self._given.new_shape_every, self.at_step - self._given.onset
        return past // every + 1 if self._slow and every and past >= 0 and past % every == 0 else 0


def _head(rows: torch.Tensor) -> torch.Tensor:
    for _ in range(20):  # some graph, so that compiling it takes a while
        rows = torch.nn.functional.gelu(rows) * 1.01 + 0.01
    return rows


def make_garbage(heap: list[Any], nodes: int) -> None:
    """Small objects that refer to each other, and stay, as careless bookkeeping makes them."""
    for _ in range(nodes):
        node: list[Any] = [None]
        node[0] = node
        heap.append({"node": node})


def disturbances(options: argparse.ArgumentParser) -> None:
    """Options of what a loop does besides its plain steps."""
    options.add_argument("--jitter", type=float, default=0.0, help="mean extra work, a share")
    options.add_argument("--uneven", type=float, default=0.0, help="batch sizes vary so much")
    options.add_argument("--warm-up-steps", type=int, default=0, help="three times slower")
    options.add_argument("--evaluate-every", type=int, default=0)
    options.add_argument("--checkpoint-every", type=int, default=0)
    options.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    options.add_argument("--slow-rank", type=int, default=-1)
    options.add_argument("--slow-factor", type=float, default=1.0)
    options.add_argument("--onset", type=int, default=0, help="first step of the slow rank")
    options.add_argument("--slow-input-ms", type=float, default=0.0, help="of the slow rank")
    options.add_argument("--collect-every", type=int, default=0, help="steps; a full collection")
    options.add_argument("--collect-together", type=int, default=0, help="1: all ranks do it")
    options.add_argument("--heap", type=int, default=0, help="thousand objects to walk")
    options.add_argument("--compiled", type=int, default=0, help="1: a part by torch.compile")
    options.add_argument("--new-shape-every", type=int, default=0, help="steps; the slow rank")


def train(model: nn.Module, disturbed: Disturbed, given: argparse.Namespace, rank: int) -> None:
    """A loop as many people write it.

    Args:
        model: What is called; ``disturbed``, or what wraps it.
        disturbed: Is told the step.
        given: Options.
        rank: Of this process.
    """
    batch = batch_for(given.layers, given.step_ms / given.accumulate)
    data = Batches(
        batch,
        given.steps * given.accumulate,
        given.uneven,
        given.seed * 100 + rank,
        slow_s=given.slow_input_ms / 1000 if rank == given.slow_rank else 0.0,
        slow_from=given.onset * given.accumulate,
    )
    loader = iter(DataLoader(data, batch_size=None))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(given.steps):
        disturbed.at_step = step
        optimizer.zero_grad()
        for micro in range(given.accumulate):
            last = micro == given.accumulate - 1
            with nullcontext() if last else _without_sync(model):
                model(next(loader)).square().mean().backward()
        optimizer.step()
        if given.evaluate_every and step % given.evaluate_every == given.evaluate_every - 1:
            _evaluate(model, batch)
        if given.checkpoint_every and step % given.checkpoint_every == given.checkpoint_every - 1:
            _checkpoint(model, rank)


def _without_sync(model: nn.Module) -> AbstractContextManager[Any]:
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


def _evaluate(model: nn.Module, batch: int) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(batch, WIDTH))
    model.train()


def _checkpoint(model: nn.Module, rank: int) -> None:
    state = model.state_dict()
    if rank == 0:
        with tempfile.NamedTemporaryFile() as file:
            for _ in range(4):
                torch.save(state, file.name)
    dist.barrier()
