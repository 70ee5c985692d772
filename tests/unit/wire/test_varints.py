"""Packed integers: whatever goes in comes out, and damage is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.wire.varints import decode_uvarints, encode_uvarints, pack, unzigzag, zigzag

unsigned = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 300))
signed = st.integers(-(2**63), 2**63 - 1)


def column(values, dtype):
    return np.array(values, dtype=dtype)


@given(st.lists(unsigned, max_size=200))
def test_any_column_comes_back(values):
    """From nothing at all to the largest 64-bit number."""
    packed, _ = encode_uvarints(column(values, np.uint64))

    assert decode_uvarints(packed.tobytes()).tolist() == values


@given(st.lists(unsigned, max_size=50))
def test_one_number_at_a_time_gives_the_same_bytes(values):
    """Headers are written by the scalar routine, columns by the vectorised one."""
    packed, _ = encode_uvarints(column(values, np.uint64))

    assert pack(values) == packed.tobytes()


@given(st.lists(unsigned, max_size=50), st.integers(0, 50))
def test_many_records_encoded_at_once_can_be_cut_apart(values, cut):
    """The offsets say where each number starts, so that one pass serves many steps."""
    cut = min(cut, len(values))

    packed, starts = encode_uvarints(column(values, np.uint64))

    assert decode_uvarints(packed[: starts[cut]].tobytes()).tolist() == values[:cut]
    assert decode_uvarints(packed[starts[cut] :].tobytes()).tolist() == values[cut:]


@pytest.mark.parametrize(
    ("value", "size"), [(0, 1), (127, 1), (128, 2), (16_383, 2), (16_384, 3), (2**64 - 1, 10)]
)
def test_a_number_takes_one_byte_for_every_seven_bits(value, size):
    """A microsecond count under 16 ms is two bytes, which the size of a digest rests on."""
    packed, _ = encode_uvarints(column([value], np.uint64))

    assert packed.size == size


@given(st.lists(signed, max_size=100))
def test_signed_numbers_come_back_through_zigzag(values):
    """Arrivals may go backwards, as far as 64 bits reach."""
    assert unzigzag(zigzag(column(values, np.int64))).tolist() == values


def test_zigzag_keeps_small_magnitudes_small():
    """0, -1, 1, -2, 2 become 0, 1, 2, 3, 4."""
    assert zigzag(column([0, -1, 1, -2, 2], np.int64)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x80", "end inside a number"),
        (b"\x01\xff", "end inside a number"),
        (b"\xff" * 10 + b"\x01", "more than ten bytes"),
        (b"\xff" * 9 + b"\x02", "does not fit 64 bits"),
    ],
)
def test_damaged_bytes_are_refused(data, reason):
    """A wrong number would be worse than none."""
    with pytest.raises(ValueError, match=reason):
        decode_uvarints(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_either_read_or_refused(data):
    """No other exception, whatever arrives."""
    try:
        values = decode_uvarints(data)
    except ValueError:
        return
    assert values.dtype == np.uint64
