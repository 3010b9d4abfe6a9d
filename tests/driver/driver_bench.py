"""An executor on the stand-in driver, with its tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from pagedtune.harness.cuda_context import CudaContext, DeviceMemory
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.cuda_executor import CudaExecutor
from pagedtune.kernels.launch import Access, CType, KernelStep, LaunchPlan, ScalarArg, SlotArg, SlotSpec

MakeArtifact = Callable[..., Artifact]
MIXED_STEP = KernelStep(
    "mixed",
    (1, 1, 1),
    (SlotArg("out"), ScalarArg(1 << 40, CType.I64), ScalarArg(-5, CType.I32), ScalarArg(2.75, CType.F32)),
    (32, 1, 1),
)
OUT = {"out": SlotSpec(torch.int64, (32,), Access.OUT)}


class Bench:
    """Tensors on the stand-in's device, and an executor that finds them."""

    def __init__(self, context: CudaContext, tensors: Mapping[str, torch.Tensor], *artifacts: Artifact) -> None:
        self.context, self.tensors = context, dict(tensors)
        self.memory: dict[str, DeviceMemory] = {name: context.upload(tensor) for name, tensor in tensors.items()}
        where = {tensor.data_ptr(): self.memory[name].address for name, tensor in tensors.items()}
        context.driver.know(*artifacts)
        self.executor = CudaExecutor(
            artifacts, context.driver, lambda: context.stream, lambda tensor: where[tensor.data_ptr()]
        )

    def prepare(self, plan: LaunchPlan) -> Callable[[], None]:
        return self.executor.prepare(plan.bind(self.tensors))

    def fetch(self, name: str) -> torch.Tensor:
        self.memory[name].copy_to(self.tensors[name])
        return self.tensors[name]


def mixed_plan(**changes: object) -> LaunchPlan:
    return LaunchPlan((replace(MIXED_STEP, **changes),), OUT)  # type: ignore[arg-type]
