"""A small DDP job, as people write them; the environment says what goes wrong in it.

Without torchrun it trains alone.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("JOB_STEPS", "60"))
PAUSE_S = float(os.environ.get("JOB_PAUSE_S", "0"))
"""Every rank sleeps so long in every step."""
WORK_S = float(os.environ.get("JOB_WORK_S", "0.002"))
"""CPU time of every rank's step, beside the model's."""
CULPRIT = int(os.environ.get("JOB_CULPRIT", "-1"))
"""This rank is the slow one, by sleeping in some steps or by working more in all."""
SLOW_STEPS = {int(step) for step in os.environ.get("JOB_SLOW_STEPS", "").split(",") if step}
SLOW_S = float(os.environ.get("JOB_SLOW_S", "0"))
CULPRIT_WORK_S = float(os.environ.get("JOB_CULPRIT_WORK_S", str(WORK_S)))
FAIL_AT = int(os.environ.get("JOB_FAIL_AT", "-1"))
FAIL_CODE = int(os.environ.get("JOB_FAIL_CODE", "1"))
PROGRESS = os.environ.get("JOB_PROGRESS", "")
"""A file that rank 0 writes the number of its step to."""
WIDTH = 64


def work(cpu_s: float, weight: torch.Tensor) -> None:
    """So much CPU time, however fast the machine is and whoever else uses it."""
    began_s = time.thread_time()
    while time.thread_time() - began_s < cpu_s:
        weight @ weight


def main() -> None:
    """Train for some steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    weight = torch.randn(WIDTH, WIDTH)

    for step in range(STEPS):
        if step == FAIL_AT:
            raise SystemExit(FAIL_CODE)
        optimizer.zero_grad()
        loss = model(torch.randn(16, WIDTH)).square().mean()
        work(CULPRIT_WORK_S if rank == CULPRIT else WORK_S, weight)
        time.sleep(PAUSE_S + (SLOW_S if rank == CULPRIT and step in SLOW_STEPS else 0))
        loss.backward()
        optimizer.step()
        if PROGRESS and rank == 0:
            Path(PROGRESS).write_text(str(step))
    if "RANK" in os.environ:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
