"""Process groups, from the ``key|description|ranks`` lines that digests carry now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from argus_otel.tables.schemas import GROUPS

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_MEMBERS: Final = 1_000_000
"""Above any job there is; a damaged range must not fill the memory."""


def read_group(line: str) -> tuple[int, tuple[str, tuple[int, ...]]]:
    """Split one line into the group's key, and its description and members.

    Raises:
        ValueError: The line does not read ``key|description|ranges``.
    """
    key, separator, rest = line.partition("|")
    description, second, ranges = rest.rpartition("|")  # a description may hold a bar itself
    if not separator or not second:
        msg = f"group {line[:80]!r} does not read key|description|ranks"
        raise ValueError(msg)
    number = int(key, 16)
    if not 0 <= number < 2**64:
        msg = f"group key {key[:40]!r} has more than 64 bits"
        raise ValueError(msg)
    return number, (description, read_ranges(ranges))


def read_ranges(text: str) -> tuple[int, ...]:
    """Ranks of ``0-3,8,12-15``, in that order.

    Raises:
        ValueError: Not such a list, or more ranks than any job has.
    """
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        first = int(low)
        last = int(high) if high else first
        if not 0 <= first <= last <= _MAX_MEMBERS or len(ranks) + last - first > _MAX_MEMBERS:
            msg = f"{part[:40]!r} is no range of ranks"
            raise ValueError(msg)
        ranks.extend(range(first, last + 1))
    return tuple(ranks)


def groups_table(
    run: str, attempt: int, groups: Mapping[int, tuple[str, tuple[int, ...]]]
) -> pa.Table:
    """One row a group, sorted by key."""
    keys = sorted(groups)
    return pa.Table.from_arrays(
        [
            pa.array([run] * len(keys), pa.string()),
            pa.array([attempt] * len(keys), pa.int32()),
            pa.array(keys, pa.uint64()),
            pa.array([groups[key][0] for key in keys], pa.string()),
            pa.array([groups[key][1] for key in keys], pa.list_(pa.int32())),
        ],
        schema=GROUPS,
    )
