"""Faults planted in `cuda_split_mma`. `#n` numbers a public bug of another project with that root cause."""

from __future__ import annotations

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import ScaleKind

from .gpu_planted import SEEN, VALUE, GpuFault, gpu_case

PLAIN = gpu_case()
LONG = gpu_case((300, 40))
NEEDLE = gpu_case((300, 40), family=Family.NEEDLE)
QUERIES = gpu_case(query_lens=(3, 1, 2, 4))
WINDOWED_QUERIES = gpu_case((100, 40), query_lens=(3, 4), window=20)
WINDOW = gpu_case((100, 40), window=20)
SINKS = gpu_case((200, 40), sinks=True)
HIGH_ROWS = gpu_case((70, 20), Hazard.HIGH_ROWS, query_lens=(1, 2))
CAPPED = gpu_case((40, 17), soft_cap=20.0)
FP8 = gpu_case((40, 17), kv_dtype=DType.FP8_E4M3, scale_kind=ScaleKind.PER_HEAD)
STREAM, PRODUCTS, RESULT = (f"split_mma_{part}.cuh" for part in ("stream", "products", "result"))
ROWS = "split_rows.cuh"
SPLIT = {"num_splits": 4, "tile_tokens": 32, "split_tokens": 32, "num_warps": 2, "num_stages": 3}
LAST = SPLIT | {"merge": "last_block"}
ONE_WARP = SPLIT | {"num_splits": 1, "tile_tokens": 16, "num_warps": 1}


def fault(
    name: str,
    source: str,
    old: str,
    new: str,
    expected: tuple[Check, ...],
    case: Case = PLAIN,
    config: dict[str, object] = SPLIT,
    file: str = "",
) -> GpuFault:
    """A fault in the kernel's main source, unless said otherwise, with four splits."""
    return GpuFault(name, source, old, new, expected, case, config, file)


