"""Host side of the CUDA cache operations (`kernels/cuda/cache_ops.cu`): write, copy and gather of KV blocks.

Packing and unpacking are in `cuda_swap.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .artifact import Artifact, KernelAbi
from .bounds import Bounds
from .device import Device, DeviceKind
from .dtypes import DType
from .gpu_cache import block_strides, cache_limits, chunks_of, first_default, runs_of, vector_elements, widest_rows
from .launch import Arg, KernelStep, LaunchPlan, SizeArg, SlotArg, SlotSpec, StrideArg
from .native_args import abi_of, i64, pointers, scale_stride, strides, token_scale_strides
from .pool_format import Layout, PoolFormat
from .problem import Problem
from .slots import aligned, copy_blocks_slots, gather_kv_slots, kv_write_slots
from .variant import Config, Op, Properties, Variant

SOURCE = Path(__file__).parent / "cuda" / "cache_ops.cu"
WARP_CHOICES = (4, 2, 8)
VECTOR_CHOICES = (16, 8, 4)
UNROLL_CHOICES = (1, 2, 4)
_OPS = (Op.KV_WRITE, Op.COPY_BLOCKS, Op.GATHER_KV, Op.PACK_BLOCKS, Op.UNPACK_BLOCKS)  # by PT_OP
_CODES = {DType.FP32: 0, DType.BF16: 1, DType.FP16: 2, DType.FP8_E4M3: 3, DType.INT8: 4}


@dataclass(frozen=True)
class CudaCopyConfig(Config):
    """Tunables of `cuda_copy_blocks`.

    Args:
        num_warps: warps of a block.
        vector_bytes: widest load and store of a thread, in bytes.
        unroll: vectors of a thread that are on their way at once.
    """

    num_warps: int = 4
    vector_bytes: int = 16
    unroll: int = 4


@dataclass(frozen=True)
class CudaRowsConfig(CudaCopyConfig):
    """Tunables of `cuda_kv_write` and `cuda_gather_kv`.

    Args:
        rows_per_block: tokens that one block takes.
    """

    unroll: int = 2
    rows_per_block: int = 1


@dataclass(frozen=True)
class CudaGatherConfig(CudaRowsConfig):
    """The same tunables with the defaults of `cuda_gather_kv`: a context has many tokens."""

    unroll: int = 4
    rows_per_block: int = 8


class _CudaCacheOp(Variant):
    """What the three operations share: one kernel a shape, no workspace, every integer from the plan or a slot."""

    row_choices: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)
    entry: ClassVar[str]

    device_kind = DeviceKind.CUDA
    config_type: ClassVar[type[CudaCopyConfig]] = CudaRowsConfig
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)

    def default_config(self, problem: Problem, pool_format: PoolFormat, bounds: Bounds, device: Device) -> Config:
        """The widest vectors that the rows allow."""
        return first_default(self, problem, pool_format, device)

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Vector width x warps x tokens x vectors at once."""
        for vector_bytes in VECTOR_CHOICES:
            for rows in self.row_choices:
                for num_warps in WARP_CHOICES:
                    for unroll in UNROLL_CHOICES:
                        values = {"num_warps": num_warps, "vector_bytes": vector_bytes, "unroll": unroll}
                        yield self.config_from({**values, "rows_per_block": rows})

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernels."""
        config = self._own(config)
        if pool_format.kv_dtype not in _CODES:
            return f"{self.name} cannot store {pool_format.kv_dtype} pools"
        for name, most in (("num_warps", 32), ("unroll", 16), ("rows_per_block", 256)):
            value = getattr(config, name, 1)
            if not 1 <= value <= most:
                return f"{name}={value} must be from 1 to {most}"
        reason = pool_format.reject(problem)
        if reason is not None:
            return reason
        return widest_rows(config.vector_bytes, self._row_bytes(problem, pool_format))

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One cubin per shape, dtypes and config."""
        from .build_nvrtc import CudaKernel, build_nvrtc

        args = self._args(problem, pool_format, self._own(config), Bounds(1, 1))
        slots = self._slots(problem, pool_format, self._own(config))
        align = {k: slots[a.slot].align for k, a in enumerate(args) if isinstance(a, SlotArg) and a.slot in slots}
        abi = KernelAbi(abi_of(args).arg_types, {k: n for k, n in align.items() if n})
        defines = self._defines(problem, pool_format, self._own(config))
        return (build_nvrtc(CudaKernel(SOURCE, {self.entry: abi}, defines=defines), device.capability),)

    def binary_id(self, problem: Problem, pool_format: PoolFormat, config: Config) -> str:
        """See `Variant.binary_id`: the scales' values and the batch are arguments."""
        defines = self._defines(problem, pool_format, self._own(config))
        return ",".join(f"{name[3:]}={value}" for name, value in sorted(defines.items()))

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One launch, whose grid covers the bounds; blocks past the batch end at once."""
        config = self._own(config)
        grid = self._grid(problem, pool_format, config, bounds)
        args = self._args(problem, pool_format, config, bounds)
        step = KernelStep(self.entry, grid, args, (32 * config.num_warps, 1, 1))
        slots = self._slots(problem, pool_format, config)
        return LaunchPlan((step,), slots, {}, cache_limits(self.op, bounds))

    def _own(self, config: Config) -> CudaCopyConfig:
        if not isinstance(config, self.config_type):
            raise TypeError(f"{self.name} takes a {self.config_type.__name__}, not {type(config).__name__}")
        return config

    def _row_bytes(self, problem: Problem, pool_format: PoolFormat) -> tuple[int, int]:
        """Bytes, of K and of V, that a vector of the wider of source and destination may not straddle."""
        size = pool_format.kv_dtype.itemsize
        return problem.head_dim * size, problem.head_dim_v * size

    def _defines(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, int | str]:
        xpacked = pool_format.layout is Layout.XPACKED
        vectors = self._vectors(problem, pool_format, config)
        return {
            "PT_OP": _OPS.index(self.op),
            "PT_HEADS": problem.num_kv_heads,
            "PT_HEAD_DIM_K": problem.head_dim,
            "PT_HEAD_DIM_V": problem.head_dim_v,
            "PT_BLOCK_SIZE": pool_format.block_size,
            "PT_PACK_K": pool_format.pack if xpacked else problem.head_dim,
            "PT_PACK_V": 1 if xpacked else problem.head_dim_v,
            "PT_VECTOR_K": vectors["k"],
            "PT_VECTOR_V": vectors["v"],
            "PT_Q_DTYPE": _CODES[problem.q_dtype],
            "PT_KV_DTYPE": _CODES[pool_format.kv_dtype],
            "PT_SCALE_STRIDE": scale_stride(pool_format) if pool_format.has_constant_scales else -1,
            "PT_TOKEN_SCALES": int(pool_format.has_token_scales),
            "PT_THREADS": 32 * config.num_warps,
            "PT_ROWS": getattr(config, "rows_per_block", 1),
            "PT_UNROLL": config.unroll,
            "PT_VECTOR_BYTES": config.vector_bytes,
        }

    def _vectors(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, int]:
        """Elements of a vector of K and of V."""
        k, v = self._row_bytes(problem, pool_format)
        return {
            "k": vector_elements(problem.head_dim, k // problem.head_dim, config.vector_bytes),
            "v": vector_elements(problem.head_dim_v, v // problem.head_dim_v, config.vector_bytes),
        }

    def _pool_align(self, pool_format: PoolFormat, vectors: Mapping[str, int]) -> dict[str, int]:
        """What vectors need of the pools; x-packed rows are reached x elements, or 1, at a time."""
        most = {"k": pool_format.pack, "v": 1} if pool_format.layout is Layout.XPACKED else vectors
        return {f"{n}_cache": min(vectors[n], most[n]) * pool_format.kv_dtype.itemsize for n in ("k", "v")}

    def _grid(
        self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig, bounds: Bounds
    ) -> tuple[int, int, int]:
        raise NotImplementedError

    def _args(
        self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig, bounds: Bounds
    ) -> tuple[Arg, ...]:
        raise NotImplementedError

    def _slots(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, SlotSpec]:
        raise NotImplementedError


class CudaKVWrite(_CudaCacheOp):
    """Stores new K and V at their slots, converting, scaling and saturating on the way; where each token and head has
    scales, it works them out and stores them too."""

    name = "cuda_kv_write"
    summary = "CUDA C++ K/V write by slot mapping, to fp8 and int8 pools too; negative slots are not even read"
    op = Op.KV_WRITE
    entry = "kv_write"

    def _row_bytes(self, problem: Problem, pool_format: PoolFormat) -> tuple[int, int]:
        size = max(problem.q_dtype.itemsize, pool_format.kv_dtype.itemsize)
        return problem.head_dim * size, problem.head_dim_v * size

    def _grid(
        self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig, bounds: Bounds
    ) -> tuple[int, int, int]:
        return -(-bounds.max_num_tokens // _rows(config)), 2, 1

    def _args(
        self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig, bounds: Bounds
    ) -> tuple[Arg, ...]:
        return (
            *pointers("k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale"),
            *strides("k", (0, 1)),
            *strides("v", (0, 1)),
            *_pool_args(pool_format),
            SizeArg("slot_mapping", 0),
            *token_scale_strides(pool_format),
        )

    def _slots(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, SlotSpec]:
        vectors = self._vectors(problem, pool_format, config)
        rows = {n: vectors[n] * problem.q_dtype.itemsize for n in ("k", "v")}
        return aligned(kv_write_slots(problem, pool_format), rows | self._pool_align(pool_format, vectors))


class CudaCopyBlocks(_CudaCacheOp):
    """Copies whole blocks of both pools, scales of tokens included: as one piece where a block is one, else in runs."""

    name = "cuda_copy_blocks"
    summary = "CUDA C++ copy of (source, destination) block pairs, 16 bytes a thread and several on their way"
    op = Op.COPY_BLOCKS
    config_type = CudaCopyConfig
    entry = "copy_blocks"

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Vector width x warps x vectors at once."""
        for vector_bytes in VECTOR_CHOICES:
            for num_warps in WARP_CHOICES:
                for unroll in (*UNROLL_CHOICES, 8):
                    yield CudaCopyConfig(num_warps, vector_bytes, unroll)

    def _row_bytes(self, problem: Problem, pool_format: PoolFormat) -> tuple[int, int]:
        """A whole block may be one piece."""
        tokens = pool_format.block_size * problem.num_kv_heads * pool_format.kv_dtype.itemsize
        return tokens * problem.head_dim, tokens * problem.head_dim_v

    def _vectors(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, int]:
        """Bytes of a piece where a block is not one: of one run."""
        size = pool_format.kv_dtype.itemsize
        return {
            name: vector_elements(run, size, config.vector_bytes) * size
            for name, (*_, run) in runs_of(problem, pool_format).items()
        }

    def _defines(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, int | str]:
        shapes = {
            f"PT_SHAPE_{n.upper()}": ",".join(map(str, runs)) for n, runs in runs_of(problem, pool_format).items()
        }
        return super()._defines(problem, pool_format, config) | shapes

    def _grid(
        self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig, bounds: Bounds
    ) -> tuple[int, int, int]:
        scales = int(pool_format.has_token_scales)
        return bounds.max_num_seqs, sum(self._chunks(problem, pool_format, config)) + scales, 1

    def _chunks(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> tuple[int, int]:
        """Blocks of threads that share one K block, and one V block."""
        one = 32 * config.num_warps * config.unroll * config.vector_bytes
        k, v = self._row_bytes(problem, pool_format)
        return chunks_of(k, one), chunks_of(v, one)

    def _args(
        self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig, bounds: Bounds
    ) -> tuple[Arg, ...]:
        return (
            *pointers("k_cache", "v_cache", "block_pairs"),
            *block_strides(pool_format, "k"),
            *block_strides(pool_format, "v"),
            SizeArg("block_pairs", 0),
            *i64(self._chunks(problem, pool_format, config)[0]),
            *pointers("k_scale", "v_scale"),
            *token_scale_strides(pool_format),
        )

    def _slots(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, SlotSpec]:
        align = {f"{n}_cache": size for n, size in self._vectors(problem, pool_format, config).items()}
        return aligned(copy_blocks_slots(problem, pool_format), align)


class CudaGatherKV(_CudaCacheOp):
    """Collects the tokens of a batch from their blocks, bit for bit; scales of tokens, if there are any, with them."""

    name = "cuda_gather_kv"
    summary = "CUDA C++ gather of paged K/V into packed tensors"
    op = Op.GATHER_KV
    config_type = CudaGatherConfig
    row_choices = (4, 8, 16, 32)
    entry = "gather_kv"

    def _grid(
        self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig, bounds: Bounds
    ) -> tuple[int, int, int]:
        return bounds.max_num_seqs * chunks_of(bounds.max_context_len, _rows(config)), 2, 1

    def _args(
        self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig, bounds: Bounds
    ) -> tuple[Arg, ...]:
        return (
            *pointers("k_cache", "v_cache", "block_table", "context_lens", "out_start", "k_out", "v_out"),
            *_pool_args(pool_format),
            StrideArg("block_table", 0),
            SizeArg("context_lens", 0),
            *i64(chunks_of(bounds.max_context_len, _rows(config))),
            *pointers("k_scale", "v_scale", "k_scale_out", "v_scale_out"),
            *token_scale_strides(pool_format),
        )

    def _slots(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, SlotSpec]:
        vectors = self._vectors(problem, pool_format, config)
        rows = {f"{n}_out": vectors[n] * pool_format.kv_dtype.itemsize for n in ("k", "v")}
        return aligned(gather_kv_slots(problem, pool_format), rows | self._pool_align(pool_format, vectors))


def _rows(config: CudaCopyConfig) -> int:
    assert isinstance(config, CudaRowsConfig)
    return config.rows_per_block


def _pool_args(pool_format: PoolFormat) -> tuple[Arg, ...]:
    """Strides of block, slot, head and outer dim, of K and of V."""
    k, v = pool_format.k_axes, pool_format.v_axes
    return (
        *strides("k_cache", (k.block, k.slot, k.head, k.dim)),
        *strides("v_cache", (v.block, v.slot, v.head, v.dim)),
    )
