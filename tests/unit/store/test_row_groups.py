"""Row groups read one by one: what repeats is decoded once, and only what is equal counts as that."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argus_otel.store.row_groups import RowGroups
from argus_otel.store.windows import _cut

SCHEMA = pa.schema(
    [
        ("op", pa.dictionary(pa.int32(), pa.string())),
        ("peer", pa.int32()),
        ("counts", pa.list_(pa.struct([("group", pa.uint64()), ("count", pa.int64())]))),
        ("took", pa.int64()),
    ]
)


def row_group(took: list[int], *, peers: list[int | None] = [3, None, 4]) -> pa.Table:  # noqa: B006
    """Three rows of one step."""
    counts = [[{"group": 2**63, "count": 8}], [], [{"group": 1, "count": 0}]]
    columns = {"op": ["send", "recv", "send"], "peer": peers, "counts": counts, "took": took}
    return pa.table([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


@pytest.fixture
def written(tmp_path):
    """Writes row groups, uncompressed or not, and gives a reader of them."""

    def write(*groups: pa.Table, **options: object) -> RowGroups:
        path = tmp_path / "rows.parquet"
        with pq.ParquetWriter(path, SCHEMA, **options) as writer:
            for rows in groups:
                writer.write_table(rows)
        return RowGroups(path, pq.read_metadata(path), SCHEMA)

    return write


def addresses(column: pa.ChunkedArray) -> list[int]:
    """Where the values lie in memory."""
    return [b.address for chunk in column.chunks for b in chunk.buffers() if b is not None]


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_what_repeats_is_decoded_once(written, compression):
    """Equal columns of several row groups are one array; nested ones too."""
    groups = [row_group([n, n + 1, n + 2]) for n in range(4)]
    reader = written(*groups, compression=compression)

    found = list(reader.read([0, 1]))
    found += reader.read([2, 3])

    assert all(rows.equals(given) for rows, given in zip(found, groups, strict=True))
    for name in ("peer", "counts"):
        assert {*map(tuple, (addresses(rows[name]) for rows in found))} == {
            tuple(addresses(found[0][name]))
        }


def test_columns_of_equal_size_that_differ_are_told_apart(written):
    """Sizes say what may be equal, bytes what is: plain numbers always have the same size."""
    groups = [
        row_group([1, 2, 3]),
        row_group([1, 2, 4]),
        row_group([1, 2, 3], peers=[3, 4, None]),
        row_group([1, 2, 4]),
    ]
    reader = written(*groups, compression="none", use_dictionary=["op"])

    found = list(reader.read([3, 1, 0, 2]))

    assert found[0].equals(groups[3])
    assert found[1].equals(groups[1])
    assert found[2].equals(groups[0])
    assert found[3].equals(groups[2])


def test_columns_whose_sizes_differ_are_not_held(written):
    """A large file is read without the whole of it being kept."""
    reader = written(row_group([0, 0, 0]), row_group([0, 1, 1]), row_group([0, 1, 2]))

    assert len(list(reader.read([0, 1, 2]))) == 3

    assert reader._held["peer"]
    assert not reader._held["took"]


def test_a_file_that_is_gone_is_missing(written, tmp_path):
    """Compaction removed it: whoever reads looks at the manifest again."""
    reader = written(row_group([1, 2, 3]))
    (tmp_path / "rows.parquet").unlink()

    with pytest.raises(FileNotFoundError):
        list(reader.read([0]))


def test_rows_that_are_not_in_the_order_of_steps_are_cut_as_those_that_are() -> None:
    """A store that several ranks' batches were written into has them as they came."""
    ordinal = [3, 1, 2, 0, 2, 4]
    rows = pa.table({"ordinal": pa.array(ordinal, pa.int64()), "row": list(range(6))})

    assert _cut(rows, (1, 3))["row"].to_pylist() == [1, 2, 4]
    assert _cut(rows.sort_by("ordinal"), (1, 3))["ordinal"].to_pylist() == [1, 2, 2]
    assert _cut(rows.sort_by("ordinal"), (None, 2))["ordinal"].to_pylist() == [0, 1]
    assert _cut(rows.sort_by("ordinal"), (9, None)).num_rows == 0
