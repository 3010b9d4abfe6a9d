"""Attention over a paged KV cache: picks a kernel by the bounds of a launch, and runs it on the caller's tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.bounds import Bounds, Bucket, bucket_of
from ..kernels.executors import make_executor, torch_device
from ..kernels.launch import Executor, LaunchPlan, Tensors
from ..kernels.pool_format import PoolFormat
from ..kernels.problem import Problem
from ..kernels.slot import WorkspaceSpec
from ..kernels.variant import Op
from .dispatch import Dispatch, Selection
from .explanation import Explanation, explain
from .ladder import Rung

_LOG = logging.getLogger(__name__)


class Workspaces:
    """Scratch memory by name, shared by all launches on one stream: it grows to the largest and stays.

    So does what it has outgrown, as long as this object lives: a CUDA graph that was captured over it holds its
    address, and keeps nothing alive. It grows to twice its size at least: all that was outgrown is less than what is
    in use.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._memory: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def take(self, plan: LaunchPlan) -> dict[str, torch.Tensor]:
        """Tensors for all workspaces of a plan, with undefined content."""
        return {name: self._view(name, spec) for name, spec in plan.workspaces.items()}

    def _view(self, name: str, spec: WorkspaceSpec) -> torch.Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < spec.num_bytes:
            if memory is not None:
                self._outgrown.append(memory)
            num_bytes = max(spec.num_bytes, 0 if memory is None else 2 * memory.numel())
            memory = self._memory[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return memory[: spec.num_bytes].view(spec.dtype).view(spec.shape)


@dataclass(frozen=True)
class PlannedOp:
    """One op, planned for a bucket of bounds: bind it to tensors once, run it as often as wanted.

    Args:
        selection: what runs and why.
        plan: the launch plan, at the largest bounds of the bucket.
        executor: runs it.
        workspaces: scratch memory.
    """

    selection: Selection
    plan: LaunchPlan
    executor: Executor
    workspaces: Workspaces

    def bind(self, tensors: Tensors) -> Callable[[], None]:
        """A function that runs the op on `tensors` (`kernels/slots.py`), whose addresses are fixed with this.

        Batches smaller than the tensors are padded: a padded sequence has a context length of 0 and no query
        token, a padded token a negative slot. A CUDA graph that captures the function is valid as long as the tensors
        and the op that planned this live.

        Raises:
            ValueError: a tensor is missing or has the wrong dtype, shape or strides; the message names it.
        """
        return self.executor.prepare(self.plan.bind({**tensors, **self.workspaces.take(self.plan)}))


class PagedOp:
    """One op for one problem and pool format; plans are kept by bucket of bounds.

    Args:
        op: what is computed.
        problem, pool_format: of what.
        dispatch: device, table, binaries.
        workspaces: scratch memory to share with other ops of the same stream; fresh without.
    """

    def __init__(
        self,
        op: Op,
        problem: Problem,
        pool_format: PoolFormat,
        dispatch: Dispatch,
        workspaces: Workspaces | None = None,
    ) -> None:
        self.op, self.problem, self.pool_format, self.dispatch = op, problem, pool_format, dispatch
        self._workspaces = workspaces or Workspaces(torch_device(dispatch.device.kind))
        self._planned: dict[Bucket, PlannedOp] = {}
        self._executors: dict[tuple[str, ...], Executor] = {}  # by the keys of what each has loaded
        self._logged: set[Rung] = set()

    def plan(self, bounds: Bounds) -> PlannedOp:
        """The plan for everything in the bucket of `bounds`; the same object for the same bucket.

        Raises:
            NoKernel: nothing can serve it.
            LaunchError: a binary of the choice does not load on this machine.
        """
        bucket = bucket_of(bounds)
        planned = self._planned.get(bucket)
        if planned is None:
            planned = self._planned[bucket] = self._plan(bucket)
        return planned

    def _plan(self, bucket: Bucket) -> PlannedOp:
        selection = self.dispatch.select(self.op, self.problem, self.pool_format, bucket.bounds)
        self._log(selection)
        plan = selection.variant.plan(self.problem, self.pool_format, selection.config, bucket.bounds)
        return PlannedOp(selection, plan, self._executor_of(selection), self._workspaces)

    def _executor_of(self, selection: Selection) -> Executor:
        """Buckets share binaries, and a binary that is loaded once for each takes time and memory as often."""
        keys = tuple(artifact.key for artifact in selection.artifacts)
        if keys not in self._executors:
            self._executors[keys] = make_executor(self.dispatch.device.kind, selection.artifacts)
        return self._executors[keys]

    def _log(self, selection: Selection) -> None:
        if selection.rung in self._logged:
            return
        self._logged.add(selection.rung)
        level = logging.INFO if selection.rung is Rung.EXACT else logging.WARNING
        skipped = f" (passed over: {'; '.join(selection.passed_over)})" if selection.passed_over else ""
        _LOG.log(
            level,
            "%s of %s on %s: %s, rung %s: %s%s",
            self.op,
            self.problem.key,
            self.pool_format.key,
            selection.variant.name,
            selection.rung,
            selection.why,
            skipped,
        )


class PagedAttention(PagedOp):
    """Attention of one problem over pools of one format.

    Args:
        problem, pool_format: what is asked, and how the pool is laid out.
        dispatch: device, table, binaries.
        workspaces: see `PagedOp`.
    """

    def __init__(
        self, problem: Problem, pool_format: PoolFormat, dispatch: Dispatch, workspaces: Workspaces | None = None
    ) -> None:
        super().__init__(Op.ATTENTION, problem, pool_format, dispatch, workspaces)

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        bounds: Bounds,
        out: torch.Tensor | None = None,
        **others: torch.Tensor,
    ) -> torch.Tensor:
        """Attends once, binding anew each time; a decode loop binds once with `plan(bounds).bind(tensors)`.

        Args:
            q, k_cache, v_cache, block_table, context_lens, query_start_loc: as `kernels.slots.attention_slots` says.
            bounds: upper limits of this launch, which the host must know.
            out: where the result goes; fresh without.
            others: `lse` and, where problem or format ask for them, `sinks`, `alibi_slopes`, `k_scale`, `v_scale`.

        Returns:
            `out` [num_tokens, num_q_heads, head_dim_v], in the dtype of the query.

        Raises:
            ValueError: a tensor does not fit; the message names it.
            NoKernel: nothing can serve the launch.
        """
        if out is None:
            out = q.new_empty((q.shape[0], self.problem.num_q_heads, self.problem.head_dim_v))
        tensors = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": block_table,
            "context_lens": context_lens,
            "query_start_loc": query_start_loc,
            "out": out,
            **others,
        }
        self.plan(bounds).bind(tensors)()
        return out

    def explain(self, bounds: Bounds) -> Explanation:
        """Which variant and config run for `bounds`, why, and on what evidence. Loads no binary.

        Raises:
            NoKernel: nothing can serve it.
        """
        bucket = bucket_of(bounds)
        planned = self._planned.get(bucket)
        if planned is not None:
            return explain(bounds, planned.selection)
        return explain(bounds, self.dispatch.select(self.op, self.problem, self.pool_format, bucket.bounds))
