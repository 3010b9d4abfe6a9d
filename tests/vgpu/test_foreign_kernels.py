"""Decode kernels that nobody here wrote, from wheels of other projects, against attention in float64.

Their own host code picks the grid, tiles and constants; see `harness.foreign`. Skipped where the package index cannot
be reached: `pytest -m "not foreign"` leaves them out altogether.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from pagedtune.harness.foreign import Foreign, ForeignError, Launch, load, recording
from pagedtune.harness.foreign_plan import run
from pagedtune.harness.vgpu.report import VirtualGpuError
from pagedtune.harness.vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions
from pagedtune.kernels.launch import Access
from pagedtune.tuner.emulated_sglang import PDL, sglang
from pagedtune.tuner.emulated_vllm import KvQuantMode, vllm_decode, vllm_unified

pytest.importorskip("triton", reason="foreign kernels are compiled with Triton")
pytestmark = pytest.mark.foreign

IN, OUT, INOUT = Access.IN, Access.OUT, Access.INOUT
CAPABILITIES = (80, 90)
SCHEDULES = {
    "plain": VirtualGpuOptions(num_threads=1),
    "adverse": VirtualGpuOptions(num_threads=1, reverse_warps=True, reverse_ctas=True, async_early=True, quantum=7),
}
LENS, SLOTS, DIM = (5, 37, 130), 256, 64


def wheel_or_skip(foreign: Foreign) -> ModuleType:
    try:
        return load(foreign)
    except ForeignError as error:
        pytest.skip(str(error))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, soft_cap: float = 0.0, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [heads, dim] and LSE [heads] of one query row over k, v [tokens, kv heads, dim], in float64."""
    group = q.shape[0] // k.shape[1]
    keys, values = (x[first:].double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.einsum("ht,thd->hd", scores.softmax(1), values), scores.logsumexp(1)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within two roundings of the kernels' own 16-bit probabilities and outputs, relative to the largest value."""
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < 2 * torch.finfo(torch.bfloat16).eps, float(error)


def note(name: str, gpu: VirtualGpu) -> None:
    lanes = sum(step.counters.lane_instructions for step in gpu.report.steps)
    print(f"{name}: {', '.join(s.entry for s in gpu.report.steps)}: {lanes} lane-instructions, no fault")


def unused_slots_hold_nothing(used: torch.Tensor, heads: int, dim: int) -> dict[str, torch.Tensor]:
    """Tokens of the pool that no sequence has: no result may depend on them."""
    mask = ~used.view(-1, 1, 1).expand(-1, heads, dim)
    return {"k": mask, "v": mask}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)], ids=["ungrouped", "grouped"])
def test_sglang_decode(heads: int, kv_heads: int, capability: int) -> None:
    module = wheel_or_skip(foreign := sglang())
    splits, batch = 4, len(LENS)
    q, k, v = random(batch, heads, DIM), random(SLOTS, kv_heads, DIM), random(SLOTS + 1, kv_heads, DIM)[1:].clone()
    places = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))[: sum(LENS)]
    starts = torch.tensor([0, *torch.tensor(LENS).cumsum(0).tolist()], dtype=torch.int32)
    tensors = {
        "q": (q, IN), "k": (k, IN), "v": (v, IN), "starts": (starts, IN), "places": (places, IN),
        "splits": (torch.tensor([1, 2, 4], dtype=torch.int32), IN), "out": (torch.zeros_like(q), OUT),
        "partial": (torch.empty(batch, heads, splits, DIM), None),
        "partial lse": (torch.empty(batch, heads, splits), None),
    }  # fmt: skip
    t = {name: tensor for name, (tensor, _) in tensors.items()}
    with recording(module, foreign.kernels) as launches:
        module.decode_attention_fwd(
            q, k, v, t["out"], starts, places, t["partial"], t["partial lse"], t["splits"], splits, DIM**-0.5, 1.0, 1.0,
            logit_cap=30.0, use_pdl=capability >= PDL,
        )  # fmt: skip
    used = torch.zeros(SLOTS, dtype=torch.bool)
    used[places.long()] = True
    for name, options in SCHEDULES.items():
        t["out"].zero_()
        unknown = replace(options, uninitialised=unused_slots_hold_nothing(used, kv_heads, DIM))
        note(f"sglang {name} sm_{capability}", run(launches, tensors, capability, unknown))
        for seq in range(batch):
            rows = places[starts[seq] : starts[seq + 1]].long()
            check(t["out"][seq], attention(q[seq], k[rows], v[rows], DIM**-0.5, 30.0)[0])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)], ids=["ungrouped", "grouped"])
