"""Faults planted in the CUDA and Triton kernels are refused by the gate on the virtual GPU, for the expected reason."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from pagedtune.kernels import (
    cuda_cache,
    cuda_paged,
    cuda_split_mma,
    cuda_split_simt,
    triton_cache,
    triton_split,
    triton_swap,
)
from pagedtune.kernels.cuda_cache import CudaCopyBlocks, CudaGatherKV, CudaKVWrite
from pagedtune.kernels.cuda_paged import CudaPaged
from pagedtune.kernels.cuda_split_mma import CudaSplitMma
from pagedtune.kernels.cuda_split_simt import CudaSplitSimt
from pagedtune.kernels.cuda_swap import CudaPackBlocks, CudaUnpackBlocks
from pagedtune.kernels.record import Status
from pagedtune.kernels.triton_cache import TritonCopyBlocks, TritonGatherKV, TritonKVWrite
from pagedtune.kernels.triton_split import TritonSplit
from pagedtune.kernels.triton_swap import TritonPackBlocks, TritonUnpackBlocks
from pagedtune.kernels.variant import Variant

from .cuda_paged_faults import CUDA_PAGED_FAULTS
from .gpu_cache_faults import (
    CUDA_COPY_FAULTS,
    CUDA_GATHER_FAULTS,
    CUDA_WRITE_FAULTS,
    TRITON_COPY_FAULTS,
    TRITON_GATHER_FAULTS,
    TRITON_WRITE_FAULTS,
)
from .gpu_planted import H100, GpuFault, result_of, run_case
from .gpu_swap_faults import CUDA_PACK_FAULTS, CUDA_UNPACK_FAULTS, TRITON_PACK_FAULTS, TRITON_UNPACK_FAULTS
from .single_faults import CUDA_PAGED_SINGLES, SPLIT_MMA_SINGLES, TRITON_SPLIT_SINGLES
from .split_mma_faults import SPLIT_MMA_FAULTS
from .split_simt_faults import SPLIT_SIMT_FAULTS
from .token_scale_faults import (
    CUDA_COPY_SCALE_FAULTS,
    CUDA_GATHER_SCALE_FAULTS,
    CUDA_PAGED_SCALE_FAULTS,
    CUDA_WRITE_SCALE_FAULTS,
    SPLIT_MMA_SCALE_FAULTS,
    SPLIT_SIMT_SCALE_FAULTS,
    TRITON_COPY_SCALE_FAULTS,
    TRITON_GATHER_SCALE_FAULTS,
    TRITON_SPLIT_SCALE_FAULTS,
    TRITON_WRITE_SCALE_FAULTS,
)
from .triton_split_faults import TRITON_SPLIT_FAULTS

FAMILIES: tuple[tuple[Variant, ModuleType, tuple[GpuFault, ...]], ...] = (
    (TritonSplit(), triton_split, (*TRITON_SPLIT_FAULTS, *TRITON_SPLIT_SCALE_FAULTS, *TRITON_SPLIT_SINGLES)),
    (CudaPaged(), cuda_paged, (*CUDA_PAGED_FAULTS, *CUDA_PAGED_SCALE_FAULTS, *CUDA_PAGED_SINGLES)),
    (CudaSplitMma(), cuda_split_mma, (*SPLIT_MMA_FAULTS, *SPLIT_MMA_SCALE_FAULTS, *SPLIT_MMA_SINGLES)),
    (CudaSplitSimt(), cuda_split_simt, (*SPLIT_SIMT_FAULTS, *SPLIT_SIMT_SCALE_FAULTS)),
    (CudaKVWrite(), cuda_cache, (*CUDA_WRITE_FAULTS, *CUDA_WRITE_SCALE_FAULTS)),
    (CudaCopyBlocks(), cuda_cache, (*CUDA_COPY_FAULTS, *CUDA_COPY_SCALE_FAULTS)),
    (CudaGatherKV(), cuda_cache, (*CUDA_GATHER_FAULTS, *CUDA_GATHER_SCALE_FAULTS)),
    (TritonKVWrite(), triton_cache, (*TRITON_WRITE_FAULTS, *TRITON_WRITE_SCALE_FAULTS)),
    (TritonCopyBlocks(), triton_cache, (*TRITON_COPY_FAULTS, *TRITON_COPY_SCALE_FAULTS)),
    (TritonGatherKV(), triton_cache, (*TRITON_GATHER_FAULTS, *TRITON_GATHER_SCALE_FAULTS)),
    (CudaPackBlocks(), cuda_cache, CUDA_PACK_FAULTS),
    (CudaUnpackBlocks(), cuda_cache, CUDA_UNPACK_FAULTS),
    (TritonPackBlocks(), triton_swap, TRITON_PACK_FAULTS),
    (TritonUnpackBlocks(), triton_swap, TRITON_UNPACK_FAULTS),
)
PLANTED = [(variant, module, fault) for variant, module, faults in FAMILIES for fault in faults]


def name_of(value: object) -> str | None:
    if isinstance(value, GpuFault):
        return value.name.replace(" ", "_")
    return value.name if isinstance(value, Variant) else ""


@pytest.mark.parametrize(("variant", "module", "fault"), PLANTED, ids=name_of)
def test_planted_fault_is_refused(
    variant: Variant,
    module: ModuleType,
    fault: GpuFault,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[..., None],
) -> None:
    result = result_of(fault, variant, module, monkeypatch)
    name = f"{variant.name}: {fault.name}"
    record_property("planted_fault", (name, fault.source, result.failed, result.case_key, None))
    assert result.status not in (Status.PASSED, Status.REJECTED), f"{name}: passed"
    assert result.failed in fault.expected, result.reason


@pytest.mark.parametrize(("variant", "faults"), [(v, faults) for v, _, faults in FAMILIES], ids=name_of)
def test_real_kernel_passes_the_same_cases(variant: Variant, faults: tuple[GpuFault, ...]) -> None:
    for case, config in {fault.case: fault.config for fault in faults}.items():
        result = run_case(variant, variant.config_from(dict(config)), case, H100)
        assert result.status is Status.PASSED, f"{case.key}: {result.reason}"
