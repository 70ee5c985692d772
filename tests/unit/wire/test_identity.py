"""How a group's members are written: short, and the same when read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.wire.identity import format_ranks, parse_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((5,), "5"),
        ((0, 1), "0-1"),
        ((0, 1, 2, 3, 8, 12, 13, 5), "0-3,8,12-13,5"),
        (tuple(range(0, 10_000, 8)), "0-9992/8"),
        ((0, 4), "0,4"),
        ((0, 2, 3, 4), "0,2-4"),
        ((0, 4, 8, 9, 10), "0-8/4,9-10"),
        ((3, 2, 1), "3,2,1"),
        ((7, 7), "7,7"),
    ],
)
def test_ranks_are_written_as_ranges_with_strides(ranks, text):
    """Data-parallel groups of a large job are every eighth rank."""
    assert format_ranks(ranks) == text
    assert parse_ranks(text) == ranks


@given(st.lists(st.integers(0, 40)).map(tuple))
def test_ranks_come_back_in_their_order(ranks):
    """It is the group's own numbering."""
    assert parse_ranks(format_ranks(ranks)) == ranks


@pytest.mark.parametrize(
    "text",
    ["x", "-1", "3-1", "1-", "0-8/", "0-8/0", "0-8/-2", "0-99999999999", "0-999999,0-999999"],
)
def test_what_is_no_list_of_ranks_is_refused(text):
    """And a range that would fill the memory is damage."""
    with pytest.raises(ValueError, match=r"."):
        parse_ranks(text)
