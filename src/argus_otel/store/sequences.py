"""Which operation of its group, or of its point-to-point channel, each collective is.

Shape legend: D = digests, G = (digest, group) pairs, C = collectives of all digests,
K = (digest, channel) pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.wire.codes import OPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from argus_otel.wire.digest import SyncColumns

_SEND: Final = OPS.index("send")
_RECV: Final = OPS.index("recv")


def sequence_numbers(
    syncs: Sequence[SyncColumns],
    *,
    pair_C: NDArray[np.int64],
    op_C: NDArray[np.int64],
    peer_C: NDArray[np.int64],
    rank_C: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Count operations on from where each step began.

    Args:
        syncs: Shape [D].
        pair_C: Index into the (digest, group) pairs.
        op_C: Index into ``OPS``.
        peer_C: The other rank; -1 unless point-to-point.
        rank_C: The rank that issued the operation.

    Returns:
        Shape [C], from 0 at the group's or channel's creation; -1 where the digest does not say
        how many went before (a channel it does not list).
    """
    seq_C = np.full(pair_C.size, -1, np.int64)
    paired_C = (op_C == _SEND) | (op_C == _RECV)
    start_G = np.concatenate([sync.start_counts for sync in syncs] or [np.empty(0, np.int64)])
    grouped_C = ~paired_C
    seq_C[grouped_C] = start_G[pair_C[grouped_C]] + _occurrence(pair_C[grouped_C])
    rows = np.flatnonzero(paired_C & (peer_C >= 0))
    if rows.size:
        _number_channels(seq_C, rows, syncs, pair_C, op_C, peer_C, rank_C)
    return seq_C


def _number_channels(
    seq_C: NDArray[np.int64],
    rows: NDArray[np.int64],
    syncs: Sequence[SyncColumns],
    pair_C: NDArray[np.int64],
    op_C: NDArray[np.int64],
    peer_C: NDArray[np.int64],
    rank_C: NDArray[np.int64],
) -> None:
    channels_K = np.concatenate([sync.channels for sync in syncs])
    groups_D = np.fromiter((sync.group_keys.size for sync in syncs), np.int64, len(syncs))
    first_pair_D = np.cumsum(groups_D) - groups_D
    sizes_D = np.fromiter((len(sync.channels) for sync in syncs), np.int64, len(syncs))
    listed_K3 = channels_K[:, :3].copy()
    listed_K3[:, 0] += first_pair_D[np.repeat(np.arange(len(syncs)), sizes_D)]
    sends = op_C[rows] == _SEND
    wanted_3 = np.stack(
        (
            pair_C[rows],
            np.where(sends, rank_C[rows], peer_C[rows]),
            np.where(sends, peer_C[rows], rank_C[rows]),
        ),
        axis=1,
    )
    _, code = np.unique(np.concatenate((listed_K3, wanted_3)), axis=0, return_inverse=True)
    code = code.ravel()
    start = np.full(int(code.max()) + 1, -1, np.int64)
    start[code[: len(listed_K3)]] = channels_K[:, 3]
    wanted = code[len(listed_K3) :]
    # A rank can both send and receive on a channel only if it talks to itself; then both count.
    known = start[wanted] >= 0
    seq_C[rows[known]] = (start[wanted] + _occurrence(wanted))[known]


def _occurrence(key: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many equal keys stand before each, in order."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    lengths = np.diff(np.append(begins, key.size))
    out = np.empty(key.size, np.int64)
    out[order] = np.arange(key.size) - np.repeat(begins, lengths)
    return out
