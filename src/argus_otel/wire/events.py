"""What the training thread records: eight 64-bit integers an event.

The recorder writes them, condense reads them; the meaning of each field is agreed here.

============ ================== ================== =============================================
kind         t0, t1 (ns)        a                  b, c, d
============ ================== ================== =============================================
COLLECTIVE   arrival, 0         packed, see below  own count in group or channel; bytes; op id
END          end, 0             group              -; -; op id
WAIT         begin, end         -                  -
DATA         begin, end         CPU ns at begin    run delay ns at begin; both at end
FORWARD      begin, end         CPU ns at begin    run delay ns at begin; flags
BACKWARD     begin, end         CPU ns at begin    run delay ns at begin; flags
OPTIMIZER    begin, end         -                  -; flags
PHASE        begin, end         index of name      -; flags
GC           begin, end         generation         objects collected
STEP_END     end, rule | flags  ordinal            iteration or NONE; CPU ns; run delay ns
EXCEPTION    time, 0            index in a table
IDENTITY     time, 0            index of identity
WORK         time, 0            kind of work       amount
============ ================== ================== =============================================
"""

from __future__ import annotations

from typing import Final

import numpy as np

WORDS: Final = 8
BYTES: Final = WORDS * 8

VOID: Final = 0
"""A slot that was taken and could not be filled; means nothing."""
COLLECTIVE: Final = 1
END: Final = 2
WAIT: Final = 3
DATA: Final = 4
FORWARD: Final = 5
BACKWARD: Final = 6
OPTIMIZER: Final = 7
PHASE: Final = 8
GC: Final = 9
STEP_END: Final = 10
EXCEPTION: Final = 11
IDENTITY: Final = 12
WORK: Final = 13

NONE: Final = -(1 << 62)
"""Not known, where 0 could be a value."""

NESTED: Final = 1
"""Flag: inside another phase (a backward inside LBFGS's step); not a phase of its own."""
NO_GRAD: Final = 2
"""Flag: a forward pass without gradients."""
DDP_WAITS: Final = 4
"""Flag: a backward at whose end DDP's reducer waits for the last bucket in C++."""
ENDS_CAPTURED: Final = 1 << 8
"""Flag of STEP_END: ends of asynchronous collectives were asked for in this step."""
DEVICE: Final = 2 << 8
"""Flag of STEP_END: an accelerator was in use, so host times say nothing of who waits."""
RULE_MASK: Final = 0xFF
"""The rule, an index into ``RULES``, in ``t1`` of STEP_END; flags above it."""

RULES: Final = ("optimizer", "backward", "scaler", "set_step", "integration", "exit")
WORK_KINDS: Final = ("tokens", "samples", "sum_len2")

EVENT: Final = np.dtype([(name, "<i8") for name in ("seq", "kind", "t0", "t1", "a", "b", "c", "d")])

_GROUP_BITS = 20
_OP_BITS = 6


def pack_collective(group: int, op: int, *, is_async: bool, peer: int) -> int:
    """Field ``a`` of COLLECTIVE. ``peer`` is a global rank, -1 where there is none."""
    return group | op << _GROUP_BITS | is_async << (_GROUP_BITS + _OP_BITS) | (peer + 1) << 32


def unpack_collective(
    a: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.int64]],
    np.ndarray[tuple[int], np.dtype[np.int64]],
    np.ndarray[tuple[int], np.dtype[np.bool_]],
    np.ndarray[tuple[int], np.dtype[np.int64]],
]:
    """Group, operation, asynchronous, peer; shape [N] each."""
    group = a & ((1 << _GROUP_BITS) - 1)
    op = (a >> _GROUP_BITS) & ((1 << _OP_BITS) - 1)
    is_async = (a >> (_GROUP_BITS + _OP_BITS)) & 1 == 1
    return group, op, is_async, (a >> 32) - 1
