"""Host side of `cuda_paged`: the classic paged decode kernel in CUDA C++ (`kernels/cuda/paged_attention.cu`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .artifact import Artifact, KernelAbi
from .bounds import Bounds
from .device import Device, DeviceKind
from .dtypes import DType
from .launch import Arg, CType, KernelStep, LaunchPlan, SizeArg, StrideArg
from .native_args import f32, i64, pointers, token_scale_strides
from .pool_format import Layout, PoolFormat, ScaleKind
from .problem import Problem
from .slots import aligned, attention_slots, batch_limits
from .variant import Config, Properties, Variant

SOURCE = Path(__file__).parent / "cuda" / "paged_attention.cu"
MAX_HEAD_DIM = 512  # a lane holds a 32nd of the query and of the output in registers
WARP_CHOICES = (2, 4, 8)
_Q_CODES = {DType.FP32: 0, DType.BF16: 1, DType.FP16: 2}
_KV_CODES = {**_Q_CODES, DType.FP8_E4M3: 3, DType.INT8: 4}
_POINTERS = (
    "out", "q", "k_cache", "v_cache", "block_table", "context_lens", "query_start_loc", "sinks", "alibi_slopes",
    "k_scale", "v_scale", "lse",
)  # fmt: skip
_NUM_INTEGERS = 16


@dataclass(frozen=True)
class CudaPagedConfig(Config):
    """Tunables of `cuda_paged`.

    Args:
        num_warps: warps that share one query head's keys.
    """

    num_warps: int = 4


class CudaPaged(Variant):
    """One block per query token and query head; scores and sums in fp32 on the plain cores, no split."""

    name = "cuda_paged"
    summary = "CUDA C++, one block per query head with an online softmax per warp; reads the 2023 layout too"
    device_kind = DeviceKind.CUDA
    config_type = CudaPagedConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Warps."""
        for num_warps in WARP_CHOICES:
            yield CudaPagedConfig(num_warps)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        if pool_format.kv_dtype not in _KV_CODES:
            return f"cuda_paged cannot read {pool_format.kv_dtype} pools"
        if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
            return f"head dims go up to {MAX_HEAD_DIM}, not {max(problem.head_dim, problem.head_dim_v)}"
        if not 1 <= _own(config).num_warps <= 32:
            return f"num_warps={_own(config).num_warps} must be from 1 to 32"
        return pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One cubin per shape, dtypes and features."""
        from .build_nvrtc import CudaKernel, build_nvrtc

        chunk_k, chunk_v = _chunks(problem, pool_format)
        defines: dict[str, int | str] = {
            "PT_HEAD_DIM_K": problem.head_dim,
            "PT_HEAD_DIM_V": problem.head_dim_v,
            "PT_GROUP": problem.gqa_ratio,
            "PT_BLOCK_SIZE": pool_format.block_size,
            "PT_WARPS": _own(config).num_warps,
            "PT_Q_DTYPE": _Q_CODES[problem.q_dtype],
            "PT_KV_DTYPE": _KV_CODES[pool_format.kv_dtype],
            "PT_CHUNK_K": chunk_k,
            "PT_CHUNK_V": chunk_v,
            "PT_WINDOW": problem.window or 0,
            "PT_HAS_CAP": int(problem.soft_cap is not None),
            "PT_HAS_SINKS": int(problem.sinks),
            "PT_HAS_ALIBI": int(problem.alibi),
            "PT_HAS_SCALES": int(pool_format.has_constant_scales),
            "PT_TOKEN_SCALES": int(pool_format.has_token_scales),
            "PT_SCALE_STRIDE": int(pool_format.scale_kind is ScaleKind.PER_HEAD),
        }
        abi = {"attention_paged": _abi(problem, pool_format)}
        return (build_nvrtc(CudaKernel(SOURCE, abi, defines=defines), device.capability),)

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One launch."""
        k, v = pool_format.k_axes, pool_format.v_axes
        xpacked = pool_format.layout is Layout.XPACKED
        args: tuple[Arg, ...] = (
            *pointers(*_POINTERS),
            *(StrideArg("q", dim) for dim in (0, 1)),
            *(StrideArg("k_cache", dim) for dim in (k.block, k.slot, k.head, k.dim)),
            *i64(pool_format.pack if xpacked else problem.head_dim),
            *(StrideArg("v_cache", dim) for dim in (v.block, v.slot, v.head, v.dim)),
            *(StrideArg("out", dim) for dim in (0, 1)),
            StrideArg("lse", 0),
            StrideArg("block_table", 0),
            SizeArg("context_lens", 0),
            *f32(problem.softmax_scale, problem.soft_cap or 0.0),
            *token_scale_strides(pool_format),
        )
        grid = (bounds.max_num_tokens, problem.num_q_heads, 1)
        step = KernelStep("attention_paged", grid, args, (32 * _own(config).num_warps, 1, 1))
        slots = aligned(attention_slots(problem, pool_format), _alignments(problem, pool_format))
        return LaunchPlan((step,), slots, {}, batch_limits(bounds))


def _own(config: Config) -> CudaPagedConfig:
    if not isinstance(config, CudaPagedConfig):
        raise TypeError(f"cuda_paged takes a CudaPagedConfig, not {type(config).__name__}")
    return config


def _chunks(problem: Problem, pool_format: PoolFormat) -> tuple[int, int]:
    """Adjacent elements that a lane loads at once: up to 4, and 1 where the layout scatters them."""

    def chunk(dim: int) -> int:
        return next(c for c in (4, 2, 1) if dim % c == 0 and (dim >= 32 * c or c == 1))

    scattered = pool_format.layout is Layout.XPACKED
    return chunk(problem.head_dim), 1 if scattered else chunk(problem.head_dim_v)


def _alignments(problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
    """Bytes that are loaded in one piece, by tensor."""
    chunk_k, chunk_v = _chunks(problem, pool_format)
    size = pool_format.kv_dtype.itemsize
    return {"q": chunk_k * problem.q_dtype.itemsize, "k_cache": chunk_k * size, "v_cache": chunk_v * size}


def _abi(problem: Problem, pool_format: PoolFormat) -> KernelAbi:
    """Chunks are loaded in one piece: tensors and strides must be aligned to them."""
    chunk_k, chunk_v = _chunks(problem, pool_format)
    count, sizes = len(_POINTERS), _alignments(problem, pool_format)
    align = {k: sizes[name] for k, name in enumerate(_POINTERS) if name in sizes}
    num_strides = 6 if pool_format.layout is Layout.XPACKED else 5  # elsewhere the outer dim has stride 1
    align |= {count + k: chunk_k for k in range(num_strides)}
    align |= {count + 7 + k: chunk_v for k in range(3)}
    types = (CType.POINTER,) * count + (CType.I64,) * _NUM_INTEGERS + (CType.F32,) * 2 + (CType.I64,) * 4
    return KernelAbi(types, align)
