"""Every code path of the native kernel passes the gate, not only the one that this CPU would choose.

The AVX-512 source runs here as well where the CPU lacks it: `PT_TEST_WIDE` compiles it for AVX2, 64-byte vectors split
in two. What stays unproven without such a CPU is the compiler's choice of instructions.
"""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest

from pagedtune.harness.case import Case, Level
from pagedtune.harness.coverings import cases_for
from pagedtune.harness.gate import run_case
from pagedtune.kernels import cpu_split
from pagedtune.kernels.artifact import Artifact
from pagedtune.kernels.build_native import build_library
from pagedtune.kernels.cpu_facts import cpu_device
from pagedtune.kernels.cpu_split import ABI, CpuSplit, CpuSplitConfig, defines
from pagedtune.kernels.device import Device
from pagedtune.kernels.native_args import SOURCE_DIR
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.record import Status
from pagedtune.kernels.variant import Config

from .toy import CPU

WIDE = 9  # PT_ISA_TEST_WIDE
MAX_SHAPES = 3  # one per KV dtype: each is a compilation


class AllPaths(CpuSplit):
    """`cpu_split` with the wide source in its library."""

    def build(self, problem: Problem, pool_format: PoolFormat, config: Config, device: Device) -> tuple[Artifact, ...]:
        """As the real one, without the optimisation that only speed needs."""
        wanted = {**defines(problem, pool_format), "PT_TEST_WIDE": 1}
        headers = sorted(SOURCE_DIR.glob("*.h"))
        return (build_library(SOURCE_DIR / "attention.cpp", headers, wanted, ABI, optimise=1),)


def some_cases() -> list[Case]:
    """The corner cases of the shape that occurs most, for each KV dtype."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases_for(CpuSplit(), CPU, Level.CORNER):
        p = case.problem
        shape = (case.pool_format.kv_dtype, p.head_dim, p.head_dim_v, p.gqa_ratio, p.q_dtype)
        groups.setdefault(shape, []).append(case)
    most = sorted(groups.items(), key=lambda item: -len(item[1]))
    chosen = {shape[0]: cases for shape, cases in reversed(most)}
    return [case for cases in list(chosen.values())[:MAX_SHAPES] for case in cases]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the AVX2 and AVX-512 paths are for x86-64")
@pytest.mark.parametrize("path", ["portable", "avx2", "avx512", "wide"])
def test_code_path_passes_the_gate(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widest = list(cpu_split.ISA_CODES).index(cpu_device().isa)
    if path in cpu_split.ISA_CODES and list(cpu_split.ISA_CODES).index(path) > widest:
        pytest.skip(f"this CPU has no {path}; its source runs as `wide`")
    monkeypatch.setitem(cpu_split.ISA_CODES, "wide", WIDE)
    variant = AllPaths()
    for index, case in enumerate(some_cases()):
        base = variant.default_config(case.problem, case.pool_format, case.bounds, CPU)
        assert isinstance(base, CpuSplitConfig)
        config = replace(base, isa=path, num_splits=1 + 3 * (index % 2), split_tokens=32, tile_tokens=16 << index % 4)
        result = run_case(variant, config, case, CPU)
        assert result.status is Status.PASSED, f"{case.key} {config.key}: {result.reason}"
