"""Every instruction form on the virtual GPU against its statement in numpy, and numpy against exact fractions."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import vgpu_numpy as num
import vgpu_semantics as ref
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vgpu_all_forms import FORMS
from vgpu_evaluate import evaluate
from vgpu_forms import FLOATS, Form, check, edges, rows_of, width

APPROXIMATE = [f for forms in FORMS.values() for f in forms if f.real is not None and f.result in FLOATS]


@pytest.mark.parametrize("family", FORMS)
def test_edge_values(family: str) -> None:
    """Zeros, subnormals, ties, extremes, infinities and NaN: all pairs, or as many combinations as a form's budget."""
    wrong = []
    for form in FORMS[family]:
        try:
            check(form, rows_of(form))
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong[:10])


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_arbitrary_values(data: st.DataObject) -> None:
    """Hypothesis picks a form and rows of patterns, half of them edges; a failure shrinks to one form and few rows."""
    form = data.draw(st.sampled_from([f for forms in FORMS.values() for f in forms]))
    one = [
        st.one_of(st.sampled_from(edges(t)), st.integers(0, (1 << bits_of(t)) - 1).map(lambda x, t=t: cut(x, t)))
        for t in form.operands
    ]
    check(form, data.draw(st.lists(st.tuples(*one), min_size=1, max_size=48)))


@pytest.mark.parametrize("form", APPROXIMATE, ids=lambda form: form.name)
def test_approximations_are_as_wrong_as_documented(form: Form) -> None:
    """Within the bound, and over half of it somewhere: a kernel that needs more than is documented does not pass."""
    rng = np.random.default_rng(11)
    columns = [num.patterns(rng.uniform(0.3, 1.7, 2000), t) for t in form.operands]
    check(form, list(zip(*(c.tolist() for c in columns), strict=True)))
    bits = width(form.result)
    got = evaluate(form.text, [bits] * len(columns), [c.tolist() for c in columns], bits)
    assert form.real is not None
    exact = form.real(*columns)
    error = np.abs(num.value(np.array(got, np.uint64), form.result) - exact)
    assert (error / np.maximum(form.absolute, form.relative * np.abs(exact))).max() > 0.5


def bits_of(type: str) -> int:
    scalar = type.partition("x2")[0]
    if scalar not in FLOATS and width(type) == 16:
        return int(type[1:])
    return width(type)


def cut(pattern: int, type: str) -> int:
    """tf32 holds no lower 13 bits."""
    return pattern & ~0x1FFF if type == "tf32" else pattern


@pytest.mark.parametrize("name", ["f16", "bf16", "f32", "e4m3", "e5m2"])
def test_numpy_agrees_with_exact_fractions(name: str) -> None:
    """The two statements of rounding: on numbers, beside and halfway between them, at both ends of the range."""
    f, exact = num.FORMATS[name], ref.FORMATS[name]
    patterns = np.array(edges(name), np.uint64)
    values = num.value(patterns, name)
    for pattern, x in zip(edges(name), values, strict=True):
        y = ref.value_of(pattern, exact)
        assert (np.isnan(x) and ref.is_nan(y)) or float(y) == x
    finite = values[np.isfinite(values)]
    steps = np.abs(finite) * 2.0 ** -(f.mantissa + 1)
    near = np.concatenate([finite, finite + steps, finite + steps / 2, finite * (1 + 2.0**-40), finite * 1.75])
    for mode, saturate in itertools.product(("rn", "rz", "rm", "rp", "rna"), (False, True)):
        got = num.value(num.patterns(near, name, mode, saturate), name)
        for x, y in zip(near, got, strict=True):
            expected = float(ref.round_to(Fraction(float(x)), exact, mode, saturate))
            assert y == expected or (np.isnan(y) and np.isnan(expected)), (name, mode, saturate, x)


def test_sums_are_rounded_to_odd_exactly() -> None:
    rng = random.Random(5)
    a = np.array([rng.uniform(-1, 1) * 2.0 ** rng.randrange(-60, 60) for _ in range(500)])
    b = np.array([rng.uniform(-1, 1) * 2.0 ** rng.randrange(-60, 60) for _ in range(500)])
    for x, y, s in zip(a, b, num.add_odd(a, b), strict=True):
        total = Fraction(float(x)) + Fraction(float(y))
        assert Fraction(float(s)) == total or int(np.float64(s).view(np.uint64)) % 2 == 1
        assert abs(Fraction(float(s)) - total) < Fraction(float(np.spacing(abs(s))))


@pytest.mark.parametrize("family", FORMS)
def test_a_wrong_statement_is_noticed(family: str) -> None:
    """The comparison has teeth: one bit of the results of a family's first form, flipped, is a failure."""
    form: Form = FORMS[family][0]

    def off_by_one(*columns: np.ndarray) -> np.ndarray:
        out = np.array(form.function(*columns)).astype(np.uint64)
        return out ^ np.uint64(1 << 7)

    with pytest.raises(AssertionError, match="expected 0x"):
        check(replace(form, function=off_by_one), rows_of(form)[:64])
