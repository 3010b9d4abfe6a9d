"""Builds for the virtual GPU alone: the same PTX, no machine code, and nothing that a device would take."""

from __future__ import annotations

from pathlib import Path

import pytest
from vgpu_attention import H100

from pagedtune.harness.case import Case
from pagedtune.harness.jobs import check_case
from pagedtune.kernels.artifact import Artifact, ArtifactKind
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.catalogue import VARIANTS, find_variant
from pagedtune.kernels.cubin import ptx_is_enough
from pagedtune.kernels.device import DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.executors import make_executor
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.serial import to_jsonable
from pagedtune.kernels.variant import Op, Variant
from pagedtune.kernels.workload import Workload

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("triton")

PROBLEM, FORMAT = Problem(4, 2, 64), PoolFormat(16, DType.BF16)
GPU = [v for v in VARIANTS if v.device_kind is DeviceKind.CUDA]


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDTUNE_CACHE", str(tmp_path))


def built(variant: Variant) -> Artifact:
    config = variant.default_config(PROBLEM, FORMAT, Bounds(2, 256), H100)
    return variant.build(PROBLEM, FORMAT, config, H100)[0]


@pytest.mark.parametrize("variant", GPU, ids=lambda v: v.name)
def test_the_ptx_is_the_one_that_machine_code_is_made_of(variant: Variant) -> None:
    with ptx_is_enough():
        alone = built(variant)
    whole = built(variant)
    assert (alone.kind, whole.kind) == (ArtifactKind.PTX, ArtifactKind.CUBIN)
    assert alone.ptx_path is not None
    assert whole.ptx_path is not None
    assert alone.ptx_path.read_text() == whole.ptx_path.read_text()
    assert {e: r.dynamic_shared_bytes for e, r in alone.resources.items()} == {
        e: r.dynamic_shared_bytes for e, r in whole.resources.items()
    }


@pytest.mark.parametrize("name", ["cuda_copy_blocks", "triton_copy_blocks"])
def test_a_build_that_needs_code_does_not_take_the_ptx_from_the_cache_but_the_other_way_round(name: str) -> None:
    variant = find_variant(name)
    with ptx_is_enough():
        assert built(variant).kind is ArtifactKind.PTX
    assert built(variant).kind is ArtifactKind.CUBIN
    with ptx_is_enough():
        assert built(variant).kind is ArtifactKind.CUBIN


def test_no_device_takes_it() -> None:
    with ptx_is_enough():
        artifact = built(find_variant("cuda_copy_blocks"))
    with pytest.raises(ValueError, match="is a ptx binary: a cuda device runs cubin ones"):
        make_executor(DeviceKind.CUDA, (artifact,))


def test_a_hook_of_somebody_else_in_triton_stays_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    def theirs(*arguments: object) -> tuple[str, str] | None:
        return None if arguments else ("theirs", "theirs")

    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", theirs)
    with ptx_is_enough():
        assert built(find_variant("triton_copy_blocks")).kind is ArtifactKind.CUBIN
    assert triton.knobs.runtime.add_stages_inspection_hook is theirs


@pytest.mark.parametrize(("code", "suffixes"), [(True, {".cubin", ".ptx", ".json"}), (False, {".ptx", ".json"})])
def test_a_case_is_built_as_its_job_says(code: bool, suffixes: set[str], tmp_path: Path) -> None:
    case = Case(Op.COPY_BLOCKS, PROBLEM, FORMAT, Workload((40, 17), name="two"))
    payload = {"variant": "cuda_copy_blocks", "config": {}, "case": case, "device": H100, "code": code}
    assert check_case({k: to_jsonable(v) for k, v in payload.items()})["status"] == "passed"
    assert {path.suffix for path in (tmp_path / "gpu").iterdir()} == suffixes
