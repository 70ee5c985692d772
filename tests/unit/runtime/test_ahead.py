"""One item is made ahead, in order, and what fails fails in its place."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from argus_otel._runtime.ahead import one_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_items_come_in_order() -> None:
    """Nothing is lost or swapped."""
    assert list(one_ahead(range(100))) == list(range(100))
    assert list(one_ahead([])) == []


def test_the_next_item_is_made_while_one_is_looked_at() -> None:
    """And no more than the next one."""
    made: list[int] = []
    second = threading.Event()

    def items() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            if number == 1:
                second.set()
            yield number

    coming = one_ahead(items())
    assert next(coming) == 0
    assert second.wait(10)
    assert made == [0, 1]
    coming.close()  # type: ignore[attr-defined]  # a generator


def test_a_failure_is_raised_in_its_place() -> None:
    """What came before it is given all the same."""

    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    coming = one_ahead(items())
    assert next(coming) == 1
    with pytest.raises(OSError, match="gone"):
        next(coming)
