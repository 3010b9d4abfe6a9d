"""Hand-written kernels with every kind of argument, as artifacts whose binary is any bytes: the stand-in runs PTX."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pagedtune.kernels.artifact import Artifact, ArtifactKind, KernelAbi, Resources
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.launch import CType

H100 = Device(
    "h100",
    DeviceKind.CUDA,
    "NVIDIA H100 80GB HBM3",
    capability=90,
    num_units=132,
    registers_per_unit=65536,
    shared_bytes_per_block=232448,
    shared_bytes_per_unit=233472,
    l2_bytes=50 << 20,
    memory_bytes=80 << 30,
)
HEADER = ".version 8.7\n.target {target}\n.address_size 64\n"

# out[thread] = a (i64) + b (i32) + c (f32) as an i64; the f32 is cut to an integer.
MIXED = """
.visible .entry mixed(.param .u64 out, .param .u64 a, .param .u32 b, .param .f32 c)
{
 .reg .b64 %rd<8>; .reg .b32 %r<4>; .reg .f32 %f<2>;
 ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [a]; ld.param.u32 %r1, [b]; ld.param.f32 %f1, [c];
 cvt.s64.s32 %rd3, %r1;
 cvt.rzi.s64.f32 %rd4, %f1;
 add.s64 %rd5, %rd2, %rd3;
 add.s64 %rd5, %rd5, %rd4;
 mov.u32 %r2, %tid.x;
 mul.wide.u32 %rd6, %r2, 8;
 add.s64 %rd7, %rd1, %rd6;
 st.global.u64 [%rd7], %rd5;
 ret;
}
"""
MIXED_ABI = KernelAbi((CType.POINTER, CType.I64, CType.I32, CType.F32))

# target[0] += 1.
COUNT = """
.visible .entry count(.param .u64 target)
{
 .reg .b64 %rd<2>; .reg .b32 %r<2>;
 ld.param.u64 %rd1, [target];
 atom.global.add.u32 %r1, [%rd1], 1;
 ret;
}
"""
COUNT_ABI = KernelAbi((CType.POINTER,))

# Stores one word `offset` bytes from `target`.
STORE = """
.visible .entry store(.param .u64 target, .param .u64 offset)
{
 .reg .b64 %rd<4>; .reg .b32 %r<2>;
 ld.param.u64 %rd1, [target]; ld.param.u64 %rd2, [offset];
 add.s64 %rd3, %rd1, %rd2;
 mov.u32 %r1, 7;
 st.global.u32 [%rd3], %r1;
 ret;
}
"""
STORE_ABI = KernelAbi((CType.POINTER, CType.I64))

NOTHING = """
.visible .entry nothing()
{
 ret;
}
"""
NOTHING_ABI = KernelAbi(())


def make_artifact(
    folder: Path, entry: str, body: str, abi: KernelAbi, resources: Resources | None = None, target: str = "sm_90"
) -> Artifact:
    """An artifact of one entry."""
    text = HEADER.format(target=target) + body
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    ptx, cubin = folder / f"{name}.ptx", folder / f"{name}.cubin"
    ptx.write_text(text)
    cubin.write_bytes(b"\x7fELF" + name.encode())
    return Artifact(
        ArtifactKind.CUBIN, cubin, name, target, {entry: abi}, {entry: resources or Resources(registers=16)}, ptx
    )
