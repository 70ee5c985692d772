"""A small real DDP job with a fault planted in one rank. It knows nothing of argus.

Run by ``argus demo`` under torchrun; by hand:
``DEMO_FAULT=compute argus run --local -- torchrun --nproc-per-node 4 train.py``.
"""

import gc
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = os.environ.get("DEMO_FAULT", "none")
FAULTY_RANK = int(os.environ.get("DEMO_RANK", "-1"))
FROM_STEP = int(os.environ.get("DEMO_FROM_STEP", "0"))
STEPS = int(os.environ.get("DEMO_STEPS", "100"))
BATCH = 32
WIDTH = 256
DEPTH = 10
SLOW_READ_S = 0.002  # a batch of 32 takes 64 ms longer
GARBAGE_EVERY = 3


class Samples(Dataset):
    """Random rows; with a fault, each takes a while to come."""

    def __init__(self, rows: int, *, slow_from: int | None) -> None:
        self.data = torch.randn(rows, WIDTH)
        self.slow_from = slow_from
        self.read = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        if self.slow_from is not None and self.read > self.slow_from:
            time.sleep(SLOW_READ_S)
        return self.data[index]


def work(times: int, weight: torch.Tensor) -> None:
    """Stands for the part of a model's forward that is not in the layers below."""
    for _ in range(times):
        weight @ weight


def make_garbage(heap: list) -> None:
    """Many small objects that refer to each other, as careless bookkeeping makes them."""
    for _ in range(40_000):
        node: list = [None]
        node[0] = node
        heap.append({"node": node})
    gc.collect()


def main() -> None:
    """Train for some steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = dist.get_rank()
    faulty = rank == FAULTY_RANK

    layers: list[torch.nn.Module] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    slow_from = FROM_STEP * BATCH if FAULT == "input" and faulty else None
    samples = Samples(STEPS * BATCH * dist.get_world_size(), slow_from=slow_from)
    loader = DataLoader(samples, batch_size=BATCH, sampler=DistributedSampler(samples))
    weight = torch.randn(WIDTH, WIDTH)
    heap: list = []

    for step, batch in enumerate(loader):
        hurt = faulty and step >= FROM_STEP
        work(60 if hurt and FAULT == "compute" else 20, weight)
        loss = model(batch).square().mean()
        if hurt and FAULT == "gc" and step % GARBAGE_EVERY == 0:
            make_garbage(heap)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
