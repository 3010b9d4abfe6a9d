"""Slots of a cache operation with random values over permuted blocks, to count its work on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slots import block_elements
from pagedtune.kernels.variant import Op


def cache_tensors(
    op: Op, problem: Problem, pool_format: PoolFormat, lengths: Sequence[int], query_lens: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Every slot of `op` for one batch.

    Args:
        op: any but attention.
        problem, pool_format: of the pools.
        lengths, query_lens: of each sequence. A write is of the last `query_lens` tokens of each, a gather of all its
            tokens; a block pair, and a block that is packed or unpacked, is a sequence.
    """
    g = torch.Generator().manual_seed(0)
    blocks = [-(-n // pool_format.block_size) for n in lengths]
    total = {Op.COPY_BLOCKS: 2 * len(lengths), Op.PACK_BLOCKS: len(lengths), Op.UNPACK_BLOCKS: len(lengths)}.get(
        op, sum(blocks)
    )
    order = torch.randperm(total, generator=g)
    tensors = _pools(problem, pool_format, total, op, g)
    match op:
        case Op.KV_WRITE:
            rows = (sum(query_lens), problem.num_kv_heads)
            dtype = problem.q_dtype.torch
            tensors["k"] = random_values((*rows, problem.head_dim), dtype, g)
            tensors["v"] = random_values((*rows, problem.head_dim_v), dtype, g)
            tensors["slot_mapping"] = _slots(permuted_table(order, blocks), lengths, query_lens, pool_format.block_size)
        case Op.COPY_BLOCKS:
            tensors["block_pairs"] = order.view(2, -1).T.contiguous()
        case Op.PACK_BLOCKS | Op.UNPACK_BLOCKS:
            tensors["block_ids"] = order
            shape = (len(lengths), sum(block_elements(problem, pool_format)))
            tensors["staging"] = random_values(shape, pool_format.kv_dtype.torch, g)
        case _:
            tensors |= _gathered(problem, pool_format, lengths)
            tensors["block_table"] = permuted_table(order, blocks).int()
    return tensors


def _pools(
    problem: Problem, pool_format: PoolFormat, num_blocks: int, op: Op, g: torch.Generator
) -> dict[str, torch.Tensor]:
    """Both pools, and the scales that the op reads or writes."""
    dtype = pool_format.kv_dtype.torch
    pools = {
        "k_cache": random_values(pool_format.k_shape(num_blocks, problem), dtype, g),
        "v_cache": random_values(pool_format.v_shape(num_blocks, problem), dtype, g),
    }
    scales = pool_format.scale_shape(num_blocks, problem)
    if scales is not None and (pool_format.has_token_scales or op is Op.KV_WRITE):
        pools |= {"k_scale": torch.ones(scales), "v_scale": torch.ones(scales)}
    return pools


def _gathered(problem: Problem, pool_format: PoolFormat, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Lengths and outputs of a gather."""
    dtype, rows = pool_format.kv_dtype.torch, (sum(lengths), problem.num_kv_heads)
    tensors = {
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
        "out_start": torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        "k_out": torch.zeros((*rows, problem.head_dim), dtype=dtype),
        "v_out": torch.zeros((*rows, problem.head_dim_v), dtype=dtype),
    }
    if pool_format.has_token_scales:
        tensors |= {name: torch.zeros(rows) for name in ("k_scale_out", "v_scale_out")}
    return tensors


def permuted_table(order: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Block table [num_seqs, most blocks] with -1 behind each sequence's blocks."""
    table = torch.full((len(blocks), max(blocks)), -1, dtype=torch.int64)
    start = 0
    for seq, count in enumerate(blocks):
        table[seq, :count] = order[start : start + count]
        start += count
    return table


def _slots(table: torch.Tensor, lengths: Sequence[int], query_lens: Sequence[int], block_size: int) -> torch.Tensor:
    """Slots of the last tokens of each sequence, int64 [num_tokens]."""
    found = []
    for seq, (length, query_len) in enumerate(zip(lengths, query_lens, strict=True)):
        tokens = torch.arange(length - query_len, length)
        found.append(table[seq, tokens // block_size] * block_size + tokens % block_size)
    return torch.cat(found)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Random values that repeat: their number matters to no count."""
    tile = torch.randn(1 << 14, generator=g).to(dtype)
    size = int(np.prod(shape))
    return tile.repeat(-(-size // tile.numel()))[:size].view(shape).clone()
