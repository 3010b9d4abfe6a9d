"""Faults planted in what GPU kernels do with the scales of each token and KV head."""

from __future__ import annotations

from dataclasses import replace

from pagedtune.harness.case import Hazard
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import ScaleKind
from pagedtune.kernels.variant import Op

from .gpu_planted import SEEN, VALUE, GpuFault, gpu_case

EXACT = (Check.EXACT,)
KIND = ScaleKind.PER_TOKEN_HEAD
INT8 = gpu_case(kv_dtype=DType.INT8, scale_kind=KIND)
FP8 = gpu_case((40, 17), kv_dtype=DType.FP8_E4M3, scale_kind=KIND)
LONG = gpu_case((300, 40), kv_dtype=DType.INT8, scale_kind=KIND)
# V so small that its scales leave a half few bits.
HALF = gpu_case((300, 40), q_dtype=DType.FP16, kv_dtype=DType.INT8, scale_kind=KIND)
# Here the largest scale comes late.
GROWING = replace(LONG, seed=7)
SMALL_BLOCKS = gpu_case((100, 33), kv_dtype=DType.INT8, scale_kind=KIND, block_size=2)
HIGH = gpu_case((33, 1), Hazard.HIGH_POOL, kv_dtype=DType.INT8, scale_kind=KIND)
# 74 rows of a token and head: some are of zeros, some hold an infinity or a NaN.
WRITE = gpu_case((40, 3), query_lens=(35, 2), op=Op.KV_WRITE, kv_dtype=DType.INT8, scale_kind=KIND)
WRITE_FP8 = gpu_case((40, 3), query_lens=(35, 2), op=Op.KV_WRITE, kv_dtype=DType.FP8_E4M3, scale_kind=KIND)
COPY = gpu_case((70, 33), op=Op.COPY_BLOCKS, kv_dtype=DType.INT8, scale_kind=KIND)
GATHER = gpu_case((33, 0, 5), op=Op.GATHER_KV, kv_dtype=DType.INT8, scale_kind=KIND)
STRIDED = gpu_case((300, 40), Hazard.STRIDED_POOL, kv_dtype=DType.INT8, scale_kind=KIND)
STRIDED_COPY = gpu_case((70, 33), Hazard.STRIDED_POOL, op=Op.COPY_BLOCKS, kv_dtype=DType.INT8, scale_kind=KIND)
SCALES, STREAM, SIMT = "split_mma_scales.cuh", "split_mma_stream.cuh", "split_simt_stream.cuh"
ONE_WARP = {"num_splits": 1, "num_warps": 1}
SPLIT = {"num_splits": 4, "tile_tokens": 32, "split_tokens": 32, "num_warps": 2, "num_stages": 3}

SPLIT_MMA_SCALE_FAULTS = (
    GpuFault(
        "V's scales by the head stride of K's",
        "strides",
        "v(p.v_scale + w.kv_head * p.v_scale_head)",
        "v(p.v_scale + w.kv_head * p.k_scale_head)",
        (*SEEN, *VALUE),
        STRIDED,
        SPLIT,
        SCALES,
    ),
    GpuFault(
        "K's scales of tokens dropped",
        "#16",
        "if (PT_TOKEN_SCALES) scale_scores(",
        "if (false) scale_scores(",
        VALUE,
        INT8,
        SPLIT,
    ),
    GpuFault(
        "V's scales of tokens dropped", "#16", "        multiply_by_scales(p, own);\n", "", VALUE, FP8, SPLIT, SCALES
    ),
    GpuFault(
        "scales of tokens swapped",
        "scale swapped",
        "k(p.k_scale + w.kv_head * p.k_scale_head), v(p.v_scale + w.kv_head * p.v_scale_head)",
        "k(p.v_scale + w.kv_head * p.v_scale_head), v(p.k_scale + w.kv_head * p.k_scale_head)",
        VALUE,
        INT8,
        SPLIT,
        SCALES,
    ),
    GpuFault(
        "scale of the neighbouring token",
        "scale index",
        "[16 * m + 8 * h + lane / 4]",
        "[(16 * m + 8 * h + lane / 4) ^ 1]",
        VALUE,
        LONG,
        SPLIT,
        SCALES,
    ),
    GpuFault(
        "scale of the logical block",
        "#20",
        "scales.place(block, slot)",
        "scales.place(token(tile) / PT_BLOCK_SIZE, slot)",
        (*SEEN, *VALUE),
        LONG,
        SPLIT,
        STREAM,
    ),
    GpuFault(
        "scales of the first head",
        "#17",
        "k(p.k_scale + w.kv_head * p.k_scale_head)",
        "k(p.k_scale)",
        VALUE,
        INT8,
        SPLIT,
        SCALES,
    ),
    GpuFault(
        "scale offset in 32 bits",
        "#3",
        "i64(block) * k_block + slot",
        "u32(block * k_block + slot)",
        SEEN,
        HIGH,
        SPLIT,
        SCALES,
    ),
    GpuFault(
        "weights times scales leave the range of a half",
        "numerics",
        "raise(most, out);",
        "unit = 1.0f;",
        (*VALUE, Check.PARTIALS),
        HALF,
        SPLIT,
        SCALES,
    ),
    GpuFault(
        "outputs are not rescaled with the unit",
        "online softmax",
        "out[v][n][k] *= shrink;",
        ";",
        VALUE,
        GROWING,
        SPLIT | {"num_splits": 1},
        SCALES,
    ),
)

