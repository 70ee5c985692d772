"""What each rank's process said of itself, put together over all that it sent."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from argus_otel.store.spans import Origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pyarrow as pa


def merge_origins(known: Mapping[int, Origin], more: Iterable[Origin]) -> dict[int, Origin]:
    """Add what later spans say: a rank's place in the parallel axes may come after its first step.

    Args:
        known: By rank.
        more: In order of arrival; one without a rank says nothing here.
    """
    merged = dict(known)
    done: set[int] = set()
    for origin in more:
        if id(origin) in done or origin.rank is None:
            continue  # the spans of one resource share their origin
        done.add(id(origin))
        before = merged.get(origin.rank)
        merged[origin.rank] = origin if before is None else _filled(before, origin)
    return merged


def origins_of(ranks: pa.Table, service: str) -> dict[int, Origin]:
    """Read origins back from stored rank rows; a later row of a rank supersedes an earlier one."""
    return {row["rank"]: Origin(service=service, **row) for row in ranks.to_pylist()}


def _filled(before: Origin, after: Origin) -> Origin:
    """``before``, with what it lacks from ``after``: the first word holds, as for digests."""
    missing: dict[str, Any] = {
        field.name: getattr(after, field.name)
        for field in fields(Origin)
        if getattr(before, field.name) is None and getattr(after, field.name) is not None
    }
    return replace(before, **missing) if missing else before
