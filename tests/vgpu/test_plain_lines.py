"""Lines that are read whole give what they give token by token: modules, programs and errors."""

from __future__ import annotations

import random

import numpy as np
import pytest
from vgpu_attention import BF16, CASES, H100, require_compiler
from vgpu_pairs import module

from pagedtune.harness.vgpu.decoder import decode
from pagedtune.harness.vgpu.ptx_module import Imm, Instruction, Label, Reg, Vector
from pagedtune.harness.vgpu.ptx_parser import parse
from pagedtune.harness.vgpu.run_ptx import FILE_HEADER
from pagedtune.kernels.cuda_paged import CudaPaged, CudaPagedConfig
from pagedtune.kernels.cuda_split_mma import CudaSplitMma
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.split_mma_plan import CudaSplitMmaConfig
from pagedtune.kernels.triton_split import TritonSplit
from pagedtune.kernels.variant import Config, Variant

PLAIN, FP8 = CASES["plain"], CASES["fp8"]
KERNELS: dict[str, tuple[Variant, Problem, PoolFormat, Config]] = {
    "triton_split": (TritonSplit(), PLAIN.problem, PLAIN.pool_format, PLAIN.triton),
    "triton_split, fp8": (TritonSplit(), FP8.problem, FP8.pool_format, FP8.triton),
    "cuda_paged": (CudaPaged(), PLAIN.problem, PLAIN.pool_format, CudaPagedConfig()),
    "cuda_split_mma": (CudaSplitMma(), Problem(8, 1, 64), BF16, CudaSplitMmaConfig(1, 32, 16, 1, 3)),
}

ODD = (
    FILE_HEADER
    + """
.file 1 "/a/b/kernel.py"
.global .align 4 .u32 table[2] = {1, 2};
.func (.param .b32 res) twice(.param .b32 arg)
{
.reg .b32 %r<4>;
ld.param.u32 %r1, [arg];
add.s32 %r1, %r1, %r1;
st.param.b32 [res], %r1;
ret;
}
.visible .entry k(.param .u64 x)
.reqntid 32
{
\t.reg .pred \t%p<8>;
\t.reg .b16 %h<8>; .reg .b32 %r<64>;
\t.reg .b64 \t%rd<9>, %alone;
\t.reg .b32 %r00<9>;
\t.reg .f32 %f<8>;
\t.loc\t1 7 0                         // kernel.py:7:0
$L__begin:
\tld.param.b64 \t%rd1, [x];   // "odd" ~ ` characters { ; in a comment
\t.loc\t1 8 3, function_name $L__begin, inlined_at 1 7 0
\tmov.u32 \t%r1, %tid.x;
mov.u32 %r007, 5;  /* the eighth of %r00<9> */
/* two
 lines ; mov.u32 %r1, 6; */ mov.u32 %r0, 010;
\tmov.u32 %r2, 0x1F; mov.u32 %r3, -7;
\tmov.u32 %r4, 4294967295U;
\tmov.f32 %f0, 0f3F800000;
\tmov.f32 %f1, -0f3F800000;
\tmov.f32 %f2, 1.5;
\tmov.u32 %r5, WARP_SZ;
\tmov.u32 %r5 , %laneid ;
\tadd.s32 %r6,%r5,%r4;
\tadd.s32
\t\t%r6, %r6,
\t\t1;
\tsetp.lt.s32 \t%p1|%p2, %r1, %r2;
\tsetp.lt.s32 \t_|%p3, %r1, %r2;
\tand.pred %p4, %p1, !%p2;
\t@%p1 bra \tNEXT;
\t@!%p1 mov.u32 %r8, 1;
@ %p1 mov.u32 %r8, 2;
\tshfl.sync.bfly.b32 \t%r9|%p5, %r8, 1, 31, -1;
NEXT: mov.u32 %r10, 3;
\tmul.wide.u32 %rd2, %r1, 4;
\tadd.s64 %rd3, %rd1, %rd2;
\t@%p4 ret;
\tst.global.v2.b32 \t[%rd3+8], {%r1, %r2};
\tst.global.v2.b32 [ %rd3 + 16 ], { %r1,%r2 };
\tst.global.v4.b32 [%rd3+-16], {
\t\t%r1, %r2, %r3, _};
\tld.global.L1::no_allocate.v2.b32 {%r1,_}, [%rd3 + 8];
\tld.global.b32 \t%r7, [table+4];
\tld.global.b32 %r7, [table + 0x4];
\t{ .reg .b32 %r1; mov.u32 %r1, 9; mov.u32 %r2, %r1; }
\t{
\t.reg .b16 %r3;
\tmov.b16 %r3, 4;
\tmov.u32 %r11, %r4;
\t.reg .b32 %r4;
\tmov.u32 %r4, 1;
\tadd.s32 %r11, %r4, %r11;
\tLOCAL:
\tbra LOCAL_END;
\tLOCAL_END:
\t}
\tadd.s32 %r11, %r4, %r3;
\t{
\tLOCAL:
\tcvt.u32.u16 %r12, %h1;}
\t{ .param .b32 a;
\t.param .b32 b;
\tst.param.b32 [a+0], %r11;
\tcall.uni (b), twice, (a);
\tld.param.b32 %r13, [b];
\t}
\tmov.b32 {%h2, %h3}, %r13;
\tmov.b32 %r14, {%h2,%h3};
\t.pragma "nounroll";
TABLE:
\t.branchtargets CASE0, CASE1;
\tbrx.idx %r14, TABLE;
CASE0:
CASE1:
\tbar.sync 0;

\tret;
}
"""
)


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """PTX by name."""
    found = {"odd": ODD, "odd, carriage returns": ODD.replace("\n", "\r\n")}
    for name, (variant, problem, pool_format, config) in KERNELS.items():
        require_compiler(variant.name)
        for number, artifact in enumerate(variant.build(problem, pool_format, config, H100)):
            assert artifact.ptx_path is not None
            found[f"{name} {number}"] = artifact.ptx_path.read_text()
    return found


