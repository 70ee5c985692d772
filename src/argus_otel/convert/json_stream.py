"""A JSON document with one long array, read element by element in one pass and bounded memory.

Traces grow to gigabytes, nearly all of it in ``traceEvents``, and what those need to be understood
may stand before or behind them. Python's own scanner reads each element: as quick as a streaming
parser, and it takes the ``NaN`` and ``Infinity`` that profilers write, which is no JSON.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, BinaryIO, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK_BYTES: Final = 1 << 20
_MAX_VALUE: Final = 64 << 20
"""Characters of one value. What is longer is taken for damaged: an event has hundreds."""
_NUMBER: Final = re.compile(r"[-+.eE0-9]*")
_BETWEEN: Final = re.compile(r"[ \t\r\n]*,[ \t\r\n]*(?=\{)")
_SPACE: Final = re.compile(r"[ \t\r\n]*")


class JsonStreamError(ValueError):
    """It is no JSON, or breaks off."""


class JsonStream:
    """Elements of one array of a document, and all that is beside it.

    Args:
        file: Where to read from.
        array: Name of the array in the outermost object. A document that is an array itself will
            do as well.
    """

    def __init__(self, file: BinaryIO, array: str) -> None:
        self._file, self._array = file, array
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._scan = json.JSONDecoder(strict=False).raw_decode
        self._text = ""
        self._at = 0
        self._before = 0
        """Characters that were read and dropped."""
        self._ended = False
        self.beside: dict[str, Any] = {}
        """The other members of the outermost object; complete once the elements were taken."""

    def elements(self) -> Iterator[Any]:
        """The array's elements, in order.

        Raises:
            JsonStreamError: The document is damaged or cut short; what came before holds.
        """
        first = self._peek()
        if first == "[":
            yield from self._elements()
        elif first == "{":
            yield from self._members()
        else:
            raise self._error("an object or array")
        if self._peek() != "":
            raise self._error("the end")

    def _members(self) -> Iterator[Any]:
        self._at += 1
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            if self._peek() != '"':
                raise self._error("a member's name")
            name = self._value()
            self._take(":")
            if name == self._array and self._peek() == "[":
                yield from self._elements()
            else:
                self._peek()
                self.beside[name] = self._value()
            if self._peek() == "}":
                self._at += 1
                return
            self._take(",")

    def _elements(self) -> Iterator[Any]:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            return
        self._peek()
        while True:
            yield self._value()
            between = _BETWEEN.match(self._text, self._at)
            if between:  # the usual case, in one go
                self._at = between.end()
                continue
            follows = self._peek()
            if follows == ",":
                self._at += 1
                self._peek()
            elif follows == "]":
                self._at += 1
                return
            else:
                raise self._error("',' or ']'")

    def _value(self) -> Any:  # noqa: ANN401 - any JSON value
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except (ValueError, RecursionError) as error:
                # Cut by the end of what was read so far, or damaged: more text will tell.
                if self._ended or len(self._text) - self._at > _MAX_VALUE:
                    raise self._error("a value") from error
            else:
                if isinstance(value, dict):
                    self._at = end
                    return value
                # A number at the end of the text may go on: "1", "1.", "1.5e".
                rest = _NUMBER.match(self._text, end)
                if self._ended or (rest and rest.end() < len(self._text)):
                    self._at = end
                    return value
            self._more()

    def _take(self, character: str) -> None:
        if self._peek() != character:
            raise self._error(f"{character!r}")
        self._at += 1

    def _peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def _more(self) -> None:
        data = self._file.read(max(_CHUNK_BYTES, len(self._text) - self._at))
        self._ended = not data
        self._before += self._at
        self._text = self._text[self._at :] + self._decode(data, final=self._ended)
        self._at = 0

    def _error(self, expected: str) -> JsonStreamError:
        found = self._text[self._at : self._at + 20]
        what = f"got {found!r}" if found else "it breaks off"
        return JsonStreamError(
            f"at character {self._before + self._at}: expected {expected}, {what}"
        )
