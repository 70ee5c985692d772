"""Makes the next item while the one before is being used: reading and reducing take turns no more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_T = TypeVar("_T")

_END: Final = object()


def one_ahead(items: Iterable[_T]) -> Iterator[_T]:
    """The same items in the same order, each made in a thread while the last one is looked at.

    Raises:
        Exception: What the making of an item raised, in its place.

    Cost:
        One item more in memory. It pays where making them leaves the interpreter's lock, as
        reading Parquet does.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="argus-ahead") as pool:
        coming = pool.submit(next, iterator, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, iterator, _END)
            yield item  # type: ignore[misc]  # mypy does not tell _END apart
