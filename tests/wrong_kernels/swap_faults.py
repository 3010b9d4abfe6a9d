"""Faults planted in packing and unpacking, as torch code."""

from __future__ import annotations

import torch

from pagedtune.harness.verdicts import Check
from pagedtune.kernels.eager_swap import pack_blocks, unpack_blocks
from pagedtune.kernels.launch import Tensors
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.variant import Op

from .cache_faults import PlantedOp

EXACT = (Check.EXACT,)


def _with_ids(tensors: Tensors, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**tensors, "block_ids": ids}


def _negative_as_last(tensors: Tensors) -> dict[str, torch.Tensor]:
    return _with_ids(tensors, tensors["block_ids"] % tensors["k_cache"].shape[0])


def _pack_sorted(pool_format: PoolFormat, tensors: Tensors) -> None:
    pack_blocks(_with_ids(tensors, tensors["block_ids"].sort()[0]))


def _pack_negative_as_last(pool_format: PoolFormat, tensors: Tensors) -> None:
    pack_blocks(_negative_as_last(tensors))


def _pack_without_gaps(pool_format: PoolFormat, tensors: Tensors) -> None:
    ids = tensors["block_ids"]
    live = ids[ids >= 0]
    pack_blocks({**_with_ids(tensors, live), "staging": tensors["staging"][: len(live)]})


def _pack_without_last_block(pool_format: PoolFormat, tensors: Tensors) -> None:
    ids = tensors["block_ids"][:-1]
    pack_blocks({**_with_ids(tensors, ids), "staging": tensors["staging"][: len(ids)]})


def _pack_without_tail(pool_format: PoolFormat, tensors: Tensors) -> None:
    staging = tensors["staging"]
    last = staging[:, -1].clone()
    pack_blocks(tensors)
    staging[:, -1] = last


def _pack_v_first(pool_format: PoolFormat, tensors: Tensors) -> None:
    pack_blocks({**tensors, "k_cache": tensors["v_cache"], "v_cache": tensors["k_cache"]})


def _pack_clears_blocks(pool_format: PoolFormat, tensors: Tensors) -> None:
    pack_blocks(tensors)
    ids = tensors["block_ids"]
    tensors["v_cache"][ids[ids >= 0]] = 0


def _unpack_to_next_block(pool_format: PoolFormat, tensors: Tensors) -> None:
    unpack_blocks(_with_ids(tensors, tensors["block_ids"].roll(1)))


def _unpack_negative_as_last(pool_format: PoolFormat, tensors: Tensors) -> None:
    unpack_blocks(_negative_as_last(tensors))


def _unpack_k_only(pool_format: PoolFormat, tensors: Tensors) -> None:
    unpack_blocks({**tensors, "v_cache": tensors["v_cache"].clone()})


def _unpack_dense_rows(pool_format: PoolFormat, tensors: Tensors) -> None:
    staging = tensors["staging"]
    dense = staging.as_strided(staging.shape, (staging.shape[1], 1))
    unpack_blocks({**tensors, "staging": dense})


SWAP_FAULTS = (
    PlantedOp(Op.PACK_BLOCKS, "rows in the order of the blocks", "order", _pack_sorted, EXACT),
    PlantedOp(Op.PACK_BLOCKS, "id -1 packs the last block", "padding", _pack_negative_as_last, EXACT),
    PlantedOp(Op.PACK_BLOCKS, "skipped rows are closed up", "padding", _pack_without_gaps, EXACT),
    PlantedOp(Op.PACK_BLOCKS, "the last listed block is left", "off by one", _pack_without_last_block, EXACT),
    PlantedOp(Op.PACK_BLOCKS, "the last element of a row is left", "tail", _pack_without_tail, EXACT),
    PlantedOp(Op.PACK_BLOCKS, "V before K", "order", _pack_v_first, EXACT),
    PlantedOp(Op.PACK_BLOCKS, "packed blocks are cleared", "input edited", _pack_clears_blocks, (Check.INPUTS,)),
    PlantedOp(Op.UNPACK_BLOCKS, "rows go to each other's blocks", "order", _unpack_to_next_block, EXACT),
    PlantedOp(Op.UNPACK_BLOCKS, "id -1 unpacks to the last block", "padding", _unpack_negative_as_last, EXACT),
    PlantedOp(Op.UNPACK_BLOCKS, "only K is unpacked", "swap", _unpack_k_only, EXACT),
    PlantedOp(Op.UNPACK_BLOCKS, "row stride assumed dense", "layout assumption", _unpack_dense_rows, EXACT),
)
