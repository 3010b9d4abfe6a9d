"""Faults planted in the CUDA and Triton cache operations. `#n` numbers a public bug with that root cause."""

from __future__ import annotations

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, ScaleKind
from pagedtune.kernels.variant import Op

from .gpu_planted import SEEN, GpuFault, gpu_case

EXACT = (Check.EXACT,)
WRITE = gpu_case((20, 3), query_lens=(5, 2), op=Op.KV_WRITE)
SCALED = gpu_case((20, 3), query_lens=(5, 2), op=Op.KV_WRITE, scale_kind=ScaleKind.PER_HEAD)
FP8 = gpu_case((20,), query_lens=(5,), op=Op.KV_WRITE, kv_dtype=DType.FP8_E4M3, scale_kind=ScaleKind.PER_HEAD)
FP32 = gpu_case((40,), query_lens=(8,), op=Op.KV_WRITE, q_dtype=DType.FP32, scale_kind=ScaleKind.PER_HEAD)
INT8 = gpu_case((20,), family=Family.CODED, query_lens=(5,), op=Op.KV_WRITE, kv_dtype=DType.INT8)
SKIPPED = gpu_case((20, 3), Hazard.SKIPPED_TOKENS, query_lens=(5, 2), op=Op.KV_WRITE)
HIGH_WRITE = gpu_case((20,), Hazard.HIGH_POOL, query_lens=(5,), op=Op.KV_WRITE)
LOOSE_WRITE = gpu_case((20,), Hazard.LOOSE_BOUNDS, query_lens=(5,), op=Op.KV_WRITE)
COPY = gpu_case((70, 33), family=Family.CODED, op=Op.COPY_BLOCKS)
SKIPPED_COPY = gpu_case((70, 33), Hazard.SKIPPED_TOKENS, op=Op.COPY_BLOCKS)
LOOSE_COPY = gpu_case((70,), Hazard.LOOSE_BOUNDS, op=Op.COPY_BLOCKS)
XPACKED = gpu_case((40,), family=Family.CODED, op=Op.GATHER_KV, layout=Layout.XPACKED)
GATHER = gpu_case((33, 0, 5), Hazard.TAIL_INT_MAX, op=Op.GATHER_KV)


def fault(
    name: str, source: str, old: str, new: str, expected: tuple[Check, ...], case: Case, **config: object
) -> GpuFault:
    """A fault with the default config but for what is given."""
    return GpuFault(name, source, old, new, expected, case, config)


# Enough fp32 values that some lie next to a tie of e4m3, and on it once they are halves.
FP8_FINE = gpu_case((200,), query_lens=(64,), op=Op.KV_WRITE, q_dtype=DType.FP32, kv_dtype=DType.FP8_E4M3)

CUDA_WRITE_FAULTS = (
    fault("pool offset in 32 bits", "#3", "const i64 row = block_id * block + slot_id * slot + head_id * head;",
          "const i64 row = unsigned(block_id * block + slot_id * slot + head_id * head);", SEEN, HIGH_WRITE),
    fault("negative slots are written", "padding", "slots[first + at / VECTORS] : -1;",
          "max(slots[first + at / VECTORS], 0ll) : -1;", (*SEEN, *EXACT), SKIPPED),
    fault("e4m3 does not saturate", "#19", "__NV_SATFINITE", "__NV_NOSAT", EXACT, FP8),
    fault("int8 does not saturate", "#19", "max(-127, min(127, __float2int_rn(x)))", "__float2int_rn(x)", EXACT, INT8),
    fault("int8 is cut", "rounding", "__float2int_rn(x)", "__float2int_rz(x)", EXACT, INT8),
    fault("scale dropped", "#17", "__fdiv_rn(wide, divisor)", "wide", EXACT, SCALED),
    fault("scale multiplied by its reciprocal", "rounding", "__fdiv_rn(wide, divisor)", "wide * (1.0f / divisor)",
          EXACT, FP32),
    fault("V stored with k_scale", "#16", "slots, v_scale, first", "slots, k_scale, first", EXACT, SCALED),
    fault("scale of the first head for all", "#17", "scale[head * PT_SCALE_STRIDE]", "scale[0]", EXACT, SCALED),
    fault("rows past the batch are written", "#23", "int(min(num_tokens - first, i64(PT_ROWS))) * VECTORS",
          "PT_ROWS * VECTORS", SEEN, gpu_case((20,), query_lens=(5,), op=Op.KV_WRITE), rows_per_block=4),
    fault("slot in its block by the wrong block size", "#24", "slot[u] - block * BLOCK_SIZE", "slot[u] % 8",
          EXACT, WRITE),
)  # fmt: skip

