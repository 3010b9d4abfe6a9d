"""Faults planted in GPU kernels: one edit of a source, built and run on the virtual GPU like the real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pagedtune.harness.case import Case, Family, Hazard
from pagedtune.harness.gate import run_case
from pagedtune.harness.verdicts import CaseResult, Check
from pagedtune.kernels.artifact import cache_dir, content_key, publish
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op, Variant
from pagedtune.kernels.workload import Workload

H100 = Device("h100", DeviceKind.CUDA, capability=90, num_units=132, shared_bytes_per_block=232448)
VALUE = (Check.EXACT, Check.ELEMENT, Check.ROW, Check.SCALE, Check.LSE, Check.NONFINITE)
SEEN = (Check.EMULATION,)


@dataclass(frozen=True)
class GpuFault:
    """A fault and what must become of it.

    Args:
        name: what is wrong, in a few words.
        source: where such a fault was seen, as numbered in the list of public bugs, or what class it is of.
        old, new: the edit; `old` must occur exactly once in `file`, a file beside the variant's main source (empty:
            that one).
        expected: the checks that may refuse it; any other reason fails the test.
        case: one that reaches it.
        config: tunables.
    """

    name: str
    source: str
    old: str
    new: str
    expected: tuple[Check, ...]
    case: Case
    config: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""


def gpu_case(
    lens: tuple[int, ...] = (100, 0, 17, 33),
    *hazards: Hazard,
    family: Family = Family.RANDOM,
    query_lens: tuple[int, ...] = (),
    heads: tuple[int, int, int] = (4, 2, 64),
    q_dtype: DType = DType.BF16,
    kv_dtype: DType | None = None,
    block_size: int = 16,
    layout: Layout = Layout.NHD,
    scale_kind: ScaleKind = ScaleKind.NONE,
    op: Op = Op.ATTENTION,
    **features: Any,
) -> Case:
    """A small case: 4 query and 2 KV heads of 64, bf16, blocks of 16, unless said otherwise."""
    problem = Problem(*heads, q_dtype=q_dtype, max_query_len=max(1, *query_lens, 1), **features)
    pool_format = PoolFormat(block_size, kv_dtype or q_dtype, layout, scale_kind)
    return Case(op, problem, pool_format, Workload(lens, query_lens), family, hazards, seed=5)


def result_of(fault: GpuFault, variant: Variant, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> CaseResult:
    """What the gate says of the edited kernel. `module` is the variant's, whose `SOURCE` names the kernel's file."""
    monkeypatch.setattr(module, "SOURCE", _edited(fault, module.SOURCE))
    return run_case(variant, variant.config_from(dict(fault.config)), fault.case, H100)


def _edited(fault: GpuFault, source: Path) -> Path:
    name = fault.file or source.name
    texts = {path.name: path.read_text() for path in source.parent.iterdir() if path.suffix in (".py", ".cu", ".cuh")}
    count = texts[name].count(fault.old)
    if count != 1:
        raise ValueError(f"the text to edit occurs {count} times in {name}, expected once: {fault.old!r}")
    texts[name] = texts[name].replace(fault.old, fault.new)
    folder = cache_dir() / "planted" / content_key(texts)
    for file, text in texts.items():
        if not (folder / file).exists():
            publish(text.encode(), folder / file)
    return folder / source.name
