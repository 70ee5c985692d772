"""Which ranks do the same work, so that one may be measured by another.

A pipeline stage is never compared with another stage. Where the topology columns are known,
peers share pp, tp, ep and cp. Else they share a work signature: the multiset of (operation, group
size, bytes) that they took part in, and their place in the chain of point-to-point partners.
"""

# ruff: noqa: N815 - fields carry shape suffixes
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from numpy.typing import NDArray


TOPOLOGY: Final = ("pp", "tp", "ep", "cp")
"""Axes along which ranks do different work."""
SAMPLED_STEPS: Final = 5
"""Steps whose signatures vote: one odd step (evaluation, a lost row) must not split peers."""

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xBF58476D1CE4E5B9)

Source = Literal["topology", "work signature"]


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Groups of ranks with the same work."""

    label_R: NDArray[np.int64]
    """Group of each rank; -1 where nothing says what it does."""
    source: Source | None
    """None when neither topology nor collectives are known."""

    @cached_property
    def buckets(self) -> list[NDArray[np.intp]]:
        """Rank indices of all groups of two or more, shape [G, n], one array for each size n."""
        order = np.argsort(self.label_R, kind="stable")
        labels, first, sizes = np.unique(self.label_R[order], return_index=True, return_counts=True)
        usable = (labels >= 0) & (sizes > 1)
        return [
            order[first[usable & (sizes == n), None] + np.arange(n)]
            for n in np.unique(sizes[usable]).tolist()
        ]

    @property
    def alone(self) -> int:
        """Ranks without any peer."""
        return int(self.label_R.size - sum(bucket.size for bucket in self.buckets))


def find_peers(
    ranks: pa.Table,
    groups: pa.Table,
    samples: Sequence[pa.Table],
    ranks_R: NDArray[np.int64],
    ordinals: NDArray[np.int64],
) -> Peers:
    """Group the ranks by what they do.

    Args:
        ranks: The ranks table.
        groups: The groups table.
        samples: Collectives of whole steps; needed where the topology is not known.
        ranks_R: Ranks, ascending.
        ordinals: Steps to take work signatures from, where sampled.
    """
    columns = ranks.select(["rank", "dp", *TOPOLOGY]).to_pydict()
    row = {rank: index for index, rank in enumerate(columns["rank"])}
    here = [row[rank] for rank in ranks_R.tolist() if rank in row]
    known = [name for name in ("dp", *TOPOLOGY) if any(columns[name][i] is not None for i in here)]
    if known and len(here) == ranks_R.size:
        places = [tuple(columns[name][i] for name in TOPOLOGY) for i in here]
        return Peers(label_R=_labels(places), source="topology")
    return _by_signature(groups, samples, ranks_R, ordinals)


def _labels(keys: list[tuple[object, ...]]) -> NDArray[np.int64]:
    seen: dict[tuple[object, ...], int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def _by_signature(
    groups: pa.Table,
    samples: Sequence[pa.Table],
    ranks_R: NDArray[np.int64],
    ordinals: NDArray[np.int64],
) -> Peers:
    nothing = Peers(label_R=np.full(ranks_R.size, -1, np.int64), source=None)
    import pyarrow as pa
    import pyarrow.compute as pc

    collectives = pa.concat_tables(samples) if samples else None
    if collectives is None or collectives.num_rows == 0:
        return nothing
    ordinals = np.intersect1d(ordinals, collectives["ordinal"].to_numpy())
    if ordinals.size == 0:
        return nothing
    picks = ordinals[np.linspace(0, ordinals.size - 1, SAMPLED_STEPS).astype(int)]
    votes: dict[bytes, tuple[int, NDArray[np.int64]]] = {}
    sizes = {
        key: len(members)
        for key, members in zip(
            groups["group"].to_pylist(), groups["ranks"].to_pylist(), strict=True
        )
    }
    for ordinal in np.unique(picks).tolist():
        table = collectives.filter(pc.equal(collectives["ordinal"], ordinal))
        label_R = _step_labels(table, ranks_R, sizes)
        if (label_R >= 0).any():
            count, _ = votes.get(label_R.tobytes(), (0, label_R))
            votes[label_R.tobytes()] = (count + 1, label_R)
    if not votes:
        return nothing
    # Most ranks known, then most votes: a rank that falls silent stays its peers' peer.
    _, winner = max(votes.values(), key=lambda vote: (int((vote[1] >= 0).sum()), vote[0]))
    return Peers(label_R=winner, source="work signature")


def _step_labels(
    table: pa.Table, ranks_R: NDArray[np.int64], sizes: dict[int, int]
) -> NDArray[np.int64]:
    rank = table["rank"].to_numpy().astype(np.int64)
    index = np.searchsorted(ranks_R, rank)
    index[index == ranks_R.size] = 0
    mine = ranks_R[index] == rank
    group, group_code = np.unique(table["group"].to_numpy(), return_inverse=True)
    group_size = np.array([sizes.get(int(key), 0) for key in group], dtype=np.int64)
    peer = table["peer"].to_numpy(zero_copy_only=False).astype(np.float64)
    _, op_code = np.unique(np.array(table["op"].to_pylist(), dtype=str), return_inverse=True)
    word = _mix(op_code.astype(np.uint64))
    for part in (
        group_size[group_code],
        table["payload_bytes"].to_numpy(),
        table["count"].to_numpy(),
    ):
        word = _mix(word ^ part.astype(np.uint64))
    signature_R = np.zeros(ranks_R.size, dtype=np.uint64)
    # A sum does not depend on the order: the multiset's hash.
    np.add.at(signature_R, index[mine], word[mine])
    seen_R = np.zeros(ranks_R.size, dtype=bool)
    seen_R[index[mine]] = True
    place_R = _place_in_chain(ranks_R, rank, peer)
    labels = _labels(list(zip(signature_R.tolist(), place_R.tolist(), strict=True)))
    return np.where(seen_R, labels, -1)


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        word = (word + _GOLDEN) * _MIX
        mixed: NDArray[np.uint64] = word ^ (word >> np.uint64(29))
    return mixed


def _place_in_chain(
    ranks_R: NDArray[np.int64], rank: NDArray[np.int64], peer: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Position of each rank among those it is linked to by point-to-point traffic; else -1.

    Pipelines number their stages in rank order, so the order in the connected part is the stage.
    """
    place_R = np.full(ranks_R.size, -1, dtype=np.int64)
    linked = ~np.isnan(peer)
    if not linked.any():
        return place_R
    parent = {int(r): int(r) for r in ranks_R}

    def root(r: int) -> int:
        while parent[r] != r:
            parent[r] = parent[parent[r]]
            r = parent[r]
        return r

    edges = np.unique(np.stack((rank[linked], peer[linked].astype(np.int64)), axis=1), axis=0)
    for a, b in edges.tolist():
        if a in parent and b in parent:
            parent[root(a)] = root(b)
    members: dict[int, list[int]] = {}
    for r in np.unique(edges).tolist():
        if r in parent:
            members.setdefault(root(r), []).append(r)
    index = {int(r): i for i, r in enumerate(ranks_R)}
    for chain in members.values():
        for place, r in enumerate(sorted(chain)):
            place_R[index[r]] = place
    return place_R
