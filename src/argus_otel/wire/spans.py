"""Spans as condense hands them to encode: one by one, or as columns where there are thousands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True)
class SpanRows:
    """N spans of one shape, of one or many traces."""

    scope: str
    name: str
    constants: Mapping[str, str | int | float | bool]
    """Attributes that all rows share."""
    trace_ids: NDArray[np.uint8]
    """Shape [N, 16]."""
    span_ids: NDArray[np.uint64]
    """Shape [N]."""
    parent_ids: NDArray[np.uint64]
    """Shape [N]; 0 is none."""
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    ints: Mapping[str, NDArray[np.int64]]
    """Attributes that vary, shape [N] each."""
    doubles: Mapping[str, NDArray[np.float64]]


@dataclass(slots=True, kw_only=True)
class Span:
    """A span with attributes of its own."""

    scope: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, object]
    error: str | None = None
    """Status message; None is no error."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanShape:
    """What many spans share. Compared by identity: makers keep one object for each shape."""

    scope: str
    name: str
    constants: Mapping[str, str | int | float | bool]
    """Attributes that all of them share."""
    ints: tuple[str, ...] = ()
    """Names of the whole-number attributes that vary."""
    doubles: tuple[str, ...] = ()
    """Names of the double attributes that vary."""


class ShapedSpan(NamedTuple):
    """One span of a shape."""

    shape: SpanShape
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    """Eight zero bytes: none."""
    start_ns: int
    end_ns: int
    values: tuple[int | float, ...]
    """The varying attributes: ``shape.ints`` first, then ``shape.doubles``."""
