"""Host side of packing in Triton (`kernels/triton/swap_kernels.py`): blocks to a staging buffer and back."""

from __future__ import annotations

from pathlib import Path

from .bounds import Bounds
from .device import Device
from .gpu_cache import reject_scales_of_blocks
from .launch import Arg, SizeArg, StrideArg
from .pool_format import PoolFormat
from .problem import Problem
from .slots import block_elements
from .triton_cache import TritonCopyBlocks, TritonCopyConfig, run_strides
from .variant import Config, Op

SOURCE = Path(__file__).parent / "triton" / "swap_kernels.py"


class _TritonSwap(TritonCopyBlocks):
    """What packing and unpacking share: the space and the grid of block copies, one side of which has no gaps."""

    entry = "move_blocks"

    def reject(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> str | None:
        """Each constraint of the kernel."""
        return reject_scales_of_blocks(pool_format) or super().reject(problem, pool_format, config, device)

    def _source(self) -> Path:
        return SOURCE

    def _pointers(self, problem: Problem, pool_format: PoolFormat) -> dict[str, str]:
        bits = self._bits(pool_format)
        return {"k_cache": bits, "v_cache": bits, "block_ids": "*i64", "staging": bits}

    def _integers(self, pool_format: PoolFormat, config: TritonCopyConfig, bounds: Bounds) -> dict[str, Arg]:
        return run_strides(pool_format) | {"row": StrideArg("staging", 0), "num_listed": SizeArg("block_ids", 0)}

    def _constants(self, problem: Problem, pool_format: PoolFormat, config: TritonCopyConfig) -> dict[str, object]:
        return self._runs(problem, pool_format, config) | {"PACK": self.op is Op.PACK_BLOCKS}

    def _row_sizes(self, problem: Problem, pool_format: PoolFormat) -> dict[str, int]:
        return {"staging": sum(block_elements(problem, pool_format)) * pool_format.kv_dtype.itemsize}


class TritonPackBlocks(_TritonSwap):
    """Copies listed blocks of both pools to the rows of a staging buffer, which one transfer can take to the host."""

    name = "triton_pack_blocks"
    summary = "Triton copy of listed blocks to a staging buffer"
    op = Op.PACK_BLOCKS


class TritonUnpackBlocks(_TritonSwap):
    """Copies the rows of a staging buffer to listed blocks of both pools."""

    name = "triton_unpack_blocks"
    summary = "Triton copy of a staging buffer to listed blocks"
    op = Op.UNPACK_BLOCKS