def test_vllm_decode(heads: int, kv_heads: int, capability: int) -> None:
    module = wheel_or_skip(foreign := vllm_decode())
    splits, page, batch = 4, 16, len(LENS)
    q = random(batch, heads, DIM)
    k, v = random(SLOTS // page, page, kv_heads, DIM), random(SLOTS // page, page, kv_heads, DIM) * 2
    table = torch.randperm(SLOTS // page, generator=torch.Generator().manual_seed(3))[:15].int()
    pages = [table[:1], table[1:4], table[4:13]]
    tables = torch.full((batch, 9), -1, dtype=torch.int32)
    for seq, own in enumerate(pages):
        tables[seq, : len(own)] = own
    tensors = {
        "q": (q, IN), "k": (k, IN), "v": (v, IN), "tables": (tables, IN),
        "lens": (torch.tensor(LENS, dtype=torch.int32), IN), "out": (torch.zeros_like(q), OUT),
        "lse": (torch.zeros(batch, heads), OUT), "partial": (torch.empty(batch, heads, splits, DIM + 1), None),
        "k_scale": (torch.ones(1), IN), "v_scale": (torch.ones(1), IN),
    }  # fmt: skip
    t = {name: tensor for name, (tensor, _) in tensors.items()}
    with recording(module, foreign.kernels) as launches:
        module.decode_attention_fwd(
            q, k, v, t["out"], t["lse"], tables, t["lens"], t["partial"], splits, DIM**-0.5, page,
            k_scale=t["k_scale"], v_scale=t["v_scale"],
        )  # fmt: skip
    for name, options in SCHEDULES.items():
        note(f"vllm decode {name} sm_{capability}", run(launches, tensors, capability, options))
        for seq, own in enumerate(pages):
            keys, values = (x[own.long()].flatten(0, 1)[: LENS[seq]] for x in (k, v))
            out, lse = attention(q[seq], keys, values, DIM**-0.5)
            check(t["out"][seq], out)
            check(t["lse"][seq], lse)


def unified(
    kind: str, columns: int
) -> tuple[dict[str, tuple[torch.Tensor, Access | None]], list[Launch], Callable[[], None]]:
    """Tensors, recorded launches and the check of vLLM's unified kernel.

    2d: mixed prefill and decode with a window; 3d: split decode with segments that are merged; fp8: the same over a
    pool of e4m3 with one scale each for K and V. `columns`: of the block table; the longest sequence needs 9.
    """
    module = wheel_or_skip(foreign := vllm_unified())
    heads, kv_heads, page, segments = 8, 2, 16, 4
    queries, window = ((2, 5, 1), 40) if kind == "2d" else ((1, 1, 1), 0)
    q = random(sum(queries), heads, DIM)
    k, v = random(SLOTS // page, page, kv_heads, DIM), random(SLOTS // page, page, kv_heads, DIM) * 2
    k_scale, v_scale = torch.ones(1), torch.ones(1)
    if kind == "fp8":
        k, v, k_scale, v_scale = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), k_scale * 0.5, v_scale * 3
    table = torch.randperm(SLOTS // page, generator=torch.Generator().manual_seed(3)).int()
    tables = torch.zeros(len(LENS), columns, dtype=torch.int32)
    pages = [table[:1], table[1:4], table[4:13]]
    for seq, own in enumerate(pages):
        tables[seq, : len(own)] = own
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    out, lens = torch.zeros_like(q), torch.tensor(LENS, dtype=torch.int32)
    tensors: dict[str, tuple[torch.Tensor, Access | None]] = {
        "q": (q, IN), "k": (k, IN), "v": (v, IN), "tables": (tables, IN), "starts": (starts, IN), "lens": (lens, IN),
        "out": (out, OUT), "k_scale": (k_scale, IN), "v_scale": (v_scale, IN),
    }  # fmt: skip
    split = {}
    if kind != "2d":
        shape = (len(q), heads, segments)
        tensors |= {n: (torch.empty(shape), None) for n in ("maxima", "sums")}
        tensors |= {"partial": (torch.empty(*shape, DIM), None)}
        names = {"softmax_segm_output": "partial", "softmax_segm_max": "maxima", "softmax_segm_expsum": "sums"}
        split = {"seq_threshold_3D": 8, "num_par_softmax_segments": segments}
        split |= {argument: tensors[name][0] for argument, name in names.items()}
    with recording(module, foreign.kernels) as launches:
        module.unified_attention(
            q, k, v, out, starts, max(queries), lens, max(LENS), DIM**-0.5, True,
            (window - 1, 0) if window else (-1, -1), tables, 0.0, None, k_scale, v_scale,
            kv_quant_mode=KvQuantMode.FP8_PER_TENSOR if kind == "fp8" else KvQuantMode.NONE, **split,
        )  # fmt: skip

    def check_all() -> None:
        for seq, own in enumerate(pages):
            for row in range(queries[seq]):
                end, at = LENS[seq] - queries[seq] + row + 1, int(starts[seq]) + row
                scaled = (k.float() * k_scale, v.float() * v_scale)
                keys, values = (x[own.long()].flatten(0, 1)[:end] for x in scaled)
                first = max(0, end - window) if window else 0
                check(out[at], attention(q[at], keys, values, DIM**-0.5, first=first)[0])

    return tensors, launches, check_all


@pytest.mark.parametrize(
    ("kind", "capability"), [("2d", 80), ("2d", 90), ("3d", 80), ("3d", 90), ("fp8", 89), ("fp8", 90)]
)
def test_vllm_unified(kind: str, capability: int) -> None:
    tensors, launches, check_all = unified(kind, columns=10)
    for name, options in SCHEDULES.items():
        note(f"vllm unified {kind} {name} sm_{capability}", run(launches, tensors, capability, options))
        check_all()


def test_vllm_unified_reads_past_a_block_table_without_slack() -> None:
    """What the checks find in the field: a prefill tile of 32 tokens loads the table unmasked, past the last block."""
    tensors, launches, _ = unified("2d", columns=9)
    with pytest.raises(VirtualGpuError, match=r"outside every allocation .* 0 bytes past the end of tables"):
        run(launches, tensors, 90, SCHEDULES["plain"])
