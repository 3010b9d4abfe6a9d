"""Packed arguments, read back as a driver reads them."""

from __future__ import annotations

import ctypes
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedtune.kernels.arguments import Argument, PackedArguments, check_alignment
from pagedtune.kernels.artifact import KernelAbi
from pagedtune.kernels.launch import CType, ScalarArg

FORMATS = {CType.POINTER: "<Q", CType.I64: "<q", CType.I32: "<i", CType.F32: "<f"}


def argument(ctype: CType, value: float) -> Argument:
    return Argument(ScalarArg(value, ctype), ctype, value)


ARGUMENTS = st.one_of(
    st.builds(argument, st.just(CType.POINTER), st.integers(0, 2**64 - 1)),
    st.builds(argument, st.just(CType.I64), st.integers(-(2**63), 2**63 - 1)),
    st.builds(argument, st.just(CType.I32), st.integers(-(2**31), 2**31 - 1)),
    st.builds(argument, st.just(CType.F32), st.floats(width=32)),
)


@given(st.lists(ARGUMENTS, max_size=40))
def test_each_pointer_leads_to_its_value(arguments: list[Argument]) -> None:
    packed = PackedArguments(arguments)
    pointers = (ctypes.c_void_p * len(arguments)).from_address(packed.address) if arguments else ()
    for pointer, given_ in zip(pointers, arguments, strict=True):
        form = FORMATS[given_.ctype]
        (value,) = struct.unpack(form, ctypes.string_at(pointer, struct.calcsize(form)))
        assert value == given_.value or (math.isnan(value) and math.isnan(given_.value))


def test_alignment_is_asked_of_addresses_and_strides_and_never_of_floats() -> None:
    abi = KernelAbi((CType.POINTER, CType.I64, CType.F32), {0: 16, 1: 8, 2: 4})
    good = [argument(CType.POINTER, 0x1230), argument(CType.I64, -16), argument(CType.F32, 0.5)]
    check_alignment("k", abi, good)
    check_alignment("k", abi, [argument(CType.POINTER, 0), *good[1:]])  # a null pointer stands for an absent slot
    with pytest.raises(ValueError, match=r"k: argument 0 .* is 0x1238, but the binary assumes a multiple of 16"):
        check_alignment("k", abi, [argument(CType.POINTER, 0x1238), *good[1:]])
    with pytest.raises(ValueError, match=r"k: argument 1 .* is -0x4, but the binary assumes a multiple of 8"):
        check_alignment("k", abi, [good[0], argument(CType.I64, -4), good[2]])
