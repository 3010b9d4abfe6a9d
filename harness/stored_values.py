"""What the cache operations must store, worked out with numpy: scales of tokens, and the bits of rounded values."""

from __future__ import annotations

import numpy as np
import torch

from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import ScaleKind

from .case import Case

INT8_MAX = 127  # stored integers are symmetric: -128 is never written
E4M3_MAX = 448


def own_scale(case: Case, value: torch.Tensor) -> torch.Tensor:
    """fp32 [num_kv_heads]: the largest finite magnitude of each row [num_kv_heads, head_dim] over the largest number
    that is stored; 1 where that is below the smallest normal fp32 number."""
    sizes = np.abs(value.float().numpy())
    largest = np.where(np.isfinite(sizes), sizes, np.float32(0)).max(axis=1)
    scale = (largest / np.float32(INT8_MAX if case.pool_format.kv_dtype is DType.INT8 else E4M3_MAX)).astype(np.float32)
    return torch.from_numpy(np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale))


def stored(case: Case, value: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Bits of a written value: divided by its scale in fp32, rounded to nearest, ties to even; what lies beyond the
    range of an 8-bit type becomes its largest number."""
    numbers = value.float().numpy()
    if scale is not None:
        one = case.pool_format.scale_kind is ScaleKind.PER_TENSOR
        divisor = np.repeat(scale.numpy(), len(numbers)) if one else scale.numpy()
        numbers = numbers / divisor[:, None]
    match case.pool_format.kv_dtype:
        case DType.FP32:
            rounded = numbers.view(np.int32)
        case DType.FP16:
            rounded = numbers.astype(np.float16).view(np.int16)
        case DType.FP8_E4M3:
            rounded = e4m3_bits(numbers)
        case DType.INT8:
            rounded = np.nan_to_num(np.clip(np.rint(numbers), -INT8_MAX, INT8_MAX)).astype(np.int8)
        case _:
            word = numbers.view(np.uint32)
            rounded = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)
    return torch.from_numpy(rounded)


# Values of the codes 0 to 0x7e: 4 bits of exponent with bias 7, 3 of mantissa, no infinity (OCP 8-bit floating point
# specification, revision 1.0, E4M3). 0x7f is NaN; bit 7 is the sign.
_E4M3 = np.array([(c % 8) / 512 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(0x7F)])


def e4m3_bits(numbers: np.ndarray) -> np.ndarray:
    """The e4m3 codes (uint8) nearest to fp32 `numbers`; ties to the even code, 448 for whatever is larger. A NaN of
    either sign is the one without (PTX ISA, `cvt`: NaN becomes the canonical NaN of the format)."""
    sizes = np.abs(numbers.astype(np.float64))
    middles = (_E4M3[:-1] + _E4M3[1:]) / 2
    codes = np.searchsorted(middles, sizes, side="left")  # a tie goes down
    tie = codes < len(middles)
    tie[tie] = sizes[tie] == middles[codes[tie]]
    codes = codes + (tie & (codes % 2 == 1))
    signed = codes + 0x80 * np.signbit(numbers)
    return np.asarray(np.where(np.isnan(numbers), 0x7F, signed).astype(np.uint8))
