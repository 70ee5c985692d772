"""A sharded loop (FSDP2): each layer's weights are gathered for its forward and its backward.

With ``--replicas`` it is hybrid: weights are sharded within each replica, and gradients reduced
across replicas, so that each rank is in two groups.
"""

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
    options.add_argument("--replicas", type=int, default=1)
    given = options.parse_args()
    rank = common.begin(given.seed)
    shards = dist.get_world_size() // given.replicas
    names, sizes = ("replicate", "shard"), (given.replicas, shards)
    along = slice(None) if given.replicas > 1 else slice(1, None)
    mesh = init_device_mesh("cpu", sizes[along], mesh_dim_names=names[along])
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