SPLIT_SIMT_SCALE_FAULTS = (
    GpuFault(
        "V's scales of tokens for K",
        "#16",
        "k_scales(k_scale, k_scale_block",
        "k_scales(v_scale, k_scale_block",
        VALUE,
        INT8,
    ),
    GpuFault("V's scales of tokens dropped", "#16", "v_scales.multiply(s);", ";", VALUE, FP8),
    GpuFault("scales of the tile before", "pipeline", "k_scales.load(stream, tile + 1);", ";", VALUE, LONG, ONE_WARP),
    GpuFault(
        "scale of the neighbouring token",
        "scale index",
        "+ u32(token) % PT_BLOCK_SIZE);",
        "+ (u32(token) % PT_BLOCK_SIZE ^ 1));",
        (*SEEN, *VALUE),
        LONG,
        file=SIMT,
    ),
    GpuFault(
        "scale of the logical block",
        "#20",
        "(i64(block) * block_stride",
        "(i64(token / PT_BLOCK_SIZE) * block_stride",
        (*SEEN, *VALUE),
        LONG,
        file=SIMT,
    ),
    GpuFault(
        "scales of a tile's first block",
        "block index",
        "key / RUN >= run ? stream.blocks[run] : block",
        "block",
        (*SEEN, *VALUE),
        SMALL_BLOCKS,
        file=SIMT,
    ),
    GpuFault(
        "scales past the end are read",
        "#21",
        "own[i] = token >= stream.begin && token < stream.end ? __ldg(place) : 0.0f;",
        "own[i] = __ldg(place);",
        (*SEEN, *VALUE),
        INT8,
        file=SIMT,
    ),
)

TRITON_SPLIT_SCALE_FAULTS = (
    GpuFault(
        "V's scales by the head stride of K's",
        "strides",
        "kv_head * scale_v_head",
        "kv_head * scale_k_head",
        (*SEEN, *VALUE),
        STRIDED,
    ),
    GpuFault("K's scales of tokens dropped", "#16", "scores *= k_scales[None, :]", "pass", VALUE, INT8),
    GpuFault(
        "K's scales of tokens for V",
        "scale swapped",
        "tl.load(v_scale + (block",
        "tl.load(k_scale + (block",
        VALUE,
        FP8,
    ),
    GpuFault(
        "scale of the neighbouring token",
        "scale index",
        "kv_head * scale_k_head + slot)",
        "kv_head * scale_k_head + (slot ^ 1))",
        (*SEEN, *VALUE),
        LONG,
    ),
    GpuFault(
        "scale of the logical block",
        "#20",
        "(block * scale_v_block",
        "(tokens // BLOCK_SIZE * scale_v_block",
        (*SEEN, *VALUE),
        LONG,
    ),
    GpuFault(
        "weights times scales leave the range of a half",
        "numerics",
        "tl.maximum(unit, power_of_two(tl.max(tl.abs(v_scales), 0)))",
        "1.0",
        (*VALUE, Check.PARTIALS),
        HALF,
    ),
    GpuFault(
        "outputs are not rescaled with the unit",
        "online softmax",
        "shrink *= unit * inverse",
        "pass",
        VALUE,
        GROWING,
        {"num_splits": 1, "tile_tokens": 32},
    ),
)

