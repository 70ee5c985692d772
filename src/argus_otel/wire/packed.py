"""Bytes as text attributes, in as many pieces as stores keep whole."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    AttributeValue = str | int | float | bool | Sequence[str] | Sequence[int]

MAX_ATTRIBUTE_CHARACTERS: Final = 2000
"""Of one piece; Tempo cuts attributes beyond 2,048 bytes."""


def put_packed(attributes: MutableMapping[str, AttributeValue], name: str, data: bytes) -> None:
    """Add ``data`` as base64: ``name``, and ``name.1``, ``name.2``, … where it is long."""
    text = binascii.b2a_base64(data, newline=False).decode("ascii")
    attributes[name] = text[:MAX_ATTRIBUTE_CHARACTERS]
    begins = range(MAX_ATTRIBUTE_CHARACTERS, len(text), MAX_ATTRIBUTE_CHARACTERS)
    for part, begin in enumerate(begins):
        attributes[f"{name}.{part + 1}"] = text[begin : begin + MAX_ATTRIBUTE_CHARACTERS]


def get_packed(attributes: Mapping[str, AttributeValue], name: str) -> bytes:
    """What ``put_packed`` added; nothing where it is not there.

    Raises:
        ValueError: It is no base64.
    """
    parts = [str(attributes.get(name, ""))]
    while (more := attributes.get(f"{name}.{len(parts)}")) is not None:
        parts.append(str(more))
    try:
        return base64.b64decode("".join(parts), validate=True)
    except (binascii.Error, ValueError) as error:
        msg = f"{name} is damaged: {error}"
        raise ValueError(msg) from error
