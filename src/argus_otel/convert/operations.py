"""What NCCL, c10d and their profilers call an operation or an element, in our words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

OTHER: Final = "other"

_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "all_reduce": ("allreduce", "allreducecoalesced"),
    "all_gather": ("allgather", "allgatherbase", "allgatherintotensor", "allgathercoalesced",
                   "allgatherintotensorcoalesced"),
    "reduce_scatter": ("reducescatter", "reducescatterbase", "reducescattertensor",
                       "reducescattertensorcoalesced"),
    "all_to_all": ("alltoall", "alltoallbase", "alltoallv", "alltoallsingle", "alltoallvbase"),
    "broadcast": ("broadcast", "broadcastoop"),
    "reduce": ("reduce", "reduceoop"),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "barrier": ("barrier", "allreducebarrier", "allbarrier"),
    "send": ("send", "isend"),
    "recv": ("recv", "irecv", "recvanysource"),
}  # fmt: skip
_OPERATION: Final = {spelling: op for op, some in _SPELLINGS.items() for spelling in some}

_ELEMENT_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "float8e4m3fn", "float8e5m2",
                     "float8e4m3fnuz", "float8e5m2fnuz", "quint8", "qint8"), 1),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float", "int", "float32", "int32", "uint32", "complexhalf"), 4),
    **dict.fromkeys(("double", "long", "float64", "int64", "uint64", "complexfloat"), 8),
    "complexdouble": 16,
}  # fmt: skip

_PLAIN: Final = re.compile(r"[^a-z0-9]")
_KERNEL: Final = re.compile(r"nccl(?:Dev)?Kernel_?([A-Za-z]+)", re.IGNORECASE)


def operation(name: str) -> str:
    """One of ``wire.digest.OPS`` for ``nccl:_all_gather_base``, ``allreduce`` or the like."""
    bare = name.rpartition(":")[2].split(" ")[0]
    return _OPERATION.get(_PLAIN.sub("", bare.lower()), OTHER)


def operation_of_kernel(name: str) -> str:
    """As ``operation``, from ``ncclDevKernel_AllReduce_Sum_f32_RING_LL`` or the like.

    A kernel that sends and receives may be any of several operations: ``other``.
    """
    match = _KERNEL.search(name)
    return _OPERATION.get(match[1].lower(), OTHER) if match else OTHER


def element_bytes(name: str) -> int:
    """Bytes of an element of a type, as torch calls it; 0 for a type that is not known."""
    bare = _PLAIN.sub("", name.lower().removeprefix("c10::").removeprefix("torch."))
    return _ELEMENT_BYTES.get(bare, 0)
