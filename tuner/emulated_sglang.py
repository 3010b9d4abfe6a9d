"""SGLang's Triton decode kernels for the virtual GPU: tensors, splits and the call of its host code."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from pagedtune.harness.foreign import Foreign

from .emulated_peer import DECODE, IN, Ask, Cell, Named, TritonPeer, common, empty

SGLANG = "sglang==0.5.23"
SPLITS = (8, 16, 32)  # --triton-attention-num-kv-splits, of which 8 is the default
PDL = 90  # compute capability from which its merge kernel is launched programmatically dependent


def sglang() -> Foreign:
    """SGLang's split decode over token indices."""
    no = ("is_hip", "is_gfx95_supported", "is_gfx1250_supported")
    stubs: dict[str, dict[str, object]] = {
        "sglang.srt.utils": {"get_device_core_count": lambda _: 0} | {name: lambda: False for name in no},
        "sglang.srt.environ": {"envs": None},  # asked on AMD's GPUs only
    }
    folder = "sglang.kernels.ops.attention"
    member = folder.replace(".", "/") + "/decode_attention.py"
    return Foreign(SGLANG, member, DECODE, stubs, (f"{folder}.score_mod",))


def _tensors(ask: Ask) -> Named:
    t, dim, length, most = ask.tensors, ask.problem.head_dim_v, ask.cell.length, ask.config["splits"]
    rows, heads = t["q"].shape[:2]
    block_size, table = t["k_cache"].shape[1], t["block_table"]
    offsets = torch.arange(block_size, device=table.device)
    places = (table.long()[:, :, None] * block_size + offsets).flatten(1)[:, :length].flatten()
    starts = torch.arange(rows + 1, device=table.device, dtype=torch.int32) * length
    splits = torch.full((rows,), splits_used(ask.cell, most), dtype=torch.int32, device=table.device)
    pools = {n: (t[n].flatten(0, 1), IN) for n in ("k_cache", "v_cache")}
    return {
        **common(ask), **pools, "starts": (starts, IN), "places": (places, IN), "splits": (splits, IN),
        "partial": (empty(ask, rows, heads, most, dim), None),
        "partial_lse": (empty(ask, rows, heads, most), None),
    }  # fmt: skip


def _call(module: ModuleType, ask: Ask, named: Named) -> None:
    t = {name: tensor for name, (tensor, _) in named.items()}
    module.decode_attention_fwd(
        t["q"], t["k_cache"], t["v_cache"], t["out"], t["starts"], t["places"], t["partial"], t["partial_lse"],
        t["splits"], ask.config["splits"], ask.problem.softmax_scale, 1.0, 1.0,
        use_pdl=ask.cell.device.capability >= PDL,
    )  # fmt: skip


def splits_used(cell: Cell, most: int) -> int:
    """Splits of a uniform batch: SMs x log2(length / 64) over the blocks of one split, at most `most`."""
    ratio = cell.problem.gqa_ratio
    units = int(cell.device.num_units * max(1.0, math.log2(cell.length / 64)))
    blocks = cell.workload.num_seqs * -(-cell.problem.num_q_heads // (min(16, ratio) if ratio > 1 else 1))
    chunk = -(-cell.length // min(most, -(-units // blocks)))
    return -(-cell.length // chunk)


DECODE_PEER = TritonPeer(
    "sglang_decode", "SGLang's Triton backend; splits as it computes them from --triton-attention-num-kv-splits",
    sglang, lambda cell: SPLITS, _tensors, _call,
)  # fmt: skip