CUDA_PAGED_SCALE_FAULTS = (
    GpuFault(
        "V's scales of tokens dropped", "#16", "PT_TOKEN_SCALES ? p * v_scale[", "false ? p * v_scale[", VALUE, FP8
    ),
    GpuFault(
        "scale of the logical block",
        "#20",
        "score *= k_scale[block * k_scale_block",
        "score *= k_scale[b * k_scale_block",
        (*SEEN, *VALUE),
        LONG,
    ),
)

CUDA_WRITE_SCALE_FAULTS = (
    GpuFault(
        "scales are not written",
        "#16",
        "if (lane == 0) scale[scales.place(block, in_block, head)] = own[u];",
        "",
        EXACT,
        WRITE,
    ),
    GpuFault(
        "scale written for the neighbouring token",
        "scale index",
        "if (lane == 0) scale[scales.place(block, in_block",
        "if (lane == 0) scale[scales.place(block, in_block ^ 1",
        (*SEEN, *EXACT),
        WRITE,
    ),
    GpuFault(
        "an infinity decides the scale",
        "NaN and infinity",
        "if (size < __int_as_float(0x7f800000)) most",
        "most",
        EXACT,
        WRITE_FP8,
    ),
    GpuFault(
        "the scale of zeros is zero",
        "division by zero",
        "if (own[u] < SMALLEST_NORMAL) own[u] = 1.0f;",
        "",
        EXACT,
        WRITE_FP8,
    ),
    GpuFault(
        "rows share a scale", "reduction", "int step = LANES / 2; step > 0", "int step = 16; step > 0", EXACT, WRITE
    ),
    GpuFault(
        "value times the scale's reciprocal",
        "rounding",
        "__fdiv_rn(float(values[u][s].x[p + k]), own[u])",
        "(float(values[u][s].x[p + k]) * (1.0f / own[u]))",
        EXACT,
        WRITE_FP8,
    ),
    GpuFault("V's scales go to K's", "scale swapped", "slots, v_scale,\n", "slots, k_scale,\n", (*SEEN, *EXACT), WRITE),
)

CUDA_COPY_SCALE_FAULTS = (
    GpuFault(
        "V's scales by the head stride of K's",
        "strides",
        "copy_scales(v_scale, Scales{v_scale_block, v_scale_head}",
        "copy_scales(v_scale, Scales{v_scale_block, k_scale_head}",
        (*SEEN, *EXACT),
        STRIDED_COPY,
    ),
    GpuFault(
        "V's scales stay behind",
        "copy-on-write",
        "        copy_scales(v_scale, Scales{v_scale_block, v_scale_head}, from, to);\n",
        "",
        EXACT,
        COPY,
    ),
)

CUDA_GATHER_SCALE_FAULTS = (
    GpuFault(
        "scales of the logical block",
        "#20",
        "scales.place(table[token / BLOCK_SIZE], token",
        "scales.place(token / BLOCK_SIZE, token",
        (*SEEN, *EXACT),
        GATHER,
    ),
)

TRITON_WRITE_SCALE_FAULTS = (
    GpuFault(
        "an infinity decides the scale",
        "NaN and infinity",
        'tl.where(size < float("inf"), size, 0.0)',
        "size",
        EXACT,
        WRITE_FP8,
    ),
    GpuFault(
        "scale written for the neighbouring token",
        "scale index",
        "head * scale_head + slot % BLOCK_SIZE",
        "head * scale_head + (slot % BLOCK_SIZE ^ 1)",
        (*SEEN, *EXACT),
        WRITE,
    ),
    GpuFault(
        "the scale of zeros is zero",
        "division by zero",
        "own = tl.where(own < SMALLEST_NORMAL, 1.0, own)",
        "pass",
        EXACT,
        WRITE_FP8,
    ),
)

TRITON_COPY_SCALE_FAULTS = (
    GpuFault(
        "K's scales stay behind",
        "copy-on-write",
        "        copy_scales(k_scale, scale_k_block, scale_k_head, source, destination, HEADS, BLOCK_SIZE, BLOCK)\n",
        "",
        EXACT,
        COPY,
    ),
)

TRITON_GATHER_SCALE_FAULTS = (
    GpuFault(
        "scales of the wrong head", "#17", "at % HEADS * head_stride + token", "0 * head_stride + token", EXACT, GATHER
    ),
)
