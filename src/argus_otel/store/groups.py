"""Process groups, from the ``key|description|ranks`` lines that digests carry now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from argus_otel.tables.schemas import GROUPS
from argus_otel.wire.identity import parse_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    return number, (description, parse_ranks(ranges))


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
