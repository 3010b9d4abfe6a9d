"""The named tensors of each op: one declaration that is documentation, check and binding at once.

Symbols in the shapes: `num_tokens` query or written tokens, `num_seqs` sequences,
`num_blocks` blocks of the pool, `max_blocks` columns of the block table, `num_pairs` block copies, `num_listed` blocks
that are packed or unpacked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from .bounds import Bounds
from .launch import Access, SlotSpec
from .pool_format import PoolFormat
from .problem import Problem


def attention_slots(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    """Slots of `Op.ATTENTION`.

    - `q` [num_tokens, num_q_heads, head_dim], `out` [num_tokens, num_q_heads, head_dim_v]: query dtype; tokens of
      one sequence are adjacent, sequences in batch order; any token and head stride.
    - `k_cache`, `v_cache`: pool tensors shaped by the format; any block stride.
    - `block_table` int32 [num_seqs, max_blocks]: block of each logical block; entries past the end of a sequence,
      and those of blocks that lie wholly before the window of every query, may hold anything and must not be
      followed. Two entries may name one block.
    - `context_lens` int32 [num_seqs]: tokens of each sequence, its query tokens included.
    - `query_start_loc` int32 [num_seqs + 1]: first query token of each sequence, and their total.
    - `lse` fp32 [num_tokens, num_q_heads]: optional output.
    - `sinks`, `alibi_slopes` fp32 [num_q_heads]; `k_scale`, `v_scale` fp32: present iff problem or format say so.
      Scales of tokens are found like the pools' elements, through the table; see `scale_slots`.
    """
    heads, dim, dim_v = problem.num_q_heads, problem.head_dim, problem.head_dim_v
    dtype, int32, fp32 = problem.q_dtype.torch, torch.int32, torch.float32
    slots = {
        "q": SlotSpec(dtype, ("num_tokens", heads, dim), unit_stride=(2,)),
        **pool_slots(problem, pool_format, Access.IN),
        "block_table": SlotSpec(int32, ("num_seqs", "max_blocks"), unit_stride=(1,)),
        "context_lens": SlotSpec(int32, ("num_seqs",), contiguous=True),
        "query_start_loc": SlotSpec(int32, ("num_seqs+1",), contiguous=True),
        "out": SlotSpec(dtype, ("num_tokens", heads, dim_v), Access.OUT, unit_stride=(2,)),
        "lse": SlotSpec(fp32, ("num_tokens", heads), Access.OUT, unit_stride=(1,), optional=True),
    }
    if problem.sinks:
        slots["sinks"] = SlotSpec(fp32, (heads,), contiguous=True)
    if problem.alibi:
        slots["alibi_slopes"] = SlotSpec(fp32, (heads,), contiguous=True)
    return slots | scale_slots(problem, pool_format)


def kv_write_slots(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    """Slots of `Op.KV_WRITE`: `k`, `v` [num_tokens, num_kv_heads, head_dim(_v)] in the query dtype go to
    `slot_mapping` int64 [num_tokens] (block · block_size + slot in block; negative is skipped). A stored value
    is the value divided by its scale in fp32, rounded to nearest, ties to even; what lies beyond the range of an 8-bit
    pool becomes its largest number (e4m3 ±448, int8 ±127). NaN stays NaN, in int8 it becomes 0.

    With a scale per token and head, `k_scale` and `v_scale` are written too: the largest finite magnitude of the row
    of head_dim(_v) values over the pool's largest number, in fp32, to nearest; 1 where that is no normal fp32 number,
    as for a row of zeros."""
    dtype, heads = problem.q_dtype.torch, problem.num_kv_heads
    return {
        "k": SlotSpec(dtype, ("num_tokens", heads, problem.head_dim), unit_stride=(2,)),
        "v": SlotSpec(dtype, ("num_tokens", heads, problem.head_dim_v), unit_stride=(2,)),
        "slot_mapping": SlotSpec(torch.int64, ("num_tokens",), contiguous=True),
        **pool_slots(problem, pool_format, Access.INOUT),
        **scale_slots(problem, pool_format, Access.INOUT),
    }


def copy_blocks_slots(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    """Slots of `Op.COPY_BLOCKS`: `block_pairs` int64 [num_pairs, 2] holds (source, destination) blocks. No
    destination occurs twice or is also a source; a pair with a negative block is skipped. Scales of tokens are copied
    with their blocks; others are no business of this op."""
    pairs = SlotSpec(torch.int64, ("num_pairs", 2), contiguous=True)
    return {
        "block_pairs": pairs,
        **pool_slots(problem, pool_format, Access.INOUT),
        **_token_scales(problem, pool_format, Access.INOUT),
    }


def gather_kv_slots(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    """Slots of `Op.GATHER_KV`: the tokens of `context_lens` int32 [num_seqs], found through `block_table`, go to
    `k_out`, `v_out` [num_tokens, num_kv_heads, head_dim(_v)] in the pool's dtype, sequence by sequence from
    `out_start` int32 [num_seqs + 1] on. Rows of the outputs past the last sequence stay as they are. Stored values
    are gathered as they are, and with them the scales of tokens, to `k_scale_out`, `v_scale_out` fp32 [num_tokens,
    num_kv_heads]; other scales are no business of this op."""
    dtype, heads = pool_format.kv_dtype.torch, problem.num_kv_heads
    scales = _token_scales(problem, pool_format, Access.IN)
    scale_out = SlotSpec(torch.float32, ("num_tokens", heads), Access.INOUT, contiguous=True)
    return {
        **pool_slots(problem, pool_format, Access.IN),
        **scales,
        **{f"{name}_out": scale_out for name in scales},
        "block_table": SlotSpec(torch.int32, ("num_seqs", "max_blocks"), unit_stride=(1,)),
        "context_lens": SlotSpec(torch.int32, ("num_seqs",), contiguous=True),
        "out_start": SlotSpec(torch.int32, ("num_seqs+1",), contiguous=True),
        "k_out": SlotSpec(dtype, ("num_tokens", heads, problem.head_dim), Access.INOUT, (2,), contiguous=True),
        "v_out": SlotSpec(dtype, ("num_tokens", heads, problem.head_dim_v), Access.INOUT, (2,), contiguous=True),
    }


def pack_blocks_slots(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    """Slots of `Op.PACK_BLOCKS`: the blocks that `block_ids` int64 [num_listed] names go to the rows of `staging`
    [num_listed, sum of `block_elements`] in the pool's dtype, block `block_ids[i]` to row i: first its K elements, then
    its V elements, each without gaps in the order of the pool tensor's dimensions, bit for bit, slots without a token
    included. So a row is all that a layer keeps of a block, and adjacent rows are one transfer; any row stride.

    The row of a negative id stays as it is. A block may be listed more than once."""
    return _staging_slots(problem, pool_format, pools=Access.IN, staging=Access.INOUT)


def unpack_blocks_slots(problem: Problem, pool_format: PoolFormat) -> dict[str, SlotSpec]:
    """Slots of `Op.UNPACK_BLOCKS`, the reverse of `Op.PACK_BLOCKS`: row i of `staging` goes to block `block_ids[i]` of
    both pools. The row of a negative id is skipped; no other id occurs twice."""
    return _staging_slots(problem, pool_format, pools=Access.INOUT, staging=Access.IN)


def _staging_slots(problem: Problem, pool_format: PoolFormat, pools: Access, staging: Access) -> dict[str, SlotSpec]:
    row = sum(block_elements(problem, pool_format))
    return {
        "block_ids": SlotSpec(torch.int64, ("num_listed",), contiguous=True),
        "staging": SlotSpec(pool_format.kv_dtype.torch, ("num_listed", row), staging, unit_stride=(1,)),
        **pool_slots(problem, pool_format, pools),
    }


def block_elements(problem: Problem, pool_format: PoolFormat) -> tuple[int, int]:
    """Elements of a K block and of a V block in one layer."""
    return math.prod(pool_format.k_shape(1, problem)), math.prod(pool_format.v_shape(1, problem))


def pool_slots(problem: Problem, pool_format: PoolFormat, access: Access) -> dict[str, SlotSpec]:
    """`k_cache` and `v_cache`, with any strides but a dense innermost dimension."""
    specs = {}
    for name, shape in (
        ("k_cache", pool_format.k_shape(1, problem)),
        ("v_cache", pool_format.v_shape(1, problem)),
    ):
        dims: tuple[int | str, ...] = ("num_blocks", *shape[1:])
        specs[name] = SlotSpec(pool_format.kv_dtype.torch, dims, access, unit_stride=(len(dims) - 1,))
    return specs


def scale_slots(problem: Problem, pool_format: PoolFormat, access: Access = Access.IN) -> dict[str, SlotSpec]:
    """`k_scale` and `v_scale` fp32, if the format has scales: `ScaleKind` gives the shapes. Those of tokens are part of
    the pool: the op has `access` to them, and like the pools they have any strides but along the slots of a block;
    what belongs to no token may hold anything."""
    shape = pool_format.scale_shape(1, problem)
    if pool_format.has_token_scales or shape is None:
        return _token_scales(problem, pool_format, access)
    return {name: SlotSpec(torch.float32, shape, contiguous=True) for name in ("k_scale", "v_scale")}


def _token_scales(problem: Problem, pool_format: PoolFormat, access: Access) -> dict[str, SlotSpec]:
    shape = pool_format.scale_shape(1, problem)
    if not pool_format.has_token_scales or shape is None:
        return {}
    spec = SlotSpec(torch.float32, ("num_blocks", *shape[1:]), access, unit_stride=(2,))
    return dict.fromkeys(("k_scale", "v_scale"), spec)


def aligned(specs: Mapping[str, SlotSpec], align: Mapping[str, int]) -> dict[str, SlotSpec]:
    """The same slots, with the alignments in bytes (see `SlotSpec.align`) that wide loads and stores need."""
    return {name: replace(spec, align=align.get(name, spec.align)) for name, spec in specs.items()}


def batch_limits(bounds: Bounds) -> dict[str, int]:
    """Largest size of each symbol of an attention or gather launch within `bounds`."""
    return {
        "num_seqs": bounds.max_num_seqs,
        "num_tokens": bounds.max_num_tokens,
    }
