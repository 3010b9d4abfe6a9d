"""A wheel for a GPU that is not here: winners by predicted time, and the PTX in it run once more on the virtual GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from ctypes import c_int
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.gate import run_case
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.bounds import Bounds, Bucket
from pagedtune.kernels.catalogue import find_variant
from pagedtune.kernels.cuda_paged import CudaPaged
from pagedtune.kernels.device import Device
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Record, Status, TimeEvidence, Timing, Verdict
from pagedtune.kernels.variant import Config, Op
from pagedtune.kernels.workload import Workload
from pagedtune.runtime.artifact_source import ArtifactUnavailable
from pagedtune.runtime.exported.calibrate import calibrate
from pagedtune.runtime.exported.gpu import gpu_here
from pagedtune.runtime.exported.integrity import check_package
from pagedtune.runtime.exported.manifest import Manifest
from pagedtune.runtime.exported.package import Package, cubin_runs
from pagedtune.tuner.cli import main
from pagedtune.tuner.configs import Configs
from pagedtune.tuner.errors import UsageError
from pagedtune.tuner.export import device_of
from pagedtune.tuner.export_gpu import driver_of, target_of
from pagedtune.tuner.jobs import identify_variant
from pagedtune.tuner.prove_wheel import prove
from pagedtune.tuner.run import write_winners
from pagedtune.tuner.select import select
from pagedtune.tuner.store import open_store

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("triton") is None,
    reason="NVRTC (cuda-bindings) or Triton is not installed: no GPU kernel can be compiled",
)
GPU = Configs().gpu("h100").device("h100")
PROBLEM = Problem(4, 2, 64)
FORMAT = PoolFormat(16, DType.BF16)
BUCKET = Bucket(4, 256)
FINALISTS = (("cuda_paged", {"num_warps": 4}, 20.0), ("cuda_paged", {"num_warps": 2}, 25.0),
             ("triton_split", {"num_splits": 2, "tile_tokens": 32}, 26.0))  # fmt: skip
WRITES = (("cuda_kv_write", {"num_warps": 2, "rows_per_block": 2}, 4.0), ("triton_kv_write", {}, 5.0))
WRITE_BUCKET = Bucket(64, 128)
Run = Callable[..., subprocess.CompletedProcess[str]]


def record(index: int, variant: str, config: dict[str, Any], us: float) -> Record:
    """What tuning without the GPU records, with the binaries of this tree."""
    made = find_variant(variant)
    attention = made.op is Op.ATTENTION
    full = made.config_from(config)
    return Record(
        run_id="run-1",
        device=GPU.fingerprint,
        op=made.op.value,
        model="tiny",
        problem=PROBLEM,
        pool_format=FORMAT,
        bucket=BUCKET if attention else WRITE_BUCKET,
        workload="ragged" if attention else "decode",
        variant=variant,
        config=full.as_dict(),
        stage="screen",
        status=Status.PASSED,
        verdict=Verdict.EMULATED,
        time_evidence=TimeEvidence.PREDICTED,
        timing=Timing("predicted", (), us, (us * 0.7, us * 1.3), 1000),
        artifact_keys=tuple(a.key for a in made.build(PROBLEM, FORMAT, full, GPU)),
        provenance={
            "bucket_weight": 1.0 if attention else 0.0,
            "num_layers": 2,
            "mean_context": 100.0,
            "source": identify_variant({"variant": variant})["source"],
            "code": "gate-1",
            "order": index,
            "is_default": False,
        },
    )


@pytest.fixture(scope="module")
def gpu_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results whose winners are predicted; the folder of all devices."""
    folder = tmp_path_factory.mktemp("gpu") / "h100"
    with open_store(folder) as store:
        store.append(*(record(index, *finalist) for index, finalist in enumerate((*FINALISTS, *WRITES))))
        write_winners(folder, select(store.records, GPU.fingerprint))
    return folder.parent


