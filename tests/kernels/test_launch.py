"""Plans, binding and the native executor: what is checked before a kernel sees an address."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedtune.kernels.artifact import KernelAbi, content_key, publish
from pagedtune.kernels.build_native import build_library, find_compiler
from pagedtune.kernels.launch import (
    CType,
    KernelStep,
    LaunchAttributes,
    LaunchPlan,
    MemsetStep,
    ScalarArg,
    SizeArg,
    SlotArg,
    SlotSpec,
    StrideArg,
    WorkspaceSpec,
)
from pagedtune.kernels.native import LaunchError, NativeExecutor
from pagedtune.kernels.variant import BuildError

SOURCE = """
#include <cstdint>
struct Launch { int64_t grid[3]; int32_t num_threads; int32_t reserved; };
template <class T> T get(void* const* params, int i) { return *static_cast<T*>(params[i]); }
extern "C" __attribute__((visibility("default"))) int32_t scale_rows(const Launch* launch, void* const* params) {
    float* out = get<float*>(params, 0);
    const float* x = get<float*>(params, 1);
    const int64_t stride = get<int64_t>(params, 2), rows = get<int64_t>(params, 3);
    const float factor = get<float>(params, 4) * launch->grid[0];
    if (get<int32_t>(params, 5) != 7) return 3;
    for (int64_t i = 0; i < rows; ++i) out[i] = x ? x[i * stride] * factor : -1.0f;
    return 0;
}
"""
ARGS = (
    SlotArg("out"),
    SlotArg("x"),
    StrideArg("x", 0),
    SizeArg("out", 0),
    ScalarArg(0.5, CType.F32),
    ScalarArg(7, CType.I32),
)
ABI = {
    "scale_rows": KernelAbi((CType.POINTER, CType.POINTER, CType.I64, CType.I64, CType.F32, CType.I32)),
}
SLOTS = {
    "out": SlotSpec(torch.float32, ("rows",), contiguous=True),
    "x": SlotSpec(torch.float32, ("rows", 2), optional=True),
    "starts": SlotSpec(torch.int32, ("rows+1",), optional=True),
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> NativeExecutor:
    source = tmp_path_factory.mktemp("source") / "scale.cpp"
    source.write_text(SOURCE)
    return NativeExecutor((build_library(source, (), {}, ABI),))


def plan(args: tuple[object, ...] = ARGS) -> LaunchPlan:
    step = KernelStep("scale_rows", (4, 1, 1), args, attributes=LaunchAttributes(num_threads=1))  # type: ignore[arg-type]
    return LaunchPlan((step,), SLOTS, limits={"rows": 8})


def test_arguments_reach_the_kernel_as_declared(executor: NativeExecutor) -> None:
    x = torch.arange(16, dtype=torch.float32).view(8, 2)[::2]  # [4, 2], row stride 4
    out = torch.full((4,), torch.nan)
    executor.prepare(plan().bind({"out": out, "x": x}))()
    assert out.tolist() == [0.0, 8.0, 16.0, 24.0]  # x[:, 0] * 0.5 * grid 4


def test_absent_optional_slot_is_a_null_pointer(executor: NativeExecutor) -> None:
    out = torch.zeros(3)
    executor.prepare(plan().bind({"out": out}))()
    assert out.tolist() == [-1.0] * 3


def test_error_code_of_a_kernel_is_raised(executor: NativeExecutor) -> None:
    launch = executor.prepare(plan((*ARGS[:5], ScalarArg(8, CType.I32))).bind({"out": torch.zeros(1)}))
    with pytest.raises(LaunchError, match="scale_rows: error code 3"):
        launch()


@pytest.mark.parametrize(
    "args", [ARGS[:5], (*ARGS, ScalarArg(1, CType.I64)), (*ARGS[:4], ScalarArg(1, CType.I32), ARGS[5])]
)
def test_arguments_that_do_not_fit_the_binary_are_refused(executor: NativeExecutor, args: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit the binary"):
        executor.prepare(plan(args).bind({"out": torch.zeros(1)}))


def test_unknown_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="no artifact has the entry 'scale_rows'"):
        NativeExecutor().prepare(plan().bind({"out": torch.zeros(1)}))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "slot 'out' is not filled"),
        ({"out": torch.zeros(2, dtype=torch.float64)}, "has dtype torch.float64, expected torch.float32"),
        ({"out": torch.zeros(2, 2)}, "slot 'out' has shape"),
        ({"out": torch.zeros(4)[::2]}, "expected a contiguous tensor"),
        ({"out": torch.zeros(9)}, "rows=9 exceeds the plan's bound of 8"),
        ({"out": torch.zeros(2), "x": torch.zeros(3, 2)}, "3 is not 2"),
        ({"out": torch.zeros(2), "x": torch.zeros(2, 3)}, "3 is not 2"),
        ({"out": torch.zeros(2), "starts": torch.zeros(2, dtype=torch.int32)}, "2 is not 3"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan().bind(tensors)


def test_misaligned_tensor_is_refused() -> None:
    slots = {"x": SlotSpec(torch.float32, (2,), align=16)}
    base = torch.zeros(12)
    offset = next(i for i in range(4) if base[i:].data_ptr() % 16 == 4)
    with pytest.raises(ValueError, match="expected an alignment of 16 bytes"):
        LaunchPlan((), slots).bind({"x": base[offset : offset + 2]})


def test_unit_stride_is_required_only_where_it_matters() -> None:
    slots = {"q": SlotSpec(torch.float32, ("n", 4), unit_stride=(1,))}
    LaunchPlan((), slots).bind({"q": torch.zeros(3, 8)[:, :4]})
    with pytest.raises(ValueError, match="expected 1 along dimension 1"):
        LaunchPlan((), slots).bind({"q": torch.zeros(3, 8)[:, ::2]})


def test_memset_fills_a_workspace_and_nothing_else() -> None:
    specs = {"partial": WorkspaceSpec(torch.float32, (3, 2))}
    bound = LaunchPlan((MemsetStep("partial", 0xFF),), {}, specs)
    workspaces = bound.allocate_workspaces()
    NativeExecutor().prepare(bound.bind(workspaces))()
    assert workspaces["partial"].isnan().all()  # four bytes 0xff are a NaN
    with pytest.raises(ValueError, match="workspace 'partial' is missing"):
        bound.bind({})
    with pytest.raises(ValueError, match="expected contiguous"):
        bound.bind({"partial": torch.zeros(2, 3)})


def test_build_error_carries_the_compilers_words(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int f() { return no_such_name; }")
    with pytest.raises(BuildError, match="no_such_name"):
        build_library(source, (), {}, {})


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    find_compiler.cache_clear()
    try:
        with pytest.raises(BuildError, match=r"CXX=/no/such/compiler does not run: install g\+\+"):
            find_compiler()
    finally:
        find_compiler.cache_clear()


def test_content_key_changes_with_source_header_and_define(tmp_path: Path) -> None:
    source, header = tmp_path / "a.cpp", tmp_path / "a.h"
    source.write_text('#include "a.h"\nint f() { return VALUE; }')
    header.write_text("// one")
    first = build_library(source, [header], {"VALUE": 1}, {})
    assert build_library(source, [header], {"VALUE": 1}, {}).key == first.key
    assert build_library(source, [header], {"VALUE": 2}, {}).key != first.key
    header.write_text("// two")
    assert build_library(source, [header], {"VALUE": 1}, {}).key != first.key


def test_publish_leaves_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file"
    publish(b"one", target)
    publish(b"two", target)
    assert target.read_bytes() == b"two"
    assert [p.name for p in target.parent.iterdir()] == ["file"]
    (tmp_path / "blocked").write_text("a file where a folder should be")
    with pytest.raises(OSError):
        publish(b"x", tmp_path / "blocked" / "file")


def test_content_key_is_canonical() -> None:
    assert content_key({"a": 1, "b": (1, 2)}) == content_key({"b": [1, 2], "a": 1})
    assert content_key({"a": 1}) != content_key({"a": 2})
