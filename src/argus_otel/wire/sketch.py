"""Durations of kernels as log-bucket sketches: one row per (name, stream, phase), packed.

A sketch counts durations in buckets whose edges grow by a constant ratio, so that whatever is read
from it is within ``error`` of a duration that was put in. Of a bucket it also keeps whereabouts in
it the durations are on average: kernels vary by less than a bucket is wide, and a rank that is 2 %
slower than another would else be at no distance from it. Both are sums of whole numbers. So
sketches of the same edges are merged by adding, which gives exactly what a sketch of all durations
together would be: over steps, over ranks, in any order.

Buckets, for an error of e per mille: bucket 0 holds durations of 0 ns, bucket k the whole
nanoseconds ``low[k] ... high[k]``, where ``low[k] = high[k-1] + 1`` and
``high[k] = floor(low[k] * (1000 + e) / (1000 - e))``. That is whole numbers throughout, so that all
machines agree on every edge. A bucket stands for ``2 * low * high / (low + high)``, which is within
e of both its edges. A duration's place in it is 0 to 15 from low to high, the nearest: with
w = high - low, ``floor((30 * (duration - low) + w) / (2 * w))``, or 0 where w is. Durations below
zero count as 0, those beyond ``MOST_NS`` as ``MOST_NS``.

Layout 1, all values unsigned base-128 integers; rows by (name, stream, phase), each key once:
    version, error in per mille, n, name difference[n], stream[n], phase + 1 [n],
    buckets in the row [n],
    then for each bucket, row by row, upwards:
        8 * step + min(count, 8) - 1, where step is the bucket for the first of a row, and the
        difference to the one before, less 1, for the others;
    then count - 8 of each bucket that has 8 or more,
    then zigzag (sum of places - 7 * count) of each bucket.
Name and phase are indices into dictionaries that travel beside (names rarely, phases as those of
the digest); phase is 0 where unknown.

In tables a row is a sketch by itself: the same layout with n = 1, and name, stream and phase 0, for
columns beside it say them. ``pack_rows`` and ``read_rows`` make and read millions of those.

A reader of a newer version must keep reading this one.

Shape legend: G = rows, E = filled buckets over all rows, N = durations, K = buckets there are.

Source:
    The buckets: Masson, Rim, Lee, "DDSketch", VLDB 2019, section 2.1, on whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from argus_otel.wire.codes import PHASES
from argus_otel.wire.varints import decode_uvarints, encode_uvarints, pack, unzigzag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

_Number = TypeVar("_Number", np.int64, np.float64)

VERSION: Final = 1

ERROR_PER_MILLE: Final = 20
"""Relative error of a duration: 2 %, a fifth of the smallest slowdown that fires a detector."""

MOST_NS: Final = 3_600_000_000_000
"""An hour. A kernel that takes longer hangs, whatever its duration."""

_MOST_ERROR_PER_MILLE: Final = 200
_LAST_PLACE: Final = 15
_MIDDLE_PLACE: Final = 7
_COUNT_CODES: Final = 8


_ROUNDING: Final = 1e-12
"""Shares that differ by less are the same, added up in another order."""

_MOST_PACKED: Final = 1 << 40
"""No count, code or stream on the wire is larger."""

_ROW_HEAD: Final = 7
"""Numbers before the buckets of a packed row: version, error, n, name, stream, phase + 1, buckets."""
_ROW_FILLED: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sketch:
    """Counts of durations per (name, stream, phase), rows and buckets in ascending order."""

    names: tuple[str, ...]
    """The dictionary that ``name`` points into."""
    phases: tuple[str, ...] = PHASES
    """The dictionary that ``phase`` points into."""
    name: Ints
    """Shape [G]."""
    stream: Ints
    """Shape [G]; 0 or more."""
    phase: Ints
    """Shape [G]; -1 unknown."""
    row: Ints
    """Shape [E]; the row that a filled bucket belongs to."""
    bucket: Ints
    """Shape [E]."""
    count: Ints
    """Shape [E]; 1 or more."""
    place_sum: Ints
    """Shape [E]; 0 to 15 times count: sum of the durations' places in their bucket."""
    error_per_mille: int = ERROR_PER_MILLE

    @property
    def counts(self) -> Ints:
        """How many durations each row holds [G]."""
        return _sums(self.count, self._starts())

    @property
    def means_ns(self) -> Floats:
        """Mean of the durations in each bucket [E], to a thirtieth of the bucket's width."""
        return _means_ns(self.bucket, self.count, self.place_sum, self.error_per_mille)

    @property
    def totals_ns(self) -> Floats:
        """Sum of each row's durations [G], to a fourteenth of the sketch's error."""
        return _sums(self.count * self.means_ns, self._starts())

    def labels(self) -> list[tuple[str, int, str | None]]:
        """Name, stream and phase of each row [G]; None where the phase is unknown."""
        return [
            (self.names[name], stream, self.phases[phase] if phase >= 0 else None)
            for name, stream, phase in zip(
                self.name.tolist(), self.stream.tolist(), self.phase.tolist(), strict=True
            )
        ]

    def quantiles_ns(self, q: ArrayLike) -> Floats:
        """Quantiles of each row.

        Args:
            q: Shape [Q], 0 to 1.

        Returns:
            Nanoseconds, shape [G, Q]: within the sketch's error of the smallest duration that at
            least that share of the row does not exceed (numpy's ``inverted_cdf``).
        """
        quantile_ns: Floats = _buckets(self.error_per_mille).middle_ns[
            self.bucket[self.quantile_entries(q)]
        ]
        return quantile_ns

    def quantile_entries(self, q: ArrayLike) -> Ints:
        """Which filled bucket each quantile of each row lies in, shape [G, Q], an index of [E]."""
        wanted_Q = np.atleast_1d(np.asarray(q, dtype=np.float64))
        if bool(((wanted_Q < 0) | (wanted_Q > 1)).any()) or bool(np.isnan(wanted_Q).any()):
            msg = "quantiles are between 0 and 1"
            raise ValueError(msg)
        counts_G = self.counts
        running_E = np.cumsum(self.count)
        before_G = running_E[self._starts()] - self.count[self._starts()]
        # The place of the duration wanted, from 1, among all of the sketch.
        place_GQ = np.clip(np.ceil(wanted_Q * counts_G[:, None]), 1, counts_G[:, None])
        entries: Ints = np.searchsorted(running_E, before_G[:, None] + place_GQ)
        return entries

    def _starts(self) -> Ints:
        return np.searchsorted(self.row, np.arange(self.name.size))


