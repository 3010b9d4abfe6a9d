"""Host side of the Triton cache operations (`kernels/triton/cache_kernels.py`): write, copy and gather of KV blocks.

Packing and unpacking are in `triton_swap.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .artifact import Artifact
from .bounds import Bounds
from .device import Device, DeviceKind
from .dtypes import DType
from .gpu_cache import block_strides, cache_limits, chunks_of, runs_of
from .launch import Arg, CType, KernelStep, LaunchPlan, ScalarArg, SizeArg, StrideArg
from .native_args import pointers, scale_stride, strides, token_scale_strides
from .pool_format import Layout, PoolFormat
from .problem import Problem
from .slots import aligned, copy_blocks_slots, gather_kv_slots, kv_write_slots, pack_blocks_slots, unpack_blocks_slots
from .variant import Config, Op, Properties, Variant

SOURCE = Path(__file__).parent / "triton" / "cache_kernels.py"
VECTOR_BYTES = 16  # widest access of a thread
WARP_CHOICES = (4, 2, 1, 8)
UNROLL_CHOICES = (1, 2, 4)
_TYPES = {DType.BF16: "bf16", DType.FP16: "fp16", DType.FP32: "fp32", DType.FP8_E4M3: "fp8e4nv", DType.INT8: "i8"}
_SLOTS = {
    Op.KV_WRITE: kv_write_slots,
    Op.COPY_BLOCKS: copy_blocks_slots,
    Op.GATHER_KV: gather_kv_slots,
    Op.PACK_BLOCKS: pack_blocks_slots,
    Op.UNPACK_BLOCKS: unpack_blocks_slots,
}
_HIDDEN = (ScalarArg(0, CType.POINTER), ScalarArg(0, CType.POINTER))  # Triton's scratch memories, which are unused


@dataclass(frozen=True)
class TritonCopyConfig(Config):
    """Tunables of `triton_copy_blocks`.

    Args:
        num_warps: warps of a program.
        unroll: 16-byte vectors of a thread that are on their way at once.
    """

    num_warps: int = 4
    unroll: int = 1


@dataclass(frozen=True)
class TritonRowsConfig(TritonCopyConfig):
    """Tunables of `triton_kv_write` and `triton_gather_kv`.

    Args:
        rows_per_block: tokens that one program takes.
    """

    rows_per_block: int = 1


@dataclass(frozen=True)
class TritonGatherConfig(TritonRowsConfig):
    """The same tunables with the defaults of `triton_gather_kv`: a context has many tokens."""

    rows_per_block: int = 8


class _TritonCacheOp(Variant):
    """What the three operations share: one kernel a shape, no workspace, every integer from the plan or a slot."""

    device_kind = DeviceKind.CUDA
    config_type: ClassVar[type[TritonCopyConfig]] = TritonRowsConfig
    row_choices: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)
    properties = Properties(deterministic=True, batch_invariant=True, graph_safe=True)
    entry: ClassVar[str]

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Tokens x warps x vectors at once."""
        for rows in self.row_choices:
            for num_warps in WARP_CHOICES:
                for unroll in UNROLL_CHOICES:
                    yield self.config_from({"num_warps": num_warps, "unroll": unroll, "rows_per_block": rows})

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernels."""
        config = self._own(config)
        if pool_format.kv_dtype not in _TYPES:
            return f"{self.name} cannot store {pool_format.kv_dtype} pools"
        for name, most in (("num_warps", 32), ("unroll", 16), ("rows_per_block", 256)):
            value = getattr(config, name, 1)
            if not 1 <= value <= most:
                return f"{name}={value} must be from 1 to {most}"
            if name != "rows_per_block" and value & (value - 1):
                return f"{name}={value} must be a power of two"
        return pool_format.reject(problem)

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """One cubin per shape, dtypes and config."""
        from .build_triton import TritonKernel, build_triton

        config = self._own(config)
        integers = self._integers(pool_format, config, Bounds(1, 1))
        signature = self._pointers(problem, pool_format) | dict.fromkeys(integers, "i64")
        constants = self._constants(problem, pool_format, config)
        divisible = self._divisible(problem, pool_format)
        kernel = TritonKernel(
            self._source(), self.entry, signature, constants, divisible, config.num_warps, num_stages=1
        )
        return (build_triton(kernel, device.capability),)

    def plan(self, problem: Problem, pool_format: PoolFormat, config: Config, bounds: Bounds) -> LaunchPlan:
        """One launch, whose grid covers the bounds; programs past the batch end at once."""
        config = self._own(config)
        integers = self._integers(pool_format, config, bounds)
        args = (*pointers(*self._pointers(problem, pool_format)), *integers.values(), *_HIDDEN)
        grid = self._grid(problem, pool_format, config, bounds)
        step = KernelStep(self.entry, grid, args, (32 * config.num_warps, 1, 1))
        slots = aligned(_SLOTS[self.op](problem, pool_format), self._alignments(problem, pool_format))
        return LaunchPlan((step,), slots, {}, cache_limits(self.op, bounds))

    def _own(self, config: Config) -> TritonCopyConfig:
        if not isinstance(config, self.config_type):
            raise TypeError(f"{self.name} takes a {self.config_type.__name__}, not {type(config).__name__}")
        return config

    def _source(self) -> Path:
        return SOURCE

    def _bits(self, pool_format: PoolFormat) -> str:
        """The pool's elements as integers: copies change no bit."""
        return f"*i{8 * pool_format.kv_dtype.itemsize}"

    def _block(self, itemsize: int, config: TritonCopyConfig) -> int:
        """Elements of `itemsize` bytes that a program takes at once."""
        return 32 * config.num_warps * config.unroll * VECTOR_BYTES // itemsize

    def _shape(self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig) -> dict[str, object]:
        """Constants of the operations on tokens."""
        xpacked = pool_format.layout is Layout.XPACKED
        return {
            "HEADS": problem.num_kv_heads,
            "DIM_K": problem.head_dim,
            "DIM_V": problem.head_dim_v,
            "PACK_K": pool_format.pack if xpacked else problem.head_dim,
            "PACK_V": 1 if xpacked else problem.head_dim_v,
            "BLOCK_SIZE": pool_format.block_size,
            "ROWS": _rows(config),
            "BLOCK": self._block(pool_format.kv_dtype.itemsize, config),
        }

    def _alignments(self, problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
        """Tensors whose rows are accessed 16 bytes at a time: those with rows of a multiple of that size."""
        rows = {n: length * pool_format.kv_dtype.itemsize for n, (*_, length) in runs_of(problem, pool_format).items()}
        sizes = {f"{n}_cache": num_bytes for n, num_bytes in rows.items()} | self._row_sizes(problem, pool_format)
        return {name: VECTOR_BYTES for name, num_bytes in sizes.items() if num_bytes % VECTOR_BYTES == 0}

    def _row_sizes(self, problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
        """Bytes of a head's row in the tensors beside the pools."""
        return {}

    def _divisible(self, problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
        """What pointers (in bytes) and strides (in elements) are multiples of, by argument; see `_alignments`.

        The inner stride of x-packed V and the outer one of other layouts are 1 and so left out.
        """
        known = self._alignments(problem, pool_format)
        specs = _SLOTS[self.op](problem, pool_format)
        found = dict(known)
        for name, arg in self._integers(pool_format, self._own(self.config_type()), Bounds(1, 1)).items():
            if isinstance(arg, StrideArg) and arg.slot in known and arg.dim not in specs[arg.slot].unit_stride:
                found[name] = known[arg.slot] // specs[arg.slot].dtype.itemsize
            elif isinstance(arg, ScalarArg) and arg.value == 0:
                found[name] = VECTOR_BYTES
        return found

    def _pointers(self, problem: Problem, pool_format: PoolFormat) -> dict[str, str]:
        raise NotImplementedError

    def _integers(self, pool_format: PoolFormat, config: TritonCopyConfig, bounds: Bounds) -> dict[str, Arg]:
        raise NotImplementedError

    def _constants(self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig) -> dict[str, object]:
        raise NotImplementedError

    def _grid(
        self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig, bounds: Bounds
    ) -> tuple[int, int, int]:
        raise NotImplementedError


class TritonKVWrite(_TritonCacheOp):
    """Stores new K and V at their slots, converting, scaling and saturating on the way; where each token and head has
    scales, it works them out and stores them too."""

    name = "triton_kv_write"
    summary = "Triton K/V write by slot mapping, to fp8 and int8 pools too; negative slots are not even read"
    op = Op.KV_WRITE
    entry = "kv_write"

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        if pool_format.kv_dtype is DType.FP8_E4M3 and device.capability < 89:
            return f"Triton converts to e4m3 from compute capability 8.9 on, not {device.capability / 10}"
        return super().reject(problem, pool_format, config, device)

    def _pointers(self, problem: Problem, pool_format: PoolFormat) -> dict[str, str]:
        rows, pool = f"*{_TYPES[problem.q_dtype]}", f"*{_TYPES[pool_format.kv_dtype]}"
        scales = dict.fromkeys(("k_scale", "v_scale"), "*fp32")
        return {"k": rows, "v": rows, "k_cache": pool, "v_cache": pool, "slot_mapping": "*i64"} | scales

    def _integers(self, pool_format: PoolFormat, config: TritonCopyConfig, bounds: Bounds) -> dict[str, Arg]:
        rows = strides("k", (0, 1)) + strides("v", (0, 1))
        names = ("k_token", "k_row", "v_token", "v_row")
        return (
            dict(zip(names, rows, strict=True))
            | _pool_strides(pool_format)
            | {"num_tokens": SizeArg("slot_mapping", 0)}
            | _scale_strides(pool_format)
        )

    def _constants(self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig) -> dict[str, object]:
        scales = {
            "HAS_SCALES": pool_format.has_constant_scales,
            "SCALE_STRIDE": scale_stride(pool_format),
            "TOKEN_SCALES": pool_format.has_token_scales,
            "WIDTH_K": 1 << (problem.head_dim - 1).bit_length(),
            "WIDTH_V": 1 << (problem.head_dim_v - 1).bit_length(),
        }
        widest = max(problem.q_dtype.itemsize, pool_format.kv_dtype.itemsize)
        return self._shape(problem, pool_format, config) | scales | {"BLOCK": self._block(widest, config)}

    def _row_sizes(self, problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
        size = problem.q_dtype.itemsize
        return {"k": problem.head_dim * size, "v": problem.head_dim_v * size}

    def _grid(
        self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig, bounds: Bounds
    ) -> tuple[int, int, int]:
        return chunks_of(bounds.max_num_tokens, _rows(config)), 2, 1


class TritonCopyBlocks(_TritonCacheOp):
    """Copies whole blocks of both pools, scales of tokens included."""

    name = "triton_copy_blocks"
    summary = "Triton copy of (source, destination) block pairs"
    op = Op.COPY_BLOCKS
    config_type = TritonCopyConfig
    entry = "copy_blocks"

    def space(self, problem: Problem, pool_format: PoolFormat, device: Device) -> Iterator[Config]:
        """Warps x vectors at once."""
        for num_warps in WARP_CHOICES:
            for unroll in (*UNROLL_CHOICES, 8):
                yield TritonCopyConfig(num_warps, unroll)

    def _pointers(self, problem: Problem, pool_format: PoolFormat) -> dict[str, str]:
        pools = dict.fromkeys(("k_cache", "v_cache"), self._bits(pool_format))
        return {**pools, "block_pairs": "*i64", **dict.fromkeys(("k_scale", "v_scale"), "*i32")}

    def _integers(self, pool_format: PoolFormat, config: TritonCopyConfig, bounds: Bounds) -> dict[str, Arg]:
        return run_strides(pool_format) | {"num_pairs": SizeArg("block_pairs", 0)} | _scale_strides(pool_format)

    def _constants(self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig) -> dict[str, object]:
        scales = {
            "TOKEN_SCALES": pool_format.has_token_scales,
            "HEADS": problem.num_kv_heads,
            "BLOCK_SIZE": pool_format.block_size,
        }
        return self._runs(problem, pool_format, config) | scales

    def _runs(self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig) -> dict[str, object]:
        """How the blocks of both pools are cut into runs and chunks."""
        runs = {
            f"{name.upper()}_{axis}": count
            for name, counts in runs_of(problem, pool_format).items()
            for axis, count in zip("ABCL", counts, strict=True)
        }
        chunks = self._chunks(problem, pool_format, config)
        return {**runs, "K_CHUNKS": chunks[0], "BLOCK": self._block(pool_format.kv_dtype.itemsize, config)}

    def _chunks(self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig) -> tuple[int, int]:
        """Programs that share one K block, and one V block."""
        heads, one = pool_format.block_size * problem.num_kv_heads, self._block(pool_format.kv_dtype.itemsize, config)
        return chunks_of(heads * problem.head_dim, one), chunks_of(heads * problem.head_dim_v, one)

    def _grid(
        self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig, bounds: Bounds
    ) -> tuple[int, int, int]:
        scales = int(pool_format.has_token_scales)
        return bounds.max_num_seqs, sum(self._chunks(problem, pool_format, config)) + scales, 1


class TritonGatherKV(_TritonCacheOp):
    """Collects the tokens of a batch from their blocks, bit for bit; scales of tokens, if there are any, with them."""

    name = "triton_gather_kv"
    summary = "Triton gather of paged K/V into packed tensors"
    op = Op.GATHER_KV
    config_type = TritonGatherConfig
    row_choices = (4, 8, 16, 32)
    entry = "gather_kv"

    def _pointers(self, problem: Problem, pool_format: PoolFormat) -> dict[str, str]:
        bits = self._bits(pool_format)
        tables = dict.fromkeys(("block_table", "context_lens", "out_start"), "*i32")
        scales = dict.fromkeys(("k_scale", "v_scale", "k_scale_out", "v_scale_out"), "*i32")  # bits too
        return {"k_cache": bits, "v_cache": bits, **tables, "k_out": bits, "v_out": bits, **scales}

    def _integers(self, pool_format: PoolFormat, config: TritonCopyConfig, bounds: Bounds) -> dict[str, Arg]:
        batch: dict[str, Arg] = {"table_seq": StrideArg("block_table", 0), "num_seqs": SizeArg("context_lens", 0)}
        chunks = chunks_of(bounds.max_context_len, _rows(config))
        chunk_count: dict[str, Arg] = {"chunks": ScalarArg(chunks, CType.I64)}
        return _pool_strides(pool_format) | batch | chunk_count | _scale_strides(pool_format)

    def _constants(self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig) -> dict[str, object]:
        return {**self._shape(problem, pool_format, config), "TOKEN_SCALES": pool_format.has_token_scales}

    def _row_sizes(self, problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
        size = pool_format.kv_dtype.itemsize
        return {"k_out": problem.head_dim * size, "v_out": problem.head_dim_v * size}

    def _grid(
        self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig, bounds: Bounds
    ) -> tuple[int, int, int]:
        return bounds.max_num_seqs * chunks_of(bounds.max_context_len, _rows(config)), 2, 1


def _rows(config: TritonCopyConfig) -> int:
    assert isinstance(config, TritonRowsConfig)
    return config.rows_per_block


def _scale_strides(pool_format: PoolFormat) -> dict[str, Arg]:
    """Strides of block and head of the scales of tokens, of K and of V."""
    names = ("scale_k_block", "scale_k_head", "scale_v_block", "scale_v_head")
    return dict(zip(names, token_scale_strides(pool_format), strict=True))


def run_strides(pool_format: PoolFormat) -> dict[str, Arg]:
    """Strides of the block and of its runs, of K and of V."""
    names = ("block", "a", "b", "c")
    return {
        f"{name}_{of}": arg
        for name in ("k", "v")
        for of, arg in zip(names, block_strides(pool_format, name), strict=True)
    }


def _pool_strides(pool_format: PoolFormat) -> dict[str, Arg]:
    """Strides of block, slot, head and outer dim, of K and of V."""
    found: dict[str, Arg] = {}
    for name, axes in (("k", pool_format.k_axes), ("v", pool_format.v_axes)):
        dims = {"block": axes.block, "slot": axes.slot, "head": axes.head, "outer": axes.dim}
        found |= {f"{name}_{of}": StrideArg(f"{name}_cache", dim) for of, dim in dims.items()}
    return found
