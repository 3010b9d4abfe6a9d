"""SGLang's Triton decode kernels for the virtual GPU: tensors, splits and the call of its host code."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from pagedtune.harness.foreign import Foreign
from pagedtune.kernels.device import Device
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.workload import Workload

from .emulated_peer import DECODE, IN, Ask, Named, Peer, common, empty

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
    t, dim = ask.tensors, ask.problem.head_dim_v
    rows, heads = t["q"].shape[:2]
    block_size, table = t["k_cache"].shape[1], t["block_table"]
    offsets = torch.arange(block_size, device=table.device)
    places = (table.long()[:, :, None] * block_size + offsets).flatten(1)[:, : ask.longest].flatten()
    starts = torch.arange(rows + 1, device=table.device, dtype=torch.int32) * ask.longest
    splits = torch.full((rows,), ask.splits_used, dtype=torch.int32, device=table.device)
    pools = {n: (t[n].flatten(0, 1), IN) for n in ("k_cache", "v_cache")}
    return {
        **common(ask), **pools, "starts": (starts, IN), "places": (places, IN), "splits": (splits, IN),
        "partial": (empty(ask, rows, heads, ask.splits, dim), None),
        "partial_lse": (empty(ask, rows, heads, ask.splits), None),
    }  # fmt: skip


def _call(module: ModuleType, ask: Ask, named: Named) -> None:
    t = {name: tensor for name, (tensor, _) in named.items()}
    module.decode_attention_fwd(
        t["q"], t["k_cache"], t["v_cache"], t["out"], t["starts"], t["places"], t["partial"], t["partial_lse"],
        t["splits"], ask.splits, ask.problem.softmax_scale, 1.0, 1.0,
        use_pdl=ask.device.capability >= PDL,
    )  # fmt: skip


def _used(problem: Problem, workload: Workload, device: Device, most: int) -> int:
    """Splits of a uniform batch: SMs x log2(length / 64) over the blocks of one split, at most `most`."""
    longest, ratio = max(workload.context_lens), problem.gqa_ratio
    units = int(device.num_units * max(1.0, math.log2(longest / 64)))
    blocks = workload.num_seqs * -(-problem.num_q_heads // (min(16, ratio) if ratio > 1 else 1))
    chunk = -(-longest // min(most, -(-units // blocks)))
    return -(-longest // chunk)


DECODE_PEER = Peer(
    "sglang_decode", sglang, lambda p, w, d: SPLITS, _used, _tensors, _call,
    "SGLang's Triton backend; splits as it computes them from --triton-attention-num-kv-splits",
)  # fmt: skip
