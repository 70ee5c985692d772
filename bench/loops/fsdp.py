"""A sharded loop (FSDP2): each layer's weights are gathered for its forward and its backward."""

from __future__ import annotations

import common
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train."""
    options = common.parser(__doc__)
    common.disturbances(options)
    given = options.parse_args()
    rank = common.begin(given.seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = common.make_model(given.layers)
    model = common.Disturbed(layers, given, rank)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    common.train(model, model, given, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
