"""One dump of torch's flight recorder, read: what its groups and entries are.

A pickle is a program: it is run with every name refused, so that it can build numbers, strings,
lists and mappings, and call nothing.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from argus_otel.convert.operations import element_bytes, operation
from argus_otel.convert.sources import Source, source_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from argus_otel.convert.sources import Advance

_MAX_BYTES: Final = 256 << 20
"""A ring of 20,000 entries with stacks is under 100 MB."""
_MAX_FRAMES: Final = 64
EXPECTED: Final = "a dump of torch's flight recorder (a pickle or JSON, one for each rank)"

# What unpickling raises for bytes that are no pickle, or one of something else.
_NOT_A_PICKLE: Final = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
_DIRECT: Final = re.compile(r"(?:\w+:)?(send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")
_RANK_IN_NAME: Final = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|bin))?(?:\.gz)?$")


class _RefusedError(pickle.UnpicklingError):
    """A pickle asked for something by name."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain data and nothing else."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        msg = f"asks for {module_name[:60]}.{global_name[:60]}"
        raise _RefusedError(msg)

    @override
    def persistent_load(self, pid: Any) -> Any:
        msg = "asks for an object outside the file"
        raise _RefusedError(msg)


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, as torch names it."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One operation."""

    record: int
    group: Group | None
    op: str
    seq: int | None
    """Own count of the group; null for point-to-point, which torch counts for both directions."""
    peer: int | None
    payload_bytes: int
    created_ns: int
    timeout_ns: int
    """0 where the dump does not say."""
    started_ns: int | None
    completed_ns: int | None
    duration_s: float | None
    completed: bool
    stack: str | None


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank wrote."""

    source: Source
    rank: int
    groups: Mapping[str, Group]
    entries: tuple[Entry, ...]
    damaged: int
    """Entries that could not be read."""
    has_gpu: bool

    @property
    def world_size(self) -> int:
        """Ranks that this rank knows of."""
        return max((group.ranks[-1] + 1 for group in self.groups.values()), default=self.rank + 1)


def read_dump(source: Source, advance: Advance | None) -> Dump:
    """One rank's dump, a pickle or JSON.

    Raises:
        SourceError: It is no such thing, asks to run code, or does not say whose it is.
    """
    document = _load(source, source.read(_MAX_BYTES, advance))
    if not isinstance(document, dict) or not isinstance(document.get("entries"), (list, tuple)):
        raise source_error(source, "without entries", EXPECTED)
    groups = _read_groups(document.get("pg_config"))
    rank = _rank_of(source, document, groups)
    entries = []
    damaged = 0
    for raw in document["entries"]:
        try:
            entries.append(_entry(raw, groups))
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
            damaged += 1
    has_gpu = "nccl_version" in document  # NCCL runs on nothing else
    return Dump(source, rank, groups, tuple(entries), damaged, has_gpu)


def _load(source: Source, data: bytes) -> Any:  # noqa: ANN401 - whatever is in the file
    if data.lstrip()[:1] in (b"{", b"["):
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise source_error(source, f"not readable as JSON: {error}", EXPECTED) from error
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _RefusedError as error:
        raise source_error(
            source,
            f"refused: the pickle {error}",
            EXPECTED,
            "A dump is plain data; a pickle that asks for names would run code. Do not load it.",
        ) from error
    except _NOT_A_PICKLE as error:
        raise source_error(source, f"not readable as a pickle: {error}", EXPECTED) from error


def _read_groups(config: object) -> dict[str, Group]:
    """Groups by torch's name for them; one that is not understood is left out."""
    if not isinstance(config, dict):
        return {}
    found = {}
    for name, about in config.items():
        if isinstance(about, dict):
            ranks = _read_ranks(about.get("ranks"))
            if ranks:
                found[str(name)] = Group(str(name), str(about.get("desc") or "undefined"), ranks)
    return found


