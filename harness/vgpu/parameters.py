"""The parameter buffer of a launch: which of its bytes each argument fills."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pagedtune.kernels.arguments import Argument
from pagedtune.kernels.artifact import KernelAbi
from pagedtune.kernels.launch import CType

from .program import Program

_PACK = {CType.POINTER: "<Q", CType.I64: "<q", CType.I32: "<i", CType.F32: "<f"}
_SIZES = {CType.POINTER: 8, CType.I64: 8, CType.I32: 4, CType.F32: 4}


def check_places(program: Program, abi: KernelAbi, ctypes: Sequence[CType]) -> None:
    """Checks that the arguments fit the parameters that the PTX declares.

    Raises:
        ValueError: one argument for each parameter does not have its size, or where the ABI gives offsets, an argument
            lies across two parameters, outside all, or over another one.
    """
    sizes = [_SIZES[ctype] for ctype in ctypes]
    if not abi.offsets:
        takes = [p.num_bytes for p in program.params]
        if sizes != takes:
            raise ValueError(
                f"{program.entry}: the PTX takes {takes} bytes, not {sizes}: give every parameter, with its type"
            )
        return
    if len(abi.offsets) != len(sizes):
        raise ValueError(f"{program.entry}: {len(abi.offsets)} offsets for {len(sizes)} arguments")
    end = 0
    for offset, size in sorted(zip(abi.offsets, sizes, strict=True)):
        if not any(p.offset <= offset and offset + size <= p.offset + p.num_bytes for p in program.params):
            raise ValueError(f"{program.entry}: bytes {offset} to {offset + size} do not lie in one parameter")
        if offset < end:
            raise ValueError(f"{program.entry}: two arguments fill byte {offset} of the parameters")
        end = offset + size


def pack(program: Program, abi: KernelAbi, arguments: Sequence[Argument]) -> bytes:
    """The parameter buffer; bytes that no argument fills are zero. Arguments as `check_places` accepts them."""
    data = bytearray(program.param_bytes)
    offsets = abi.offsets or [p.offset for p in program.params]
    for argument, offset in zip(arguments, offsets, strict=True):
        struct.pack_into(_PACK[argument.ctype], data, offset, argument.value)
    return bytes(data)
