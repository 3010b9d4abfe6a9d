"""Host side of `cuda_split_mma`: split-K decode on tensor cores in CUDA C++ (`kernels/cuda/split_mma.cu`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .artifact import Artifact
from .bounds import Bounds
from .device import Device, DeviceKind
from .dtypes import DType
from .launch import KernelStep, LaunchPlan
from .pool_format import Layout, PoolFormat
from .problem import Problem
from .split_defaults import SplitShape, default_splits
from .split_launch import Merge, has_merge_kernel, merge_abi, merge_scratch_bytes, split_plan
from .split_mma_plan import (
    COPY_BYTES,
    CudaSplitMmaConfig,
    defines,
    flight_bytes,
    live_splits,
    num_chunks,
    shared_bytes,
    slots_of,
    split_abi,
    split_args,
)
from .variant import Config, Numerics, Properties, Variant

SOURCE = Path(__file__).parent / "cuda" / "split_mma.cu"
INCLUDES = (
    "types.cuh", "copies.cuh", "mma.cuh", "softmax.cuh", "merge.cuh", "split_mma_shape.cuh", "split_mma_stream.cuh",
    "split_mma_products.cuh", "split_mma_result.cuh", "split_mma_scales.cuh", "split_rows.cuh", "split_merge.cuh",
)  # fmt: skip
MAX_HEAD_DIM = 256  # a warp holds the output of all value dims in registers
MAX_SPLITS = 128  # of `kernels/cuda/merge.cuh`
MAX_WARPS = 16
WARP_TOKENS = (16, 32)  # keys of a warp in one tile: whole matrix products, and at most one per lane
SPLIT_CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)
FIXED_LENGTHS = ((128, 256), (128, 512), (128, 1024))  # splits, split tokens
SHAPE_CHOICES = ((4, 64), (2, 32), (8, 128), (4, 128))  # warps, tile tokens
STAGE_CHOICES = (3, 2, 4)


class CudaSplitMma(Variant):
    """One block per sequence, KV head and split; the keys are the M dimension, the query rows N in tiles of 8.

    The rows are the query heads of a group times the query tokens of a sequence: all of them share each key and value
    that is read. Splits adapt to each sequence's context length on the device. Scales of tokens travel with their tile;
    those of values are kept relative to a power of two about the largest, so that weights stay in the range of a half.
    """

    name = "cuda_split_mma"
    summary = "CUDA C++ split-K decode on tensor cores, keys as M; each warp has its own asynchronous pipeline"
    device_kind = DeviceKind.CUDA
    config_type = CudaSplitMmaConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)

    def numerics(self, problem: Problem, pool_format: PoolFormat) -> Numerics:
        """Softmax weights (times the scales of tokens) are rounded to what the second product takes: the query's dtype,
        fp16 with 8-bit pools."""
        return Numerics(p=problem.q_dtype if pool_format.kv_dtype is problem.q_dtype else DType.FP16)

    def default_config(self, problem: Problem, pool_format: PoolFormat, bounds: Bounds, device: Device) -> Config:
        """The first block shape that fits the device, and the splits of `split_defaults`."""
        # Tiles of 32 tokens a warp cost fewer instructions per byte, which 8-bit pools are shorter of than of bytes.
        eight_bit = pool_format.kv_dtype.itemsize == 1
        order = sorted(SHAPE_CHOICES, key=lambda shape: eight_bit and shape != (4, 128))
        shapes = [CudaSplitMmaConfig(SPLIT_CHOICES[-1], t, 128, w, s) for w, t in order for s in STAGE_CHOICES]
        config = next((c for c in shapes if self.reject(problem, pool_format, c, device) is None), shapes[0])
        shape = SplitShape(
            bounds.max_num_seqs * problem.num_kv_heads * num_chunks(problem, bounds),
            flight_bytes(problem, pool_format, config),
            resident=2 if 2 * shared_bytes(problem, pool_format, config) <= device.shared_bytes_per_block else 1,
        )
        return replace(config, num_splits=default_splits(problem, pool_format, bounds, device, shape, SPLIT_CHOICES))

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Splits x block shape x stages x merge."""
        for splits, split_tokens in (*((s, 128) for s in SPLIT_CHOICES), *FIXED_LENGTHS):
            for warps, tile in SHAPE_CHOICES:
                for stages in STAGE_CHOICES:
                    for merge in Merge if splits > 1 else (Merge.KERNEL,):
                        yield CudaSplitMmaConfig(splits, tile, split_tokens, warps, stages, merge.value)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        config = _own(config)
        reason = _reject_types(problem, pool_format, device) or _reject_config(config) or pool_format.reject(problem)
        if reason is not None:
            return reason
        if config.num_splits > 1 and config.merge == Merge.EARLY_KERNEL and device.capability < 90:
            return f"a launch that starts early needs compute capability 9.0, not {device.capability / 10}"
        shared = shared_bytes(problem, pool_format, config)
        if shared > device.shared_bytes_per_block:
            return f"a block needs {shared} bytes of shared memory, {device.name} has {device.shared_bytes_per_block}"
        return None

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One cubin with the split kernel, and the merge kernel where there is one."""
        from .build_nvrtc import CudaKernel, build_nvrtc

        config = _own(config)
        shared = {"attention_split": shared_bytes(problem, pool_format, config)}
        abi = {"attention_split": split_abi(problem, pool_format, config)}
        if has_merge_kernel(config):
            shared["attention_merge"] = merge_scratch_bytes(problem)
            abi["attention_merge"] = merge_abi(problem, config)
        includes = tuple(SOURCE.parent / name for name in INCLUDES)
        kernel = CudaKernel(SOURCE, abi, includes, defines(problem, pool_format, config), shared)
        return (build_nvrtc(kernel, device.capability),)

    def binary_id(self, problem: Problem, pool_format: PoolFormat, config: Config) -> str:
        """The numbers of heads, splits and fewest keys of a split are arguments of the kernel."""
        return ",".join(f"{k[3:]}={v}" for k, v in sorted(defines(problem, pool_format, _own(config)).items()))

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """The split kernel alone, or split and merge over fp32 partials, or arrivals cleared and one kernel."""
        config = _own(config)
        blocks = bounds.max_num_seqs * num_chunks(problem, bounds) * problem.num_kv_heads
        splits = live_splits(problem, config, bounds)
        split = KernelStep(
            "attention_split",
            (blocks, splits, 1),
            split_args(problem, pool_format, config, bounds),
            (32 * config.num_warps, 1, 1),
            shared_bytes=shared_bytes(problem, pool_format, config),
        )
        return split_plan(split, problem, config, bounds, splits, slots_of(problem, pool_format))


def _own(config: Config) -> CudaSplitMmaConfig:
    if not isinstance(config, CudaSplitMmaConfig):
        raise TypeError(f"cuda_split_mma takes a CudaSplitMmaConfig, not {type(config).__name__}")
    return config


def _reject_types(problem: Problem, pool_format: PoolFormat, device: Device) -> str | None:
    kv = pool_format.kv_dtype
    if problem.q_dtype not in (DType.BF16, DType.FP16):
        return f"tensor cores would round {problem.q_dtype} queries to tf32: cuda_split_mma takes bf16 and fp16"
    if kv is not problem.q_dtype and kv not in (DType.FP8_E4M3, DType.INT8):
        return f"cuda_split_mma cannot read {kv} pools with {problem.q_dtype} queries"
    if pool_format.layout is Layout.XPACKED:
        return "layout xpacked scatters a value over its block: cuda_split_mma copies 16 bytes of a token at once"
    if device.capability < 80:
        return f"asynchronous copies need compute capability 8.0, not {device.capability / 10}"
    multiple = COPY_BYTES // kv.itemsize
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % multiple or dim > MAX_HEAD_DIM:
            return f"{name}={dim} must be a multiple of {multiple}, for copies of 16 bytes, and at most {MAX_HEAD_DIM}"
    return None


def _reject_config(config: CudaSplitMmaConfig) -> str | None:
    limits = {"num_splits": (1, MAX_SPLITS), "num_warps": (1, MAX_WARPS), "num_stages": (2, 8)}
    for name, (least, most) in limits.items():
        if not least <= getattr(config, name) <= most:
            return f"{name}={getattr(config, name)} must be from {least} to {most}"
    if config.tile_tokens not in {config.num_warps * tokens for tokens in WARP_TOKENS}:
        return f"tile_tokens={config.tile_tokens} must be 16 or 32 for each of the {config.num_warps} warps"
    if config.split_tokens < 1:
        return f"split_tokens={config.split_tokens} must be at least 1"
    if config.merge not in set(Merge):
        return f"merge={config.merge!r} must be one of {', '.join(Merge)}"
    return None
