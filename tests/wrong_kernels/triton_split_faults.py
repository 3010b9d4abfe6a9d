"""Faults planted in `triton_split`. `#n` numbers a public bug of another project with that root cause."""

from __future__ import annotations

from typing import Any

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import ScaleKind

from .gpu_planted import SEEN, VALUE, GpuFault, gpu_case

PLAIN = gpu_case()
FP32 = gpu_case(q_dtype=DType.FP32)
SCALED = gpu_case(scale_kind=ScaleKind.PER_HEAD, kv_dtype=DType.FP8_E4M3)
SINKS = gpu_case(sinks=True)
HUGE_SINKS = gpu_case((100, 0, 17), Hazard.HUGE_SINKS, sinks=True)
QUERIES = gpu_case(query_lens=(3, 1, 2, 4))
_SPLITS: dict[str, Any] = {"num_splits": 4, "tile_tokens": 32, "split_tokens": 16, "num_stages": 2}


def fault(name: str, source: str, old: str, new: str, expected: tuple[Check, ...], case: Case = PLAIN) -> GpuFault:
    """A fault with several short splits."""
    return GpuFault(name, source, old, new, expected, case, _SPLITS)


TRITON_SPLIT_FAULTS = (
    fault(
        "K offset in 32 bits", "index width",
        "k_rows = block * k_block + slot * k_slot", "k_rows = (block * k_block + slot * k_slot).to(tl.int32)",
        SEEN, gpu_case((33, 1), Hazard.HIGH_POOL),
    ),
    fault(
        "q offset in 32 bits", "index width", "q_at = q + token * q_token", "q_at = q + (token * q_token).to(tl.int32)",
        (*SEEN, *VALUE), gpu_case((33, 7), Hazard.HIGH_ROWS),
    ),
    fault(
        "V loaded without its tail mask", "tail mask",
        "v_tile = tl.load(v_at, mask=seen[:, None]", "v_tile = tl.load(v_at, mask=(tokens > -1)[:, None]",
        (*SEEN, *VALUE),
    ),
    fault(
        "scores past the end kept", "tail mask",
        'scores = tl.where(seen[None, :], scores, -float("inf"))', "scores = scores * 1.0", (*SEEN, *VALUE),
    ),
    fault(
        "table read past its end", "stale table",
        "tl.load(table + tokens // BLOCK_SIZE, mask=seen, other=0)", "tl.load(table + tokens // BLOCK_SIZE)",
        SEEN, gpu_case((33, 5), block_size=1),
    ),
    fault(
        "first block of a tile for all of it", "stale table",
        "table + tokens // BLOCK_SIZE,", "table + (tokens * 0 + start) // BLOCK_SIZE,", VALUE,
    ),
    fault(
        "an empty split says nothing", "empty split",
        'tl.store(partial_lse + part, tl.full([BLOCK_H], -float("inf"), tl.float32), live_rows)\n            return',
        "return", (*SEEN, Check.PARTIALS),
    ),
    fault(
        "the merge reads empty splits", "empty split",
        'live = (lses != -float("inf"))[:, None]', "live = (parts < num_splits)[:, None]", SEEN,
    ),
    fault(
        "merge without maximum", "merge", "weights = tl.exp2(lses - safe_top)", "weights = tl.exp2(lses)", VALUE,
    ),
    fault(
        "query heads interleaved over KV heads", "GQA map",
        "heads = kv_head * GROUP + rows", "heads = rows * (tl.num_programs(1) // ROW_TILES) + kv_head", VALUE,
    ),
    fault("softmax scale dropped", "scale", "score_scale = scale * LOG2E", "score_scale = LOG2E", VALUE),
    fault("K scale for V", "scale swapped", "tl.load(v_scale + kv_head", "tl.load(k_scale + kv_head", VALUE, SCALED),
    fault(
        "scale of the first head for all", "scale stride",
        "k_scale + kv_head * SCALE_STRIDE", "k_scale + kv_head * 0", VALUE, SCALED,
    ),
    fault(
        "window one too wide", "window", "position - WINDOW + 1", "position - WINDOW", (*SEEN, *VALUE),
        gpu_case((100, 40), family=Family.NEEDLE, window=20),
    ),
    fault(
        "sink counted once per split", "sink", "1.0, tl.exp2(sink - safe_top))  #",
        '1.0, tl.exp2(sink - safe_top)) * tl.sum(tl.where(lses > -float("inf"), 1.0, 0.0), 0)  #', VALUE, SINKS,
    ),
    fault(
        "sink left out of the maximum", "sink", "LOG2E\n        top = tl.maximum(top, sink)", "LOG2E",
        VALUE, HUGE_SINKS,
    ),
    fault(
        "tanh made of exp alone", "soft cap",
        "libdevice.tanh(scores / cap)", "(1.0 - 2.0 / (tl.exp2(scores / cap * (2.0 * LOG2E)) + 1.0))",
        VALUE, gpu_case((1, 2, 3), soft_cap=200.0),
    ),
    fault(
        "approximate tanh", "soft cap", "libdevice.tanh(scores / cap)",
        'tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [scores / cap], tl.float32, True, 1)',
        VALUE, gpu_case((40, 17), soft_cap=20.0),
    ),
    fault(
        "no causal mask among several queries", "query-length mask",
        "tl.minimum(begin + share, position + 1)", "tl.minimum(begin + share, context_len)", VALUE, QUERIES,
    ),
    fault(
        "ALiBi with the wrong sign", "ALiBi", "(tokens - position).to", "(position - tokens).to", VALUE,
        gpu_case(alibi=True),
    ),
    fault(
        "partials rounded to bf16", "numerics",
        "acc * (out_scale / safe_total)[:, None], live_out",
        "(acc * (out_scale / safe_total)[:, None]).to(tl.bfloat16), live_out",
        (Check.PARTIALS,),
    ),
    fault("odd dims of V for even ones", "lane map", "tl.dot(weights, halves_of(pairs, 0)",
          "tl.dot(weights, halves_of(pairs, 1)", VALUE, SCALED),
    fault("words of K beside the wrong dims", "lane map", "tl.dot(q_high, halves_of(pairs, 1), tl.dot(q_low,",
          "tl.dot(q_low, halves_of(pairs, 1), tl.dot(q_high,", VALUE, SCALED),
    fault("words past the end weighed", "tail mask", "pairs = tl.load(v_at, mask=seen[:, None]",
          "pairs = tl.load(v_at, mask=(tokens > -1)[:, None]", (*SEEN, *VALUE), SCALED),
    fault("a query row is not scaled back", "scale", "score_scale = (score_scale * row_scale)[:, None]",
          "score_scale = score_scale * 1.0", VALUE, SCALED),
    fault("weights rounded to bf16", "numerics", "weights = p.to", "weights = p.to(tl.bfloat16).to", VALUE, FP32),
    fault("tf32 in silence", "numerics", '"ieee" if DOT_FP32 else "tf32"', '"tf32"', (*VALUE, Check.PARTIALS), FP32),
    fault(
        "LSE written through a null pointer", "optional output",
        "acc / safe_total, cols < DIM_V)\n    if lse.to(tl.int64) != 0:",
        "acc / safe_total, cols < DIM_V)\n    if True:",
        SEEN, gpu_case((40, 3), Hazard.NO_LSE),
    ),
    fault(
        "padded rows are computed", "padding",
        "split = tl.program_id(2)\n    if token >= tl.load(query_start_loc + num_seqs):",
        "split = tl.program_id(2)\n    if token < 0:",
        SEEN, gpu_case((40, 3), Hazard.LOOSE_BOUNDS),
    ),
    fault(
        "splits depend on the batch", "batch invariance",
        "num_splits.to(tl.int32)), SPLIT_TOKENS)", "num_splits.to(tl.int32)), SPLIT_TOKENS * num_seqs.to(tl.int32))",
        (Check.BATCH_INVARIANT,),
    ),
    fault(
        "first token of a sequence given to the one before", "sequence search",
        "tl.load(query_start_loc + middle) <= token", "tl.load(query_start_loc + middle) < token", (*SEEN, *VALUE),
    ),
)  # fmt: skip
