"""What is timed: decode batches of two models, and for each configurations of every variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedtune.harness.roofline import kv_bytes
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.catalogue import variants_for
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Config, Op, Variant
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


CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("triton_split", {"tile_tokens": 128, "num_warps": 8}),
    ("triton_split", {"num_stages": 3}),
    ("cuda_paged", {"num_warps": 8}),
    ("cuda_split_mma", {"merge": "last_block"}),
    ("cuda_split_mma", {"merge": "early_kernel"}),
    ("cuda_split_mma", {"tile_tokens": 128}),
    ("cuda_split_mma", {"num_splits": 128, "split_tokens": 1024}),
    ("cuda_split_simt", {"merge": "last_block"}),
)


def candidates(cell: Cell, device: Device) -> list[Candidate]:
    """The default of each variant first, then with a few tunables changed whose best value only a device can tell."""
    defaults = {
        variant.name: Candidate(variant, variant.default_config(cell.problem, cell.pool_format, cell.bounds, device))
        for variant in variants_for(DeviceKind.CUDA, Op.ATTENTION)
    }
    found = list(defaults.values())
    found += [
        Candidate(default.variant, default.variant.config_from({**default.config.as_dict(), **changes}))
        for name, changes in CHANGES
        if (default := defaults.get(name))
    ]
    return [c for c in found if c.variant.reject(cell.problem, cell.pool_format, c.config, device) is None]
