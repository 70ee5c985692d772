"""Packed integers: whatever goes in comes out, and damage is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.wire.varints import decode_uvarints, pack, pack_differences, unzigzag, varint

unsigned = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 300))
signed = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(unsigned, max_size=200))
def test_any_column_comes_back(values):
    """From nothing at all to the largest 64-bit number."""
    assert decode_uvarints(pack(values)).tolist() == values


@given(st.lists(st.one_of(st.integers(-(2**70), 2**70), signed), max_size=50))
def test_a_number_outside_of_64_bits_becomes_the_nearest_within(values):
    """The numbers around it stay what they are."""
    within = [min(max(value, 0), 2**64 - 1) for value in values]

    assert decode_uvarints(pack(values)).tolist() == within


@given(unsigned)
def test_a_number_by_itself_gives_the_same_bytes(value):
    """Lengths in protobuf are written one at a time."""
    assert varint(value) == pack([value])


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 1),
        (127, 1),
        (128, 2),
        (16_383, 2),
        (16_384, 3),
        (2**21 - 1, 3),
        (2**21, 4),
        (2**63 - 1, 9),
        (2**64 - 1, 10),
    ],
)
def test_a_number_takes_one_byte_for_every_seven_bits(value, size):
    """A microsecond count under 16 ms is two bytes, which the size of a digest rests on."""
    packed = pack([value])

    assert len(packed) == size
    assert decode_uvarints(packed).tolist() == [value]


@given(st.lists(st.integers(-(2**62), 2**62), max_size=100))
def test_signed_numbers_come_back_from_their_differences(values):
    """Arrivals may go backwards, as far as 63 bits reach."""
    differences = unzigzag(decode_uvarints(pack_differences(values)))

    assert np.cumsum(differences).tolist() == values


def test_differences_stay_small_either_way():
    """Steps of 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4."""
    assert pack_differences([0, -1, 0, -2, 0]) == bytes([0, 1, 2, 3, 4])


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
