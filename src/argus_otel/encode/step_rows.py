"""The spans of many steps that have the same ones: a loop's, after every wake-up.

For each shape the bytes of a whole step are made once. Those of N steps are N copies, into which
one call of numpy puts all ids, times and numbers. Only the rank's own span, whose texts have any
length, is put together for each step.

Shape legend: N = steps; K = spans below the rank's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from argus_otel.encode.protobuf import attributes as encode_attributes
from argus_otel.encode.protobuf import double_head, integer_heads, name_and_kind, text_head
from argus_otel.encode.requests import EncodedSpans
from argus_otel.encode.spans import ATTRIBUTES_FIELD, FLAGS_FIELD, PARENT_HEAD
from argus_otel.wire.varints import varint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from argus_otel.wire.spans import SpanShape, StepRows, StepShape

_MAX_SHAPES: Final = 64

# Where the ids of a step lie, side by side: the trace's, the root's, the rank's own span's, and
# those below.
_TRACE, _ROOT, _OWN, _BELOW = 0, 16, 24, 32
_NOTHING: Final = -1


class StepRowsEncoder:
    """Encodes steps of shapes that recur, and keeps what it has found out about each shape."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[StepShape, tuple[int, ...]], _Layout] = {}

    def encode(
        self, rows: StepRows, pause: Callable[[], None] = lambda: None
    ) -> tuple[EncodedSpans, EncodedSpans]:
        """Entries of ScopeSpans: the ranks' own spans and the roots, and those below.

        Args:
            rows: Steps of one shape.
            pause: Gives the GIL away.

        Cost:
            Background thread. 60 µs, and 3 µs a step with seven spans; 300 µs more the first time
            that a shape is seen.
        """
        ints = rows.ints.astype(np.uint64)
        widths = tuple([len(varint(most)) for most in ints.max(axis=0, initial=0).tolist()])
        layout = self._layouts.get((rows.shape, widths))
        if layout is None:
            if len(self._layouts) >= _MAX_SHAPES:
                del self._layouts[next(iter(self._layouts))]
            layout = self._layouts[rows.shape, widths] = _Layout(rows.shape, widths)
        own_size, below_from, size = layout.own_size, layout.below_from, layout.size
        pause()
        filled = layout.fill(rows, ints, pause).tobytes()
        pause()
        keys = rows.shape.texts
        own: list[bytes] = []
        below: list[bytes] = []
        for texts, at in zip(rows.texts, range(0, len(filled), size), strict=True):
            whole = own_size
            fields: list[bytes] = []
            for key, text in zip(keys, texts, strict=True):
                head = text_head(ATTRIBUTES_FIELD, key, len(text))
                whole += len(head) + len(text)
                fields += (head, text)
            own += (
                b"\x12" + varint(whole),
                filled[at : at + own_size],
                *fields,
                filled[at + own_size : at + below_from],
            )
            below.append(filled[at + below_from : at + size])
        count = len(rows.texts) * len(rows.shape.below)
        return (
            EncodedSpans(b"".join(own), rows.spans - count),
            EncodedSpans(b"".join(below), count),
        )


class _Bytes:
    """Some bytes of a step, and what comes where in them."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.places: list[int] = []
        """Of each byte that varies."""
        self.sources: list[int] = []
        """Its place among the bytes of the step's values."""

    def put(self, head: bytes, source: int, size: int) -> None:
        """Constant bytes, then some of the values."""
        self.data += head
        self.places += range(len(self.data), len(self.data) + size)
        self.sources += range(source, source + size)
        self.data += bytes(size)

    def put_entry(self, span: _Bytes) -> None:
        """A span, with its length before it."""
        self.data += b"\x12" + varint(len(span.data))
        self.places += [len(self.data) + place for place in span.places]
        self.sources += span.sources
        self.data += span.data


