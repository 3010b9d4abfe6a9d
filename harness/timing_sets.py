"""What timed launches work on: one large pool, and many sets of blocks in it that launches rotate over.

Each set holds a whole batch in blocks of its own, drawn at random from the whole pool, as in an engine that has served
for a while. A launch on one set after launches on all the others finds nothing of its KV in the caches, if the sets
together are several times as large as the last-level cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagedtune.harness.roofline import kv_bytes
from pagedtune.harness.stream import DEFAULT_CACHE_BYTES
from pagedtune.kernels.device import Device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.memory import huge_empty
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.workload import Workload

COLD, HOT = "cold", "hot"
MODES = (COLD, HOT)
COLD_CACHE_FACTOR = 5  # a rotation reads this many times the last-level cache
MIN_CACHE_FACTOR = 2  # below this a mode called cold would not be
MAX_SETS = 4096
MAX_POOL_BYTES = 2 << 30
MAX_MEMORY_SHARE = 0.25
_PATTERN_ELEMENTS = 1 << 20  # random values repeated over the pool: drawing all would take longer than the timing


class DoesNotFit(ValueError):
    """The KV of one batch needs more memory than timing may take; the message has both figures."""


@dataclass(frozen=True)
class Extent:
    """How large a rotation is.

    Args:
        num_sets: sets of blocks.
        set_bytes: KV bytes that one launch reads at least.
        note: what falls short, if anything does.
    """

    num_sets: int
    set_bytes: int
    note: str = ""

    @property
    def working_set_bytes(self) -> int:
        """KV bytes between two launches on one set."""
        return self.num_sets * self.set_bytes


def extent(problem: Problem, pool_format: PoolFormat, workload: Workload, device: Device, mode: str) -> Extent:
    """The rotation for a mode.

    Raises:
        DoesNotFit: one set is already larger than timing may take.
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"unknown timing mode {mode!r}: use one of {', '.join(MODES)}")
    set_bytes = kv_bytes(problem, pool_format, workload)
    pool_bytes = _pool_bytes(problem, pool_format, workload)
    limit = min(MAX_POOL_BYTES, int(MAX_MEMORY_SHARE * (device.memory_bytes or 4 * MAX_POOL_BYTES)))
    if pool_bytes > limit:
        raise DoesNotFit(
            f"its KV of {pool_bytes / 2**20:.0f} MiB is above the {limit / 2**20:.0f} MiB that timing may take here"
        )
    if mode == HOT:
        return Extent(1, set_bytes)
    cache_bytes = device.l2_bytes or DEFAULT_CACHE_BYTES
    wanted = -(-COLD_CACHE_FACTOR * cache_bytes // max(1, set_bytes))
    result = Extent(max(1, min(wanted, limit // pool_bytes, MAX_SETS)), set_bytes)
    if result.working_set_bytes >= MIN_CACHE_FACTOR * cache_bytes:
        return result
    factor = result.working_set_bytes / cache_bytes
    return Extent(result.num_sets, set_bytes, f"not quite cold: the rotation is only {factor:.1f} times the cache")


def _pool_bytes(problem: Problem, pool_format: PoolFormat, workload: Workload) -> int:
    blocks = max(1, workload.num_blocks(pool_format.block_size))
    return blocks * pool_format.block_size * pool_format.bytes_per_token(problem)


@dataclass(frozen=True)
class TimingSets:
    """The tensors of a rotation.

    Args:
        shared: slots that are the same for all sets.
        q: [num_sets, num_tokens, num_q_heads, head_dim].
        block_tables: int32 [num_sets, num_seqs, max_blocks].
        out_shape: shape of one set's output.
        extent: what was asked for.
    """

    shared: Mapping[str, torch.Tensor]
    q: torch.Tensor
    block_tables: torch.Tensor
    out_shape: tuple[int, ...]
    extent: Extent

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The input slots of one set; output and workspaces belong to the candidate."""
        return {**self.shared, "q": self.q[index], "block_table": self.block_tables[index]}

    def poisoned_outputs(self) -> torch.Tensor:
        """Outputs for all sets, all NaN: [num_sets, num_tokens, num_q_heads, head_dim_v]."""
        return torch.full((self.extent.num_sets, *self.out_shape), torch.nan, dtype=self.q.dtype)


def make_sets(
    problem: Problem, pool_format: PoolFormat, workload: Workload, size: Extent, seed: int, device: str = "cpu"
) -> TimingSets:
    """Pool, block tables and queries with random content, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    blocks_per_set = max(1, workload.num_blocks(pool_format.block_size))
    num_blocks = blocks_per_set * size.num_sets
    pool_dtype = pool_format.kv_dtype
    num_tokens = workload.num_tokens
    starts = torch.tensor([0, *workload.query_lens]).cumsum(0).to(torch.int32)
    shared = {
        "k_cache": _filled(pool_format.k_shape(num_blocks, problem), pool_dtype, generator),
        "v_cache": _filled(pool_format.v_shape(num_blocks, problem), pool_dtype, generator),
        "context_lens": torch.tensor(workload.context_lens, dtype=torch.int32),
        "query_start_loc": starts,
        **_extras(problem, pool_format, num_blocks, generator),
    }
    q = torch.randn((size.num_sets, num_tokens, problem.num_q_heads, problem.head_dim), generator=generator)
    tables = _block_tables(workload, pool_format.block_size, num_blocks, size.num_sets, generator)
    return TimingSets(
        shared={name: tensor.to(device) for name, tensor in shared.items()},
        q=q.to(problem.q_dtype.torch).to(device),
        block_tables=tables.to(device),
        out_shape=(num_tokens, problem.num_q_heads, problem.head_dim_v),
        extent=size,
    )


def _filled(shape: tuple[int, ...], dtype: DType, generator: torch.Generator) -> torch.Tensor:
    """A pool tensor on huge pages, every page written: unwritten pages would all be the one zero page."""
    pool = huge_empty(shape, dtype.torch)
    flat = pool.view(-1)
    pattern = torch.randn(min(_PATTERN_ELEMENTS, flat.numel()), generator=generator)
    pattern = (pattern * 32).round().clamp(-127, 127).to(torch.int8) if dtype is DType.INT8 else pattern.to(dtype.torch)
    for start in range(0, flat.numel(), pattern.numel()):
        part = flat[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])
    return pool


def _extras(
    problem: Problem, pool_format: PoolFormat, num_blocks: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    extras = {}
    if problem.sinks:
        extras["sinks"] = torch.randn(problem.num_q_heads, generator=generator)
    if problem.alibi:
        extras["alibi_slopes"] = torch.logspace(-1, -8, problem.num_q_heads, base=2.0)
    scale_shape = pool_format.scale_shape(num_blocks, problem)
    if scale_shape is not None:
        value = 1 / 32 if pool_format.kv_dtype is DType.INT8 else 1.0
        extras |= {name: torch.full(scale_shape, value) for name in ("k_scale", "v_scale")}
    return extras


def _block_tables(
    workload: Workload, block_size: int, num_blocks: int, num_sets: int, generator: torch.Generator
) -> torch.Tensor:
    """int32 [num_sets, num_seqs, max_blocks] over a permutation of the whole pool; entries past an end are -1."""
    counts = torch.tensor([-(-n // block_size) for n in workload.context_lens])
    width = max(1, int(counts.max()))
    tables = torch.full((num_sets, workload.num_seqs, width), -1, dtype=torch.int32)
    live = torch.arange(width)[None, :] < counts[:, None]  # [num_seqs, max_blocks]
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    if int(counts.sum()):
        tables[:, live] = order.view(num_sets, -1)
    return tables