SPLIT_MMA_FAULTS = (
    fault("a copy is waited for too late", "wait", "copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();",
          SEEN, LONG, file=STREAM),
    fault(
        "no barrier of the warp after the wait", "#29", "copies_wait<STAGES - 2>();\n        __syncwarp();",
        "copies_wait<STAGES - 2>();", SEEN, LONG, file=STREAM,
    ),
    fault(
        "no barrier before the pipeline becomes the output", "barrier",
        "    __syncthreads();  // the statistics are there", "    // the statistics are there", SEEN, file=RESULT,
    ),
    fault("the stage being read is filled", "pipeline", "free_stage = STAGES - 1", "free_stage = 0", SEEN, LONG),
    fault("one stage too many", "pipeline", "stage + 1 == STAGES", "stage == STAGES", (*SEEN, *VALUE), LONG, ONE_WARP),
    fault(
        "K offset in 32 bits", "#3", "i64(block * k_block + slot * k_slot)",
        "i64(u32(block * k_block + slot * k_slot))",
        SEEN, gpu_case((33, 1), Hazard.HIGH_POOL), file=STREAM,
    ),
    fault(
        "V offset in 32 bits", "#3", "i64(block * v_block + slot * v_slot)",
        "i64(u32(block * v_block + slot * v_slot))",
        SEEN, gpu_case((33, 1), Hazard.HIGH_POOL), file=STREAM,
    ),
    fault("q offset in 32 bits", "#3", "p.q + rows.token(row) * p.q_token", "p.q + u32(rows.token(row) * p.q_token)",
          (*SEEN, *VALUE), HIGH_ROWS, file=PRODUCTS),
    fault("output offset in 32 bits", "#3", "p.out + token(row) * p.out_token", "p.out + u32(token(row) * p.out_token)",
          (*SEEN, *VALUE, Check.WRITTEN), HIGH_ROWS, file=ROWS),
    fault("LSE offset in 32 bits", "#3", "p.lse + token(row) * p.lse_token", "p.lse + u32(token(row) * p.lse_token)",
          (*SEEN, *VALUE, Check.WRITTEN), HIGH_ROWS, file=ROWS),
    fault("output offset of a merged row in 32 bits", "#3", "out + token * out_token", "out + u32(token * out_token)",
          (*SEEN, *VALUE, Check.WRITTEN), gpu_case((20, 70), Hazard.HIGH_ROWS), file="split_merge.cuh"),
    fault("one key past the end", "tail mask", "if (token >= stop ||", "if (token > stop ||", VALUE, file=RESULT),
    fault(
        "table read past its end", "#21", "u32(min(first_token(tile) + lane, end - 1))",
        "u32(first_token(tile) + lane)",
        SEEN, LONG, file=STREAM,
    ),
    fault("K rows half a copy apart", "alignment", "p.k_head * KV_BYTES + lane % 8 * 16",
          "p.k_head * KV_BYTES + lane % 8 * 8",
          SEEN, file=STREAM),
    fault(
        "copies and reads swizzled differently", "swizzle", "^ 16 * T::TOGGLE", "^ 0",
        (*SEEN, *VALUE), file="copies.cuh",
    ),
    fault(
        "weights not transposed", "fragment", "transpose(pack<MMA_DTYPE>(p[m][n][0], p[m][n][1]))",
        "pack<MMA_DTYPE>(p[m][n][0], p[m][n][1])", VALUE, file=PRODUCTS,
    ),
    fault(
        "query heads interleaved over KV heads", "#36", "return head + (first + row) % GROUP;",
        "return head / GROUP + (first + row) % GROUP * (num_heads / GROUP);", VALUE, file=ROWS,
    ),
    fault(
        "output not rescaled", "online softmax", "out[v][n][e] *= shrink, out[v][n][e + 2] *= shrink;",
        "out[v][n][e] *= 1.0f;",
        VALUE, NEEDLE, ONE_WARP, "softmax.cuh",
    ),
    fault(
        "total not rescaled", "online softmax", "total[n][e] *= shrink;", "", VALUE, NEEDLE, ONE_WARP, "softmax.cuh",
    ),
    fault(
        "warps merged without their maxima", "merge", "const float factor = exp2_fast(softmax.top[n][e] - top) *",
        "const float factor =", VALUE, NEEDLE, file=RESULT,
    ),
    fault(
        "splits merged without their maximum", "merge", "weight[k] = exp2_fast(weight[k] - safe_top);",
        "weight[k] = exp2_fast(weight[k]);", VALUE, file="merge.cuh",
    ),
    fault(
        "sink once per split", "#31", "const float sink = whole ? rows.sink(p, row) : -infinity();",
        "const float sink = rows.sink(p, row);", (*VALUE, Check.PARTIALS), SINKS, file=RESULT,
    ),
    fault("sink of an unsplit row dropped", "#32", "whole ? rows.sink(p, row) : -infinity()", "-infinity()", VALUE,
          gpu_case((20, 1), sinks=True), file=RESULT),
    fault(
        "partials rounded", "#37", "w.split) * DV + d] = value;", "w.split) * DV + d] = float(Q(value));",
        (Check.PARTIALS, *VALUE), file=RESULT,
    ),
    fault(
        "sequences share partials", "scratch index", "return token(row) * num_heads + q_head(row);",
        "return q_head(row);",
        (*SEEN, *VALUE, Check.PARTIALS),
        gpu_case((100, 110)), file=ROWS,
    ),
    fault(
        "last block without release or acquire", "#28", "atom.acq_rel.gpu.global", "atom.relaxed.gpu.global", SEEN,
        config=LAST, file=RESULT,
    ),
    fault(
        "last block arrives before its warps have written", "#28", "    __syncthreads();\n    if (threadIdx.x == 0) {",
        "    if (threadIdx.x == 0) {", SEEN, config=LAST, file=RESULT,
    ),
    fault("empty splits arrive too", "empty split", "if (rows.count <= 0 || work.split >= share.live) return;",
          "if (rows.count <= 0) return;", (*SEEN, *VALUE), config=LAST),
    fault("window one key too wide", "#35", "token <= position - PT_WINDOW", "token < position - PT_WINDOW", VALUE,
          WINDOWED_QUERIES, file=RESULT),
    fault("window one key too narrow", "#35", "s.context - s.query_len - window + 1",
          "s.context - s.query_len - window + 2",
          VALUE, WINDOW, file="merge.cuh"),
    fault("every query sees the whole context", "query-length mask", "stop = min(end, position + 1)", "stop = end",
          VALUE,
          QUERIES, file=RESULT),
    fault("all queries at the last position", "query-length mask", "position(s.context - s.query_len)",
          "position(s.context - 1)", VALUE, QUERIES, file=ROWS),
    fault(
        "approximate tanh", "soft cap", "if (PT_HAS_CAP) x = soft_cap * tanhf(x / soft_cap);",
        'if (PT_HAS_CAP) { x /= soft_cap; asm("tanh.approx.f32 %0, %0;" : "+f"(x)); x *= soft_cap; }',
        VALUE, CAPPED, file=RESULT,
    ),
    fault("K scale dropped", "#16", "if (PT_HAS_SCALES) factor *= p.k_scale[w.kv_head * PT_SCALE_STRIDE];", "",
          VALUE, FP8, file=RESULT),
    fault("K scale for V", "scale swapped", "p.v_scale[w.kv_head", "p.k_scale[w.kv_head", VALUE, FP8, file=RESULT),
    fault("scale of the query dropped", "scale", "SCALED_QUERY ? factor * query_scales[",
          "SCALED_QUERY ? factor + 0.0f * query_scales[",
          VALUE, FP8, file=RESULT),
    fault("8-bit values of two keys mixed up", "fragment", "__byte_perm(x, 0, 0x3120)", "__byte_perm(x, 0, 0x3210)",
          VALUE, FP8,
          file="types.cuh"),
)  # fmt: skip
