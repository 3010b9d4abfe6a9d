"""Faults planted in `cuda_split_simt`. `#n` numbers a public bug of another project with that root cause."""

from __future__ import annotations

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import ScaleKind

from .gpu_planted import SEEN, VALUE, GpuFault, gpu_case

PLAIN = gpu_case((40, 0, 17))
NEEDLE = gpu_case((100, 40), family=Family.NEEDLE)
SPLIT = {"num_splits": 4, "split_tokens": 16, "num_warps": 1, "keys_per_lane": 4}
LAST = SPLIT | {"merge": "last_block"}
WINDOW = gpu_case((40, 17), query_lens=(3, 2), window=20)
LONG = gpu_case((70,))
CAPPED = gpu_case((40, 17), soft_cap=20.0)
SINKS = gpu_case((70,), sinks=True)
FP8 = gpu_case((40, 17), kv_dtype=DType.FP8_E4M3, scale_kind=ScaleKind.PER_HEAD)
HIGH = gpu_case((33,), Hazard.HIGH_POOL)
STREAM, STATE, RESULT = (f"split_simt_{part}.cuh" for part in ("stream", "state", "result"))


def fault(
    name: str, source: str, old: str, new: str, expected: tuple[Check, ...], case: Case = PLAIN,
    config: dict[str, object] = SPLIT, file: str = "",
) -> GpuFault:  # fmt: skip
    """A fault with four splits, unless said otherwise; in the kernel's main source where no file is named."""
    return GpuFault(name, source, old, new, expected, case, config, file)


SPLIT_SIMT_FAULTS = (
    fault("row offset in 32 bits", "#3", "base + blocks[run] * block_bytes", "base + u32(blocks[run] * block_bytes)",
          SEEN, HIGH, file=STREAM),
    fault("keys past the end are read", "#9", "bits_below(end - first) & ~bits_below", "~bits_below",
          (*SEEN, *VALUE), file=STREAM),
    fault("keys past the end are weighed", "tail", "own + i < from || own + i >= stop", "own + i < from", VALUE,
          file=STATE),
    fault("the table is followed past the end", "#21", "max(begin, min(key, end - 1))", "max(begin, key)",
          SEEN, gpu_case((17,), block_size=1), SPLIT | {"num_warps": 8}, STREAM),
    fault("entries passed to the wrong lanes", "lane map", "at % 32 + lane / LANES) :", "at % 32) :", VALUE,
          gpu_case((100,), block_size=1), file=STREAM),
    fault("values of dead keys stay", "#8", "values.clear();", ";", (*SEEN, *VALUE), file=STREAM),
    fault("window one key too wide", "#35", "position - PT_WINDOW + 1) : stream.begin",
          "position - PT_WINDOW) : stream.begin", VALUE, WINDOW, file=STATE),
    fault("window masks nothing", "#35", "max(stream.begin, position - PT_WINDOW + 1) : stream.begin", "0 : 0",
          (*SEEN, *VALUE), WINDOW, file=STATE),
    fault("query tokens see the whole context", "mask of q_len > 1", "stop = min(stream.end, position + 1);",
          "stop = stream.end;", VALUE, WINDOW, file=STATE),
    fault("query heads interleaved over KV heads", "#36", "head + (first + row) % GROUP;",
          "head / GROUP + (first + row) % GROUP * (num_heads / GROUP);", VALUE, file="split_rows.cuh"),
    fault("a weight goes to the next key", "lane map", "p[r][key % VALUES], key * LANES / KEYS, LANES",
          "p[r][key % VALUES], (key + 1) % KEYS * LANES / KEYS, LANES", VALUE, file=STATE),
    fault("sums dealt to the wrong lanes", "lane map", "const float sent = upper ? s[i] : s[i + HALF], kept",
          "const float sent = upper ? s[i + HALF] : s[i], kept", VALUE, file=STATE),
    fault("earlier outputs are not rescaled", "online softmax", "acc[r][step][e] *= shrink;", ";", VALUE, NEEDLE,
          SPLIT | {"num_splits": 1}, STATE),
    fault("keys of several lanes counted twice", "duplicates",
          "KEYS < LANES ? state.total[r] * (float(KEYS) / LANES) : state.total[r]", "state.total[r]",
          (*VALUE, Check.PARTIALS), file=RESULT),
    fault("approximate tanh", "soft cap", "if (PT_HAS_CAP) x = soft_cap * tanhf(x / soft_cap);",
          'if (PT_HAS_CAP) { x /= soft_cap; asm("tanh.approx.f32 %0, %0;" : "+f"(x)); x *= soft_cap; }',
          VALUE, CAPPED, file=STATE),
    fault("k_scale dropped", "#16", "raw_scale *= p.k_scale[w.kv_head * PT_SCALE_STRIDE]", "raw_scale *= 1.0f",
          VALUE, FP8, file=STATE),
    fault("v_scale of the first head", "#17", "p.v_scale[w.kv_head * PT_SCALE_STRIDE]", "p.v_scale[0]", VALUE, FP8,
          file=RESULT),
    fault("k_scale for values", "#16", "p.v_scale[w.kv_head * PT_SCALE_STRIDE]",
          "p.k_scale[w.kv_head * PT_SCALE_STRIDE]", VALUE, FP8, file=RESULT),
    fault("sink once per split", "#31", "whole ? rows.sink(p, row) : -infinity()", "rows.sink(p, row)",
          (Check.PARTIALS, *VALUE), SINKS, file=RESULT),
    fault("no barrier before the warps are added up", "barrier", "    __syncthreads();\n}\n\n// Writes",
          "}\n\n// Writes", SEEN, PLAIN, SPLIT | {"num_warps": 2}, RESULT),
    fault("arrival without release", "#28", "atom.acq_rel.gpu", "atom.relaxed.gpu", SEEN, LONG, LAST, RESULT),
    fault("padded sequences are not skipped", "#23", "    if (work.seq >= num_seqs) return;\n", "", SEEN,
          gpu_case((40,), Hazard.LOOSE_BOUNDS)),
    fault("partials rounded to bf16", "#37", "* DV + d] = value;", "* DV + d] = float(__float2bfloat16_rn(value));",
          (Check.PARTIALS,), LONG, file=RESULT),
)  # fmt: skip
