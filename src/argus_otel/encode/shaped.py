"""A few spans of each of many shapes: what a training process has after every wake-up.

For each shape all bytes but its ids, times and varying attributes are made once; a span is then
one call of ``struct`` that lays them side by side, and its varying attributes behind it. Below
about thirty spans of one shape this is cheaper than ``SpanTemplate``, whose numpy calls have a
price of their own, and the spans are shorter: integers take the bytes that they need.
"""

from __future__ import annotations

import struct
from itertools import chain, repeat
from operator import call, getitem
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from argus_otel.encode.protobuf import attributes as encode_attributes
from argus_otel.encode.protobuf import double_head, integer_heads, name_and_kind, text_head
from argus_otel.encode.requests import EncodedSpans
from argus_otel.encode.spans import ATTRIBUTES_FIELD, FLAGS_FIELD, NO_PARENT, PARENT_HEAD
from argus_otel.wire.varints import TABLED, VARINTS, varint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from argus_otel.wire.spans import ShapedSpan, SpanShape

_MAX_SHAPES: Final = 512
_MAX_KNOWN_VALUES: Final = 64
"""Of one attribute. A loop's counts and sizes are a few numbers; what never repeats is made anew
each time."""

_MAX_KNOWN_SIZES: Final = 512
"""Of a span's varying attributes; packed digests have some hundred."""

_UINT64_MASK: Final = (1 << 64) - 1
_NO_ID: Final = bytes(8)
_SPAN_ID_HEAD: Final = b"\x12\x08"
_NO_PARENT_HEAD: Final = NO_PARENT[:2]
_NO_PARENT_REST: Final = NO_PARENT[2:]
_END_TIME_TAG: Final = 0x41


class ShapedSpanEncoder:
    """Encodes spans of shapes that recur, and keeps what it has found out about each shape."""

    def __init__(self) -> None:
        self._layouts = _Layouts()

    def encode(self, spans: Sequence[ShapedSpan]) -> EncodedSpans:
        """Entries of ScopeSpans, in order; the scopes of the shapes are the caller's business.

        Ids are taken to have their 8 or 16 bytes.

        Raises:
            ValueError: A span has more or fewer values than its shape.

        Cost:
            Background thread. 0.6 µs a span without varying attributes, 1.5 µs with three
            integers and a double, 4 µs for a digest; 10 µs the first time that a shape is seen.
        """
        if not spans:
            return EncodedSpans(b"", 0)
        shapes, trace_ids, span_ids, parent_ids, starts_ns, ends_ns, values = zip(*spans)
        layouts = map(self._layouts.__getitem__, shapes)
        packs, middles, rests, heads, fields, counts = zip(*layouts)
        if (*map(len, values),) != counts:
            _complain(shapes, values, counts)
        varying = [of_shape(row) if row else b"" for of_shape, row in zip(fields, values)]
        parent_heads: Iterable[bytes] = repeat(PARENT_HEAD)
        if _NO_ID in parent_ids:
            parent_heads = [_NO_PARENT_HEAD if one == _NO_ID else PARENT_HEAD for one in parent_ids]
            parent_ids = tuple([_NO_PARENT_REST if one == _NO_ID else one for one in parent_ids])
        bodies = map(
            call, packs, trace_ids, repeat(_SPAN_ID_HEAD), span_ids, parent_heads, parent_ids,
            middles, starts_ns, repeat(_END_TIME_TAG), ends_ns, rests,
        )  # fmt: skip
        entry_heads = map(getitem, heads, map(len, varying))
        data = b"".join(chain.from_iterable(zip(entry_heads, bodies, varying)))
        return EncodedSpans(data, len(spans))


def _complain(
    shapes: Sequence[SpanShape], values: Sequence[Sequence[object]], counts: Sequence[int]
) -> NoReturn:
    for shape, row, count in zip(shapes, values, counts):
        if len(row) != count:
            msg = f"{shape.name} has {count} values, got {len(row)}"
            raise ValueError(msg)
    raise AssertionError


class _Layouts(dict["SpanShape", "_Layout"]):
    """Layouts by shape; made when first asked for, the oldest forgotten."""

    def __missing__(self, shape: SpanShape) -> _Layout:
        if len(self) >= _MAX_SHAPES:
            del self[next(iter(self))]
        layout = self[shape] = _layout_of(shape)
        return layout


class _Layout(NamedTuple):
    """What spans of one shape share."""

    pack: Callable[..., bytes]
    """Lays down all but the entry's head and the varying attributes."""
    middle: bytes
    """Between the parent's id and the start's time."""
    rest: bytes
    """After the end's time."""
    heads: dict[int, bytes]
    fields: Callable[[Sequence[Any]], bytes]
    """The varying attributes, from their values."""
    varies: int
    """How many attributes vary."""


def _layout_of(shape: SpanShape) -> _Layout:
    middle = name_and_kind(shape.name) + b"\x39"
    rest = encode_attributes(ATTRIBUTES_FIELD, shape.constants) + FLAGS_FIELD
    form = struct.Struct(f"<16s2s8s2s8s{len(middle)}sQBQ{len(rest)}s")
    fields = _Fields(shape)
    return _Layout(form.pack, middle, rest, _EntryHeads(2 + form.size), fields.encode, fields.count)


class _Fields:
    """The attributes of a shape that vary."""

    __slots__ = ("_doubles", "_ints", "_pack_doubles", "_texts", "count")

    def __init__(self, shape: SpanShape) -> None:
        self._ints = [_Integers(integer_heads(ATTRIBUTES_FIELD, key)) for key in shape.ints]
        heads = [double_head(ATTRIBUTES_FIELD, key) for key in shape.doubles]
        self._doubles: list[Any] = [part for head in heads for part in (head, 0.0)]
        """Every second one is a place for a value."""
        self._pack_doubles = struct.Struct("<" + "".join([f"{len(head)}sd" for head in heads])).pack
        self._texts = [text_head(ATTRIBUTES_FIELD, key) for key in shape.texts]
        self.count = len(shape.ints) + len(shape.doubles) + len(shape.texts)

    def encode(self, values: Sequence[Any]) -> bytes:
        """The attributes that vary."""
        attributes = [*map(getitem, self._ints, values)]
        at = len(attributes)
        if doubles := self._doubles[:]:
            end = at + len(doubles) // 2
            doubles[1::2] = values[at:end]
            attributes.append(self._pack_doubles(*doubles))
            at = end
        for head, value in zip(self._texts, values[at:]):
            data = value.encode("utf-8", "replace")
            attributes += (head(len(data)), data)
        return b"".join(attributes)


class _Integers(dict[int, bytes]):
    """An attribute by its value; those that come first are kept."""

    def __init__(self, heads: Sequence[bytes]) -> None:
        super().__init__()
        self._heads = heads
        """What precedes a value, by the bytes that it takes."""

    def __missing__(self, value: int) -> bytes:
        data = VARINTS[value] if 0 <= value < TABLED else varint(value & _UINT64_MASK)
        attribute = self._heads[len(data)] + data
        if len(self) < _MAX_KNOWN_VALUES:
            self[value] = attribute
        return attribute


class _EntryHeads(dict[int, bytes]):
    """An entry up to its trace id, by the bytes of its varying attributes; made when asked for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        """All else of the span."""

    def __missing__(self, varying: int) -> bytes:
        head = b"\x12" + varint(self._size + varying) + b"\x0a\x10"
        if len(self) < _MAX_KNOWN_SIZES:
            self[varying] = head
        return head
