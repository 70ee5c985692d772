"""Intervals, and what others call an operation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argus_otel.convert.intervals import inside, length, length_outside, union
from argus_otel.convert.operations import element_bytes, operation, operation_of_kernel
from argus_otel.wire.codes import OPS

SETS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=8)


def arrays(pairs):
    begin = np.array([float(begin) for begin, _ in pairs])
    return begin, begin + np.array([float(took) for _, took in pairs])


def ticks(pairs):
    """The same on a grid, the slow way."""
    return {tick for begin, took in pairs for tick in range(begin, begin + took)}


@given(first=SETS, second=SETS)
def test_intervals_cover_what_their_ticks_cover(first, second):
    """Each moment once, wherever they overlap."""
    begin, end = union(*arrays(first))

    assert length(*arrays(first)) == len(ticks(first))
    assert length_outside(*arrays(first), *arrays(second)) == len(ticks(first) - ticks(second))
    assert (begin[1:] > end[:-1]).all()
    at = np.arange(60.0)
    assert set(at[inside(at + 0.5, *arrays(first))].astype(int)) == ticks(first)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("nccl:all_to_all", "all_to_all"),
        ("nccl:send 0->1", "send"),
        ("gloo:broadcast", "broadcast"),
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_to_allv", "all_to_all"),
        ("nccl:all_reduce_barrier", "barrier"),
        ("nccl:coalesced", "other"),
        ("", "other"),
    ],
)
def test_operations_have_one_name_each(name, expected):
    """Whoever wrote them down."""
    assert operation(name) == expected
    assert expected in OPS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL", "all_gather"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "other"),
        ("ncclDevKernel_Generic_1", "other"),
    ],
)
def test_operations_are_told_from_kernels(name, expected):
    """Unless it may be any of several."""
    assert operation_of_kernel(name) == expected


def test_elements_have_a_size():
    """0 where the type is not known."""
    names = ("BFloat16", "c10::BFloat16", "Float", "Long", "Byte", "Float8_e4m3fn", "Odd")

    assert [element_bytes(name) for name in names] == [2, 2, 4, 8, 1, 1, 0]
