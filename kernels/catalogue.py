"""The variants that are part of the project, in the order in which they are listed."""

from __future__ import annotations

import difflib

from .cpu_cache import CpuCopyBlocks, CpuGatherKV, CpuKVWrite
from .cpu_split import CpuSplit
from .cpu_swap import CpuPackBlocks, CpuUnpackBlocks
from .cuda_cache import CudaCopyBlocks, CudaGatherKV, CudaKVWrite
from .cuda_paged import CudaPaged
from .cuda_split_mma import CudaSplitMma
from .cuda_split_simt import CudaSplitSimt
from .cuda_swap import CudaPackBlocks, CudaUnpackBlocks
from .device import DeviceKind
from .eager import Eager
from .eager_cache import EagerCopyBlocks, EagerGatherKV, EagerKVWrite
from .eager_swap import EagerPackBlocks, EagerUnpackBlocks
from .triton_cache import TritonCopyBlocks, TritonGatherKV, TritonKVWrite
from .triton_split import TritonSplit
from .triton_swap import TritonPackBlocks, TritonUnpackBlocks
from .variant import Op, Variant

VARIANTS: tuple[Variant, ...] = (
    Eager(),
    CpuSplit(),
    EagerKVWrite(),
    CpuKVWrite(),
    EagerCopyBlocks(),
    CpuCopyBlocks(),
    EagerGatherKV(),
    CpuGatherKV(),
    EagerPackBlocks(),
    CpuPackBlocks(),
    EagerUnpackBlocks(),
    CpuUnpackBlocks(),
    TritonSplit(),
    CudaPaged(),
    CudaKVWrite(),
    CudaCopyBlocks(),
    CudaGatherKV(),
    TritonKVWrite(),
    TritonCopyBlocks(),
    TritonGatherKV(),
    CudaSplitMma(),
    CudaSplitSimt(),
    CudaPackBlocks(),
    CudaUnpackBlocks(),
    TritonPackBlocks(),
    TritonUnpackBlocks(),
)


def variants_for(kind: DeviceKind, op: Op = Op.ATTENTION) -> tuple[Variant, ...]:
    """The variants of an op on a kind of device."""
    return tuple(v for v in VARIANTS if v.device_kind is kind and v.op is op)


def find_variant(name: str) -> Variant:
    """The variant called `name`.

    Raises:
        ValueError: there is none; the message gives the nearest names, if any is near.
    """
    by_name = {v.name: v for v in VARIANTS}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.4)
    guess = f" did you mean {', '.join(near)}?" if near else ""
    raise ValueError(f"unknown variant {name!r}:{guess} `pagedtune variants` lists all")