def sketch_durations(
    duration_ns: ArrayLike,
    name: ArrayLike,
    stream: ArrayLike,
    phase: ArrayLike,
    *,
    names: Sequence[str],
    phases: Sequence[str] = PHASES,
    error_per_mille: int = ERROR_PER_MILLE,
) -> Sketch:
    """Sketch durations.

    Args:
        duration_ns: Whole nanoseconds, shape [N].
        name: Shape [N], index into ``names``.
        stream: Shape [N], 0 to 2**40 - 1.
        phase: Shape [N], index into ``phases``, -1 where unknown.
        names: What ``name`` points into.
        phases: What ``phase`` points into.
        error_per_mille: Relative error; sketches of different errors cannot be merged.

    Raises:
        ValueError: Shapes differ, or a code is outside of its dictionary.

    Cost:
        Background thread. About 0.2 µs a duration.
    """
    duration_N, name_N, stream_N, phase_N = (
        np.asarray(column, dtype=np.int64) for column in (duration_ns, name, stream, phase)
    )
    if duration_N.ndim != 1 or not (
        duration_N.shape == name_N.shape == stream_N.shape == phase_N.shape
    ):
        msg = "durations, names, streams and phases differ in shape"
        raise ValueError(msg)
    _check_codes(name_N, 0, len(names), "name")
    _check_codes(phase_N, -1, len(phases), "phase")
    _check_codes(stream_N, 0, _MOST_PACKED, "stream")
    bucket_N, place_N = places_of(duration_N, error_per_mille)
    return _fold(
        (name_N, stream_N, phase_N),
        bucket_N,
        np.ones_like(bucket_N),
        place_N,
        names=tuple(names),
        phases=tuple(phases),
        error_per_mille=error_per_mille,
    )


