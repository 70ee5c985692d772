"""Little-endian base-128 integers: protobuf's, and those of the digest's columns.

Written one by one in plain Python, since a step has some tens of them and a numpy call costs as
much as ten; read a whole array at a time, since a service reads thousands of steps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_MAX_BYTES = 10  # ceil(64 / 7)
_SHIFTS = np.arange(_MAX_BYTES, dtype=np.uint64) * np.uint64(7)
_MOST = (1 << 64) - 1

_SMALL = [bytes((value,)) for value in range(128)]
_LOW = [bytes((value | 128,)) for value in range(128)]

VARINTS: Final = _SMALL + [low + high for high in _SMALL[1:] for low in _LOW]
"""Every number below 2**14 as it is packed: a microsecond count under 16 ms, the length of a
span. A look-up costs a third of the arithmetic; the table is 0.7 MB and a millisecond to make."""

TABLED: Final = len(VARINTS)

_ZIGZAG = VARINTS[::2] + VARINTS[::-2]
"""Every difference from -2**13 to below 2**13, at its own index: the negative ones from the end."""


def varint(value: int) -> bytes:
    """One number, 0 to 2**64 - 1, in its shortest form.

    Cost:
        Background thread. 0.1 µs below 2**14, and as much again for every seven bits more.
    """
    if value < TABLED:
        return VARINTS[value]
    return _LOW[value & 127] + varint(value >> 7)


def pack(values: Iterable[int]) -> bytes:
    """Numbers back to back.

    One outside of 64 bits is cut to the nearest within: of a whole digest, it is the least loss.

    Cost:
        Background thread. 0.1 µs a number below 2**21.
    """
    table, low = VARINTS, _LOW
    return b"".join(
        [
            table[value]
            if 0 <= value < 0x4000
            else low[value & 127] + table[value >> 7]
            if 0 <= value < 0x200000
            else any_varint(value)
            for value in values
        ]
    )


def pack_differences(values: Iterable[int]) -> bytes:
    """Each number's difference to the one before (the first one's to 0), back to back.

    Zigzag, so that small differences stay short: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4.

    Cost:
        Background thread. 0.1 µs a number below 2**20.
    """
    table = _ZIGZAG
    packed = []
    before = 0
    for value in values:
        difference = value - before
        before = value
        packed.append(
            table[difference] if -0x2000 <= difference < 0x2000 else _zigzag_varint(difference)
        )
    return b"".join(packed)


def _zigzag_varint(difference: int) -> bytes:
    number = difference << 1 if difference >= 0 else ~(difference << 1)
    if number < 0x200000:
        return _LOW[number & 127] + VARINTS[number >> 7]
    return any_varint(number)


def any_varint(value: int) -> bytes:
    """One number; outside of 64 bits the nearest within."""
    if 0 <= value < 1 << 40:
        return varint(value)
    return _large_varint(value)


@lru_cache(maxsize=256)  # above 2**40 are the keys of groups, the same in every step
def _large_varint(value: int) -> bytes:
    return varint(min(max(value, 0), _MOST))


def encode_uvarints(values: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Numbers of 0 and more back to back, a whole array at a time.

    Args:
        values: Shape [N].

    Returns:
        The bytes, and for each number where its bytes end, shape [N].

    Cost:
        Service. About 0.03 µs a number; beyond some hundred it is faster than ``pack``.
    """
    largest = int(values.max(initial=0))
    width = max(-(-largest.bit_length() // 7), 1)
    small = np.uint16 if width <= 2 else np.uint32 if largest < 1 << 32 else np.uint64
    rest: NDArray[Any] = values.astype(small)
    columns = np.empty((values.size, width), dtype=np.uint8)
    used = np.ones((values.size, width), dtype=bool)
    ends = np.arange(1, values.size + 1)
    for place in range(width):
        low = (rest & 0x7F).astype(np.uint8)
        if place + 1 < width:
            rest = rest >> 7
            more = rest > 0
            low |= more.view(np.uint8) << 7
            used[:, place + 1] = more
            ends += np.cumsum(more)
        columns[:, place] = low
    return columns[used], ends


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


def unzigzag(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Signed from unsigned: 0, 1, 2, 3, 4 become 0, -1, 1, -2, 2."""
    return (values >> np.uint64(1)).view(np.int64) ^ -(values & np.uint64(1)).view(np.int64)
