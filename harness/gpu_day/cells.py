"""What is timed: decode batches of two models, and for each the configurations of both variants."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedtune.harness.roofline import kv_bytes
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.cuda_paged import CudaPaged, CudaPagedConfig
from pagedtune.kernels.device import Device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.triton_split import TritonSplit, TritonSplitConfig
from pagedtune.kernels.variant import Config, Variant
from pagedtune.kernels.workload import Workload

BF16_POOL = PoolFormat(16, DType.BF16)


@dataclass(frozen=True)
class Cell:
    """One batch: `num_seqs` sequences of `context_len` tokens, one query token each."""

    name: str
    problem: Problem
    num_seqs: int
    context_len: int
    pool_format: PoolFormat = BF16_POOL

    @property
    def bounds(self) -> Bounds:
        """Those of the batch."""
        return Bounds(self.num_seqs, self.context_len)

    @property
    def kv_bytes(self) -> int:
        """KV bytes that a launch must read."""
        return kv_bytes(self.problem, self.pool_format, Workload((self.context_len,) * self.num_seqs))


@dataclass(frozen=True)
class Candidate:
    """One configuration of a variant."""

    variant: Variant
    config: Config

    @property
    def label(self) -> str:
        """E.g. `cuda_paged num_warps=8`: the name, and what is not as in the config's own defaults."""
        plain = type(self.config)().as_dict()
        changed = [f"{name}={value}" for name, value in self.config.as_dict().items() if value != plain[name]]
        return f"{self.variant.name} {','.join(changed) or 'default'}"


LLAMA3_8B, QWEN25_7B = Problem(32, 8, 128), Problem(28, 4, 128)
CELLS = (
    Cell("llama-3-8b 1x8192", LLAMA3_8B, 1, 8192),
    Cell("llama-3-8b 16x4096", LLAMA3_8B, 16, 4096),
    Cell("llama-3-8b 64x2048", LLAMA3_8B, 64, 2048),
    Cell("qwen2.5-7b 1x32768", QWEN25_7B, 1, 32768),
    Cell("qwen2.5-7b 64x4096", QWEN25_7B, 64, 4096),
    Cell("qwen2.5-7b 16x512", QWEN25_7B, 16, 512),
)
DRY_CELLS = (Cell("tiny 2x40", Problem(4, 2, 64), 2, 40),)
COUNTED = Cell("llama-3-8b 4x512", LLAMA3_8B, 4, 512)  # small enough for the virtual GPU
DRY_COUNTED = DRY_CELLS[0]


def candidates(cell: Cell, device: Device) -> list[Candidate]:
    """The default of each variant first."""
    triton, cuda = TritonSplit(), CudaPaged()
    default = triton.default_config(cell.problem, cell.pool_format, cell.bounds, device)
    assert isinstance(default, TritonSplitConfig)
    wide = replace(default, tile_tokens=128, num_warps=8)
    deep = replace(default, num_stages=3)
    found = [Candidate(triton, default), Candidate(cuda, CudaPagedConfig())]
    found += [Candidate(triton, wide), Candidate(triton, deep), Candidate(cuda, CudaPagedConfig(8))]
    return [c for c in found if c.variant.reject(cell.problem, cell.pool_format, c.config, device) is None]
