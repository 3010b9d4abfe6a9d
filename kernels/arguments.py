"""Kernel arguments as the driver and the native libraries take them: an array of pointers, one to each value."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .artifact import KernelAbi
from .launch import Arg, BoundPlan, CType, KernelStep, SlotArg

CValue = ctypes.c_uint64 | ctypes.c_int64 | ctypes.c_int32 | ctypes.c_float
PointerOf = Callable[[torch.Tensor], int]


@dataclass(frozen=True)
class Argument:
    """One argument of a bound step: where it comes from, and what the kernel gets."""

    source: Arg
    ctype: CType
    value: int | float


def resolve_arguments(
    bound: BoundPlan, step: KernelStep, abi: KernelAbi, pointer_of: PointerOf | None = None
) -> tuple[Argument, ...]:
    """The arguments of a step, checked against the binary that takes them.

    Args:
        pointer_of: address of a tensor's first element as the kernel sees it, where that is not `data_ptr()`.

    Raises:
        ValueError: number, types or alignment are not what the binary assumes; the message names the argument. Or the
            binary takes a struct by value, of which an argument is a part only.
    """
    if abi.offsets:
        raise ValueError(f"{step.entry}: takes a struct by value, which only the virtual GPU passes")
    arguments = tuple(_resolve(bound, arg, pointer_of) for arg in step.args)
    check_abi(step.entry, abi, [argument.ctype for argument in arguments])
    check_alignment(step.entry, abi, arguments)
    return arguments


def _resolve(bound: BoundPlan, arg: Arg, pointer_of: PointerOf | None) -> Argument:
    ctype, value = bound.resolve(arg)
    if pointer_of is not None and isinstance(arg, SlotArg) and arg.slot in bound.tensors:
        value = pointer_of(bound.tensors[arg.slot])
    return Argument(arg, ctype, value)


def check_abi(entry: str, abi: KernelAbi, given: Sequence[CType]) -> None:
    """Raises ValueError unless the arguments of a step are those that the binary takes."""
    if tuple(given) != abi.arg_types:
        wrong = next((i for i, (a, b) in enumerate(zip(given, abi.arg_types, strict=False)) if a != b), None)
        where = f"argument {wrong}" if wrong is not None else "the number of arguments"
        raise ValueError(
            f"{entry}: {where} does not fit the binary: {len(given)} arguments given, {len(abi.arg_types)} expected"
        )


def check_alignment(entry: str, abi: KernelAbi, arguments: Sequence[Argument]) -> None:
    """Raises ValueError unless addresses and strides are the multiples that the compiler was promised."""
    for index, argument in enumerate(arguments):
        align = abi.align.get(index, 1)
        if argument.ctype is not CType.F32 and int(argument.value) % align:
            raise ValueError(
                f"{entry}: argument {index} ({argument.source}) is {int(argument.value):#x}, "
                f"but the binary assumes a multiple of {align}"
            )


class PackedArguments:
    """Values that stay where they are, and `params[i]`, the address of value i: what `cuLaunchKernel` takes."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self._values = [_c_value(argument.ctype, argument.value) for argument in arguments]
        self._params = (ctypes.c_void_p * len(self._values))(*(ctypes.addressof(value) for value in self._values))

    @property
    def address(self) -> int:
        """Address of `params`: valid as long as this object lives."""
        return ctypes.addressof(self._params)


def _c_value(ctype: CType, value: int | float) -> CValue:
    match ctype:
        case CType.POINTER:
            return ctypes.c_uint64(int(value))
        case CType.I64:
            return ctypes.c_int64(int(value))
        case CType.I32:
            return ctypes.c_int32(int(value))
        case CType.F32:
            return ctypes.c_float(value)