def merge_sketches(sketches: Iterable[Sketch]) -> Sketch:
    """Sketch of all durations that went into these; rows are matched by the names themselves.

    Returns:
        Exactly what ``sketch_durations`` gives of all of them. Where dictionaries differ, a new one
        of all names in alphabetical order.

    Raises:
        ValueError: There is none, or their errors differ.
    """
    parts = list(sketches)
    errors = {part.error_per_mille for part in parts}
    if len(errors) != 1:
        msg = f"sketches of one error can be merged, not of {sorted(errors) or 'none'}"
        raise ValueError(msg)
    names, name_codes = _one_dictionary([part.names for part in parts])
    phases, phase_codes = _one_dictionary([part.phases for part in parts])
    columns: list[list[Ints]] = [[], [], [], [], [], []]
    for part, name_code, phase_code in zip(parts, name_codes, phase_codes, strict=True):
        of_rows = (
            name_code[part.name],
            part.stream,
            phase_code[part.phase],  # -1 takes the last: unknown
        )
        of_entries = (part.bucket, part.count, part.place_sum)
        for column, values in zip(
            columns, (*(values[part.row] for values in of_rows), *of_entries), strict=True
        ):
            column.append(values)
    name, stream, phase, bucket, count, place_sum = (np.concatenate(column) for column in columns)
    return _fold(
        (name, stream, phase),
        bucket,
        count,
        place_sum,
        names=names,
        phases=phases,
        error_per_mille=errors.pop(),
    )


def distances(sketch: Sketch, peers: Sketch) -> Floats:
    """How far each row is from the same row of its peers, as a share of their median duration.

    A rank that takes 1.3 times as long is at 0.3.

    Args:
        sketch: One rank's.
        peers: Another's, or many merged.

    Returns:
        Shape [G] of ``sketch``; NaN where peers lack the row. ``distances_ns`` over the median,
        which is the mean of the bucket that it lies in: for kernels that vary little it is nearer
        than a quantile's error.

    Raises:
        ValueError: Their errors differ.
    """
    distance_ns = distances_ns(sketch, peers)
    theirs_G = _same_rows(sketch, peers)
    (known,) = np.nonzero(theirs_G >= 0)
    median_ns = peers.means_ns[peers.quantile_entries(0.5)[theirs_G[known], 0]]
    distance_ns[known] /= np.maximum(median_ns, 1.0)
    return distance_ns


def distances_ns(sketch: Sketch, peers: Sketch) -> Floats:
    """How far each row is from the same row of its peers.

    The Wasserstein-1 distance: by how much durations would have to change, on average, for the one
    distribution to become the other. Each bucket stands for the mean of the durations in it.

    Args:
        sketch: One rank's.
        peers: Another's, or many merged.

    Returns:
        Nanoseconds, shape [G] of ``sketch``; NaN where peers lack the row. At worst it is off by
        15/14 * e * (mean of the row + mean of the peers'), e the sketches' relative error;
        ordinarily by a tenth of that.

    Raises:
        ValueError: Their errors differ.

    Cost:
        Service. About 0.3 µs a bucket.
    """
    if sketch.error_per_mille != peers.error_per_mille:
        msg = "sketches of different errors cannot be compared"
        raise ValueError(msg)
    theirs_G = _same_rows(sketch, peers)
    mine_of = np.full(peers.name.size, -1)
    mine_of[theirs_G[theirs_G >= 0]] = np.flatnonzero(theirs_G >= 0)
    here = theirs_G[sketch.row] >= 0
    there = mine_of[peers.row] >= 0
    row = np.concatenate((sketch.row[here], mine_of[peers.row[there]]))
    value_ns = np.concatenate((sketch.means_ns[here], peers.means_ns[there]))
    share = np.concatenate(
        (
            sketch.count[here] / sketch.counts[sketch.row[here]],
            -peers.count[there] / peers.counts[peers.row[there]],
        )
    )
    order = np.lexsort((value_ns, row))
    row, value_ns = row[order], value_ns[order]
    # Shares of a row add up to nothing, so that the next row begins at 0.
    ahead = np.cumsum(share[order])[:-1]
    ahead[np.abs(ahead) < _ROUNDING] = 0.0
    step_ns = np.where(row[1:] == row[:-1], np.diff(value_ns), 0.0)
    distance_ns = np.bincount(row[:-1], np.abs(ahead) * step_ns, theirs_G.size)
    return np.where(theirs_G >= 0, distance_ns, np.nan)


