"""Spans as condense hands them to encode: one by one, or as columns where there are many alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    constants: Mapping[str, str | int | float | bool | tuple[str, ...]]
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


@dataclass(frozen=True, slots=True, eq=False)
class StepShape:
    """What many steps of a rank share: the rank's own span, and K spans below it.

    Compared by identity: makers keep one object for each shape.
    """

    own: SpanShape
    texts: tuple[str, ...]
    """Names of the text attributes of the rank's own span, all of which vary."""
    root: SpanShape | None
    """The span above it, where it is this rank that writes it. Its integers are the rank's own
    span's first ones; no doubles."""
    below: tuple[SpanShape, ...]
    """Shape [K]."""
    parents: tuple[int, ...]
    """Which of those below each hangs below; -1 is the rank's own. Shape [K]."""

    @property
    def spans(self) -> int:
        """Of one step."""
        return 1 + (self.root is not None) + len(self.below)


@dataclass(slots=True, kw_only=True)
class StepRows:
    """N steps of one shape, each with a trace of its own."""

    shape: StepShape
    trace_ids: Sequence[bytes]
    own_ids: Sequence[bytes]
    root_ids: Sequence[bytes]
    """Of the spans above the rank's own, whoever writes them."""
    ids_below: Sequence[bytes]
    """K times 8 bytes for each step."""
    times_ns: NDArray[np.int64]
    """Start and end of the rank's own span, then of each below it; shape [N, 2 + 2K]."""
    ints: NDArray[np.int64]
    """Of the rank's own span, then of those below; shape [N, I]."""
    doubles: NDArray[np.float64]
    """Of the rank's own span, then of those below; shape [N, D]."""
    texts: Sequence[Sequence[bytes]]
    """Of the rank's own span, in UTF-8, for each step."""

    @property
    def spans(self) -> int:
        """Of all steps together."""
        return len(self.trace_ids) * self.shape.spans