@pytest.fixture(scope="module")
def gpu_installed(gpu_results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, exported by the command and unpacked."""
    out = tmp_path_factory.mktemp("gpu-dist")
    arguments = ["export", "--device", "h100", "--results", str(gpu_results), "--out", str(out), "--allow-predicted"]
    assert main(arguments) == 0
    (wheel,) = out.glob("*.whl")
    target = tmp_path_factory.mktemp("gpu-installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture(scope="module")
def package(gpu_installed: Path) -> Package:
    root = gpu_installed / "pagedtune_runtime"
    return Package(root, Manifest.parse(check_package(root)), GPU)


def test_predicted_winners_need_leave(gpu_results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--device", "h100", "--results", str(gpu_results), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "the times of 2 winners are only predicted" in error
    assert "--allow-predicted" in error
    assert not list(tmp_path.iterdir())


def test_the_wheel_has_cubins_ptx_and_finalists(package: Package) -> None:
    manifest = package.manifest
    attention, write = package.finalists
    assert [(c.variant, c.median_us) for c in attention.candidates] == [(name, us) for name, _, us in FINALISTS]
    assert [(c.variant, c.median_us) for c in write.candidates] == [("cuda_kv_write", 4.0)]  # calibration leaves it
    for library in manifest.libraries:
        assert (package.root / library.file).read_bytes()[:4] == b"\x7fELF"
        assert f".target {library.target}\n" in (package.root / library.ptx).read_text()
        # Triton 3.x compiles for Hopper's own instructions too, NVRTC here for the capability.
        assert library.target == ("sm_90a" if library.compiler.startswith("triton") else "sm_90")
        assert {library.file, library.ptx} <= set(manifest.files)
    assert {p.verdict for p in manifest.provenance} == {"emulated"}
    assert {p.time_evidence for p in manifest.provenance} == {"predicted"}
    assert any("predicted, not measured" in note for note in manifest.notes)
    assert manifest.tuned_for == GPU


def test_the_fallback_is_ptx_for_every_later_gpu(package: Package) -> None:
    """Of the NVRTC variants, cache operations among them, labelled with the driver that takes CUDA 13's PTX: branch
    580."""
    fallbacks = package.manifest.fallbacks
    cache_operations = {"cuda_kv_write", "cuda_copy_blocks", "cuda_gather_kv", "cuda_pack_blocks", "cuda_unpack_blocks"}
    assert {f.variant for f in fallbacks} == {"cuda_paged", *cache_operations}
    for fallback in fallbacks:
        assert ".target sm_80" in (package.root / fallback.library.ptx).read_text()
        assert int(fallback.driver) >= 580


@pytest.mark.parametrize(
    ("version", "driver"),
    [("8.0", "525"), ("8.5", "555"), ("8.8", "575"), ("9.0", "580"), ("9.1", "590"), ("99.0", "590")],
)
def test_the_driver_of_a_ptx_version(version: str, driver: str) -> None:
    """CUDA 12.0 needs driver 525, 12.5 555, 12.9 575, 13.0 580, 13.1 590; of what is newer nothing less is promised."""
    assert driver_of(f"//\n.version {version}\n.target sm_90\n") == driver


@pytest.mark.parametrize(
    ("target", "runs", "does_not"),
    [("sm_80", (80, 86, 89), (75, 90)), ("sm_86", (86, 89), (80, 90)), ("sm_90", (90,), (89, 100)),
     ("sm_90a", (90,), (89, 91, 100)), ("sm_100a", (100,), (103, 120)), ("sm_100f", (100, 103), (90, 120))],
)  # fmt: skip
def test_which_devices_run_a_cubin(target: str, runs: tuple[int, ...], does_not: tuple[int, ...]) -> None:
    """CUDA's programming guide: within a major capability, on no earlier minor one; of an `a` target, exactly there."""
    assert target_of(f".version 9.0\n.target {target}, debug\n") == target
    assert all(cubin_runs(target, capability) for capability in runs)
    assert not any(cubin_runs(target, capability) for capability in does_not)


class Shipped(CudaPaged):
    """`cuda_paged` with the binaries of a package."""

    package: Package

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        return self.package.artifacts.artifacts(self, problem, pool_format, config, device)


CASES = (
    Case(find_variant("cuda_paged").op, PROBLEM, FORMAT, Workload((1, 16, 17, 100)), Family.RANDOM, (), 3),
    Case(
        find_variant("cuda_paged").op,
        PROBLEM,
        FORMAT,
        Workload((33, 0, 64)),
        Family.NEEDLE,
        (Hazard.TAIL_FOREIGN, Hazard.STRIDED_POOL),
        4,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family.value)
@pytest.mark.parametrize("capability", [90, 80])
def test_ptx_from_the_wheel_passes_the_gate(package: Package, case: Case, capability: int) -> None:
    """The cubin's PTX on the GPU that was tuned for, the fallback's on an older one."""
    Shipped.package = package
    config = find_variant("cuda_paged").config_from({"num_warps": 4})
    shipped = Shipped()
    device = replace(GPU, capability=capability)
    (artifact,) = shipped.build(PROBLEM, FORMAT, config, device)
    assert artifact.target == f"sm_{capability}"
    assert artifact.ptx_path is not None
    assert artifact.ptx_path.is_relative_to(package.root)
    result = run_case(shipped, config, case, device)
    assert result.status is Status.PASSED, result.reason


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.ATTENTION])
def test_cache_operations_from_the_wheel_pass_the_gate(
    package: Package, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What dispatch takes on this GPU: the tuned winner of a write, and of what was not tuned the CUDA kernel with its
    default config."""
    selection = package.dispatch.select(op, PROBLEM, FORMAT, Bounds(4, 256 if op is Op.GATHER_KV else 1))
    assert selection.variant.name == f"cuda_{op}"
    assert all(artifact.path.is_relative_to(package.root) for artifact in selection.artifacts)
    tuned = op is Op.KV_WRITE
    assert (selection.winner is not None, selection.config.as_dict()["num_warps"]) == (tuned, 2 if tuned else 4)
    variant = find_variant(selection.variant.name)
    monkeypatch.setattr(type(variant), "build", lambda *_: selection.artifacts)
    case = Case(op, PROBLEM, FORMAT, Workload((33, 0, 64)), Family.CODED, (Hazard.STRIDED_POOL,), 4)
    result = run_case(variant, variant.config_from(selection.config.as_dict()), case, GPU)
    assert result.status is Status.PASSED, result.reason


def test_both_kernels_of_a_split_are_shipped(package: Package) -> None:
    variant = find_variant("triton_split")
    config = variant.config_from({"num_splits": 2, "tile_tokens": 32})
    artifacts = package.artifacts.artifacts(variant, PROBLEM, FORMAT, config, GPU)
    built = variant.build(PROBLEM, FORMAT, config, GPU)
    assert [a.key for a in artifacts] == [a.key for a in built]
    assert [a.abi for a in artifacts] == [a.abi for a in built]
    assert [a.resources for a in artifacts] == [a.resources for a in built]


def test_without_a_gpu_it_verifies_and_explains(gpu_installed: Path, run_isolated: Run) -> None:
    program = "import sys, pagedtune_runtime.runtime.exported.command as c; sys.exit(c.main(sys.argv[1:]))"
    verified = run_isolated(program, gpu_installed, "verify")
    assert verified.returncode == 0, verified.stderr
    assert "cubins with their PTX" in verified.stdout
    assert "none was launched" in verified.stdout
    explained = run_isolated(program, gpu_installed, "explain")
    assert explained.returncode == 0, explained.stderr
    assert "no NVIDIA GPU" in explained.stdout
    assert "is predicted to win n4-c256" in explained.stdout
    assert "verdict emulated, time 20.0 us, predicted" in explained.stdout
    assert "kv_write n64-c128: cuda_kv_write[num_warps=2," in explained.stdout
    assert "is predicted to win n64-c128 (decode)" in explained.stdout
    settled = run_isolated(program, gpu_installed, "calibrate")
    assert settled.returncode == 2
    assert "there is none here" in settled.stderr


def test_a_damaged_cubin_is_found(gpu_installed: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "pagedtune_runtime"
    subprocess.run(["cp", "-r", gpu_installed / "pagedtune_runtime", damaged], check=True)
    cubin = next((damaged / "gpu").glob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"x")
    command = [sys.executable, "-m", "pagedtune_runtime", "verify"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{cubin.name} was changed" in done.stderr


class FakeDriver:
    """Answers as a driver with one GPU would."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, handle: c_int) -> int:
        buffer.value = b"NVIDIA A100-SXM4-80GB"
        return 0

    def cuDeviceTotalMem_v2(self, pointer: Any, handle: c_int) -> int:
        pointer._obj.value = 80 << 30
        return 0

    def cuDeviceGetAttribute(self, pointer: Any, attribute: int, handle: c_int) -> int:
        pointer._obj.value = {75: 8, 76: 0, 16: 108, 82: 65536, 97: 166912, 81: 167936, 38: 41943040}[attribute]
        return 0


def test_the_gpu_here_is_asked_of_the_driver(package: Package) -> None:
    """Attribute numbers are those of `CUdevice_attribute`; every fact is that of the A100's file."""
    stated = Configs().gpu("a100").device("a100")
    here = gpu_here(stated, FakeDriver())
    assert here is not None
    assert here == replace(stated, bandwidth_gb_s=None, boost_clock_mhz=None, base_clock_mhz=None)
    assert package.dispatch.select(CASES[0].op, PROBLEM, FORMAT, Bounds(4, 256)).config.key == "num_warps=4"
    variant = find_variant("triton_split")
    config = variant.config_from({"num_splits": 2, "tile_tokens": 32})
    with pytest.raises(ArtifactUnavailable, match=r"its binary for sm_90a, and this is sm_80"):
        package.artifacts.artifacts(variant, PROBLEM, FORMAT, config, here)


def test_another_description_of_the_device_is_refused(gpu_results: Path, tmp_path: Path) -> None:
    folder = gpu_results / "h100"
    table = json.loads((folder / "winners.json").read_text())
    assert table["entries"][0]["time_evidence"] == "predicted"
    with pytest.raises(UsageError, match="tune again"):
        device_of(GPU.fingerprint.replace("132", "114"), Configs())


def test_every_entry_of_a_wheel_is_proven_from_its_ptx(package: Package, tmp_path: Path) -> None:
    lines: list[str] = []
    assert prove(package, 1, lines.append) == 0
    assert len(lines) == len(package.table.entries)
    assert all(line.endswith("1 of 1 cases passed") for line in lines)
    assert lines[-1].startswith("kv_write tiny")


def test_a_write_beyond_the_tuned_range_says_so(package: Package) -> None:
    """64 tokens were tuned: fewer have the same winner, more the default config of its variant."""
    fewer, more = (package.dispatch.select(Op.KV_WRITE, PROBLEM, FORMAT, Bounds(n, 1)) for n in (3, 65))
    assert fewer.winner is not None
    assert fewer.config.as_dict()["rows_per_block"] == 2
    assert more.winner is None
    assert more.config == more.variant.default_config(PROBLEM, FORMAT, Bounds(128, 128), GPU)
    assert "no cell covers n128-c128" in more.why


def test_calibration_leaves_cache_operations_alone(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where an exporter had shipped a choice: nothing here can time or check a write."""
    (write,) = (cell for cell in package.finalists if cell.op == Op.KV_WRITE)
    several = replace(write, candidates=write.candidates * 2)
    monkeypatch.setattr(package, "finalists", (several,))
    assert list(calibrate(package, 1.0)) == []