def encode_sketch(sketch: Sketch) -> bytes:
    """Pack a sketch, without its dictionaries.

    Cost:
        Background thread. About 1 µs a row.
    """
    starts = sketch._starts()  # noqa: SLF001 - the same module
    step = np.diff(sketch.bucket, prepend=0) - 1
    step[starts] = sketch.bucket[starts]
    off = sketch.place_sum - _MIDDLE_PLACE * sketch.count
    columns = (
        np.diff(sketch.name, prepend=0),
        sketch.stream,
        sketch.phase + 1,
        np.diff(starts, append=sketch.row.size),
        _COUNT_CODES * step + np.minimum(sketch.count, _COUNT_CODES) - 1,
        sketch.count[sketch.count >= _COUNT_CODES] - _COUNT_CODES,
        (off << 1) ^ (off >> 63),
    )
    head = [VERSION, sketch.error_per_mille, sketch.name.size]
    return pack(head + np.concatenate(columns).tolist())


def decode_sketch(data: bytes, names: Sequence[str], phases: Sequence[str] = PHASES) -> Sketch:
    """Read a packed sketch.

    Args:
        data: What ``encode_sketch`` gave.
        names: The dictionary, or a longer one that begins with it.
        phases: The same of phases.

    Raises:
        ValueError: Damaged, of a version that this reader does not know, or of another dictionary.
    """
    values = decode_uvarints(data)
    if not values.size or int(values[0]) != VERSION:
        version = int(values[0]) if values.size else "none"
        msg = f"packed sketch has layout version {version}; this reader knows {VERSION}"
        raise ValueError(msg)
    columns = _Columns(values)
    error_per_mille, rows = columns.take(2).tolist()
    buckets = _buckets(error_per_mille)
    name = np.cumsum(columns.take(rows))
    stream, phase, filled = columns.take(rows), columns.take(rows) - 1, columns.take(rows)
    _check_codes(name, 0, len(names), "name")
    _check_codes(phase, -1, len(phases), "phase")
    if bool((filled < 1).any()) or bool((filled > buckets.size).any()):
        msg = "packed sketch has a row without buckets, or with more than there are"
        raise ValueError(msg)
    coded = columns.take(int(filled.sum()))
    count = coded % _COUNT_CODES + 1
    several = count == _COUNT_CODES
    count[several] += columns.take(int(several.sum()))
    place_sum = unzigzag(columns.take(coded.size).astype(np.uint64)) + _MIDDLE_PLACE * count
    columns.end()
    row = np.repeat(np.arange(rows), filled)
    starts = np.cumsum(filled) - filled
    bucket = _bucket_of(coded // _COUNT_CODES, starts, row, buckets.size)
    order = np.lexsort((phase, stream, name))
    key = np.stack((name, stream, phase))
    if bool((order != np.arange(rows)).any()) or bool(
        (key[:, 1:] == key[:, :-1]).all(axis=0).any()
    ):
        msg = "packed sketch has its rows out of order"
        raise ValueError(msg)
    _check_places(place_sum, count)
    return Sketch(
        names=tuple(names),
        phases=tuple(phases),
        name=name,
        stream=stream,
        phase=phase,
        row=row,
        bucket=bucket,
        count=count,
        place_sum=place_sum,
        error_per_mille=error_per_mille,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """What rows hold, whatever they are of: buckets row by row, in each upwards."""

    filled: Ints
    """Shape [G]; buckets of each row, 1 or more."""
    bucket: Ints
    """Shape [E]."""
    count: Ints
    """Shape [E]."""
    place_sum: Ints
    """Shape [E]."""
    error_per_mille: int = ERROR_PER_MILLE

    @property
    def totals_ns(self) -> Floats:
        """Sum of each row's durations [G], to a fourteenth of the sketch's error."""
        means_ns = _means_ns(self.bucket, self.count, self.place_sum, self.error_per_mille)
        return _sums(self.count * means_ns, np.cumsum(self.filled) - self.filled)


def places_of(duration_ns: ArrayLike, error_per_mille: int = ERROR_PER_MILLE) -> tuple[Ints, Ints]:
    """Bucket of each duration, and its place in it.

    Args:
        duration_ns: Whole nanoseconds, any shape.
        error_per_mille: Of the sketch.

    Returns:
        Two arrays of that shape.
    """
    within = np.clip(np.asarray(duration_ns, dtype=np.int64), 0, MOST_NS)
    buckets = _buckets(error_per_mille)
    bucket = np.searchsorted(buckets.high_ns, within)
    low = buckets.low_ns[bucket]
    width = buckets.high_ns[bucket] - low
    return bucket, (2 * _LAST_PLACE * (within - low) + width) // np.maximum(2 * width, 1)


def pack_rows(rows: Rows) -> tuple[NDArray[np.uint8], Ints]:
    """Pack each row as a sketch by itself.

    Returns:
        The bytes of all, and where each row's begin and end, shape [G + 1].

    Cost:
        Service. About 0.5 µs a row of two buckets.
    """
    filled, first = rows.filled, np.cumsum(rows.filled) - rows.filled
    step = np.diff(rows.bucket, prepend=0) - 1
    step[first] = rows.bucket[first]
    off = rows.place_sum - _MIDDLE_PLACE * rows.count
    several = rows.count >= _COUNT_CODES
    extra = _sums(several.astype(np.int64), first)
    width = _ROW_HEAD + 2 * filled + extra
    begin = np.cumsum(width) - width
    numbers = np.zeros(int(width.sum()), dtype=np.int64)
    numbers[begin], numbers[begin + 1], numbers[begin + 2] = VERSION, rows.error_per_mille, 1
    numbers[begin + _ROW_FILLED] = filled
    at = np.arange(rows.bucket.size) + np.repeat(begin + _ROW_HEAD - first, filled)
    numbers[at] = _COUNT_CODES * step + np.minimum(rows.count, _COUNT_CODES) - 1
    numbers[at + np.repeat(filled + extra, filled)] = (off << 1) ^ (off >> 63)
    extra_first = np.cumsum(extra) - extra
    at = np.arange(int(extra.sum())) + np.repeat(begin + _ROW_HEAD + filled - extra_first, extra)
    numbers[at] = rows.count[several] - _COUNT_CODES
    data, ends = encode_uvarints(numbers)
    return data, np.append(0, ends[begin + width - 1])


def read_rows(data: bytes, offsets: Ints) -> Rows:
    """Read rows that ``pack_rows`` has packed.

    Args:
        data: The bytes of all.
        offsets: Where each row's begin and end, shape [G + 1], from 0.

    Raises:
        ValueError: Damaged, of a version that this reader does not know, or of several errors.

    Cost:
        Service. About 0.5 µs a row of two buckets.
    """
    size = offsets.size - 1
    if size < 1:
        nothing = np.empty(0, dtype=np.int64)
        return Rows(filled=nothing, bucket=nothing, count=nothing, place_sum=nothing)
    if not data:
        msg = "packed sketch is cut short: there are rows, and no bytes"
        raise ValueError(msg)
    values = decode_uvarints(data)
    # A number ends with a byte below 128; before each row lie as many numbers as such bytes.
    ended = np.cumsum(np.frombuffer(data, dtype=np.uint8) < 0x80)
    bounds = np.append(0, ended[np.maximum(offsets[1:] - 1, 0)])
    begin, width = bounds[:-1], np.diff(bounds)
    if int(width.min()) < _ROW_HEAD or int(values.max()) >= _MOST_PACKED:
        msg = "packed sketch is cut short, or has a number that is too large"
        raise ValueError(msg)
    numbers = values.astype(np.int64)
    if bool((numbers[begin] != VERSION).any()) or bool((numbers[begin + 2] != 1).any()):
        msg = f"packed sketch is no single row of layout version {VERSION}"
        raise ValueError(msg)
    error = int(numbers[begin[0] + 1])
    if bool((numbers[begin + 1] != error).any()):
        msg = "sketches of different errors cannot be compared"
        raise ValueError(msg)
    buckets = _buckets(error)
    filled = numbers[begin + _ROW_FILLED]
    extra = width - _ROW_HEAD - 2 * filled
    if bool(((filled < 1) | (filled > buckets.size) | (extra < 0)).any()):
        msg = "packed sketch is cut short, or has a row without buckets"
        raise ValueError(msg)
    first = np.cumsum(filled) - filled
    at = np.arange(int(filled.sum())) + np.repeat(begin + _ROW_HEAD - first, filled)
    coded = numbers[at]
    count = coded % _COUNT_CODES + 1
    several = count == _COUNT_CODES
    if bool((_sums(several.astype(np.int64), first) != extra).any()):
        msg = "packed sketch has more, or fewer, counts than buckets"
        raise ValueError(msg)
    off = unzigzag(values[at + np.repeat(filled + extra, filled)])
    extra_first = np.cumsum(extra) - extra
    at = np.arange(int(extra.sum())) + np.repeat(begin + _ROW_HEAD + filled - extra_first, extra)
    count[several] += numbers[at]
    row = np.repeat(np.arange(size), filled)
    bucket = _bucket_of(coded // _COUNT_CODES, first, row, buckets.size)
    place_sum = off + _MIDDLE_PLACE * count
    _check_places(place_sum, count)
    return Rows(
        filled=filled, bucket=bucket, count=count, place_sum=place_sum, error_per_mille=error
    )


def sketch_of_rows(
    rows: Rows,
    name: ArrayLike,
    stream: ArrayLike,
    phase: ArrayLike,
    *,
    names: Sequence[str],
    phases: Sequence[str] = PHASES,
) -> Sketch:
    """One sketch of many rows; those of one key are added up.

    Args:
        rows: Shape [G].
        name: Shape [G], index into ``names``.
        stream: Shape [G], 0 or more.
        phase: Shape [G], index into ``phases``, -1 where unknown.
        names: What ``name`` points into.
        phases: What ``phase`` points into.

    Raises:
        ValueError: A code is outside of its dictionary.
    """
    columns = [np.asarray(column, dtype=np.int64) for column in (name, stream, phase)]
    _check_codes(columns[0], 0, len(names), "name")
    _check_codes(columns[1], 0, _MOST_PACKED, "stream")
    _check_codes(columns[2], -1, len(phases), "phase")
    name_E, stream_E, phase_E = (np.repeat(column, rows.filled) for column in columns)
    return _fold(
        (name_E, stream_E, phase_E),
        rows.bucket,
        rows.count,
        rows.place_sum,
        names=tuple(names),
        phases=tuple(phases),
        error_per_mille=rows.error_per_mille,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Buckets:
    """Edges, whole nanoseconds, and what a bucket stands for; shape [K] each."""

    low_ns: Ints
    high_ns: Ints
    middle_ns: Floats

    @property
    def size(self) -> int:
        return self.low_ns.size


@lru_cache(maxsize=8)
def _buckets(error_per_mille: int) -> _Buckets:
    if not 1 <= error_per_mille <= _MOST_ERROR_PER_MILLE:
        msg = f"a sketch's error is 1 to {_MOST_ERROR_PER_MILLE} per mille, not {error_per_mille}"
        raise ValueError(msg)
    low, high = [0], [0]
    while high[-1] < MOST_NS:
        low.append(high[-1] + 1)
        high.append(min(low[-1] * (1000 + error_per_mille) // (1000 - error_per_mille), MOST_NS))
    low_ns, high_ns = np.array(low), np.array(high)
    return _Buckets(
        low_ns=low_ns,
        high_ns=high_ns,
        middle_ns=2.0 * low_ns * high_ns / np.maximum(low_ns + high_ns, 1),
    )


def _fold(
    key: tuple[Ints, Ints, Ints],
    bucket: Ints,
    count: Ints,
    place_sum: Ints,
    *,
    names: tuple[str, ...],
    phases: tuple[str, ...],
    error_per_mille: int,
) -> Sketch:
    """Sum what has the same name, stream, phase and bucket."""
    name, stream, phase = key
    width = _buckets(error_per_mille).size
    streams, stream_code = np.unique(stream, return_inverse=True)
    place = ((name * streams.size + stream_code) * (len(phases) + 1) + phase + 1) * width + bucket
    order = np.argsort(place, kind="stable")
    place = place[order]
    entries = np.flatnonzero(np.diff(place, prepend=-1))
    row_key = place[entries] // width
    rows = np.flatnonzero(np.diff(row_key, prepend=-1))
    where = order[entries[rows]]
    return Sketch(
        names=names,
        phases=phases,
        name=name[where],
        stream=stream[where],
        phase=phase[where],
        row=np.repeat(np.arange(rows.size), np.diff(rows, append=entries.size)),
        bucket=place[entries] % width,
        count=_sums(count[order], entries),
        place_sum=_sums(place_sum[order], entries),
        error_per_mille=error_per_mille,
    )


def _means_ns(bucket: Ints, count: Ints, place_sum: Ints, error_per_mille: int) -> Floats:
    """What the places of a bucket's durations say of their mean."""
    buckets = _buckets(error_per_mille)
    low_ns = buckets.low_ns[bucket]
    width_ns = buckets.high_ns[bucket] - low_ns
    means_ns: Floats = low_ns + width_ns * (place_sum / (count * _LAST_PLACE))
    return means_ns


def _sums(values: NDArray[_Number], starts: Ints) -> NDArray[_Number]:
    """Sums of the stretches that begin there."""
    sums: NDArray[_Number] = np.add.reduceat(values, starts) if starts.size else values[:0]
    return sums


def _same_rows(sketch: Sketch, peers: Sketch) -> Ints:
    """The row of the peers for each row of the sketch [G], -1 where there is none."""
    row_of = {key: row for row, key in enumerate(peers.labels())}
    return np.array([row_of.get(key, -1) for key in sketch.labels()], dtype=np.int64)


def _one_dictionary(
    dictionaries: Sequence[tuple[str, ...]],
) -> tuple[tuple[str, ...], list[Ints]]:
    """One for all, and for each what its codes become; the last of those is for code -1."""
    if len(set(dictionaries)) == 1:
        merged = dictionaries[0]
    else:
        merged = tuple(sorted({name for names in dictionaries for name in names}))
    code = {name: index for index, name in enumerate(merged)}
    return merged, [
        np.array([*(code[name] for name in names), -1], dtype=np.int64) for names in dictionaries
    ]


def _bucket_of(step: Ints, starts: Ints, row: Ints, width: int) -> Ints:
    """Buckets from their differences, or ValueError where they leave what there is."""
    if step.size and int(step.max()) >= width:
        msg = "packed sketch names a bucket that is not there"
        raise ValueError(msg)
    up = step + 1
    up[starts] -= 1
    running = np.cumsum(up)
    bucket = running - (running[starts] - up[starts])[row]
    if bucket.size and int(bucket.max()) >= width:
        msg = "packed sketch names a bucket that is not there"
        raise ValueError(msg)
    return bucket


def _check_places(place_sum: Ints, count: Ints) -> None:
    if bool(((place_sum < 0) | (place_sum > _LAST_PLACE * count)).any()):
        msg = "packed sketch has durations outside of their bucket"
        raise ValueError(msg)


def _check_codes(code: Ints, least: int, size: int, what: str) -> None:
    if code.size and not least <= int(code.min()) <= int(code.max()) < size:
        msg = f"sketch has a {what} outside of {least} to {size - 1}"
        raise ValueError(msg)


class _Columns:
    """Takes columns off a stream of integers, and refuses to run past its end."""

    def __init__(self, values: NDArray[np.uint64]) -> None:
        self._values = values
        self._at = 1  # the version has been checked

    def take(self, count: int) -> Ints:
        """Below ``_MOST_PACKED``, so that no sum over a column leaves 64 bits."""
        part = self._values[self._at : self._at + count]
        if part.size != count:
            msg = "packed sketch is cut short"
            raise ValueError(msg)
        if count and int(part.max()) >= _MOST_PACKED:
            msg = "packed sketch has a number that is too large"
            raise ValueError(msg)
        self._at += count
        return part.astype(np.int64)

    def end(self) -> None:
        if self._at != self._values.size:
            msg = "packed sketch goes on after its end"
            raise ValueError(msg)
