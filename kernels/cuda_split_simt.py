"""Host side of `cuda_split_simt`: split-K decode attention on the plain cores (`kernels/cuda/split_simt.cu`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .artifact import Artifact
from .bounds import Bounds
from .device import Device, DeviceKind
from .launch import KernelStep, LaunchPlan
from .pool_format import Layout, PoolFormat
from .problem import Problem
from .split_defaults import SplitShape, default_splits
from .split_launch import Merge, has_merge_kernel, merge_abi, merge_scratch_bytes, split_plan
from .split_simt_plan import (
    CODES,
    PIECE_BYTES,
    CudaSplitSimtConfig,
    defines,
    live_splits,
    num_chunks,
    num_rows,
    slots_of,
    split_abi,
    split_args,
    steps,
)
from .variant import Config, Properties, Variant

SOURCE = Path(__file__).parent / "cuda" / "split_simt.cu"
INCLUDES = (
    "types.cuh", "merge.cuh", "split_simt_shape.cuh", "split_simt_stream.cuh", "split_simt_state.cuh",
    "split_simt_result.cuh", "split_rows.cuh", "split_merge.cuh",
)  # fmt: skip
MAX_HEAD_DIM = 256  # a lane holds its dims of the query and of the output in registers
MAX_SPLITS = 128  # of `kernels/cuda/merge.cuh`
MAX_STATIC_SHARED = 48 << 10  # bytes of a block that every device has without asking
LOAD_BYTES = 256  # of keys and values that a thread has on their way, by default
SPLIT_CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)
FIXED_LENGTHS = ((128, 256), (128, 512), (128, 1024))  # splits, split tokens
WARP_CHOICES = (4, 8, 2)
KEY_CHOICES = (8, 4, 2, 1)


class CudaSplitSimt(Variant):
    """One block per sequence, KV head, split and chunk of query rows; all sums in fp32, weights too.

    Splits adapt to each sequence's context length on the device.
    """

    name = "cuda_split_simt"
    summary = "CUDA C++ split-K decode on the plain cores, for GQA ratios of 1 and 2; registers are the pipeline"
    device_kind = DeviceKind.CUDA
    config_type = CudaSplitSimtConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)

    def default_config(self, problem: Problem, pool_format: PoolFormat, bounds: Bounds, device: Device) -> Config:
        """256 bytes of each thread on their way, and the splits of `split_defaults`."""
        if _reject_types(problem, pool_format):
            return CudaSplitSimtConfig()
        one = PIECE_BYTES * sum(steps(problem, pool_format))
        keys = next((k for k in KEY_CHOICES if k * one <= LOAD_BYTES), KEY_CHOICES[-1])
        config = CudaSplitSimtConfig(keys_per_lane=keys)
        shape = SplitShape(
            bounds.max_num_seqs * problem.num_kv_heads * num_chunks(problem, pool_format, bounds),
            32 * config.num_warps * keys * one,
        )
        return replace(config, num_splits=default_splits(problem, pool_format, bounds, device, shape, SPLIT_CHOICES))

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Splits x warps x keys of a lane x merge."""
        for splits, split_tokens in (*((s, 128) for s in SPLIT_CHOICES), *FIXED_LENGTHS):
            for warps in WARP_CHOICES:
                for keys in KEY_CHOICES:
                    for merge in Merge if splits > 1 else (Merge.KERNEL,):
                        yield CudaSplitSimtConfig(splits, split_tokens, warps, keys, merge.value)

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        config = _own(config)
        reason = _reject_types(problem, pool_format) or _reject_config(config) or pool_format.reject(problem)
        if reason is not None:
            return reason
        if config.num_splits > 1 and config.merge == Merge.EARLY_KERNEL and device.capability < 90:
            return f"a launch that starts early needs compute capability 9.0, not {device.capability / 10}"
        loads = config.keys_per_lane * PIECE_BYTES * sum(steps(problem, pool_format))
        if loads > 2 * LOAD_BYTES:
            return f"keys_per_lane={config.keys_per_lane} takes {loads} bytes of registers, more than {2 * LOAD_BYTES}"
        shared = config.num_warps * num_rows(problem, pool_format) * (problem.head_dim_v + 3) * 4 + 4
        if shared > MAX_STATIC_SHARED:
            return f"a block needs {shared} bytes of shared memory, more than the {MAX_STATIC_SHARED} of any device"
        return None

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One cubin with the split kernel, and the merge kernel where there is one."""
        from .build_nvrtc import CudaKernel, build_nvrtc

        config = _own(config)
        abi = {"attention_split": split_abi(problem, pool_format, config)}
        shared = {}
        if has_merge_kernel(config):
            shared["attention_merge"] = merge_scratch_bytes(problem)
            abi["attention_merge"] = merge_abi(problem, config)
        includes = tuple(SOURCE.parent / name for name in INCLUDES)
        kernel = CudaKernel(SOURCE, abi, includes, defines(problem, pool_format, config), shared)
        return (build_nvrtc(kernel, device.capability),)

    def binary_id(self, problem: Problem, pool_format: PoolFormat, config: Config) -> str:
        """The numbers of heads, splits and fewest keys of a split are arguments of the kernel."""
        found = defines(problem, pool_format, _own(config))
        return ",".join(f"{name[3:]}={value}" for name, value in sorted(found.items()))

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """The split kernel alone, or split and merge over fp32 partials, or arrivals cleared and one kernel."""
        config = _own(config)
        blocks = bounds.max_num_seqs * num_chunks(problem, pool_format, bounds) * problem.num_kv_heads
        splits = live_splits(problem, pool_format, config, bounds)
        args = split_args(problem, pool_format, config, bounds)
        split = KernelStep("attention_split", (blocks, splits, 1), args, (32 * config.num_warps, 1, 1))
        return split_plan(split, problem, config, bounds, splits, slots_of(problem, pool_format))


def _own(config: Config) -> CudaSplitSimtConfig:
    if not isinstance(config, CudaSplitSimtConfig):
        raise TypeError(f"cuda_split_simt takes a CudaSplitSimtConfig, not {type(config).__name__}")
    return config


def _reject_types(problem: Problem, pool_format: PoolFormat) -> str | None:
    kv = pool_format.kv_dtype
    if kv not in CODES:
        return f"cuda_split_simt cannot read {kv} pools"
    if pool_format.layout is Layout.XPACKED:
        return "layout xpacked scatters a value over its block: cuda_split_simt reads 16 bytes of a token at once"
    multiple = PIECE_BYTES // kv.itemsize
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % multiple or dim > MAX_HEAD_DIM:
            return f"{name}={dim} must be a multiple of {multiple}, for 16-byte loads, and at most {MAX_HEAD_DIM}"
    return None


def _reject_config(config: CudaSplitSimtConfig) -> str | None:
    limits = {"num_splits": (1, MAX_SPLITS), "num_warps": (1, 16), "keys_per_lane": (1, 8)}
    for name, (least, most) in limits.items():
        if not least <= getattr(config, name) <= most:
            return f"{name}={getattr(config, name)} must be from {least} to {most}"
    if config.keys_per_lane & (config.keys_per_lane - 1):
        return f"keys_per_lane={config.keys_per_lane} must be a power of two"
    if config.split_tokens < 1:
        return f"split_tokens={config.split_tokens} must be at least 1"
    if config.merge not in set(Merge):
        return f"merge={config.merge!r} must be one of {', '.join(Merge)}"
    return None
