"""Host side of CUDA's packing of KV blocks into a staging buffer, and of the way back (`kernels/cuda/cache_ops.cu`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from .bounds import Bounds
from .cuda_cache import CudaCopyBlocks, CudaCopyConfig
from .device import Device
from .gpu_cache import block_strides, reject_scales_of_blocks, runs_of, vector_elements
from .launch import Arg, SizeArg, SlotSpec, StrideArg
from .native_args import i64, pointers
from .pool_format import PoolFormat
from .problem import Problem
from .slots import aligned, block_elements, pack_blocks_slots, unpack_blocks_slots
from .variant import Config, Op


class _CudaSwap(CudaCopyBlocks):
    """What packing and unpacking share: the space and the grid of block copies, one side of which has no gaps."""

    entry = "move_blocks"
    slots: ClassVar[Callable[[Problem, PoolFormat], dict[str, SlotSpec]]]

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        return reject_scales_of_blocks(pool_format) or super().reject(problem, pool_format, config, device)

    def _vectors(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, int]:
        """Bytes of a piece where wide ones do not fit: of a run, of K's part of a row and of V's each a multiple."""
        size, blocks = pool_format.kv_dtype.itemsize, block_elements(problem, pool_format)
        return {
            name: vector_elements(math.gcd(run, *blocks), size, config.vector_bytes) * size
            for name, (*_, run) in runs_of(problem, pool_format).items()
        }

    def _args(
        self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig, bounds: Bounds
    ) -> tuple[Arg, ...]:
        return (
            *pointers("k_cache", "v_cache", "block_ids", "staging"),
            *block_strides(pool_format, "k"),
            *block_strides(pool_format, "v"),
            StrideArg("staging", 0),
            SizeArg("block_ids", 0),
            *i64(self._chunks(problem, pool_format, config)[0]),
        )

    def _slots(self, problem: Problem, pool_format: PoolFormat, config: CudaCopyConfig) -> dict[str, SlotSpec]:
        vectors = self._vectors(problem, pool_format, config)
        align = {f"{name}_cache": size for name, size in vectors.items()} | {"staging": max(vectors.values())}
        return aligned(type(self).slots(problem, pool_format), align)


class CudaPackBlocks(_CudaSwap):
    """Copies listed blocks of both pools to the rows of a staging buffer, which one transfer can take to the host."""

    name = "cuda_pack_blocks"
    summary = "CUDA C++ copy of listed blocks to a staging buffer, 16 bytes a thread and several on their way"
    op = Op.PACK_BLOCKS
    slots = pack_blocks_slots


class CudaUnpackBlocks(_CudaSwap):
    """Copies the rows of a staging buffer to listed blocks of both pools."""

    name = "cuda_unpack_blocks"
    summary = "CUDA C++ copy of a staging buffer to listed blocks, 16 bytes a thread and several on their way"
    op = Op.UNPACK_BLOCKS
    slots = unpack_blocks_slots
