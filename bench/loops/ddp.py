"""A data-parallel loop, with gradient accumulation if asked for."""

from __future__ import annotations

import common
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train."""
    options = common.parser(__doc__)
    common.disturbances(options)
    given = options.parse_args()
    rank = common.begin(given.seed)
    disturbed = common.Disturbed(common.make_model(given.layers), given, rank)
    model = DistributedDataParallel(disturbed, bucket_cap_mb=common.BUCKET_MB)
    common.train(model, disturbed, given, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
