"""The gate is itself gated: each planted fault is refused, and for the expected reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pagedtune.harness.case import Case, Hazard
from pagedtune.harness.dimensions import SIZES
from pagedtune.harness.gate import first_failure, run_case
from pagedtune.harness.verdicts import CaseResult, Check
from pagedtune.kernels.device import Device
from pagedtune.kernels.record import Status
from pagedtune.kernels.variant import Op

from .attention_faults import FAULTS
from .cache_faults import CACHE_FAULTS, PlantedOp
from .isolated import CRASHED, isolated
from .plain import cache_op_passes_allclose, passes_allclose
from .planted import Planted
from .stale_faults import STALE_FAULTS, Stale
from .swap_faults import SWAP_FAULTS

MAX_SHAPES = 3  # compilations a fault may cost
MAX_CASES = 24


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_planted_attention_fault_is_refused(
    fault: Planted, corner_cases: Callable[[Op], Sequence[Case]], device: Device, record_property: Callable[..., None]
) -> None:
    cases = few_shapes([case for case in corner_cases(Op.ATTENTION) if fault.where(case)])
    assert cases, f"no case of the corner level reaches {fault.name!r}: the gate has a hole"
    for case in cases:
        crash, found = isolated(lambda case=case: findings(fault, case, device))  # type: ignore[misc]
        failed, reason, plain = (CRASHED, found, None) if crash else found
        if failed:
            record_property("planted_fault", (fault.name, fault.source, failed, case.key, plain))
            assert failed in (*fault.expected, CRASHED), reason
            return
    record_property("planted_fault", (fault.name, fault.source, "", "", None))
    pytest.fail(f"{fault.name}: passed all {len(cases)} cases that reach it")


def findings(fault: Planted, case: Case, device: Device) -> tuple[str, str, bool | None]:
    """The check that refuses a fault in a case (empty: none), its reason, and whether a plain allclose passes it."""
    variant, config = fault.variant(), fault.config(case)
    result = run_case(variant, config, case, device)
    if result.status in (Status.PASSED, Status.REJECTED):
        return "", "", None
    return result.failed, result.reason, passes_allclose(variant, config, case, device)


@pytest.mark.parametrize("planted", CACHE_FAULTS + SWAP_FAULTS, ids=lambda planted: planted.fault.replace(" ", "_"))
def test_planted_cache_fault_is_refused(
    planted: PlantedOp,
    corner_cases: Callable[[Op], Sequence[Case]],
    device: Device,
    record_property: Callable[..., None],
) -> None:
    cases = corner_cases(planted.op)
    failed = next((r for c in cases if not (r := run_planted(planted, c, device)).passed), None)
    name = "" if failed is None else failed.failed
    plain = cache_op_passes_allclose(planted.op, planted.function)
    record_property("planted_fault", (planted.fault, planted.source, name, failed.case_key if failed else "", plain))
    assert failed is not None, f"{planted.fault}: passed all {len(cases)} cases"
    assert name in planted.expected, failed.reason


@pytest.mark.parametrize("planted", STALE_FAULTS, ids=lambda planted: planted.fault.replace(" ", "_"))
def test_kernel_with_a_memory_or_another_path_is_refused(
    planted: Stale, corner_cases: Callable[[Op], Sequence[Case]], device: Device, record_property: Callable[..., None]
) -> None:
    cases = [c for c in corner_cases(Op.ATTENTION) if Hazard.REPLAY in c.hazards or c.workload.name in SIZES]
    found = first_failure(planted, planted.config_type(), cases, device)
    assert found is not None, f"{planted.fault}: passed all {len(cases)} cases"
    plain = passes_allclose(planted, planted.config_type(), cases[0], device)
    record_property("planted_fault", (planted.fault, "reuse and size", found.failed, found.case_key, plain))
    assert found.failed in {Check.ELEMENT, Check.EXACT, Check.ROW, Check.NONFINITE, Check.LSE}, found.reason


def run_planted(planted: PlantedOp, case: Case, device: Device) -> CaseResult:
    """One case of a planted cache operation."""
    return run_case(planted, planted.config_type(), case, device)


def test_real_kernel_passes_where_the_planted_faults_fail(
    corner_cases: Callable[[Op], Sequence[Case]], device: Device
) -> None:
    """The control: with no edit, the same configs and a sample of the same cases pass."""
    control = Planted("nothing is wrong", "", (), (), num_splits=4)
    for case in few_shapes(corner_cases(Op.ATTENTION)):
        result = run_case(control.variant(), control.config(case), case, device)
        assert result.status in (Status.PASSED, Status.REJECTED), result.reason


def few_shapes(cases: Sequence[Case]) -> list[Case]:
    """The first cases of the few shapes that occur most: each shape is a compilation."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        problem = case.problem
        shape = (problem.head_dim, problem.head_dim_v, problem.gqa_ratio, problem.q_dtype, case.pool_format.kv_dtype)
        groups.setdefault(shape, []).append(case)
    chosen = sorted(groups.values(), key=len, reverse=True)[:MAX_SHAPES]
    return [case for group in chosen for case in group[:MAX_CASES]]
