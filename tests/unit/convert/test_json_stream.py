"""Reading a long array element by element: the same as reading the document at once."""

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.convert import json_stream
from argus_otel.convert.json_stream import JsonStream, JsonStreamError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(text):
    """Elements of ``a``, and what is beside it."""
    stream = JsonStream(io.BytesIO(text.encode("utf-8", "surrogatepass")), "a")
    return list(stream.elements()), stream.beside


@given(
    before=st.dictionaries(st.text(max_size=3).map("b".__add__), VALUES, max_size=2),
    elements=st.lists(VALUES, max_size=6),
    after=st.dictionaries(st.text(max_size=3).map("c".__add__), VALUES, max_size=2),
    indent=st.sampled_from([None, 1]),
    chunk=st.integers(1, 9),
)
def test_it_reads_what_json_reads(before, elements, after, indent, chunk):
    """Wherever the text is cut."""
    document = {**before, "a": elements, **after}
    usual, json_stream._CHUNK_BYTES = json_stream._CHUNK_BYTES, chunk
    try:
        found = read(json.dumps(document, indent=indent))
    finally:
        json_stream._CHUNK_BYTES = usual

    assert found == (elements, {**before, **after})


def test_a_document_may_be_the_array_itself():
    """The other form of chrome's traces."""
    assert read("[1, 2]") == ([1, 2], {})


def test_numbers_that_are_no_json_are_read():
    """Profilers write what C++ prints."""
    (first, second), _ = read('{"a": [NaN, -Infinity]}')

    assert math.isnan(first)
    assert second == -math.inf


def test_text_that_is_no_utf_8_costs_nothing_else():
    """Names of kernels may be cut in the middle of a character."""
    stream = JsonStream(io.BytesIO(b'{"a": ["x\xff\ty"]}'), "a")

    assert list(stream.elements()) == ["x\ufffd\ty"]


def test_memory_is_bounded_by_the_elements():
    """A hundred megabytes of events, of which none is kept."""

    class Long(io.RawIOBase):
        left = 100

        def read(self, size=-1):
            self.left -= 1
            if self.left == 99:
                return b'{"a": [0'
            some = b', {"name": "' + b"x" * 1000 + b'"}'
            return some * 1000 if self.left > 0 else b"]}" if self.left == 0 else b""

    stream = JsonStream(Long(), "a")
    longest = 0
    for _ in stream.elements():
        longest = max(longest, len(stream._text))

    assert longest < 4_000_000


@pytest.mark.parametrize(
    "text",
    ["", " ", "1", "{", "[", "[1", "[1,", "[1 2]", "[1,]", '{"a"', '{"a": [1}', '{"a": [1],}',
     "{1: 2}", '{"b": }', "[] x", '{"a": "'],
)  # fmt: skip
def test_what_is_no_json_says_where(text):
    """By character."""
    with pytest.raises(JsonStreamError, match="at character"):
        read(text)


def test_a_value_without_an_end_is_not_read_for_ever(monkeypatch):
    """Something else that happens to begin like a trace."""
    monkeypatch.setattr(json_stream, "_MAX_VALUE", 1000)
    monkeypatch.setattr(json_stream, "_CHUNK_BYTES", 100)
    stream = JsonStream(io.BytesIO(b'{"a": ["' + b"x" * 100_000), "a")

    with pytest.raises(JsonStreamError, match="expected a value"):
        list(stream.elements())
    assert len(stream._text) < 10_000
