"""The few protobuf forms that OTLP needs, each as the bytes of one complete field."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int]

_PACK_DOUBLE = struct.Struct("<d").pack
_PACK_FIXED64 = struct.Struct("<Q").pack
_UINT64_MASK = (1 << 64) - 1

# One-byte varints, which are most of them, come from a table.
_SMALL = tuple(bytes((value,)) for value in range(128))

_TRUE, _FALSE = b"\x10\x01", b"\x10\x00"


def varint(value: int) -> bytes:
    """An unsigned integer, 0 to 2**64 - 1, in its shortest form."""
    if value < 128:
        return _SMALL[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, wire_type: int) -> bytes:
    """A field's tag; wire types are 0 varint, 1 fixed64, 2 length-delimited, 5 fixed32."""
    return varint(number << 3 | wire_type)


def message(number: int, body: bytes) -> bytes:
    """A length-delimited field: message, string or bytes."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def integer(number: int, value: int) -> bytes:
    """A varint field; a negative value takes ten bytes."""
    return varint(number << 3) + varint(value & _UINT64_MASK)


def fixed64(number: int, value: int) -> bytes:
    """A fixed64 or sfixed64 field, which OTLP uses for times and counts."""
    return varint(number << 3 | 1) + _PACK_FIXED64(value & _UINT64_MASK)


def double(number: int, value: float) -> bytes:
    """A double field."""
    return varint(number << 3 | 1) + _PACK_DOUBLE(value)


def text(value: str) -> bytes:
    """UTF-8 of a string; what UTF-8 cannot hold becomes a question mark.

    Kernel and file names come from outside: a lone surrogate in one of them must not cost the
    request, and a parser refuses a string that is not UTF-8.
    """
    return value.encode("utf-8", "replace")


def attributes(number: int, pairs: Mapping[str, AttributeValue]) -> bytes:
    """KeyValue fields, one for each attribute, in order."""
    out: list[bytes] = []
    for key, value in pairs.items():
        if type(value) is float:  # half of a digest, and of one length
            out += (_double_head(number, key), _PACK_DOUBLE(value))
        else:
            out.append(attribute(number, key, value))
    return b"".join(out)


@lru_cache(maxsize=4096)
def _double_head(number: int, key: str) -> bytes:
    """A KeyValue field up to the eight bytes of its double."""
    head, key_field = _key(number, key)
    return head + varint(len(key_field) + 11) + key_field + b"\x12\x09\x21"


def attribute(number: int, key: str, value: AttributeValue) -> bytes:
    """One KeyValue field."""
    head, key_field = _key(number, key)
    any_value = value_message(value)
    size = len(any_value)
    value_field = b"\x12" + (_SMALL[size] if size < 128 else varint(size)) + any_value
    size = len(key_field) + len(value_field)
    return head + (_SMALL[size] if size < 128 else varint(size)) + key_field + value_field


@lru_cache(maxsize=4096)
def _key(number: int, key: str) -> tuple[bytes, bytes]:
    return tag(number, 2), message(1, text(key))


def value_message(value: AttributeValue) -> bytes:
    """The body of an AnyValue. ``bool`` before ``int``, since it is one in Python."""
    kind = type(value)
    if kind is str:
        data = value.encode("utf-8", "replace")  # type: ignore[union-attr]
        size = len(data)
        return b"\x0a" + (_SMALL[size] if size < 128 else varint(size)) + data
    if kind is float:
        return b"\x21" + _PACK_DOUBLE(value)
    if kind is bool:
        return _TRUE if value else _FALSE
    if kind is int:
        return b"\x18" + varint(value & _UINT64_MASK)  # type: ignore[operator]
    return _unusual_value(value)


def _unusual_value(value: object) -> bytes:
    """Sequences, numpy scalars, subclasses (StrEnum); anything else as its text."""
    if isinstance(value, str):
        return message(1, text(str(value)))
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value_message(value.item())
    if isinstance(value, bool | int | float):
        return value_message(int(value) if isinstance(value, int) else float(value))
    if isinstance(value, list | tuple):
        return message(5, b"".join([message(1, value_message(item)) for item in value]))
    if hasattr(value, "tolist"):  # an array
        return _unusual_value(value.tolist())
    return message(1, text(str(value)))
