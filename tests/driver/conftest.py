"""The attention cases of the virtual GPU's tests, and hand-written kernels, on the stand-in driver."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from driver_bench import Bench

    from pagedtune.harness.cuda_context import CudaContext
    from pagedtune.harness.standin_driver import StandInDriver
    from pagedtune.kernels.artifact import Artifact

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "vgpu")]
pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: nothing of the driver can run")


@pytest.fixture
def artifact(tmp_path: Path) -> Callable[..., Artifact]:
    """Makes an artifact of a hand-written kernel."""
    from driver_kernels import make_artifact

    return lambda *args, **kwargs: make_artifact(tmp_path, *args, **kwargs)


@pytest.fixture
def driver() -> StandInDriver:
    """An initialised stand-in for one H100."""
    from driver_kernels import H100

    from pagedtune.harness.standin_driver import StandInDriver

    made = StandInDriver(H100)
    made.cuInit(0)
    return made


@pytest.fixture
def context(driver: StandInDriver) -> Iterator[CudaContext]:
    """The primary context of `driver`."""
    from pagedtune.harness.cuda_context import CudaContext

    with CudaContext(driver) as made:
        yield made


@pytest.fixture
def mixed(context: CudaContext, artifact: Callable[..., Artifact]) -> Bench:
    """The kernel `mixed` and its output."""
    from driver_bench import Bench
    from driver_kernels import MIXED, MIXED_ABI

    return Bench(context, {"out": torch.zeros(32, dtype=torch.int64)}, artifact("mixed", MIXED, MIXED_ABI))
