"""Faults planted in packing and unpacking in CUDA and Triton. `#n` numbers a public bug with that root cause."""

from __future__ import annotations

from pagedtune.harness.case import Family, Hazard
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.pool_format import Layout
from pagedtune.kernels.variant import Op

from .gpu_cache_faults import EXACT, fault
from .gpu_planted import SEEN, gpu_case

PACK = gpu_case((70, 33), family=Family.CODED, op=Op.PACK_BLOCKS)
UNPACK = gpu_case((70, 33), family=Family.CODED, op=Op.UNPACK_BLOCKS)
LARGE = gpu_case((70, 33), op=Op.PACK_BLOCKS, heads=(4, 4, 128))  # blocks of several chunks
SKIPPED_PACK = gpu_case((70, 33), Hazard.SKIPPED_TOKENS, op=Op.PACK_BLOCKS)
SKIPPED_UNPACK = gpu_case((70, 33), Hazard.SKIPPED_TOKENS, op=Op.UNPACK_BLOCKS)
LOOSE_PACK = gpu_case((70,), Hazard.LOOSE_BOUNDS, op=Op.PACK_BLOCKS)
HIGH_PACK = gpu_case((70,), Hazard.HIGH_POOL, op=Op.PACK_BLOCKS)
HIGH_UNPACK = gpu_case((70,), Hazard.HIGH_POOL, op=Op.UNPACK_BLOCKS)
HIGH_STAGING = gpu_case((70,), Hazard.HIGH_STAGING, op=Op.PACK_BLOCKS)
HIGH_STAGING_BACK = gpu_case((70,), Hazard.HIGH_STAGING, op=Op.UNPACK_BLOCKS)
# Blocks that wide accesses fit, of a buffer that starts at any element.
ODD_STAGING = gpu_case((70,), Hazard.HIGH_POOL, Hazard.OFFSET_BASE, op=Op.PACK_BLOCKS, heads=(2, 1, 65))

CUDA_PACK_FAULTS = (
    fault("pool offset in 32 bits", "#3", "k_cache + id * k_block * KV_BYTES",
          "k_cache + unsigned(id * k_block) * i64(KV_BYTES)", SEEN, HIGH_PACK),
    fault("staging offset in 32 bits", "#3", "staging + blockIdx.x * row * KV_BYTES",
          "staging + unsigned(blockIdx.x * row) * KV_BYTES", SEEN, HIGH_STAGING),
    fault("padded rows are followed", "#23", "    if (blockIdx.x >= num_listed) return;\n", "", SEEN, LOOSE_PACK),
    fault("skipped ids are followed", "padding", "    if (id < 0) return;\n", "", SEEN, SKIPPED_PACK),
    fault("rows by the block's number", "order", "staging + blockIdx.x * row", "staging + id * row",
          (*SEEN, *EXACT, Check.GUARDS), PACK),
    fault("V over K", "order", "place + K::BYTES", "place", (*SEEN, *EXACT), PACK),
    fault("row stride assumed dense", "layout assumption", "blockIdx.x * row * KV_BYTES",
          "blockIdx.x * i64(K::BYTES + Shape<PT_SHAPE_V>::BYTES)", (*SEEN, *EXACT, Check.GUARDS),
          gpu_case((70,), Hazard.STRIDED, op=Op.PACK_BLOCKS)),
    fault("the last vectors of a block are left", "#42", "const int end = min(COUNT, (chunk + 1) * PER_CHUNK);",
          "const int end = min(COUNT, (chunk + 1) * PER_CHUNK) - 1;", EXACT, PACK),
    fault("V's chunks are counted on from K's", "tail", "place + K::BYTES, chunk - int(k_chunks)",
          "place + K::BYTES, chunk", EXACT, LARGE),
    fault("only the pool's alignment is looked at", "alignment",
          "reinterpret_cast<i64>(block) | reinterpret_cast<i64>(place)", "reinterpret_cast<i64>(block)", SEEN,
          ODD_STAGING),
    fault("x-packed blocks in the order of tokens", "layout", "run / (C * B) * a + run / C % B * b + run % C * c",
          "run % A * a + run / A % B * b + run / (A * B) * c", EXACT,
          gpu_case((40,), Hazard.GAPPED_POOL, op=Op.PACK_BLOCKS, layout=Layout.XPACKED)),
    fault("blocks taken as one piece", "layout assumption", "if (shape.one_piece() && wide) move<", "if (wide) move<",
          (*SEEN, *EXACT), gpu_case((40,), Hazard.GAPPED_POOL, op=Op.PACK_BLOCKS)),
)  # fmt: skip

