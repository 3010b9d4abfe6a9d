"""The Triton and CUDA attention kernels on the virtual GPU against attention in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vgpu_attention import BF16, CASES, H100, Case, attention, require_compiler, run, tensors_of

from pagedtune.harness.vgpu.report import FaultKind
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.cuda_paged import CudaPaged, CudaPagedConfig
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import attention_slots
from pagedtune.kernels.triton_split import TritonSplit, TritonSplitConfig
from pagedtune.kernels.variant import Variant


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("variant", [TritonSplit(), CudaPaged()], ids=lambda v: v.name)
def test_attention_is_right_and_clean_under_two_schedules(variant: Variant, name: str) -> None:
    case = CASES[name]
    config = case.triton if variant.name == "triton_split" else CudaPagedConfig()
    plain = VirtualGpuOptions(num_threads=1)
    tensors, _ = run(variant, config, case, plain)
    out, lse = attention(case, tensors)
    rounding = torch.finfo(case.problem.q_dtype.torch).eps
    bound = 2 * rounding * (1 + out.abs())
    assert ((tensors["out"].double() - out).abs() <= bound).all()
    assert ((tensors["lse"].double() - lse).abs() <= 2.0**-20 * lse.abs().clamp(min=1)).all()
    adverse = replace(plain, reverse_warps=True, reverse_ctas=True, async_early=True, quantum=7)
    again, _ = run(variant, config, case, adverse)
    assert torch.equal(again["out"], tensors["out"])
    assert torch.equal(again["lse"], tensors["lse"])


def test_unused_slots_of_the_last_block_are_never_needed() -> None:
    """Slots past the context hold nothing: the kernels may load them, but no output may depend on them."""
    case = CASES["plain"]
    tensors = tensors_of(case)
    used = torch.zeros(tensors["k_cache"].shape[:2], dtype=torch.bool)
    for seq, n in enumerate(case.lens):
        for token in range(n):
            used[tensors["block_table"][seq, token // 16], token % 16] = True
    mask = ~used[:, :, None, None]
    options = VirtualGpuOptions(num_threads=1, uninitialised={"k_cache": mask, "v_cache": mask})
    for variant, config in ((TritonSplit(), case.triton), (CudaPaged(), CudaPagedConfig())):
        run(variant, config, case, options)


def test_every_kv_byte_is_read_once() -> None:
    """Whole blocks: unique bytes are the live bytes of the pool, and each of their sectors is read exactly once."""
    case = Case(Problem(4, 2, 64), BF16, (64, 128))
    tensors, gpu = run(TritonSplit(), TritonSplitConfig(2, 32, 32), case, VirtualGpuOptions(num_threads=1))
    split = gpu.report.steps[0].counters
    live = sum(case.lens) * 2 * 64 * 2
    assert split.unique_read_bytes["k_cache"] == live
    assert split.unique_read_bytes["v_cache"] == live
    kv_sectors = sum(s.sectors for s in gpu.report.steps[0].sites if s.instruction.startswith("cp.async.cg"))
    assert kv_sectors == 2 * live // 32
    assert split.read_sectors <= 1.5 * kv_sectors  # queries and tables are small beside them
    assert tensors["out"].isfinite().all()


def test_pointer_that_breaks_the_compiled_alignment_is_refused() -> None:
    case = CASES["plain"]
    require_compiler("triton_split")
    variant, tensors = TritonSplit(), tensors_of(case)
    shifted = torch.zeros(tensors["q"].numel() + 1, dtype=torch.bfloat16)[1:].view(tensors["q"].shape)
    plan = variant.plan(case.problem, case.pool_format, case.triton, Bounds(3, 128))
    tensors |= {**plan.allocate_workspaces(), "q": shifted}
    with pytest.raises(ValueError, match=r"slot 'q' starts at .*, expected an alignment of 16 bytes"):
        plan.bind(tensors)
    careless = replace(plan, slots=attention_slots(case.problem, case.pool_format))
    gpu = VirtualGpu(variant.build(case.problem, case.pool_format, case.triton, H100))
    with pytest.raises(ValueError, match=r"argument 0 .* the binary assumes a multiple of 16"):
        gpu.prepare(careless.bind(tensors))()


@pytest.mark.parametrize("instruction", ["bar.sync", "cp.async.wait_group"])
def test_no_synchronisation_of_the_kernel_can_be_removed_unnoticed(
    instruction: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The compiler puts in what is needed: without any one of them, data is read before it is there."""
    require_compiler("triton_split")
    case, config = CASES["plain"], TritonSplitConfig(2, 32, 32)
    variant = TritonSplit()
    split, merge = variant.build(case.problem, case.pool_format, config, H100)
    assert split.ptx_path is not None
    lines = split.ptx_path.read_text().splitlines()
    sites = [k for k, line in enumerate(lines) if line.strip().startswith(instruction)]
    assert sites
    path = Path(tmp_path_factory.mktemp("ptx")) / "kernel.ptx"
    for site in sites:
        path.write_text("\n".join(line for k, line in enumerate(lines) if k != site))
        tensors = tensors_of(case)
        plan = variant.plan(case.problem, case.pool_format, config, Bounds(len(case.lens), max(case.lens)))
        gpu = VirtualGpu((replace(split, ptx_path=path), merge), VirtualGpuOptions(num_threads=1, raise_faults=False))
        gpu.prepare(plan.bind(tensors | plan.allocate_workspaces()))()
        kinds = {fault.kind for fault in gpu.report.faults}
        assert kinds & {FaultKind.RACE_SHARED, FaultKind.ASYNC_UNWAITED}, f"PTX line {site + 1}: {lines[site]}"
