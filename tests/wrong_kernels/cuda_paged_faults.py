"""Faults planted in `cuda_paged`. `#n` numbers a public bug of another project with that root cause."""

from __future__ import annotations

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, ScaleKind

from .gpu_planted import SEEN, VALUE, GpuFault, gpu_case

PLAIN = gpu_case()
STRIDED = gpu_case((40, 17), Hazard.STRIDED)
QUERIES = gpu_case(query_lens=(3, 1, 2, 4))
WINDOW = gpu_case((100, 40), window=20)
FP8 = gpu_case((40, 17), kv_dtype=DType.FP8_E4M3, scale_kind=ScaleKind.PER_HEAD)


def fault(name: str, source: str, old: str, new: str, expected: tuple[Check, ...], case: Case = PLAIN) -> GpuFault:
    """A fault at the default config."""
    return GpuFault(name, source, old, new, expected, case)


CUDA_PAGED_FAULTS = (
    fault("no barrier before the merge", "barrier", "    __syncthreads();\n", "", SEEN),
    fault(
        "K offset in 32 bits", "index width", "k_cache + block * k_block + slot * k_slot",
        "k_cache + int(block * k_block) + slot * k_slot", SEEN, gpu_case((33, 1), Hazard.HIGH_POOL),
    ),
    fault(
        "q offset in 32 bits", "index width", "q + token * q_token", "q + unsigned(token * q_token)", (*SEEN, *VALUE),
        gpu_case((20, 33), Hazard.HIGH_ROWS),
    ),
    fault(
        "output offset in 32 bits", "index width", "out[token * out_token", "out[int(token * out_token)",
        (*SEEN, *VALUE, Check.WRITTEN), gpu_case((20, 33), Hazard.HIGH_ROWS),
    ),
    fault("one token past the end", "tail mask", "end = min(position + 1,", "end = min(position + 2,", (*SEEN, *VALUE)),
    fault(
        "whole blocks at the start of a window", "window",
        "begin = max(first, b * PT_BLOCK_SIZE)", "begin = b * PT_BLOCK_SIZE", (*SEEN, *VALUE), WINDOW,
    ),
    fault(
        "query heads interleaved over KV heads", "GQA map", "head / PT_GROUP", "head % (gridDim.y / PT_GROUP)", VALUE,
    ),
    fault("total not rescaled", "online softmax", "total *= shrink;", "", VALUE),
    GpuFault(
        "what additions lose is forgotten", "long sums", "p - lost * shrink", "p", VALUE,
        gpu_case((8209,), family=Family.NEEDLE, heads=(2, 1, 64)), {"num_warps": 1},
    ),
    fault("sum not rescaled", "online softmax", "acc[s][k] * shrink + weight", "acc[s][k] + weight", VALUE),
    fault("softmax scale dropped", "scale", "score_scale = scale,", "score_scale = 1.0f,", VALUE),
    fault("K scale for V", "scale swapped", "value_scale = v_scale[", "value_scale = k_scale[", VALUE, FP8),
    fault(
        "soft cap without division", "soft cap", "tanhf(score / soft_cap)", "tanhf(score)", VALUE,
        gpu_case((40, 17), soft_cap=20.0),
    ),
    fault(
        "approximate tanh", "soft cap", "if (PT_HAS_CAP) score = soft_cap * tanhf(score / soft_cap);",
        'if (PT_HAS_CAP) { score /= soft_cap; asm("tanh.approx.f32 %0, %0;" : "+f"(score)); score *= soft_cap; }',
        VALUE, gpu_case((40, 17), soft_cap=20.0),
    ),
    fault(
        "ALiBi slope of the KV head", "ALiBi", "alibi_slopes[head]", "alibi_slopes[kv_head]", VALUE,
        gpu_case((100, 17), alibi=True),
    ),
    fault(
        "sink left out of the maximum", "sink", "top = fmaxf(top, sink);", "", VALUE,
        gpu_case((40, 0), Hazard.HUGE_SINKS, sinks=True),
    ),
    fault(
        "out taken for contiguous", "strides", "out[token * out_token + head * out_head + d]",
        "out[(token * gridDim.y + head) * DV + d]", (*SEEN, Check.GUARDS, Check.WRITTEN), STRIDED,
    ),
    fault(
        "q taken for contiguous", "strides", "q + token * q_token + head * q_head",
        "q + (token * gridDim.y + head) * DK", (*SEEN, *VALUE), STRIDED,
    ),
    fault(
        "every query sees the whole context", "query-length mask",
        "context_lens[low] - (query_start_loc[low + 1] - token)", "context_lens[low] - 1", VALUE, QUERIES,
    ),
    fault(
        "LSE written through a null pointer", "optional output", "lse != nullptr && threadIdx.x", "threadIdx.x",
        SEEN, gpu_case((40,), Hazard.NO_LSE),
    ),
    fault("warps overlap by one block", "work split", "b += PT_WARPS)", "b += PT_WARPS - 1)", VALUE),
    fault(
        "warps merged without rescaling", "merge", "total += warp_total[w] * exp2f(warp_top[w] - safe_top)",
        "total += warp_total[w]", VALUE,
    ),
    fault(
        "x-packed K read as plain", "layout", "(d / pack) * k_outer + d % pack", "d", (*SEEN, *VALUE),
        gpu_case((40, 17), layout=Layout.XPACKED),
    ),
    fault("all warps write one row", "race", "warp_acc[warp][", "warp_acc[0][", SEEN),
    fault("e5m2 for e4m3", "dtype", "using T = __nv_fp8_e4m3", "using T = __nv_fp8_e5m2", VALUE, FP8),
    fault("padded rows are computed", "padding", "if (token >= query_start_loc[num_seqs]) return;", "", SEEN,
        gpu_case((40, 3), Hazard.LOOSE_BOUNDS)),
)  # fmt: skip
