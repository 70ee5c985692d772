"""Thousands of spans of one shape: a row of bytes, copied and filled column by column.

Every varying field has a fixed width (integers are varints padded to ten bytes), so all rows of
a template have the same length and numpy writes each field of all rows in one assignment. A
padded varint is valid protobuf; upb, the Collector and Jaeger accept it (measured).

Shape legend: N = spans in the batch; K = integer fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from argus_otel.encode.protobuf import attribute, message, text
from argus_otel.encode.spans import (
    ATTRIBUTES_FIELD,
    FLAGS_FIELD,
    KIND_INTERNAL,
    NO_PARENT,
    PARENT_HEAD,
    SPANS_FIELD,
)
from argus_otel.wire.varints import varint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

    FieldType = Literal["int", "double", "bool"]

# A varying value inside AnyValue: its tag, then a place of this many bytes.
_VALUE_PLACES: Final = {"int": (b"\x18", 10), "double": (b"\x21", 8), "bool": (b"\x10", 1)}

_PARENT_PLACE: Final = len(NO_PARENT)  # head and id

_SPREAD: Final = tuple(
    (np.uint64(keep_low), np.uint64(keep_high), np.uint64(shift))
    for keep_low, keep_high, shift in (
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
    )
)
_CONTINUE_8: Final = np.uint64(0x8080808080808080)
_LOW_56: Final = np.uint64((1 << 56) - 1)

# Rows filled at a time. Whole batches of 3,000 leave the cache and make single numpy calls long:
# another thread then waits 0.9 ms for the GIL at p99, with blocks 0.3 ms (bench/gil.py).
_BLOCK: Final = 1024


class SpanTemplate:
    """One span shape: name, kind and constant attributes fixed, the rest filled for each span.

    Args:
        name: Span name.
        constants: Attributes with the same value on every span.
        fields: Attributes that vary, and their types.
        kind: OTLP SpanKind.

    Cost:
        About 30 µs to make: keep it and use it again.
    """

    def __init__(
        self,
        name: str,
        *,
        constants: Mapping[str, str | int | float | bool],
        fields: Mapping[str, FieldType],
        kind: int = KIND_INTERNAL,
    ) -> None:
        self.name = name
        self.fields: dict[str, FieldType] = dict(fields)
        row = bytearray(b"\x0a\x10" + bytes(16) + b"\x12\x08" + bytes(8))
        self._trace_id_at, self._span_id_at, self._parent_at = 2, 20, 28
        row += PARENT_HEAD + bytes(8)
        row += message(5, text(name)) + bytes((0x30, kind))
        self._start_at, self._end_at = len(row) + 1, len(row) + 10
        row += b"\x39" + bytes(8) + b"\x41" + bytes(8)
        for key, constant in constants.items():
            row += attribute(ATTRIBUTES_FIELD, key, constant)
        places: dict[str, int] = {}
        for key, kind_of_field in self.fields.items():
            value_tag, width = _VALUE_PLACES[kind_of_field]
            value = message(2, value_tag + bytes(width))
            row += message(ATTRIBUTES_FIELD, message(1, text(key)) + value)
            places[key] = len(row) - width
        row += FLAGS_FIELD
        # Rows of a batch in which no span has a parent are shorter; the prefix differs too.
        orphan = row[: self._parent_at] + row[self._parent_at + _PARENT_PLACE :]
        self._row, self._head = _prefixed(row)
        self._orphan_row, self._orphan_head = _prefixed(orphan)
        self._int_at = [places[key] for key, of in self.fields.items() if of == "int"]
        self._int_names = [key for key, of in self.fields.items() if of == "int"]
        self._double_at = {key: places[key] for key, of in self.fields.items() if of == "double"}
        self._bool_at = {key: places[key] for key, of in self.fields.items() if of == "bool"}

    def encode(
        self,
        *,
        trace_id: bytes = b"",
        span_id_N: NDArray[np.uint64],
        parent_span_id: int | NDArray[np.uint64],
        start_ns_N: NDArray[np.integer],
        end_ns_N: NDArray[np.integer],
        fields: Mapping[str, ArrayLike],
        trace_ids_N: NDArray[np.uint8] | None = None,
    ) -> bytes:
        """N ``spans`` entries of ScopeSpans, concatenated, each with its length prefix.

        Args:
            trace_id: 16 bytes, for all spans; ignored where ``trace_ids_N`` is given.
            span_id_N: Shape [N]; the eight bytes of an id read as a little-endian word.
            parent_span_id: One for all, or shape [N]; 0 means a root.
            start_ns_N: Unix nanoseconds, shape [N].
            end_ns_N: Unix nanoseconds, shape [N].
            fields: A value of shape [N], or one for all, for every field of the template. Words
                above 2**63 - 1 wrap, since OTLP integers are signed.
            trace_ids_N: Shape [N, 16]; a trace id for each span.

        Returns:
            N entries of equal length; empty for N = 0.

        Raises:
            ValueError: A field is missing or unknown, a shape does not fit, or there is no trace
                id: bugs of the caller's.

        Cost:
            Background thread. About 30 µs a call, then 0.2 µs a span with eight fields.
        """
        if fields.keys() != self.fields.keys():
            msg = f"{self.name} has fields {sorted(self.fields)}, got {sorted(fields)}"
            raise ValueError(msg)
        n = span_id_N.size
        if trace_ids_N is None:
            trace_ids_N = _one_trace_id(trace_id)
        columns = _Columns(
            trace_ids=trace_ids_N,
            span_id=span_id_N,
            parent=np.asarray(parent_span_id, dtype=np.uint64),
            start_ns=start_ns_N,
            end_ns=end_ns_N,
            fields={key: np.asarray(fields[key]) for key in self.fields},
        )
        columns.check(n)
        orphans = columns.parent.ndim == 0 and not columns.parent
        rows = np.empty((n, (self._orphan_row if orphans else self._row).size), dtype=np.uint8)
        for at in range(0, n, _BLOCK):
            self._fill_rows(rows[at : at + _BLOCK], columns.block(at, at + _BLOCK), orphans=orphans)
        return rows.tobytes()

    def _fill_rows(self, rows: NDArray[np.uint8], columns: _Columns, *, orphans: bool) -> None:
        if orphans:
            template, head, gap = self._orphan_row, self._orphan_head, _PARENT_PLACE
        else:
            template, head, gap = self._row, self._head, 0
        rows[:] = template
        at = head + self._trace_id_at
        rows[:, at : at + 16] = columns.trace_ids
        _words(rows, head + self._span_id_at)[:] = columns.span_id
        if not gap:
            self._fill_parents(rows, head + self._parent_at, columns.parent)
        head -= gap  # from here on, places are after the parent
        _words(rows, head + self._start_at)[:] = columns.start_ns
        _words(rows, head + self._end_at)[:] = columns.end_ns
        self._fill_fields(rows, head, columns.fields)

    @staticmethod
    def _fill_parents(rows: NDArray[np.uint8], at: int, parents: NDArray[np.uint64]) -> None:
        _words(rows, at + len(PARENT_HEAD))[:] = parents
        if parents.ndim and not parents.all():
            rows[parents == 0, at : at + _PARENT_PLACE] = np.frombuffer(NO_PARENT, np.uint8)

    def _fill_fields(
        self, rows: NDArray[np.uint8], head: int, fields: Mapping[str, NDArray[Any]]
    ) -> None:
        if self._int_at:
            word_KN = np.empty((len(self._int_at), rows.shape[0]), dtype=np.uint64)
            signed_KN = word_KN.view(np.int64)
            for signed_N, key in zip(signed_KN, self._int_names, strict=True):
                signed_N[:] = fields[key].astype(np.int64, copy=False)
            _fill_padded_varints(rows, [head + at for at in self._int_at], word_KN)
        for key, at in self._double_at.items():
            _words(rows, head + at, np.float64)[:] = fields[key]
        for key, at in self._bool_at.items():
            rows[:, head + at] = fields[key].astype(np.bool_, copy=False)


@dataclass(frozen=True, slots=True)
class _Columns:
    """What fills the rows; each of shape [N] ([N, 16] for trace ids), or one value for all."""

    trace_ids: NDArray[np.uint8]
    span_id: NDArray[np.uint64]
    parent: NDArray[np.uint64]
    start_ns: NDArray[np.integer]
    end_ns: NDArray[np.integer]
    fields: Mapping[str, NDArray[Any]]

    def check(self, n: int) -> None:
        """Refuse shapes that do not fit: a longer column would lose its end unnoticed."""
        own = {"parent": self.parent, "start": self.start_ns, "end": self.end_ns}
        for key, column in (own | dict(self.fields)).items():
            if column.shape not in {(), (n,)}:
                msg = f"column {key} has shape {column.shape} for {n} spans"
                raise ValueError(msg)
        if self.trace_ids.shape not in {(16,), (n, 16)}:
            msg = f"trace ids have shape {self.trace_ids.shape} for {n} spans"
            raise ValueError(msg)

    def block(self, begin: int, end: int) -> _Columns:
        """Rows ``begin`` to ``end``."""

        def cut(column: NDArray[Any], of_one: int = 0) -> NDArray[Any]:
            return column[begin:end] if column.ndim > of_one else column

        return _Columns(
            trace_ids=cut(self.trace_ids, 1),
            span_id=self.span_id[begin:end],
            parent=cut(self.parent),
            start_ns=cut(self.start_ns),
            end_ns=cut(self.end_ns),
            fields={key: cut(column) for key, column in self.fields.items()},
        )


def _one_trace_id(trace_id: bytes) -> NDArray[np.uint8]:
    if len(trace_id) != 16:
        msg = "a trace id has 16 bytes"
        raise ValueError(msg)
    return np.frombuffer(trace_id, dtype=np.uint8)


def _prefixed(row: bytearray) -> tuple[NDArray[np.uint8], int]:
    """The row as a ``spans`` entry, and where the span itself begins in it."""
    prefix = bytes((SPANS_FIELD << 3 | 2,)) + varint(len(row))
    return np.frombuffer(prefix + row, dtype=np.uint8), len(prefix)


def _words(
    rows: NDArray[np.uint8],
    at: int,
    dtype: type[np.uint64 | np.uint16 | np.float64] = np.uint64,
) -> NDArray[Any]:
    """The bytes of every row from ``at`` on, as one little-endian column of numbers."""
    words: NDArray[Any] = np.ndarray(
        rows.shape[0],
        dtype=np.dtype(dtype).newbyteorder("<"),
        buffer=rows,
        offset=at,
        strides=(rows.shape[1],),
    )
    return words


def _fill_padded_varints(
    rows: NDArray[np.uint8], places: list[int], word_KN: NDArray[np.uint64]
) -> None:
    """Write integers as varints of ten bytes.

    The low 56 bits spread over eight bytes, seven in each, by three halvings of the word (as a
    bit deposit would), which is a third of the passes that ten shifts take.
    """
    spread_KN = word_KN & _LOW_56
    for keep_low, keep_high, shift in _SPREAD:
        high_KN = spread_KN & keep_high
        high_KN <<= shift
        spread_KN &= keep_low
        spread_KN |= high_KN
    spread_KN |= _CONTINUE_8
    rest_KN = word_KN >> np.uint64(56)
    # Bit 63 alone makes the tenth byte: one addition moves it up past the ninth's high bit.
    last_KN = (rest_KN + (rest_KN & np.uint64(0x80))).astype(np.uint16) | np.uint16(0x80)
    for k, at in enumerate(places):
        _words(rows, at)[:] = spread_KN[k]
        _words(rows, at + 8, np.uint16)[:] = last_KN[k]
