"""What the CUDA split kernels are launched with, whatever their blocks look like: arguments, and the merge kernel."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import torch

from .artifact import KernelAbi
from .bounds import Bounds
from .launch import (
    Arg,
    CType,
    KernelStep,
    LaunchAttributes,
    LaunchPlan,
    MemsetStep,
    ScalarArg,
    SizeArg,
    SlotSpec,
    Step,
    StrideArg,
    WorkspaceSpec,
)
from .native_args import abi_of, f32, i64, pointers, strides, token_scale_strides
from .pool_format import PoolFormat
from .problem import Problem
from .slots import batch_limits

MERGE_WARPS = 8
_POINTERS = (
    "out", "q", "k_cache", "v_cache", "block_table", "context_lens", "query_start_loc", "sinks", "alibi_slopes",
    "k_scale", "v_scale", "lse",
)  # fmt: skip


class Merge(StrEnum):
    """Who merges the splits of a row."""

    KERNEL = "kernel"  # a second launch
    EARLY_KERNEL = "early_kernel"  # a second launch that starts early and waits for the first (compute capability 9.0)
    LAST_BLOCK = "last_block"  # the last block of the row to arrive


_MERGE_CODES = {Merge.KERNEL.value: 1, Merge.LAST_BLOCK.value: 2, Merge.EARLY_KERNEL.value: 3}


class SplitConfig(Protocol):
    """What the configs of split kernels share."""

    @property
    def num_splits(self) -> int:
        """Most parts of one sequence's keys."""

    @property
    def split_tokens(self) -> int:
        """Fewest keys of a part."""

    @property
    def merge(self) -> str:
        """A value of `Merge`."""


def has_merge_kernel(config: SplitConfig) -> bool:
    """Whether the binary has a merge kernel."""
    return config.num_splits > 1 and config.merge != Merge.LAST_BLOCK


def merge_code(config: SplitConfig) -> int:
    """`PT_MERGE`: 0 where there is one split."""
    return 0 if config.num_splits == 1 else _MERGE_CODES[config.merge]


def split_arguments(
    problem: Problem, pool_format: PoolFormat, config: SplitConfig, chunks: int, splits: int
) -> tuple[Arg, ...]:
    """Arguments of a split kernel; what a plan without a merge does not need is null.

    Args:
        chunks: blocks that share the query rows of one sequence and KV head.
        splits: most splits that a sequence has within the plan's bounds.
    """
    k, v = pool_format.k_axes, pool_format.v_axes
    partials: tuple[Arg, ...] = (
        *(pointers("partial_out", "partial_lse") if splits > 1 else _null(2)),
        *(pointers("arrivals") if splits > 1 and config.merge == Merge.LAST_BLOCK else _null(1)),
    )
    return (
        *pointers(*_POINTERS),
        *partials,
        *strides("q", (0, 1)),
        *strides("k_cache", (k.block, k.slot, k.head)),
        *strides("v_cache", (v.block, v.slot, v.head)),
        *strides("out", (0, 1)),
        StrideArg("lse", 0),
        StrideArg("block_table", 0),
        SizeArg("context_lens", 0),
        *i64(problem.num_kv_heads, chunks, config.num_splits, config.split_tokens, splits),
        *f32(problem.softmax_scale, problem.soft_cap or 0.0),
        *token_scale_strides(pool_format),
    )


def _null(count: int) -> tuple[Arg, ...]:
    return (ScalarArg(0, CType.POINTER),) * count


def merge_arguments(problem: Problem, config: SplitConfig, bounds: Bounds, splits: int) -> tuple[Arg, ...]:
    """Arguments of the merge kernel; `splits` as in `split_arguments`."""
    return (
        *pointers("out", "lse", "partial_out", "partial_lse", "context_lens", "query_start_loc", "sinks"),
        *strides("out", (0, 1)),
        StrideArg("lse", 0),
        SizeArg("context_lens", 0),
        *i64(problem.num_q_heads, bounds.max_query_len, config.num_splits, config.split_tokens, splits),
    )


def merge_step(problem: Problem, config: SplitConfig, bounds: Bounds, splits: int) -> KernelStep:
    """Launch of the merge kernel: a block per query token and head, a warp for every 4 splits up to 8."""
    warps = min(MERGE_WARPS, -(-splits // 4))
    grid = (bounds.max_num_tokens * problem.num_q_heads, 1, 1)
    args = merge_arguments(problem, config, bounds, splits)
    attributes = LaunchAttributes(programmatic_dependent_launch=config.merge == Merge.EARLY_KERNEL)
    scratch = merge_scratch_bytes(problem)
    return KernelStep("attention_merge", grid, args, (32 * warps, 1, 1), shared_bytes=scratch, attributes=attributes)


def merge_scratch_bytes(problem: Problem) -> int:
    """Dynamic shared memory of a block of the merge kernel: one output row per warp."""
    return MERGE_WARPS * problem.head_dim_v * 4


def merge_abi(problem: Problem, config: SplitConfig) -> KernelAbi:
    """Calling convention of the merge kernel."""
    return abi_of(merge_arguments(problem, config, Bounds(1, 1), 1))


def split_plan(
    split: KernelStep, problem: Problem, config: SplitConfig, bounds: Bounds, splits: int, slots: Mapping[str, SlotSpec]
) -> LaunchPlan:
    """The split kernel alone, or split and merge over fp32 partials, or arrivals cleared and one kernel.

    Args:
        split: the split kernel, its grid's first dimension the blocks that may merge.
        splits: as in `split_arguments`.
        slots: of the op.
    """
    steps: tuple[Step, ...] = (split,)
    workspaces: dict[str, WorkspaceSpec] = {}
    if splits > 1:
        rows = (bounds.max_num_tokens, problem.num_q_heads, splits)
        workspaces["partial_out"] = WorkspaceSpec(torch.float32, (*rows, problem.head_dim_v), partial_of="out")
        workspaces["partial_lse"] = WorkspaceSpec(torch.float32, rows, partial_of="lse")
    if splits > 1 and has_merge_kernel(config):
        steps = (split, merge_step(problem, config, bounds, splits))
    elif splits > 1:
        workspaces["arrivals"] = WorkspaceSpec(torch.int32, (split.grid[0],))
        steps = (MemsetStep("arrivals"), split)
    return LaunchPlan(steps, slots, workspaces, batch_limits(bounds))
