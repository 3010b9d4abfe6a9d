"""FlashInfer's paged decode on CUDA cores as a peer of the emulated tables: the plan that its host code would make.

Its host code is C++ and cannot run here: what it computes is stated here as facts, and whoever runs the plan compares
the answer with attention. The plan is the one without CUDA graphs, whose blocks all have work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pagedtune.harness.foreign import unpack
from pagedtune.harness.observation import Prepared
from pagedtune.harness.occupancy import occupancy
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.device import Device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.launch import Arg, CType, KernelStep, LaunchAttributes, LaunchPlan, ScalarArg, SlotArg
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.slot import Access, SlotSpec, WorkspaceSpec

from .emulated_peer import Ask, Cell, Tensors
from .flashinfer_kernels import FIELDS, FLASHINFER, FOLDERS, MERGE_THREADS, Shape, kernels

LEAST_CHUNK = 128  # tokens, where a sequence is split
PDL = 90  # compute capability from which both kernels are launched programmatically dependent
LISTS = ("pages", "page_starts", "last_page", "requests", "tiles", "firsts", "chunk")


@dataclass(frozen=True)
class Planned:
    """A batch as its plan has it.

    Args:
        lens: tokens of each sequence.
        chunk: pages of a chunk; None where no sequence is split.
        merge_blocks: of the merge's grid.
    """

    lens: tuple[int, ...]
    chunk: int | None
    merge_blocks: int


def resident(artifact: Artifact, threads: int, shared_bytes: int, device: Device) -> int:
    """Blocks that fit on one SM."""
    (resources,) = artifact.resources.values()
    return occupancy(device, threads, resources.registers, shared_bytes).blocks


def chunk_pages(pages: Sequence[int], page_size: int, num_kv_heads: int, most_blocks: int) -> int | None:
    """Pages of a chunk that its plan splits the sequences into; None where it does not split them.

    It is the least that keeps all blocks resident at once, and not under 128 tokens.

    Args:
        pages: of each sequence.
        page_size: tokens of a page.
        num_kv_heads: of the problem; each has blocks of its own.
        most_blocks: that are resident on the device.
    """
    if len(pages) * num_kv_heads >= most_blocks:
        return None
    low, high = max(LEAST_CHUNK // page_size, 1), max(pages)
    while low < high:
        middle = (low + high) // 2
        if sum(-(-n // middle) for n in pages) * num_kv_heads > most_blocks:
            low = middle + 1
        else:
            high = middle
    return None if sum(-(-max(n, 1) // low) for n in pages) == len(pages) else low


def division(divisor: int) -> tuple[int, int, int]:
    """What its division of 32-bit numbers by `divisor` multiplies, adds and shifts by."""
    shift = divisor.bit_length() - 1
    if divisor == 1 << shift:
        return 0, 0, shift
    quotient, rest = divmod(1 << (32 + shift), divisor)
    rounds_up = rest >= divisor - (1 << shift)
    return quotient + rounds_up, int(not rounds_up), shift


def tables(pages: Sequence[int], chunk: int) -> dict[str, torch.Tensor]:
    """Its work list: sequence and chunk of each block, and first block of each sequence, all int32."""
    counts = [-(-max(n, 1) // chunk) for n in pages]
    requests = [row for row, count in enumerate(counts) for _ in range(count)]
    tiles = [tile for count in counts for tile in range(count)]
    firsts = [sum(counts[:row]) for row in range(len(counts) + 1)]
    lists = {"requests": requests, "tiles": tiles, "firsts": firsts}
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in lists.items()}


def merge_blocks(rows: int, shape: Shape, merge: Artifact, device: Device) -> int:
    """Blocks of the merge for that many query heads of all sequences: as many on each SM as fit and have work."""
    fit = resident(merge, MERGE_THREADS, shape.merge_shared_bytes, device)
    return device.num_units * min(fit, -(-rows // device.num_units))


def decode_plan(
    problem: Problem, tensors: Tensors, planned: Planned, built: Mapping[str, Artifact], device: Device
) -> Prepared:
    """Its launches for a batch, ready to run.

    Args:
        problem: of the tensors.
        tensors: `q`, `k_cache`, `v_cache`, `out` and `block_table` of `Op.ATTENTION` over an NHD pool.
        planned: the batch.
        built: what `kernels` gave for the problem.
        device: that is launched on.
    """
    shape = Shape.of(problem, DType.of(tensors["k_cache"].dtype))
    page_size, heads = tensors["k_cache"].shape[1], problem.num_q_heads
    counts = [-(-length // page_size) for length in planned.lens]
    own = tables(counts, planned.chunk or max(counts))
    own |= {
        "pages": torch.cat([tensors["block_table"][row, :n] for row, n in enumerate(counts)]).int(),
        "page_starts": torch.tensor([0, *counts]).cumsum(0).int(),
        "last_page": torch.tensor([(length - 1) % page_size + 1 for length in planned.lens], dtype=torch.int32),
        "chunk": torch.tensor([(planned.chunk or max(counts)) * page_size], dtype=torch.int32),
    }
    given = {name: tensors[name] for name in ("q", "k_cache", "v_cache")} | own
    slots = {name: SlotSpec(t.dtype, tuple(t.shape), Access.IN) for name, t in given.items()}
    out = tensors["out"]
    slots["out"] = SlotSpec(out.dtype, tuple(out.shape), Access.OUT)
    blocks = len(own["requests"])
    attributes = LaunchAttributes(programmatic_dependent_launch=device.capability >= PDL)
    decode, merge = (next(iter(built[name].abi)) for name in ("decode", "merge"))
    target = ("partial", "partial_lse") if planned.chunk else ("out", None)
    args = _decode_args(problem, given, blocks, *target)
    grid = (blocks, problem.num_kv_heads, 1)
    steps = [KernelStep(decode, grid, args, shape.block, shared_bytes=shape.shared_bytes(), attributes=attributes)]
    workspaces = {}
    if planned.chunk:
        shapes = {"partial": (blocks, heads, problem.head_dim), "partial_lse": (blocks, heads)}
        workspaces = {
            "partial": WorkspaceSpec(out.dtype, shapes["partial"]),
            "partial_lse": WorkspaceSpec(torch.float32, shapes["partial_lse"]),
        }
        merged = _merge_args(len(counts), heads)
        size = (planned.merge_blocks, 1, 1)
        steps.append(
            KernelStep(
                merge, size, merged, shape.merge_block, shared_bytes=shape.merge_shared_bytes, attributes=attributes
            )
        )
    return Prepared(tuple(built.values()), LaunchPlan(tuple(steps), slots, workspaces), {**tensors, **own})


def _decode_args(
    problem: Problem, t: Mapping[str, torch.Tensor], blocks: int, out: str, lse: str | None
) -> tuple[Arg, ...]:
    """One argument for each of `FIELDS`, in their order."""
    pool, page_size = t["k_cache"], t["k_cache"].shape[1]
    multiplier, add, shift = division(page_size)
    strides = dict(zip(("page", "n", "h"), pool.stride(), strict=False))
    values: dict[str, int | float | str | None] = {
        "q": "q", "o": out, "lse": lse,
        "paged_kv.k_data": "k_cache", "paged_kv.v_data": "v_cache", "paged_kv.indices": "pages",
        "paged_kv.indptr": "page_starts", "paged_kv.last_page_len": "last_page",
        "request_indices": "requests", "kv_tile_indices": "tiles", "o_indptr": "firsts", "kv_chunk_size_ptr": "chunk",
        "paged_kv.page_size": page_size, "page_multiplier": multiplier, "page_add": add, "page_shift": shift,
        "page_divisor": page_size,
        "paged_kv.num_heads": problem.num_kv_heads, "paged_kv.head_dim": problem.head_dim,
        "paged_kv.batch_size": len(t["q"]),
        **{f"paged_kv.{kind}stride_{axis}": n for axis, n in strides.items() for kind in ("", "v_")},
        "padded_batch_size": blocks, "num_qo_heads": problem.num_q_heads,
        "q_stride_n": t["q"].stride(0), "q_stride_h": t["q"].stride(1),
        "window_left": -1, "sm_scale": problem.softmax_scale, "partition_kv": int(lse is not None),
    }  # fmt: skip
    return tuple(_arg(values[name], ctype) for name, (_, ctype) in FIELDS.items())


def _arg(value: int | float | str | None, ctype: CType) -> Arg:
    if isinstance(value, str):
        return SlotArg(value)
    if ctype is CType.I32:
        return ScalarArg((int(value or 0) + (1 << 31)) % (1 << 32) - (1 << 31), ctype)  # its own are unsigned
    return ScalarArg(value or 0, ctype)


def _merge_args(num_seqs: int, heads: int) -> tuple[Arg, ...]:
    null = ScalarArg(0, CType.POINTER)
    return (
        SlotArg("partial"), SlotArg("partial_lse"), SlotArg("firsts"), SlotArg("out"), null,
        ScalarArg(num_seqs, CType.I32), null, ScalarArg(heads, CType.I32),
    )  # fmt: skip


class FlashInferPeer:
    """See `Peer`."""

    name = "flashinfer_decode"
    note = (
        "FlashInfer's paged decode on CUDA cores, planned as without CUDA graphs; SGLang takes its tensor-core kernel "
        "instead from 4 query heads a KV head on, and for fp8 KV"
    )
    requirement = FLASHINFER

    def fetch(self) -> None:
        """See `Peer`."""
        unpack(FLASHINFER, FOLDERS)

    def reject(self, cell: Cell) -> str:
        """See `Peer`."""
        return Shape.of(cell.problem, cell.pool_format.kv_dtype).reject()

    def configs(self, cell: Cell) -> tuple[Mapping[str, int], ...]:
        """See `Peer`: its plan leaves nothing to choose."""
        return ({},)

    def prepare(self, ask: Ask) -> Prepared:
        """See `Peer`. The merge has one block for each row at most: those of the whole batch's grid have one too."""
        cell, num_seqs = ask.cell, len(ask.tensors["q"])
        shape = Shape.of(cell.problem, cell.pool_format.kv_dtype)
        built = kernels(shape, cell.device.capability)
        rows = num_seqs * ask.problem.num_q_heads
        whole = self._planned(cell, shape, built)
        planned = Planned((cell.length,) * num_seqs, whole.chunk, min(rows, whole.merge_blocks))
        return decode_plan(ask.problem, ask.tensors, planned, built, cell.device)

    def blocks(self, ask: Ask) -> list[int]:
        """See `Peer`."""
        cell = ask.cell
        shape = Shape.of(cell.problem, cell.pool_format.kv_dtype)
        whole = self._planned(cell, shape, kernels(shape, cell.device.capability))
        if whole.chunk is None:
            return [len(whole.lens) * cell.problem.num_kv_heads]
        pages = -(-cell.length // cell.pool_format.block_size)
        decode = len(whole.lens) * -(-pages // whole.chunk) * cell.problem.num_kv_heads
        return [decode, whole.merge_blocks]

    @staticmethod
    def _planned(cell: Cell, shape: Shape, built: Mapping[str, Artifact]) -> Planned:
        device, lens = cell.device, (cell.length,) * cell.workload.num_seqs
        pages = [-(-length // cell.pool_format.block_size) for length in lens]
        most = device.num_units * resident(built["decode"], shape.threads, shape.shared_bytes(launch=False), device)
        chunk = chunk_pages(pages, cell.pool_format.block_size, cell.problem.num_kv_heads, most)
        return Planned(lens, chunk, merge_blocks(len(lens) * cell.problem.num_q_heads, shape, built["merge"], device))
