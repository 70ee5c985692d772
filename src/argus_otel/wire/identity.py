"""Who a process is in its job, and the groups it talks in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_GROUP: Final = "default_pg"


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
        """``key|description|ranges`` as the digest carries it."""
        return f"{self.key:016x}|{self.description}|{format_ranks(self.ranks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UncaughtException:
    """What of an exception enters a span: the type and the frames; the message only if asked."""

    type_name: str
    frames: tuple[str, ...]
    """``file:line function``, outermost first."""
    message: str | None = None


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks as ranges: ``0-3,8,12-15``. Order is kept, so a reordered group stays one."""
    parts: list[str] = []
    start = 0
    for index in range(1, len(ranks) + 1):
        if index == len(ranks) or ranks[index] != ranks[index - 1] + 1:
            first, last = ranks[start], ranks[index - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = index
    return ",".join(parts)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Undo ``format_ranks``.

    Raises:
        ValueError: The text is not a list of ranges.
    """
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        ranks.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(ranks)
