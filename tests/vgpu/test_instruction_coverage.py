"""No instruction form of the virtual GPU goes untested: prints the table, fails on what no differential test runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vgpu_all_forms import FORMS
from vgpu_evaluate import kernel
from vgpu_forms import width
from vgpu_matrix import CASES, MEMORY_FORMS

from pagedtune.harness.vgpu.decoder import decode
from pagedtune.harness.vgpu.forms import all_forms, forms_of
from pagedtune.harness.vgpu.ptx_parser import parse

# No result to compare: the faulty kernels stop at them, at their line.
ENDS = {"trap", "brkpt"}


def covered() -> Iterator[tuple[str, str]]:
    """(form, test family) of everything that a differential test runs."""
    for family, forms in FORMS.items():
        for form in forms:
            text = kernel(form.text, [width(t) for t in form.operands], width(form.result))
            for name in forms_of(decode(parse(text), "k")):
                yield name, family
    for case in CASES:
        yield case.form, "matrix products"
    for name in MEMORY_FORMS:
        yield name, "matrices in memory"


def test_every_form_has_a_differential_test() -> None:
    found = Counter(name for name, _ in set(covered()))
    forms = all_forms() - ENDS
    by_opcode: dict[str, list[str]] = {}
    for name in sorted(forms):
        by_opcode.setdefault(name.partition(".")[0], []).append(name)
    print(f"\n{'opcode':14s} {'forms':>6s} {'tested':>7s}")
    for opcode, names in by_opcode.items():
        print(f"{opcode:14s} {len(names):6d} {sum(n in found for n in names):7d}")
    print(f"{'all':14s} {len(forms):6d} {len(forms & set(found)):7d}")
    print(f"{sum(map(len, FORMS.values()))} statements in numpy")
    assert not forms - set(found), f"no differential test runs {sorted(forms - set(found))}"
    assert set(found) <= forms, f"tested, but not on the list of forms: {sorted(set(found) - forms)}"
