"""Process groups as their digests describe them, and the memory of what is stored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.store.groups import read_group
from argus_otel.store.seen import SeenSteps


def test_a_description_may_hold_the_separator():
    """It is the user's text."""
    assert read_group("00c0ffee00c0ffee|my|group|0-1") == (
        0x00C0FFEE00C0FFEE,
        ("my|group", (0, 1)),
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "zz|a|0",
        "1f",
        "1f|a",
        "1f|a|3-1",
        "1f|a|x",
        "1f|a|0-99999999999",
        "1f|a|0-8/0",
        "1f|a|0-8/x",
        "1" * 17 + "|a|0",
    ],
)
def test_a_damaged_description_is_refused(line):
    """Not guessed at; and a range that would fill the memory is damage."""
    with pytest.raises(ValueError, match=r"."):
        read_group(line)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2))))
def test_seen_steps_are_those_that_were_added(steps):
    """In any order, with gaps and doubles."""
    seen = SeenSteps()

    for ordinal, rank in steps:
        seen.add(ordinal, rank)

    assert len(seen) == len(set(steps))
    grid = [(ordinal, rank) for ordinal in range(-1, 15) for rank in range(4)]
    assert [step for step in grid if step in seen] == [step for step in grid if step in set(steps)]
