"""Names that stand for small numbers on the wire."""

from __future__ import annotations

from typing import Final

PHASES: Final = (
    "data.wait",
    "h2d",
    "forward",
    "backward",
    "optimizer.step",
    "between",
    "checkpoint",
    "evaluation",
    "prepare",
    "loss",
)
"""Phase names that need no dictionary. Append only: a name's place is its code on the wire."""

OPS: Final = (
    "other",
    "send",
    "recv",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "scatter",
    "gather",
)
"""Collective operations. Append only; a reader takes a code that it does not know for "other"."""
