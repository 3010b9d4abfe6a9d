"""Runs one instruction on arrays of bit patterns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedtune.harness.vgpu.report import RunReport
from pagedtune.harness.vgpu.run_ptx import FILE_HEADER, run_ptx
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpuOptions
from pagedtune.kernels.slot import Access

ONE_THREAD = VirtualGpuOptions(num_threads=1)
_TORCH = {16: torch.int16, 32: torch.int32, 64: torch.int64}
_NUMPY = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def as_tensor(values: Sequence[int], bits: int) -> torch.Tensor:
    """A tensor of the bit patterns `values`."""
    return torch.from_numpy(np.array(values, dtype=_NUMPY[bits]).view(f"i{bits // 8}").copy())


def as_ints(tensor: torch.Tensor) -> list[int]:
    """The bit patterns of a tensor."""
    width = tensor.element_size() * 8
    return [int(v) for v in tensor.numpy().view(_NUMPY[width])]


BLOCK = 128
# What an instruction under test may name: 16 bytes of each space that belong to the thread, and its index.
SCRATCH = {
    "%rw": "ld.param.u64 %rd1, [w]; mul.wide.u32 %rd2, %r9, 16; add.s64 %rw, %rd1, %rd2;",
    "%rs": "shl.b32 %r3, %r1, 4; mov.u32 %r4, sh; add.s32 %rs, %r3, %r4;",
    "%rl": "mov.u64 %rl, lo;",
    "%rg": "mul.wide.u32 %rd2, %r1, 16; mov.u64 %rd1, sh; cvta.shared.u64 %rd1, %rd1; add.s64 %rg, %rd1, %rd2;",
}


def kernel(instruction: str, widths: Sequence[int], result: int) -> str:
    """A kernel `k` that applies `instruction` to one element of each of its arrays."""
    params = ", ".join(f".param .u64 a{k}" for k in range(len(widths) + 1))
    lines = []
    for k, width in enumerate(widths):
        lines += [
            f"ld.param.u64 %rd1, [a{k}]; mul.wide.u32 %rd2, %r9, {width // 8}; add.s64 %rd3, %rd1, %rd2;",
            f"ld.global.b{width} %x{k}, [%rd3];",
        ]
    lines += [text for register, text in SCRATCH.items() if register in instruction]
    registers = "".join(f".reg .b{width} %x{k};" for k, width in enumerate(widths)) + f".reg .b{result} %y;"
    text = instruction.replace("{d}", "%y")
    for k in range(len(widths)):
        text = text.replace("{" + str(k) + "}", f"%x{k}")
    return f"""{FILE_HEADER}
.visible .entry k({params}, .param .u64 w) {{
.reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<16>; .reg .b64 %rd<16>; {registers}
.reg .b32 %rs; .reg .b64 %rw, %rl, %rg; .shared .align 16 .b8 sh[{16 * BLOCK}]; .local .align 16 .b8 lo[16];
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r9, %r2, {BLOCK}, %r1;
{" ".join(lines)}
{text}
ld.param.u64 %rd1, [a{len(widths)}]; mul.wide.u32 %rd2, %r9, {result // 8}; add.s64 %rd3, %rd1, %rd2;
st.global.b{result} [%rd3], %y;
ret; }}"""


def evaluate(instruction: str, widths: Sequence[int], operands: Sequence[Sequence[int]], result: int) -> list[int]:
    """Results of `instruction`, in which `{d}` is the destination and `{0}`, `{1}`, .. are the operands.

    Args:
        instruction: PTX statements; `%p0`.. are free, `SCRATCH` names memory, %r1 is the thread's index in its block of
            `BLOCK`; a predicate result is moved to `{d}` by the caller's text.
        widths: bits of each operand.
        operands: equally long lists of bit patterns; the last block is filled up with the first element.
        result: bits of the result.
    """
    n = len(operands[0])
    grid = -(-n // BLOCK)
    padded = [list(o) + [o[0]] * (grid * BLOCK - n) for o in operands]
    ptx = kernel(instruction, widths, result)
    out = torch.zeros(grid * BLOCK, dtype=_TORCH[result])
    arguments = {f"a{k}": (as_tensor(v, w), Access.IN) for k, (v, w) in enumerate(zip(padded, widths, strict=True))}
    scratch = torch.empty(grid * BLOCK * 4, dtype=torch.int32)
    report = run_ptx(
        ptx,
        "k",
        {**arguments, "o": (out, Access.OUT), "w": scratch},
        (grid, 1, 1),
        (BLOCK, 1, 1),
        options=ONE_THREAD,
    )
    assert report.clean, [str(f) for f in report.faults]
    return as_ints(out)[:n]


__all__ = ["ONE_THREAD", "RunReport", "as_ints", "as_tensor", "evaluate"]