class _Layout:
    """What steps of one shape share, with certain widths of their integers."""

    def __init__(self, shape: StepShape, widths: Sequence[int]) -> None:
        count = len(shape.below)
        times = _BELOW + 8 * count
        doubles = times + 16 * (1 + count)
        spans = (shape.own, *shape.below)
        at = doubles + 8 * sum([len(span.doubles) for span in spans])
        ints = []
        """Place and width of each."""
        for width in widths:
            ints.append((at, width))
            at += width
        # Of each byte of the integers: which integer, how far down, and whether there are more.
        digits = [
            (n, 7 * place, place + 1 < width)
            for n, width in enumerate(widths)
            for place in range(width)
        ]
        self._digit_of = np.array([n for n, _, _ in digits], dtype=np.intp)
        self._shifts = np.array([shift for _, shift, _ in digits], dtype=np.uint64)
        self._goes_on = np.array([128 * more for *_, more in digits], dtype=np.uint8)
        row = _Bytes()
        _put_span(row, shape.own, (_OWN, _ROOT, times), ints)
        doubles = _put_doubles(row, shape.own, doubles)
        self.own_size = len(row.data)
        if shape.root is not None:
            root = _Bytes()
            _put_span(root, shape.root, (_ROOT, _NOTHING, times), ints)
            row.put_entry(root)
        self.below_from = len(row.data)
        left = ints[len(shape.own.ints) :]
        for n, (span, parent) in enumerate(zip(shape.below, shape.parents, strict=True)):
            below = _Bytes()
            parent_id = _OWN if parent < 0 else _BELOW + 8 * parent
            _put_span(below, span, (_BELOW + 8 * n, parent_id, times + 16 * (n + 1)), left)
            doubles = _put_doubles(below, span, doubles)
            row.put_entry(below)
            left = left[len(span.ints) :]
        self.size = len(row.data)
        self._row = np.frombuffer(bytes(row.data), dtype=np.uint8)
        self._places = np.array(row.places)
        self._sources = np.array(row.sources)

    def fill(
        self, rows: StepRows, ints: NDArray[np.uint64], pause: Callable[[], None]
    ) -> NDArray[np.uint8]:
        """Each step's bytes, but for the texts of the rank's own span."""
        n = len(rows.trace_ids)
        ids = zip(rows.trace_ids, rows.root_ids, rows.own_ids, rows.ids_below, strict=True)
        # Where a count has just grown by a byte, those before are padded, which protobuf allows.
        digits = (ints.take(self._digit_of, axis=1) >> self._shifts).astype(np.uint8) & 0x7F
        values = (
            np.frombuffer(b"".join([part for step in ids for part in step]), np.uint8),
            rows.times_ns.astype("<i8", order="C", copy=False).view(np.uint8),
            rows.doubles.astype("<f8", order="C").view(np.uint8),
            digits | self._goes_on,
        )
        pause()
        source = np.concatenate([column.reshape(n, -1) for column in values], axis=1)
        filled = np.empty((n, self._row.size), dtype=np.uint8)
        filled[:] = self._row
        pause()
        varying = source.take(self._sources, axis=1)
        pause()
        filled[:, self._places] = varying
        return filled


def _put_span(
    row: _Bytes,
    shape: SpanShape,
    places: tuple[int, int, int],
    ints: Sequence[tuple[int, int]],
) -> None:
    """A span up to its doubles.

    Args:
        row: What to add it to.
        shape: Of the span.
        places: Of its id, its parent's, and its times.
        ints: Place and width of its integers, and perhaps of more.
    """
    own_id, parent_id, times = places
    row.put(b"\x0a\x10", _TRACE, 16)
    row.put(b"\x12\x08", own_id, 8)
    if parent_id != _NOTHING:
        row.put(PARENT_HEAD, parent_id, 8)
    row.put(name_and_kind(shape.name) + b"\x39", times, 8)
    row.put(b"\x41", times + 8, 8)
    row.data += FLAGS_FIELD + encode_attributes(ATTRIBUTES_FIELD, shape.constants)
    for key, (place, width) in zip(shape.ints, ints):
        row.put(integer_heads(ATTRIBUTES_FIELD, key)[width], place, width)


def _put_doubles(row: _Bytes, shape: SpanShape, at: int) -> int:
    """A span's doubles, of which the first lies at ``at`` among the values; where those end."""
    for key in shape.doubles:
        row.put(double_head(ATTRIBUTES_FIELD, key), at, 8)
        at += 8
    return at
