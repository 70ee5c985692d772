"""One Parquet file, a row group at a time, where what repeats is decoded once.

A training loop does the same in every step, so that most columns of its rows (who did what on which
group) are the same from one row group to the next, to the byte. To compare bytes takes a tenth of the time
of decoding them: of 12,960 ranks that saves half of it, and memory too, for equal columns are one array.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_HELD: Final = 4
"""Decoded pieces of one column that are held for others like them: row groups come in two or three
lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Where one column of one row group lies: offset in the file and bytes, of each part if nested."""

    parts: tuple[tuple[int, int], ...]
    likeness: tuple[object, ...]
    """Rows, codecs and sizes: what equal pieces share, known without reading them."""


_Held: TypeAlias = "list[tuple[_Piece, pa.ChunkedArray]]"


class RowGroups:
    """Reads the row groups of one file.

    Args:
        path: The file.
        metadata: Its footer.
        schema: Columns wanted, and their types; those of dictionaries come as they lie in the file.
    """

    def __init__(self, path: Path, metadata: pq.FileMetaData, schema: pa.Schema) -> None:
        self._path, self._metadata, self._schema = path, metadata, schema
        self._coded = [f.name for f in schema if pa.types.is_dictionary(f.type)]
        self._pieces = [self._pieces_of(number) for number in range(metadata.num_row_groups)]
        self._alike = Counter(
            (name, piece.likeness) for pieces in self._pieces for name, piece in pieces.items()
        )
        self._held: dict[str, _Held] = {name: [] for name in schema.names}

    def _pieces_of(self, number: int) -> dict[str, _Piece]:
        group = self._metadata.row_group(number)
        parts: dict[str, list[tuple[int, int]]] = {name: [] for name in self._schema.names}
        codecs: dict[str, list[str]] = {name: [] for name in self._schema.names}
        for index in range(group.num_columns):
            column = group.column(index)
            name = column.path_in_schema.partition(".")[0]
            if name in parts:
                begin = column.data_page_offset
                if column.has_dictionary_page:
                    begin = min(begin, column.dictionary_page_offset)
                parts[name].append((begin, column.total_compressed_size))
                codecs[name].append(column.compression)
        return {
            name: _Piece(
                parts=tuple(found),
                likeness=(group.num_rows, *codecs[name], *(size for _, size in found)),
            )
            for name, found in parts.items()
        }

    def read(self, numbers: Sequence[int]) -> Iterator[pa.Table]:
        """Some row groups, a table each; the bytes of a column decide whether it is known already.

        Raises:
            OSError: There is no such file, or it cannot be read.
            pyarrow.ArrowException: It is damaged.
        """
        # Two handles: Arrow reads by its own, outside the interpreter's lock.
        with self._path.open("rb", buffering=0) as raw, pq.ParquetFile(
            self._path, metadata=self._metadata, read_dictionary=self._coded
        ) as file:  # fmt: skip
            for number in numbers:
                pieces = self._pieces[number]
                known = {n: self._known(n, piece, raw.fileno()) for n, piece in pieces.items()}
                missing = [name for name, values in known.items() if values is None]
                if missing:
                    wanted = pa.schema([self._schema.field(name) for name in missing])
                    fresh = file.read_row_group(number, columns=missing).cast(wanted)
                    for name in missing:
                        known[name] = fresh[name]
                        self._hold(name, pieces[name], fresh[name])
                yield pa.Table.from_arrays(list(known.values()), schema=self._schema)

    def _known(self, name: str, piece: _Piece, descriptor: int) -> pa.ChunkedArray | None:
        """The values of an equal piece that was decoded before."""
        for other, values in self._held[name]:
            if other.likeness == piece.likeness and all(
                os.pread(descriptor, size, mine) == os.pread(descriptor, size, theirs)
                for (mine, size), (theirs, _) in zip(piece.parts, other.parts, strict=True)
            ):
                return values
        return None

    def _hold(self, name: str, piece: _Piece, values: pa.ChunkedArray) -> None:
        """Keep what may come again; the sizes of columns that differ differ, so that none is held."""
        if self._alike[name, piece.likeness] > 1:
            held = [entry for entry in self._held[name] if entry[0].likeness != piece.likeness]
            self._held[name] = [*held[1 - _HELD :], (piece, values)]
