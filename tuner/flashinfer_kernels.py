"""FlashInfer's paged decode on CUDA cores: what its host code compiles for a shape, and the layout of its parameters.

Its host code is C++ and cannot run here: what it chooses is stated here as facts, and the layout is checked against its
headers whenever they are compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagedtune.harness.foreign_cuda import ForeignCuda, Instance, build_foreign
from pagedtune.kernels.artifact import Artifact, KernelAbi
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import CType
from pagedtune.kernels.problem import Problem

FLASHINFER = "flashinfer-python==0.7.4"
FOLDERS = ("flashinfer/data/include/", "flashinfer/data/cccl/libcudacxx/include/")
FLAGS = ("--use_fast_math", "-DNDEBUG")
GROUPS = (1, 2, 3, 4, 6, 8, 16)  # query heads of a KV head that it has kernels for
HEAD_DIMS = (64, 128, 256, 512)
STAGES = 2  # of the K and V tiles in shared memory, from compute capability 8.0 on
LEAST_THREADS = 128
MERGE_THREADS, MERGE_STAGES = 128, 4
MOST_LANES = 32  # that one head's vector is spread over
VECTOR_BYTES = 16
_CPP = {DType.BF16: "nv_bfloat16", DType.FP16: "half", DType.FP8_E4M3: "__nv_fp8_e4m3"}

_P, _I, _F = CType.POINTER, CType.I32, CType.F32
# Fields of its parameter struct that are not zero here: offset in bytes and type. `page_size` is a divisor with what a
# division by it multiplies, adds and shifts by.
FIELDS: Mapping[str, tuple[int, CType]] = {
    "q": (0, _P),
    "paged_kv.page_size": (16, _I), "page_multiplier": (20, _I), "page_add": (24, _I), "page_shift": (28, _I),
    "page_divisor": (32, _I),
    "paged_kv.num_heads": (36, _I), "paged_kv.head_dim": (40, _I), "paged_kv.batch_size": (44, _I),
    "paged_kv.stride_page": (48, _I), "paged_kv.stride_n": (52, _I), "paged_kv.stride_h": (56, _I),
    "paged_kv.v_stride_page": (60, _I), "paged_kv.v_stride_n": (64, _I), "paged_kv.v_stride_h": (68, _I),
    "paged_kv.k_data": (72, _P), "paged_kv.v_data": (80, _P), "paged_kv.indices": (88, _P),
    "paged_kv.indptr": (96, _P), "paged_kv.last_page_len": (104, _P),
    "o": (120, _P), "lse": (128, _P),
    "padded_batch_size": (144, _I), "num_qo_heads": (148, _I), "q_stride_n": (152, _I), "q_stride_h": (156, _I),
    "window_left": (160, _I), "sm_scale": (168, _F),
    "request_indices": (184, _P), "kv_tile_indices": (192, _P), "o_indptr": (200, _P), "kv_chunk_size_ptr": (208, _P),
    "partition_kv": (224, _I),  # a bool, with padding after it
}  # fmt: skip
STRUCT_BYTES, DIVISOR_BYTES = 232, 20
MERGE_ABI = KernelAbi((_P, _P, _P, _P, _P, _I, _P, _I))


@dataclass(frozen=True)
class Shape:
    """What its kernels are compiled for, and the launch that follows from it."""

    q_dtype: DType
    kv_dtype: DType
    head_dim: int
    group: int

    @classmethod
    def of(cls, problem: Problem, kv_dtype: DType) -> Shape:
        """Of a problem."""
        return cls(problem.q_dtype, kv_dtype, problem.head_dim, problem.gqa_ratio)

    def reject(self) -> str:
        """Why it has no kernel for the shape, or ""."""
        if self.group not in GROUPS:
            return f"FlashInfer has no CUDA-core decode for {self.group} query heads a KV head"
        if self.head_dim not in HEAD_DIMS:
            return f"FlashInfer has no CUDA-core decode for head dim {self.head_dim}"
        if self.q_dtype not in _CPP or self.kv_dtype not in _CPP:
            return f"FlashInfer has no CUDA-core decode for {self.q_dtype} over {self.kv_dtype}"
        return ""

    @property
    def vector(self) -> int:
        """Elements of a row of K that a thread has: 16 bytes, or what 32 lanes leave it."""
        return max(VECTOR_BYTES // self.kv_dtype.itemsize, self.head_dim // MOST_LANES)

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads: along a head's vector, query heads, and tokens that are read side by side."""
        lanes = self.head_dim // self.vector
        return lanes, self.group, self.threads // (lanes * self.group)

    @property
    def threads(self) -> int:
        """Of a block, as its host code counts them: a few more than there are where the group is no power of two."""
        return max(LEAST_THREADS, self.head_dim // self.vector * self.group)

    @property
    def tile(self) -> int:
        """Tokens that a thread row loads at a time."""
        if self.group > 1:
            return 1
        return 2 if self.kv_dtype.itemsize == 1 else 4

    def shared_bytes(self, launch: bool = True) -> int:
        """Dynamic shared memory of a block: tiles of K and V, and offsets of their pages.

        Args:
            launch: as launched; else as its plan assumes, which leaves out that the threads' sums need room at the end.
        """
        _, heads, rows = self.block
        tiles = 2 * STAGES * self.tile * heads * rows * self.head_dim * self.kv_dtype.itemsize
        sums = heads * rows * self.head_dim * 4 if launch else 0
        return max(tiles, sums) + max(self.tile * self.threads * 8, 2 * heads * rows * 4)

    @property
    def merge_block(self) -> tuple[int, int, int]:
        """Threads of the merge: along a head's vector, and chunks side by side."""
        lanes = self.head_dim // self.merge_vector
        return lanes, MERGE_THREADS // lanes, 1

    @property
    def merge_vector(self) -> int:
        """Elements of a chunk's output that a thread has."""
        return max(VECTOR_BYTES // self.q_dtype.itemsize, self.head_dim // MOST_LANES)

    @property
    def merge_shared_bytes(self) -> int:
        """Dynamic shared memory of a block of the merge."""
        outputs = MERGE_STAGES * self.merge_block[1] * self.head_dim * self.q_dtype.itemsize
        return outputs + MERGE_THREADS * 4


def kernels(shape: Shape, capability: int) -> dict[str, Artifact]:
    """Its decode and its merge for a shape, as `decode` and `merge`.

    Raises:
        ForeignError: the wheel cannot be had.
        BuildError: its headers do not compile, or lay out the parameters in another way.
    """
    lanes, heads, rows = shape.block
    q, kv = _CPP[shape.q_dtype], _CPP[shape.kv_dtype]
    decode = (
        f"flashinfer::BatchDecodeWithPagedKVCacheKernel<flashinfer::PosEncodingMode::kNone, {STAGES}, {shape.tile}, "
        f"{shape.vector}, {lanes}, {heads}, {rows}, Variant, Params>"
    )
    merge_lanes, side_by_side, _ = shape.merge_block
    merge = (
        f"flashinfer::PersistentVariableLengthMergeStatesKernel<{shape.merge_vector}, {merge_lanes}, {side_by_side}, "
        f"{MERGE_STAGES}, {q}, {q}, int32_t>"
    )
    abi = KernelAbi(tuple(c for _, c in FIELDS.values()), offsets=tuple(offset for offset, _ in FIELDS.values()))
    instances = {"decode": Instance(decode, abi), "merge": Instance(merge, MERGE_ABI)}
    return build_foreign(ForeignCuda(FLASHINFER, FOLDERS, _source(q, kv), instances, FLAGS), capability)


def _source(q: str, kv: str) -> str:
    """Includes, the types that the instances name, and checks that the parameters lie where `FIELDS` says."""
    lines = [f"#include <flashinfer/attention/{name}.cuh>" for name in ("default_decode_params", "variants", "decode")]
    lines += [
        f"using Params = flashinfer::BatchDecodeParams<{q}, {kv}, {q}, int32_t>;",
        "using Variant = flashinfer::DefaultAttention<false, false, false, false>;",  # no mask, window, cap or slopes
        f"static_assert(sizeof(Params) == {STRUCT_BYTES} && sizeof(flashinfer::uint_fastdiv) == {DIVISOR_BYTES});",
    ]
    named = [(name, offset) for name, (offset, _) in FIELDS.items() if not name.startswith("page_")]
    lines += [f'static_assert(__INTADDR__(&((Params*)0)->{name}) == {offset}, "{name}");' for name, offset in named]
    return "\n".join(lines) + "\n"
