"""A plan's run on the virtual GPU, with what figures need beside the counters: binaries and the answer's error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.device import Device
from pagedtune.kernels.launch import KernelStep, LaunchPlan

from .occupancy import by_entry
from .vgpu.report import StepReport
from .vgpu.virtual_gpu import VirtualGpu, VirtualGpuOptions

MAX_ERROR = 2.0**-4  # of an answer, over the largest value: an e4m3 rounding of the softmax weights; sanity, no proof


class WrongAnswerError(RuntimeError):
    """A kernel whose answer is not attention: its figures would mean nothing."""


@dataclass(frozen=True)
class Prepared:
    """A plan with its binaries and tensors.

    Args:
        artifacts, plan: of the kernels.
        tensors: every slot; workspaces may be missing.
    """

    artifacts: tuple[Artifact, ...]
    plan: LaunchPlan
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """One kernel launch as the virtual GPU saw it.

    Args:
        step: as launched.
        artifact: with the binary of `step.entry`.
        report: counters.
        workspaces: names of the plan's.
    """

    step: KernelStep
    artifact: Artifact
    report: StepReport
    workspaces: frozenset[str]


def observe(prepared: Prepared, device: Device) -> list[Seen]:
    """Runs a plan and returns what each kernel did.

    Warps take turns after every instruction, as on a device: run one after another to their next barrier, each would
    have its copies waited for before the next one asks for its own, and too few bytes would seem to be in flight.

    Raises:
        VirtualGpuError: the run has faults.
    """
    options = VirtualGpuOptions(
        num_threads=1,
        quantum=1,
        check_races=False,
        shared_bytes=device.shared_bytes_per_block,
        capability=device.capability,
    )
    plan, tensors = prepared.plan, dict(prepared.tensors)
    tensors = plan.allocate_workspaces() | tensors
    wanted = {name: tensors[name] for name in (*plan.slots, *plan.workspaces) if name in tensors}
    gpu = VirtualGpu(prepared.artifacts, options)
    gpu.prepare(plan.bind(wanted))()
    entries, names = by_entry(prepared.artifacts), frozenset(plan.workspaces)
    kernels = [step for step in plan.steps if isinstance(step, KernelStep)]
    return [Seen(s, entries[s.entry], r, names) for s, r in zip(kernels, gpu.report.steps, strict=True)]


def check_answer(tensors: Mapping[str, torch.Tensor], scale: float) -> float:
    """The error of `out` over the largest value, against attention in float64; one query token a sequence.

    Args:
        tensors: slots of `Op.ATTENTION` over an NHD pool without scales other than 1, after the run.
        scale: of the softmax.

    Raises:
        WrongAnswerError: it is above MAX_ERROR.
    """
    worst = 0.0
    for row, length in enumerate(tensors["context_lens"].tolist()):
        k, v = (
            tensors[n][tensors["block_table"][row].long().clamp(0)].flatten(0, 1)[:length].float().double()
            for n in ("k_cache", "v_cache")
        )
        q = tensors["q"][row].double()
        group = q.shape[0] // k.shape[1]
        scores = torch.einsum("hgd,thd->hgt", q.view(k.shape[1], group, -1), k) * scale
        expected = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v).flatten(0, 1)
        error = (tensors["out"][row].double() - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(error))
    if not worst <= MAX_ERROR:
        raise WrongAnswerError(f"its answer is {worst:.3g} of the largest value off attention in float64")
    return worst