CUDA_UNPACK_FAULTS = (
    fault("blocks by the row's number", "order", "v_cache + id * v_block", "v_cache + i64(blockIdx.x) * v_block",
          (*SEEN, *EXACT), UNPACK),
    fault("the next block is written", "off by one", "const i64 id = ids[blockIdx.x];",
          "const i64 id = ids[blockIdx.x] + 1;", (*SEEN, *EXACT, Check.GUARDS), UNPACK),
    fault("skipped ids are followed", "padding", "    if (id < 0) return;\n", "", (*SEEN, Check.GUARDS),
          SKIPPED_UNPACK),
    fault("pool offset in 32 bits", "#3", "k_cache + id * k_block * KV_BYTES",
          "k_cache + unsigned(id * k_block) * i64(KV_BYTES)", SEEN, HIGH_UNPACK),
    fault("staging offset in 32 bits", "#3", "staging + blockIdx.x * row * KV_BYTES",
          "staging + unsigned(blockIdx.x * row) * KV_BYTES", SEEN, HIGH_STAGING_BACK),
    fault("block stride assumed dense", "layout assumption", "k_cache + id * k_block * KV_BYTES",
          "k_cache + id * K::BYTES", (*SEEN, *EXACT, Check.GUARDS),
          gpu_case((70,), Hazard.STRIDED_POOL, op=Op.UNPACK_BLOCKS)),
    fault("blocks taken as one piece", "layout assumption", "if (shape.one_piece() && wide) move<", "if (wide) move<",
          (*SEEN, *EXACT, Check.GUARDS), gpu_case((40,), Hazard.GAPPED_POOL, op=Op.UNPACK_BLOCKS)),
    fault("packs instead", "direction", "if constexpr (PT_OP == 3)", "if constexpr (PT_OP >= 3)",
          (*SEEN, Check.INPUTS), UNPACK),
)  # fmt: skip

TRITON_PACK_FAULTS = (
    fault("pool offset in 32 bits", "#3", "in_pool = pool + block * block_stride + place",
          "in_pool = pool + (block * block_stride + place).to(tl.int32)", SEEN, HIGH_PACK),
    fault("staging offset in 32 bits", "#3", "place = staging + listed * row",
          "place = staging + (listed * row).to(tl.int32)", SEEN, HIGH_STAGING),
    fault("padded rows are followed", "#23", "    if listed >= num_listed:\n        return\n", "", SEEN, LOOSE_PACK),
    fault("skipped ids are followed", "padding", "    if block < 0:\n        return\n", "", SEEN, SKIPPED_PACK),
    fault("V over K", "order", "place + K_A * K_B * K_C * K_L", "place", (*SEEN, *EXACT), PACK),
    fault("runs taken for adjacent", "layout assumption", "run % C * c_stride", "run % C * L", (*SEEN, *EXACT),
          gpu_case((70,), Hazard.GAPPED_POOL, op=Op.PACK_BLOCKS)),
    fault("the last element of a block is left", "tail", "live = at < A * B * C * L", "live = at < A * B * C * L - 1",
          EXACT, PACK),
)  # fmt: skip

TRITON_UNPACK_FAULTS = (
    fault("rows in reverse", "order", "block = tl.load(block_ids + listed)",
          "block = tl.load(block_ids + num_listed - 1 - listed)", EXACT, UNPACK),
    fault("skipped ids are followed", "padding", "    if block < 0:\n        return\n", "", (*SEEN, Check.GUARDS),
          SKIPPED_UNPACK),
    fault("staging offset in 32 bits", "#3", "place = staging + listed * row",
          "place = staging + (listed * row).to(tl.int32)", SEEN, HIGH_STAGING_BACK),
    fault("V's chunks are counted on from K's", "tail", "K_L, chunk - K_CHUNKS, V_A", "K_L, chunk, V_A",
          (*SEEN, *EXACT), UNPACK),
)  # fmt: skip
