"""Attention problems with their answer in float64, and how the GPU variants run them on the virtual GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace

import pytest
import torch

from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.triton_split import TritonSplitConfig
from pagedtune.kernels.variant import Config, Variant

H100 = Device("h100", DeviceKind.CUDA, capability=90, num_units=132)
H100_AT = {c: replace(H100, capability=c) for c in (80, 89, 90)}  # older targets, for their code only
NEEDS = {"triton_split": "triton", "cuda_paged": "cuda", "cuda_split_mma": "cuda", "cuda_split_simt": "cuda"}


@dataclass(frozen=True)
class Case:
    """One problem with its lengths."""

    problem: Problem
    pool_format: PoolFormat
    lens: tuple[int, ...]
    query_lens: tuple[int, ...] = ()
    triton: TritonSplitConfig = field(default_factory=lambda: TritonSplitConfig(4, 32, 32))
    tokens: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", self.query_lens or (1,) * len(self.lens))


BF16 = PoolFormat(16, DType.BF16)
CASES = {
    "plain": Case(Problem(8, 2, 64), BF16, (5, 37, 128)),
    "features": Case(
        Problem(4, 4, 64, sinks=True, alibi=True, soft_cap=30.0), PoolFormat(8, DType.BF16, Layout.HND), (50, 1)
    ),
    "window": Case(Problem(6, 2, 80, window=20), PoolFormat(16, DType.BF16, Layout.XPACKED), (50, 33)),
    "fp8": Case(
        Problem(4, 1, 64, q_dtype=DType.FP16), PoolFormat(16, DType.FP8_E4M3, scale_kind=ScaleKind.PER_HEAD), (40,)
    ),
    "scales of tokens": Case(
        Problem(4, 2, 64), PoolFormat(8, DType.FP8_E4M3, Layout.HND, ScaleKind.PER_TOKEN_HEAD), (40, 9)
    ),
    "fp32": Case(Problem(2, 1, 32, q_dtype=DType.FP32), PoolFormat(16, DType.FP32), (40, 3)),
    "several queries": Case(Problem(8, 2, 64, max_query_len=3), BF16, (40, 3), (3, 2)),
    "no split": Case(
        Problem(4, 1, 64, head_dim_v=32), PoolFormat(3, DType.BF16), (33,), triton=TritonSplitConfig(1, 32)
    ),
}


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    problem, pool_format, rows = case.problem, case.pool_format, sum(case.tokens)
    blocks = [-(-n // pool_format.block_size) for n in case.lens]
    total = sum(blocks) + 3
    order = iter(torch.randperm(total, generator=g).tolist())
    table = torch.full((len(blocks), max(blocks) + 1), -1, dtype=torch.int32)
    for seq, n in enumerate(blocks):
        table[seq, :n] = torch.tensor([next(order) for _ in range(n)])

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    starts = torch.tensor([0, *torch.tensor(case.tokens).cumsum(0).tolist()], dtype=torch.int32)
    out = torch.zeros(rows, problem.num_q_heads, problem.head_dim_v, dtype=problem.q_dtype.torch)
    tensors = {
        "q": random((rows, problem.num_q_heads, problem.head_dim), problem.q_dtype.torch),
        "k_cache": random(pool_format.k_shape(total, problem), pool_format.kv_dtype.torch),
        "v_cache": random(pool_format.v_shape(total, problem), pool_format.kv_dtype.torch),
        "block_table": table,
        "context_lens": torch.tensor(case.lens, dtype=torch.int32),
        "query_start_loc": starts,
        "out": out,
        "lse": torch.zeros(rows, problem.num_q_heads),
    }
    if problem.sinks:
        tensors["sinks"] = random((problem.num_q_heads,), torch.float32)
    if problem.alibi:
        tensors["alibi_slopes"] = random((problem.num_q_heads,), torch.float32)
    scale_shape = pool_format.scale_shape(total, problem)
    if scale_shape:
        tensors["k_scale"], tensors["v_scale"] = (random(scale_shape, torch.float32).abs() + 0.5 for _ in range(2))
    return tensors


def attention(case: Case, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in float64, one query token and head at a time."""
    problem, layout, size = case.problem, case.pool_format.layout, case.pool_format.block_size
    k, v = t["k_cache"].double(), t["v_cache"].double()
    if layout is Layout.XPACKED:
        k, v = k.permute(0, 3, 1, 2, 4).flatten(3), v.permute(0, 3, 1, 2)
    elif layout is Layout.HND:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if "k_scale" in t:
        k_scale, v_scale = (t[name].double() for name in ("k_scale", "v_scale"))
        if k_scale.dim() == 3:  # [num_blocks, num_kv_heads, block_size]
            k_scale, v_scale = k_scale.transpose(1, 2).unsqueeze(3), v_scale.transpose(1, 2).unsqueeze(3)
        else:
            k_scale, v_scale = k_scale.view(-1, 1), v_scale.view(-1, 1)
        k, v = k * k_scale, v * v_scale
    out, lse = torch.zeros(t["out"].shape, dtype=torch.float64), torch.zeros(t["lse"].shape, dtype=torch.float64)
    row = 0
    for seq, n in enumerate(case.lens):
        blocks = t["block_table"][seq, : -(-n // size)].long()
        keys, values = k[blocks].flatten(0, 1)[:n], v[blocks].flatten(0, 1)[:n]
        for query in range(case.tokens[seq]):
            position = n - case.tokens[seq] + query
            seen = torch.arange(max(0, position - problem.window + 1) if problem.window else 0, position + 1)
            for head in range(problem.num_q_heads):
                group = head // problem.gqa_ratio
                scores = keys[seen, group] @ t["q"][row, head].double() * problem.softmax_scale
                if problem.soft_cap:
                    scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
                if problem.alibi:
                    scores = scores + t["alibi_slopes"][head].double() * (seen - position)
                terms = torch.cat((scores, t["sinks"][head].double().view(1))) if problem.sinks else scores
                lse[row, head] = torch.logsumexp(terms, 0)
                out[row, head] = torch.exp(scores - lse[row, head]) @ values[seen, group]
            row += 1
    return out, lse


def require_compiler(variant: str) -> None:
    """Skips the test where the compiler of a variant is not installed."""
    if importlib.util.find_spec(NEEDS[variant]) is None:
        pytest.skip(f"{NEEDS[variant]} is not installed: {variant} cannot be compiled")


def run(
    variant: Variant, config: Config, case: Case, options: VirtualGpuOptions, capability: int = 90
) -> tuple[dict[str, torch.Tensor], VirtualGpu]:
    require_compiler(variant.name)
    tensors = tensors_of(case)
    artifacts = variant.build(case.problem, case.pool_format, config, H100_AT[capability])
    bounds = Bounds(len(case.lens), max(case.lens), max(case.tokens))
    plan = variant.plan(case.problem, case.pool_format, config, bounds)
    tensors |= plan.allocate_workspaces()
    gpu = VirtualGpu(artifacts, options)
    gpu.prepare(plan.bind(tensors))()
    return tensors, gpu
