"""Every form with a statement in numpy, by family."""

from __future__ import annotations

import vgpu_forms_compare
import vgpu_forms_convert
import vgpu_forms_float
import vgpu_forms_integer
import vgpu_forms_memory
import vgpu_forms_warp
from vgpu_forms import Form

FORMS: dict[str, list[Form]] = {
    **vgpu_forms_integer.FORMS,
    **vgpu_forms_float.FORMS,
    **vgpu_forms_compare.FORMS,
    **vgpu_forms_convert.FORMS,
    **vgpu_forms_memory.FORMS,
    **vgpu_forms_warp.FORMS,
}
