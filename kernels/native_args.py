"""Argument lists that the native kernels share; their order is that of `kernels/cpu/pagedtune_cpu.h`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .artifact import KernelAbi
from .dtypes import DType
from .launch import Arg, CType, ScalarArg, SlotArg, StrideArg
from .pool_format import KVAxes, PoolFormat, ScaleKind
from .problem import Problem

SOURCE_DIR = Path(__file__).parent / "cpu"
FLOAT_CODES = {DType.FP32: 0, DType.BF16: 1, DType.FP16: 2}  # PT_Q_DTYPE, PT_KV_DTYPE and the dtype arguments


def pointers(*slots: str) -> tuple[Arg, ...]:
    """Addresses of slots or workspaces."""
    return tuple(SlotArg(slot) for slot in slots)


def strides(slot: str, dims: Sequence[int]) -> tuple[Arg, ...]:
    """Strides of a slot."""
    return tuple(StrideArg(slot, dim) for dim in dims)


def i64(*values: int) -> tuple[Arg, ...]:
    """Integers."""
    return tuple(ScalarArg(value, CType.I64) for value in values)


def f32(*values: float) -> tuple[Arg, ...]:
    """Single-precision numbers."""
    return tuple(ScalarArg(value, CType.F32) for value in values)


def pool_strides(problem: Problem, pool_format: PoolFormat) -> tuple[Arg, ...]:
    """K strides (block, slot, head, outer and inner dim, pack), then V strides (block, slot, head, dim)."""
    k, v = pool_format.k_axes, pool_format.v_axes
    inner, pack = (k.dim, problem.head_dim) if k.pack is None else (k.pack, pool_format.pack)
    return (
        *strides("k_cache", (*_leading(k), k.dim, inner)),
        *i64(pack),
        *strides("v_cache", (*_leading(v), v.dim)),
    )


def _leading(axes: KVAxes) -> tuple[int, int, int]:
    return axes.block, axes.slot, axes.head


def scale_stride(pool_format: PoolFormat) -> int:
    """Distance of the scales of two KV heads: 0 where one scale serves all."""
    return int(pool_format.scale_kind is ScaleKind.PER_HEAD)


def token_scale_strides(pool_format: PoolFormat) -> tuple[Arg, ...]:
    """Strides (block, head) of `k_scale`, then of `v_scale`; zeros where scales do not hang on the token."""
    if not pool_format.has_token_scales:
        return i64(0, 0, 0, 0)
    return (*strides("k_scale", (0, 1)), *strides("v_scale", (0, 1)))


def abi_of(args: Sequence[Arg]) -> KernelAbi:
    """The ABI that takes `args`."""
    return KernelAbi(tuple(_ctype(arg) for arg in args))


def _ctype(arg: Arg) -> CType:
    if isinstance(arg, ScalarArg):
        return arg.ctype
    return CType.POINTER if isinstance(arg, SlotArg) else CType.I64
