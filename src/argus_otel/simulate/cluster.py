"""What is simulated: the axes of a job, the work of a step, its noise; and the presets.

Ranks are laid out as Megatron-LM does by default: tensor position changes fastest, then context,
then data, and pipeline stages are contiguous blocks. Expert groups are blocks of the data axis.

Shape legend: R = ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

MAX_RANKS: Final = 200_000
"""A step of all ranks is held in memory at once."""

AXES: Final = ("world", "host", "tp", "cp", "dp", "ep", "edp", "shard", "replica")
"""What ``Cluster.group_of`` knows."""

Sharding = Literal["ddp", "fsdp", "hsdp", "zero1"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One job. Durations are those of a healthy rank without noise."""

    name: str
    dp: int
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    """Expert-parallel width: blocks of so many data-parallel ranks exchange tokens."""
    micro_batches: int = 1
    chunks: int = 1
    """Model chunks a stage (interleaved 1F1B where above 1)."""
    sharding: Sharding = "ddp"
    ranks_per_host: int = 8
    gpu: bool = True

    forward_s: float = 0.020
    """Compute of one micro-batch and chunk on a stage."""
    backward_s: float = 0.040
    optimizer_s: float = 0.004
    between_s: float = 0.0005
    data_wait_s: float = 0.0003
    buckets: int = 4
    """Gradient buckets (DDP), or sharded units (FSDP, HSDP)."""
    bucket_bytes: int = 64 << 20
    bucket_s: float = 0.003
    """Transfer of one bucket over a healthy link."""
    tensor_s: float = 0.001
    """Transfer of the tensor-parallel reductions of one micro-batch and direction."""
    context_s: float = 0.001
    expert_s: float = 0.002
    """Transfer of the token exchange of one micro-batch and direction."""
    activation_s: float = 0.0005
    """Transfer of one activation to the next stage."""
    activation_bytes: int = 16 << 20
    clip_gradients: bool = True
    """A norm over the whole world before the optimizer."""
    launch_ahead_s: float = 0.0
    """How far the host runs ahead of the GPU: a shorter pause of the host costs nothing."""
    model_bytes: int = 8 << 30
    tokens: float = 0.0
    """Tokens of a micro-batch; 0 is not known."""
    local_experts: int = 4
    """Experts that a rank holds, where ``ep`` is above 1."""

    noise: float = 0.02
    """Log-normal sigma of one rank's compute in one step."""
    common_noise: float = 0.01
    """Log-normal sigma of all ranks' compute in one step."""
    transfer_noise: float = 0.03
    between_rank_noise: float = 0.005
    """Lasting differences between healthy ranks (clocks, NUMA)."""
    length_variation: float = 0.0
    """Log-normal sigma of the tokens of one micro-batch on one data-parallel rank."""
    warm_up_steps: int = 3
    """First steps are slower: 3, 2 and 1.5 times and so on."""
    evaluation_every: int = 0
    evaluation_s: float = 0.5
    checkpoint_every: int = 0
    checkpoint_s: float = 0.4
    collection_every: int = 0
    """Steps between garbage collections of a rank; each rank has its own phase."""
    collection_s: float = 0.015
    clock_offset_s: float = 0.0
    """Standard deviation of the hosts' clock offsets."""
    clock_drift: float = 0.0
    """Standard deviation of the hosts' clock drifts, seconds a second."""
    lost_rows: float = 0.0
    """Share of (step, rank) rows that never arrive."""
    restart_s: float = 0.0
    """Where above 0, this is one attempt between two elastic restarts: loading the checkpoint takes
    so long before the first step, hosts have joined in an order of their own, and the end comes
    while some hosts have told of the last step and others have not."""
    topology_known: bool = True

    def __post_init__(self) -> None:
        """Refuse axes that do not fit.

        Raises:
            ValueError: An axis is below 1, experts do not divide the data axis, there are too many
                ranks, or a duration, size or noise is below 0 or no number.
        """
        axes = (self.dp, self.pp, self.tp, self.cp, self.ep, self.micro_batches, self.chunks)
        if min(axes) < 1 or self.dp % self.ep:
            msg = (
                f"cluster {self.name}: axes are at least 1 and ep divides dp; got dp={self.dp} "
                f"pp={self.pp} tp={self.tp} cp={self.cp} ep={self.ep}"
            )
            raise ValueError(msg)
        if self.chunks > 1 and self.micro_batches % self.pp:
            msg = (
                f"cluster {self.name}: an interleaved pipeline takes a multiple of pp="
                f"{self.pp} micro-batches, not {self.micro_batches}"
            )
            raise ValueError(msg)

        if self.ranks > MAX_RANKS:
            msg = (
                f"cluster {self.name}: {self.ranks:,} ranks; at most {MAX_RANKS:,} are simulated, "
                "because a step of all of them is held in memory at once"
            )
            raise ValueError(msg)
        if min(self.ranks_per_host, self.buckets, self.local_experts) < 1:
            msg = f"cluster {self.name}: ranks_per_host, buckets and local_experts are at least 1"
            raise ValueError(msg)
        if self.sharding not in get_args(Sharding):
            known = ", ".join(get_args(Sharding))
            msg = f"cluster {self.name}: sharding is {self.sharding!r}, not one of {known}"
            raise ValueError(msg)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                msg = f"cluster {self.name}: {field.name} is {value}, not a number from 0 on"
                raise ValueError(msg)
        if self.lost_rows > 1:
            msg = f"cluster {self.name}: lost_rows is {self.lost_rows}, a share of 0 to 1"
            raise ValueError(msg)

    @property
    def ranks(self) -> int:
        """World size."""
        return self.dp * self.pp * self.tp * self.cp

    @property
    def hosts(self) -> int:
        """Hosts, the last one possibly not full."""
        return -(-self.ranks // self.ranks_per_host)

    @cached_property
    def places(self) -> Mapping[str, Ints]:
        """Axis → position of each rank [R]; ``ep`` and ``edp`` split ``dp``."""
        rank = np.arange(self.ranks)
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp, pp = rest % self.dp, rest // self.dp
        return {"dp": dp, "pp": pp, "tp": tp, "cp": cp, "ep": dp % self.ep, "edp": dp // self.ep}

    @cached_property
    def host(self) -> Ints:
        """Host of each rank [R]."""
        block = np.arange(self.ranks) // self.ranks_per_host
        if not self.restart_s:
            return block
        joined: Ints = np.random.default_rng(self.hosts).permutation(self.hosts)
        return joined[block]

    def group_of(self, axis: str) -> Ints:
        """Index of the group along an axis that each rank is in [R]; members are contiguous or not.

        Args:
            axis: ``world``, ``host``, ``tp``, ``cp``, ``dp`` (with context ranks, as gradients
                are reduced), ``ep``, ``edp`` (ranks with the same experts), ``shard`` (HSDP's
                sharding group: the host's part of ``dp``) or ``replica`` (across those).
        """
        place = self.places
        keys = {
            "world": (),
            "host": (self.host,),
            "tp": (place["pp"], place["dp"], place["cp"]),
            "cp": (place["pp"], place["dp"], place["tp"]),
            "dp": (place["pp"], place["tp"]),
            "ep": (place["pp"], place["edp"], place["cp"], place["tp"]),
            "edp": (place["pp"], place["ep"], place["cp"], place["tp"]),
            "shard": (self.host,),
            "replica": (np.arange(self.ranks) % self.ranks_per_host,),
        }[axis]
        if not keys:
            return np.zeros(self.ranks, dtype=np.int64)
        index: Ints = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
        return index


_PRESETS: Final = (
    Cluster(name="cpu-4", dp=4, ranks_per_host=4, gpu=False),
    Cluster(name="ddp-2", dp=2, ranks_per_host=2, buckets=2),
    Cluster(name="ddp-8", dp=8),
    Cluster(name="ddp-64", dp=64),
    Cluster(name="fsdp-64", dp=64, sharding="fsdp", buckets=6, launch_ahead_s=0.010),
    Cluster(name="hsdp-64", dp=64, sharding="hsdp", buckets=4, launch_ahead_s=0.010),
    Cluster(
        name="pipeline-32", dp=8, pp=4, micro_batches=8, sharding="zero1", launch_ahead_s=0.010
    ),
    Cluster(
        name="interleaved-32", dp=8, pp=4, micro_batches=8, chunks=2, sharding="zero1",
        forward_s=0.010, backward_s=0.020,
    ),
    Cluster(name="moe-64", dp=32, pp=2, ep=8, micro_batches=2, sharding="zero1", tokens=4096.0),
    Cluster(
        name="audio-512", dp=512, ep=32, micro_batches=1, sharding="ddp", buckets=6, bucket_s=0.004,
    ),
    Cluster(
        name="video-4096", dp=512, tp=8, micro_batches=2, buckets=4, forward_s=0.15,
        backward_s=0.30, tokens=32768.0, length_variation=0.05,
    ),
    Cluster(
        name="moe-12960", dp=4320, pp=3, ep=32, micro_batches=3, sharding="zero1", forward_s=0.18,
        backward_s=0.36, bucket_s=0.02, tokens=8192.0,
    ),
)  # fmt: skip

PRESETS: Final[Mapping[str, Cluster]] = {cluster.name: cluster for cluster in _PRESETS}
