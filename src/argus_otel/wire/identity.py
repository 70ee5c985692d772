"""Who a process is in its job, and the groups it talks in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_LEAST_STRIDED: Final = 3
_MAX_MEMBERS: Final = 1_000_000
"""Above any job there is; a damaged range must not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Begins at start, and anew at each ``init_process_group``."""

    nonce: bytes
    """8 bytes that all ranks agree on; part of every id."""
    nonce_local: bool
    """The ranks could not agree: this process stands alone."""
    run_id: str
    attempt: int
    role: str
    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group, as events refer to it by index."""

    key: int
    description: str
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    era: int
    """Index of the identity under which the group was made."""
    blocks_host: bool
    """Waiting for this group blocks the host (gloo), so host times tell who waits."""

    @property
    def info(self) -> str:
        """``key|description|ranges`` as the digest carries it.

        Cost:
            Walks all members; whoever needs it often keeps it.
        """
        return f"{self.key:016x}|{self.description}|{format_ranks(self.ranks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What was compiled, as events refer to it by index."""

    function: str
    reason: str
    """The guard that failed, in torch's words; empty for a first compilation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncaughtException:
    """What of an exception enters a span: the type and the frames; the message only if asked."""

    type_name: str
    frames: tuple[str, ...]
    """``file:line function``, outermost first."""
    message: str | None = None


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks as ranges: ``0-3,8,12-15``, and with a stride ``0-9992/8``.

    Order is kept, so a reordered group stays one.
    """
    parts: list[str] = []
    start = 0
    while start < len(ranks):
        first = last = ranks[start]
        end = start + 1
        if end < len(ranks) and (stride := ranks[end] - first) > 0:
            while end < len(ranks) and ranks[end] - last == stride:
                last = ranks[end]
                end += 1
            # Two ranks apart are shorter as two, and the second may begin a range.
            if stride > 1 and end - start < _LEAST_STRIDED:
                end, last = start + 1, first
        if last == first:
            parts.append(str(first))
        else:
            parts.append(f"{first}-{last}" if stride == 1 else f"{first}-{last}/{stride}")
        start = end
    return ",".join(parts)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Undo ``format_ranks``.

    Raises:
        ValueError: The text is not a list of ranges, or names more ranks than any job has.
    """
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        low, dash, rest = part.partition("-")
        high, slash, step = rest.partition("/")
        first = int(low)
        last = int(high) if dash else first
        stride = int(step) if slash else 1
        if not (0 <= first <= last <= _MAX_MEMBERS and 1 <= stride <= _MAX_MEMBERS):
            msg = f"{part[:40]!r} is no range of ranks"
            raise ValueError(msg)
        named = range(first, last + 1, stride)
        if len(ranks) + len(named) > _MAX_MEMBERS + 1:
            msg = f"more than {_MAX_MEMBERS} ranks at {part[:40]!r}"
            raise ValueError(msg)
        ranks.extend(named)
    return tuple(ranks)