CUDA_COPY_FAULTS = (
    fault("source and destination swapped", "copy-on-write",
          "pool + from * apart, pool + to * apart, chunk);\n    else",
          "pool + to * apart, pool + from * apart, chunk);\n    else", EXACT, COPY),
    fault("padded pairs are followed", "#23", "    if (blockIdx.x >= num_pairs) return;\n", "", SEEN, LOOSE_COPY),
    fault("skipped pairs are followed", "padding", "if (from < 0 || to < 0 || from == to) return;", "",
          SEEN, SKIPPED_COPY),
    fault("the last vectors of a block are left", "#42", "const int end = min(COUNT, (chunk + 1) * PER_CHUNK);",
          "const int end = min(COUNT, (chunk + 1) * PER_CHUNK) - 1;", EXACT, COPY),
    fault("block stride assumed dense", "layout assumption", "const i64 apart = block * KV_BYTES;",
          "const i64 apart = S::BYTES;", (Check.EXACT, Check.GUARDS, *SEEN),
          gpu_case((70,), Hazard.STRIDED_POOL, op=Op.COPY_BLOCKS)),
    fault("blocks taken as one piece", "layout assumption", "if (shape.one_piece() && wide) copy<", "if (wide) copy<",
          (*SEEN, *EXACT, Check.GUARDS), gpu_case((70,), Hazard.GAPPED_POOL, op=Op.COPY_BLOCKS)),
)  # fmt: skip

CUDA_GATHER_FAULTS = (
    fault("whole blocks are gathered", "#41", "min(context_lens[seq] - first, PT_ROWS)", "PT_ROWS",
          (*SEEN, *EXACT), GATHER),
    fault("stale table", "#20", "first + at / VECTORS) / BLOCK_SIZE] : 0;", "first) / BLOCK_SIZE] : 0;", EXACT,
          gpu_case((33, 5), op=Op.GATHER_KV, block_size=1)),
    fault("padded sequences are followed", "#23", "    if (seq >= num_seqs) return;\n", "", SEEN,
          gpu_case((33,), Hazard.LOOSE_BOUNDS, op=Op.GATHER_KV)),
    fault("x-packed elements taken as adjacent", "layout",
          "if constexpr (PACK >= DIM) return row + d;\n        else return", "return row + d;\n        return",
          (*SEEN, *EXACT), XPACKED),
)  # fmt: skip

TRITON_WRITE_FAULTS = (
    fault("e4m3 rounded twice", "rounding", "to_e4m3(x.to(tl.float32))", "to_e4m3(x.to(tl.float16).to(tl.float32))",
          EXACT, FP8_FINE),
    fault("rows past the batch are written", "#23", "(at < ROWS * HEADS * DIM) & (token < num_tokens)",
          "at < ROWS * HEADS * DIM", SEEN, LOOSE_WRITE),
    fault("int8 is cut", "rounding", "libdevice.rint(x.to(tl.float32))", "x.to(tl.float32)", EXACT, INT8),
    fault("int8 does not saturate", "#19", "tl.minimum(tl.maximum(x, -127.0), 127.0)", "x", EXACT, INT8),
    fault("scale multiplied by its reciprocal", "rounding", "tl.div_rn(x.to(tl.float32), tl.load(",
          "x.to(tl.float32) * (1.0 / tl.load(", EXACT, FP32),
    fault("heads of a token in the wrong order", "#36", "    head = at // DIM % HEADS\n    d =",
          "    head = HEADS - 1 - at // DIM % HEADS\n    d =", EXACT, WRITE),
)  # fmt: skip

TRITON_GATHER_FAULTS = (
    fault("pool offset in 32 bits", "#3", "row = block * block_stride + slot * slot_stride + head * head_stride",
          "row = (block * block_stride + slot * slot_stride + head * head_stride).to(tl.int32)", SEEN,
          gpu_case((33,), Hazard.HIGH_POOL, op=Op.GATHER_KV)),
    fault("the tail is gathered", "#9", "live = at < count * (HEADS * DIM)", "live = at < ROWS * (HEADS * DIM)",
          (*SEEN, *EXACT), GATHER),
)  # fmt: skip

TRITON_COPY_FAULTS = (
    fault("V's chunks are counted on from K's", "copy-on-write", "destination, chunk - K_CHUNKS, V_A",
          "destination, chunk, V_A", EXACT, COPY),
    fault("skipped pairs are followed", "padding", "(source < 0) | (destination < 0) | (source == destination)",
          "source == destination", SEEN, SKIPPED_COPY),
)  # fmt: skip
