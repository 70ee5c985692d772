"""Very many very short DDP steps, and this process's memory as they go by."""

from __future__ import annotations

import time

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_SAMPLE_EVERY = 500


def main() -> None:
    """Train and note the memory."""
    options = common.parser(__doc__)
    options.set_defaults(steps=20_000, layers=4, step_ms=2.0)
    given = options.parse_args()
    rank = common.begin(given.seed)
    batch = common.batch_for(given.layers, given.step_ms)
    model = DistributedDataParallel(common.make_model(given.layers), bucket_cap_mb=common.BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(batch, common.WIDTH)
    at_step, resident = [], []
    began_s = time.perf_counter()
    for step in range(given.steps + 1):
        if step % min(_SAMPLE_EVERY, max(given.steps // 20, 1)) == 0:
            at_step.append(step)
            resident.append(common.resident_bytes())
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    took_s = time.perf_counter() - began_s
    common.write_results(
        given.results,
        rank,
        {"step": at_step, "resident_bytes": resident, "step_ms": took_s * 1e3 / given.steps},
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
