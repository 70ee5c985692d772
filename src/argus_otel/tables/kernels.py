"""The column ``sketch`` of the kernels table: packed rows of ``wire.sketch`` as Arrow values.

Shape legend: G = rows of the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from argus_otel.wire.sketch import Rows, pack_rows, read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from argus_otel.wire.sketch import Sketch


def sketch_column(rows: Rows) -> pa.Array:
    """Binary values [G], one a row."""
    data, offsets = pack_rows(rows)
    return pa.Array.from_buffers(
        pa.binary(),
        offsets.size - 1,
        [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)],
    )


def read_sketch_column(column: pa.ChunkedArray) -> Rows:
    """The rows [G] of a column.

    Raises:
        ValueError: A value is damaged, or of a version that this reader does not know.
    """
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # of no chunk at all
        values = pa.array([], pa.binary())
    offsets = np.frombuffer(values.buffers()[1] or b"", dtype=np.int32)
    offsets = offsets[values.offset : values.offset + len(values) + 1].astype(np.int64)
    if not len(values):
        return read_rows(b"", np.zeros(1, dtype=np.int64))
    data = values.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0])).to_pybytes()
    return read_rows(data, offsets - offsets[0])


def rows_of(sketches: Sequence[Sketch]) -> Rows:
    """The rows of sketches of one error, one sketch after the other."""
    return Rows(
        filled=np.concatenate(
            [np.bincount(sketch.row, minlength=sketch.name.size) for sketch in sketches]
        ),
        bucket=np.concatenate([sketch.bucket for sketch in sketches]),
        count=np.concatenate([sketch.count for sketch in sketches]),
        place_sum=np.concatenate([sketch.place_sum for sketch in sketches]),
        error_per_mille=sketches[0].error_per_mille,
    )
