"""The element types of queries, KV pools and declared numerics, under the field's short names."""

from __future__ import annotations

from enum import StrEnum

import torch as torch_module


class DType(StrEnum):
    """An element type. `.value` is the name used in YAML, records and on the command line."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    INT8 = "int8"
    FP64 = "fp64"  # never stored: the precision of the oracle

    @property
    def torch(self) -> torch_module.dtype:
        """The torch dtype that stores this type."""
        return _TORCH[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _TORCH[self].itemsize

    @property
    def epsilon(self) -> float:
        """Spacing of the type at 1.0 (2^-mantissa bits); for int8, one step of a unit-scaled value."""
        return 1 / 127 if self is DType.INT8 else torch_module.finfo(_TORCH[self]).eps

    @classmethod
    def of(cls, dtype: torch_module.dtype) -> DType:
        """The DType that stores `dtype`.

        Raises:
            ValueError: no KV or query type is stored so.
        """
        for name, stored in _TORCH.items():
            if stored == dtype:
                return name
        raise ValueError(f"dtype {dtype} is none of {', '.join(d.value for d in cls)}")


_TORCH: dict[DType, torch_module.dtype] = {
    DType.FP32: torch_module.float32,
    DType.BF16: torch_module.bfloat16,
    DType.FP16: torch_module.float16,
    DType.FP8_E4M3: torch_module.float8_e4m3fn,
    DType.INT8: torch_module.int8,
    DType.FP64: torch_module.float64,
}