def test_modules_and_programs_are_the_same(texts: dict[str, str]) -> None:
    assert len(texts) >= 2 + len(KERNELS)
    for name, text in texts.items():
        whole, by_token = parse(text), parse(text, by_token=True)
        assert repr(whole) == repr(by_token), name  # which tells 1 from 1.0, and registers from symbols
        for entry in (f.name for f in whole.functions.values() if f.is_entry):
            programs = [vars(decode(m, entry)) for m in (whole, by_token)]
            assert programs[0].keys() == programs[1].keys()
            for key, value in programs[0].items():
                same = np.array_equal if isinstance(value, np.ndarray) else lambda a, b: a == b
                assert same(value, programs[1][key]), (name, entry, key)


def test_odd_lines_mean_what_they_say() -> None:
    """By hand, from the text above."""
    function = parse(ODD).functions["k"]
    lines = ODD.split("\n")
    at: dict[int, Instruction] = {i.line: i for i in function.body if isinstance(i, Instruction)}

    def line_of(text: str) -> int:
        return next(n for n, line in enumerate(lines, 1) if text in line)

    assert at[line_of("lines ; mov")].operands == (Reg("%r0@0", "b32"), Imm(8))
    assert at[line_of("%r007")].operands == (Reg("%r007@0", "b32"), Imm(5))
    assert at[line_of("ld.param.b64")].source == "kernel.py:7"
    assert at[line_of("%tid.x")].source == "kernel.py:8"
    assert (at[line_of("@!%p1")].guard, at[line_of("@!%p1")].guard_negated) == (Reg("%p1@0", "pred"), True)
    assert at[line_of("[ %rd3 + 16 ]")].operands[1] == Vector((Reg("%r1@0", "b32"), Reg("%r2@0", "b32")))
    inner = next(n for n, s in enumerate(function.scopes) if s.registers.get("%r3") == Reg(f"%r3@{n}", "b16"))
    assert at[line_of("mov.u32 %r11, %r4")].operands == (Reg("%r11@0", "b32"), Reg("%r4@0", "b32"))
    assert at[line_of("mov.u32 %r4, 1")].operands[0] == Reg(f"%r4@{inner}", "b32")
    assert at[line_of("add.s32 %r11, %r4, %r11")].operands[1] == Reg(f"%r4@{inner}", "b32")
    assert at[line_of("add.s32 %r11, %r4, %r3")].operands[1:] == (Reg("%r4@0", "b32"), Reg("%r3@0", "b32"))
    assert next(i.name for i in function.body if isinstance(i, Label)) == "$L__begin@0"


def _outcome(text: str, by_token: bool) -> str:
    try:
        return repr(parse(text, by_token=by_token))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def test_damaged_text_gives_the_same_error() -> None:
    """Characters taken out, put in and exchanged: either way of reading ends the same."""
    rng = random.Random(5)
    refused = 0
    for _ in range(400):
        text = ODD
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(ODD.index(".visible .entry"), len(text))
            text = text[:at] + rng.choice(("", "", *' ,;:{}[]()@!|+-%_./~"\n1arx')) + text[at + rng.randrange(2) :]
        outcome = _outcome(text, by_token=False)
        assert outcome == _outcome(text, by_token=True)
        refused += outcome.startswith("PtxError: PTX line ")
    assert refused >= 100


NEARLY = (
    "add.s32 %r1, %r2,, %r3;", "mov.u32 %r1 %r2;", "mov.b64 %rd1, {%r1 %r2};", "mov.b64 %rd1, {%r1, %r2}{%r3};",
    "ld.global.b32 %r1, [%rd1;", "ld.global.b32 %r1, [%h];", "@%r1 ret;", "@%p99 ret;", "mov.u32 %r1, %nothing;",
)  # fmt: skip


@pytest.mark.parametrize("line", NEARLY)
def test_lines_that_nearly_look_plain_are_refused(line: str) -> None:
    text = module(f"mov.u32 %r2, 5;\n{line}", {})
    outcome = _outcome(text, by_token=False)
    assert outcome.startswith(f"PtxError: PTX line {text.split(chr(10)).index(line) + 1}: ")
    assert outcome == _outcome(text, by_token=True)
