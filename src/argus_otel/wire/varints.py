"""Little-endian base-128 integers, a whole array at a time.

The packed layouts of the digest are columns of small numbers; one vectorised pass keeps
packing them far below a microsecond a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_MAX_BYTES = 10  # ceil(64 / 7)
_SHIFTS = np.arange(_MAX_BYTES, dtype=np.uint64) * np.uint64(7)
_LIMITS = np.uint64(1) << _SHIFTS[1:]  # values below _LIMITS[k] fit k + 1 bytes


def encode_uvarints(values: NDArray[np.uint64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Encode unsigned integers back to back.

    Args:
        values: Shape [N].

    Returns:
        The bytes, and for each value the offset at which it starts, shape [N + 1]; so that a
        caller who encoded many records at once can cut them apart.
    """
    lengths = np.searchsorted(_LIMITS, values, side="right") + 1
    starts = np.zeros(values.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    width = int(lengths.max(initial=1))
    groups = (values[:, None] >> _SHIFTS[:width]).astype(np.uint8) & np.uint8(0x7F)
    column = np.arange(width)
    groups |= (column < (lengths - 1)[:, None]).astype(np.uint8) << np.uint8(7)
    return groups[column < lengths[:, None]], starts


def decode_uvarints(data: bytes) -> NDArray[np.uint64]:
    """Decode every integer in ``data``.

    Returns:
        Shape [N], all values that the bytes hold.

    Raises:
        ValueError: The data ends inside a number, or a number does not fit 64 bits.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    if raw.size == 0:
        return np.empty(0, dtype=np.uint64)
    ends = np.flatnonzero(raw < 0x80)
    if ends.size == 0 or ends[-1] != raw.size - 1:
        msg = "packed integers end inside a number"
        raise ValueError(msg)
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    place = np.arange(raw.size) - np.repeat(starts, ends - starts + 1)
    if int(place.max()) >= _MAX_BYTES:
        msg = "packed integer has more than ten bytes"
        raise ValueError(msg)
    # The tenth byte holds the one bit that is left of 64.
    if bool((raw[place == _MAX_BYTES - 1] > 1).any()):
        msg = "packed integer does not fit 64 bits"
        raise ValueError(msg)
    parts = (raw & 0x7F).astype(np.uint64) << _SHIFTS[place]
    return np.add.reduceat(parts, starts)


def zigzag(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Map signed to unsigned so that small magnitudes stay short."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def unzigzag(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Undo ``zigzag``."""
    return (values >> np.uint64(1)).view(np.int64) ^ -(values & np.uint64(1)).view(np.int64)


def pack(values: Sequence[int]) -> bytes:
    """Encode a few plain integers (headers, tables); for columns use ``encode_uvarints``."""
    out = bytearray()
    for value in values:
        rest = value
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
    return bytes(out)