def _read_ranks(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return ()
    if not isinstance(value, (list, tuple)) or not all(type(rank) is int for rank in value):
        return ()
    return tuple(sorted(rank for rank in value if 0 <= rank < 2**31))


def _rank_of(source: Source, document: Mapping[str, Any], groups: Mapping[str, Group]) -> int:
    told = document.get("rank")
    if type(told) is int and 0 <= told < 2**31:
        return told
    common = set.intersection(*(set(g.ranks) for g in groups.values())) if groups else set()
    match = _RANK_IN_NAME.search(source.file_name)
    if match is not None:
        rank = int(match[1])
        if common and rank not in common:
            raise source_error(
                source,
                f"named after rank {rank}, which is not in its process groups",
                "a name that ends in the rank, such as nccl_trace_rank_12",
                "Give it the name that torch had given it.",
            )
        return rank
    if len(common) == 1:
        return common.pop()
    raise source_error(
        source,
        "without a rank",
        "a name that ends in the rank, such as nccl_trace_rank_12",
        "Give it the name that torch had given it.",
    )


def _entry(raw: Mapping[str, Any], groups: Mapping[str, Group]) -> Entry:
    name, description = (str(part) for part in raw["process_group"])
    group = groups.get(name)
    if group is not None and group.description != description:
        group = None
    op, peer = operation(str(raw["profiling_name"])), None
    direct = _DIRECT.match(str(raw["profiling_name"]))
    is_direct = bool(raw.get("is_p2p")) or direct is not None
    if direct is not None:
        op, other = direct[1], int(direct[3])
        # Ranks within the group; on the group of all ranks that is the same.
        peer = group.ranks[other] if group is not None and other < len(group.ranks) else None
    duration_ms = raw.get("duration_ms")
    seq = raw.get("collective_seq_id", raw.get("seq_id"))
    state = str(raw["state"])
    return Entry(
        record=_whole(raw.get("record_id", raw.get("id", 0))),
        group=group,
        op=op,
        seq=None if is_direct or seq is None else _whole(seq),
        peer=peer,
        payload_bytes=_payload_bytes(raw),
        created_ns=_whole(raw["time_created_ns"]),
        timeout_ns=_whole((raw.get("timeout_ms") or 0) * 1_000_000),
        started_ns=_time(raw.get("time_discovered_started_ns")),
        completed_ns=_time(raw.get("time_discovered_completed_ns")),
        duration_s=_seconds(duration_ms),
        completed=state == "completed",
        stack=_stack(raw.get("frames")),
    )


def _whole(value: Any) -> int:  # noqa: ANN401 - whatever is in the file
    """A number that fits the tables.

    Raises:
        ValueError: It does not.
    """
    number = int(value)
    if not 0 <= number < 2**62:
        msg = f"out of range: {number}"
        raise ValueError(msg)
    return number


def _time(value: Any) -> int | None:  # noqa: ANN401 - whatever is in the file
    return (_whole(value) or None) if isinstance(value, (int, float)) else None


def _seconds(duration_ms: Any) -> float | None:  # noqa: ANN401 - whatever is in the file
    """A duration; None where there is none, or none that can be."""
    if duration_ms is None:
        return None
    seconds = float(duration_ms) / 1e3
    return seconds if 0 <= seconds < math.inf else None


def _payload_bytes(raw: Mapping[str, Any]) -> int:
    """Bytes of the inputs, as far as their types are known."""
    sizes = raw.get("input_sizes") or ()
    kinds = raw.get("input_dtypes") or ()
    total = sum(
        math.prod(int(n) for n in shape) * element_bytes(str(kind))
        for shape, kind in zip(sizes, kinds, strict=False)
    )
    return max(min(total, 2**62), 0)


def _stack(frames: object) -> str | None:
    """Outermost frame first, as heartbeats have it; torch has the innermost first."""
    if not isinstance(frames, (list, tuple)) or not frames:
        return None
    lines = [
        f"{frame.get('filename', '?')}:{frame.get('line', '?')} {frame.get('name', '?')}"
        for frame in frames[:_MAX_FRAMES]
        if isinstance(frame, dict)
    ]
    return " > ".join(reversed(lines)) or None
