"""One operation trace of ByteDance's study, read and checked, with its companion file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from argus_otel.convert.conversion import MAX_RANKS
from argus_otel.convert.sources import Source, source_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from argus_otel.convert.sources import Advance

    Ints = NDArray[np.int64]

_MAX_BYTES: Final = 4 << 30
EXPECTED: Final = "an operation trace with the columns of ByteDance's StragglerAnalysis"
_COLUMNS: Final[Mapping[str, pa.DataType]] = {
    "dp_rank": pa.int64(),
    "stage": pa.int64(),
    "rank": pa.int64(),
    "step": pa.int64(),
    "start_ts": pa.float64(),
    "duration": pa.float64(),
    "seq_id": pa.int64(),
    "mc": pa.int64(),
    "mb_id": pa.int64(),
}

_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "dp_rank": (0, MAX_RANKS),
    "stage": (0, 1 << 12),
    "rank": (0, MAX_RANKS),
    "step": (0, 2**31 - 1),
    "start_ts": (-1e6, 1e6),
    "duration": (0, 1e6),
    "seq_id": (-1, 2**31 - 1),
    "mc": (-1, 1 << 12),
    "mb_id": (-1, 1 << 16),
}
"""What can be; times are seconds within a step."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Operations of a job, and what is known of its axes. N operations."""

    columns: Mapping[str, Any]
    """Of ``_COLUMNS`` [N], sorted by step, rank and start."""
    op: Ints
    """Index into ``ops`` [N]."""
    ops: list[str]
    meta: Mapping[str, Any]
    ranks: Mapping[tuple[int, int], int]
    """(stage, place along dp) → traced rank."""

    def size(self, name: str, least: int) -> int:
        """A size from the meta file, or the least that it can be."""
        value = self.meta.get(f"{name}_size")
        return min(max(value, least), MAX_RANKS) if type(value) is int else least


def read_trace(source: Source, advance: Advance | None) -> Trace:
    """A trace and its companion.

    Raises:
        SourceError: It is no such trace, or of two worlds.
    """
    data = source.read(_MAX_BYTES, advance)
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise source_error(source, f"not readable: {error}", EXPECTED) from error
    missing = [name for name in (*_COLUMNS, "optype") if name not in table.column_names]
    if missing:
        raise source_error(source, f"without the column {', '.join(missing)}", EXPECTED)
    if not table.num_rows:
        raise source_error(source, "empty", EXPECTED)
    try:
        columns = {
            name: table[name].cast(kind).to_numpy(zero_copy_only=False)
            for name, kind in _COLUMNS.items()
        }
        optype = table["optype"].cast(pa.string()).combine_chunks().dictionary_encode()
    except (pa.ArrowException, NotImplementedError) as error:
        raise source_error(source, f"of other types: {error}", EXPECTED) from error
    for name, values in columns.items():
        known = np.isfinite(values)
        if not known.all():
            row = int(np.flatnonzero(~known)[0])
            raise source_error(source, f"without a {name} in row {row}", EXPECTED)
    for name, (least, most) in _RANGES.items():
        if columns[name].min() < least or columns[name].max() > most:
            raise source_error(source, f"with a {name} out of range", EXPECTED)
    if optype.null_count:
        raise source_error(source, "without an optype in some row", EXPECTED)
    order = np.lexsort((columns["start_ts"], columns["rank"], columns["step"]))
    return Trace(
        columns={name: values[order] for name, values in columns.items()},
        op=optype.indices.to_numpy().astype(np.int64)[order],
        ops=optype.dictionary.to_pylist(),
        meta=_read_meta(source),
        ranks=_places(source, columns),
    )


def _read_meta(source: Source) -> dict[str, Any]:
    """The companion of a trace; empty where there is none."""
    if source.member is not None:
        return {}
    stem = source.path.stem
    for name in dict.fromkeys((stem.replace("trace", "meta", 1), f"meta-{stem}", "meta")):
        path = source.path.with_name(f"{name}.yaml")
        if name == stem or not path.is_file():
            continue
        try:
            meta = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise source_error(str(path), f"not readable: {error}", "a YAML mapping") from error
        if not isinstance(meta, dict):
            raise source_error(str(path), "not a mapping", "sizes of the parallel axes")
        return meta
    return {}


def _places(source: Source, columns: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    triples = np.stack([columns["stage"], columns["dp_rank"], columns["rank"]], axis=1)
    found: dict[tuple[int, int], int] = {}
    for stage, dp, rank in np.unique(triples, axis=0).tolist():
        other = found.setdefault((stage, dp), rank)
        if other != rank:
            raise source_error(
                source,
                f"of two worlds: ranks {other} and {rank} are both at stage {stage}, dp {dp}",
                "one traced rank for each stage and place along the data-parallel axis",
            )
    if len(set(found.values())) != len(found):
        raise source_error(
            source, "of two worlds: one rank is at several places", "one place for each rank"
        )
    return found
