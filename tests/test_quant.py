"""Quantisation schemes: known answers, what search buys, and the sweep over a model."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from goldens import bundles, numerics, quantise
from goldens.forward import greedy
from goldens.quantise import Scheme, approximate, first_difference, kl_divergence

BF16 = ml_dtypes.bfloat16


def weight(rows: int = 8, columns: int = 256, key: str = "w") -> np.ndarray:
    return numerics.Stream("test_quant", key).bell((rows, columns)) / 16


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (Scheme(32, "amax/7.5"), 4.5),
        (Scheme(128, "amax/7"), 4.125),
        (Scheme(16, "range/15", symmetric=False), 5.25),
    ],
)
def test_bits_a_weight(scheme, bits):
    """4, a bf16 scale a group, and 4 bits of zero point where there is one."""
    assert scheme.bits == bits


@pytest.mark.parametrize("divisor", [7, 7.5])
def test_amax_is_the_packed_format(divisor):
    """The same values as quantise, pack, dequantise of the bundles."""
    q, scale = numerics.quantise(weight(), divisor=divisor)
    stored = numerics.dequantise(numerics.pack_int4(q), scale).astype(np.float64)
    np.testing.assert_array_equal(approximate(weight(), Scheme(32, f"amax/{divisor:g}")), stored)


def test_codes_of_one_group():
    """amax/7 gives scale 0.25 and 7 at the top; 2 is a tie (8 quarters, clipped to 7)."""
    values = np.zeros((1, 16))
    values[0, :5] = [1.75, -1.75, 0.3, 0.125, -0.375]
    got = approximate(values, Scheme(16, "amax/7"))[0, :5]
    np.testing.assert_array_equal(got, [1.75, -1.75, 0.25, 0.0, -0.5])


def test_asymmetric_spans_a_range_on_one_side_of_zero():
    """0.1 to 1.5 in 16 codes from 0: no worse than half a step of 0.1."""
    values = np.linspace(0.1, 1.5, 16)[None]
    got = approximate(values, Scheme(16, "range/15", symmetric=False))
    assert np.abs(got - values).max() <= 0.05 * 1.02  # bf16 scale and product
    symmetric = approximate(values, Scheme(16, "amax/7.5"))
    assert np.square(got - values).sum() < np.square(symmetric - values).sum() / 2


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_have_at_most_sixteen_levels_and_keep_zero(symmetric):
    values = weight(1, 128)
    values[0, 17] = 0
    for scale in ("amax/7.5" if symmetric else "range/15", "search"):
        got = approximate(values, Scheme(128, scale, symmetric))
        assert len(np.unique(got)) <= 16
        assert got[0, 17] == 0
        np.testing.assert_array_equal(got, got.astype(BF16).astype(np.float64))


@pytest.mark.parametrize("scheme", [Scheme(32, scale, sym) for scale, sym in quantise.KINDS])
def test_groups_of_zeros_and_of_one_value(scheme):
    zeros = approximate(np.zeros((2, 64)), scheme)
    np.testing.assert_array_equal(zeros, 0)
    same = approximate(np.full((2, 64), -0.75), scheme)
    assert np.abs(same + 0.75).max() < 0.06


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", quantise.GROUPS)
def test_search_is_never_worse_in_any_group(group, symmetric):
    plain = Scheme(group, "amax/7.5" if symmetric else "range/15", symmetric)
    errors = [
        np.square(approximate(weight(), scheme) - weight()).reshape(-1, group).sum(-1)
        for scheme in (Scheme(group, "search", symmetric), plain)
    ]
    assert (errors[0] <= errors[1]).all()
    assert errors[0].sum() < 0.96 * errors[1].sum()


def test_search_finds_what_a_finer_search_finds():
    """A sweep ten times as fine over twice the range takes off less than 2% of the error."""
    fine, best = np.linspace(0.3, 1.6, 520), np.inf
    grouped = weight(4, 32).reshape(4, 1, 32)
    scale = np.abs(grouped).max(-1, keepdims=True) / 7.5
    for factor in fine:
        error = np.square(quantise._values(grouped, scale * factor, True) - grouped).sum(-1)
        best = np.minimum(best, error)
    got = np.square(approximate(weight(4, 32), Scheme(32, "search")) - weight(4, 32)).sum()
    assert got < 1.02 * best.sum()


def test_a_group_that_does_not_divide():
    with pytest.raises(ValueError, match="96 inputs are no multiple of group 64"):
        approximate(np.ones((2, 96)), Scheme(64, "amax/7"))
    tensors = bundles.tensors("tiny2-fp32")
    assert quantise.undivided(tensors, 32) is None
    assert "mlp.experts.0.down_proj has 96 inputs" in quantise.undivided(tensors, 64)
    assert "down_proj has 96 inputs" in quantise.undivided(bundles.tensors("tiny2-int4"), 64)


def test_kl_divergence_of_known_distributions():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    expected = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert kl_divergence(np.log(p) + 3, np.log(q) - 700) == pytest.approx(expected)
    assert kl_divergence(np.log(p), np.log(p) + 1) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    ("a", "b", "where"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 2, 4], 2), ([1], [1, 2], 1), ([], [1], 0)],
)
def test_first_difference(a, b, where):
    assert first_difference(a, b) == where


@pytest.fixture(scope="module")
def rows():
    tensors, config = bundles.tensors("tiny2-fp32"), bundles.config("tiny2-fp32")
    prompts = bundles.prompts("tiny2-fp32")[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantise, "SEARCH", quantise.SEARCH[::6])  # for time
        return list(quantise.sweep(tensors, config, prompts, steps=6, groups=[16, 32]))


def test_sweep_has_a_row_for_every_choice(rows):
    choices = {(r.matrices, r.scheme.group, r.scheme.scale, r.scheme.symmetric) for r in rows}
    assert len(rows) == len(choices) == 3 * 2 * 5
    assert [count for count, _ in itertools.groupby(sorted(r.count for r in rows))] == [72, 84, 90]


def test_sweep_measures_what_it_says(rows):
    by = {(r.matrices, r.scheme.group, r.scheme.name): r for r in rows}
    for row in rows:
        assert 4 < row.scheme.bits < row.model_bits < 16
        assert 0.01 < row.weight_error < 0.2
        assert 0 < row.kl < 1
        assert 0 < row.kl_error < row.kl
    for matrices, kind in itertools.product(quantise.MATRICES, quantise.KINDS):
        name = Scheme(16, *kind).name
        coarse, fine = by[matrices, 32, name], by[matrices, 16, name]
        assert coarse.model_bits < fine.model_bits
        assert coarse.weight_error > fine.weight_error
    searched, plain = (by["routed", 32, f"symmetric {name}"] for name in ("search", "amax/7"))
    assert searched.weight_error < plain.weight_error


def test_sweep_finds_the_first_token_that_differs(rows):
    """Against greedy decoding of the bundle's own INT4 tensors, which are amax/7.5 group 32."""
    name = "routed, shared, dense"
    row = next(r for r in rows if (r.matrices, r.scheme) == (name, Scheme(32, "amax/7.5")))
    plain, config = bundles.tensors("tiny2-fp32"), bundles.config("tiny2-fp32")
    packed = bundles.tensors("tiny2-int4")
    mixed = {key: value for key, value in packed.items() if key.endswith((".qw", ".sc"))}
    mixed |= {key: plain[key] for key in packed if key in plain}
    for prompt, differs in zip(bundles.prompts("tiny2-fp32"), row.differs, strict=False):
        a, _ = greedy(plain, config, prompt, 6)
        b, _ = greedy(mixed, config, prompt, 6)
        assert first_difference(a, b) == differs
