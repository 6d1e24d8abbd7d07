"""The comparator: mostly wrong results, which must fail, and the few that must pass."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from harness import compare as module
from harness.compare import Actual, compare
from harness.golden import Golden
from harness.report import Status
from harness.spec import Case, Match, Output, Spec

BF16 = ml_dtypes.bfloat16
DOT = Match("dot", terms=64, accumulate="float32", store="bfloat16", slack=2.0)
COMPANION = Match("companion", store="float32", slack=1.0)
U_BF16, U_F32 = 2.0**-8, 2.0**-24


def spec_of(output):
    """A spec that has this output and nothing else."""
    return Spec(
        path=Path("specs/t.toml"), stem="t", stage="kernel", kernel="m:f", reference="m",
        weights=None, inputs={}, outputs={"y": output}, scratch={}, cases={}, axes={}, scalars={},
        options={}, invariant=(), fuzz={}, mutants=(),
    )  # fmt: skip


def judge(got, want, match="exact", *, dtype=None, magnitude=None, exact=False, **masks):
    """The Result for one output of the shape of `want`."""
    got, want = np.asarray(got), np.asarray(want)
    dtype = dtype or str(got.dtype)
    match = Match(match) if isinstance(match, str) else match
    output = Output("y", want.shape, dtype, match)
    spec = spec_of(output)
    case = Case("c", {}, exact=exact)
    magnitudes = {} if magnitude is None else {"y": np.broadcast_to(magnitude, want.shape).copy()}
    masks = {k: {"y": np.asarray(v).reshape(-1)} for k, v in masks.items()}
    golden = Golden({}, {"y": want}, magnitudes)
    (result,) = compare(spec, case, golden, Actual({"y": got}, "host", **masks))
    return result


def values(*numbers, dtype=BF16):
    return np.array(numbers, np.float64).astype(dtype)


# -- what must pass ------------------------------------------------------------------------------


def test_the_rounded_golden_passes_every_match():
    want = np.linspace(-3, 3, 64)
    got = want.astype(BF16)
    assert judge(got, want).status is Status.PASSED
    assert judge(got, want, Match("ulp", ulp=1)).headroom == 0.0
    result = judge(got, want, DOT, magnitude=3.0)
    assert (result.status, result.headroom) == (Status.PASSED, 0.0)


F32_DOT = Match("dot", terms=64, accumulate="float32", store="float32", slack=2.0)
ALLOWANCE = 2.0 * math.sqrt(64) * U_F32  # of F32_DOT where the magnitude is 1


def test_headroom_is_the_share_of_the_allowance_that_rounding_cannot_explain():
    want = np.array([1.0, 1.0])
    got = np.array([1.0, 1.0 + 5 * 2.0**-23]).astype(np.float32)
    result = judge(got, want, F32_DOT, magnitude=1.0)
    assert result.headroom == pytest.approx((5 * 2.0**-23 - 2.0**-24) / ALLOWANCE)


@pytest.mark.parametrize(
    ("terms", "slack", "roundings"),
    [(1, 1.0, 1), (4, 1.0, 4), (8, 1.0, 4), (16, 1.0, 4), (64, 1.0, 8), (8, 2.5, 8), (64, 2.5, 20)],
)
def test_errors_of_a_few_terms_need_not_average(terms, slack, roundings):
    match = Match("dot", terms=terms, accumulate="float32", store="float32", slack=slack)
    for error, status in ((roundings, Status.PASSED), (roundings + 1, Status.WRONG)):
        got = np.array([1.0 + 2 * error * U_F32], np.float32)
        assert judge(got, np.ones(1), match, magnitude=2.0).status is status


def test_one_rounding_to_the_store_format_uses_no_headroom():
    want = np.linspace(1, 2, 999)
    match = Match("dot", terms=1, accumulate="float32", store="bfloat16", slack=1e-6)
    assert judge(want.astype(BF16), want, match, magnitude=1.0).headroom == 0.0


def test_the_store_format_may_be_narrower_than_the_output():
    want = np.linspace(1, 2, 999)
    got = want.astype(BF16).astype(np.float32)
    match = Match("companion", store="bfloat16", slack=1e-6)
    assert judge(got, want, match, magnitude=1.0).status is Status.PASSED
    strict = Match("companion", store="float32", slack=1e-6)
    assert judge(got, want, strict, magnitude=1.0).status is Status.WRONG


def test_ulp_headroom_counts_units():
    want = np.array([1.0, 1.0])
    got = np.array([1.0, 1.0 + 3 * 2.0**-23], np.float32)
    assert judge(got, want, Match("ulp", ulp=4)).headroom == 0.75


def test_the_golden_is_rounded_once():
    """1 + 2^-8 + 2^-30 lies above the midpoint of two bfloat16; in float32 it would lie on it."""
    want = np.array([1.0 + 2.0**-8 + 2.0**-30])
    assert judge(values(1.0 + 2.0**-7), want).status is Status.PASSED
    assert judge(values(1.0), want).status is Status.WRONG


def test_declared_nan_and_infinity_pass_where_the_golden_has_them():
    want = np.array([np.nan, np.inf, -np.inf, 1.0])
    for match in (
        Match("exact", nonfinite=True),
        Match("ulp", ulp=1, nonfinite=True),
        Match("companion", store="bfloat16", slack=1.0, nonfinite=True),
    ):
        got = values(np.nan, np.inf, -np.inf, 1.0)
        assert judge(got, want, match, magnitude=1.0).status is Status.PASSED


def test_a_zero_may_have_either_sign_in_the_exact_regime():
    want = np.array([0.0, -0.0])
    assert judge(values(-0.0, 0.0), want, DOT, exact=True).status is Status.PASSED


def test_zero_error_under_a_zero_bound_passes():
    result = judge(values(0.0, 0.0), np.zeros(2), COMPANION, dtype="bfloat16", magnitude=0.0)
    assert (result.status, result.headroom) == (Status.PASSED, 0.0)


def test_a_subnormal_store_may_lose_half_a_unit():
    tiny = 2.0**-24  # the smallest subnormal of float16
    match = Match("companion", store="float16", slack=1e-9)
    want = np.array([0.49 * tiny])
    assert judge(np.zeros(1, np.float16), want, match, magnitude=tiny).status is Status.PASSED


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64", "bool"])
def test_equal_integers_pass(dtype):
    got = np.array([0, 1, 1], dtype)
    assert judge(got, got.copy()).status is Status.PASSED


def test_integers_of_the_golden_are_compared_in_the_dtype_of_the_output():
    assert judge(np.array([7, 255], np.uint8), np.array([7, 255], np.int64)).status is Status.PASSED


def test_chunks_give_the_same_answer(monkeypatch):
    want = np.linspace(-1, 1, 1000).reshape(10, 100)
    got = want.astype(np.float32)
    got[7, 42] += 1
    got[9, 41] += 2
    whole = judge(got, want, Match("ulp", ulp=1))
    monkeypatch.setattr(module, "CHUNK", 7)
    assert judge(got, want, Match("ulp", ulp=1)) == whole
    assert whole.first == (7, 42)
    assert whole.within == "[7:10, 41:43]"


# -- what must fail ------------------------------------------------------------------------------


def test_one_flipped_bit_fails_exact():
    want = np.linspace(-1, 1, 300).reshape(3, 100)
    got = want.astype(BF16)
    got.view(np.uint16)[2, 99] ^= 1
    result = judge(got, want)
    assert (result.status, result.wrong, result.first) == (Status.WRONG, 1, (2, 99))
    assert "off by 1 ulp" in result.message


def test_the_sign_of_a_zero_fails_exact():
    assert judge(values(-0.0), np.array([0.0])).status is Status.WRONG


def test_one_unit_more_than_allowed_fails():
    want = np.array([1.0])
    got = np.array([1.0 + 3 * 2.0**-23], np.float32)
    assert judge(got, want, Match("ulp", ulp=3)).status is Status.PASSED
    result = judge(got, want, Match("ulp", ulp=2))
    assert (result.status, result.headroom) == (Status.WRONG, 1.5)
    assert "off by 3 ulp" in result.message


def test_ulps_are_counted_across_zero():
    assert judge(np.array([1e-45], np.float32), np.array([-1e-45]), Match("ulp", ulp=1)).wrong == 1


def test_one_element_beyond_the_bound_fails_however_many_are_right():
    """Where a norm, a cosine or a matched ratio would let it through."""
    want = np.ones(100_000)
    got = want.astype(BF16)
    got[77_777] = 1.0 + 2.0**-6
    result = judge(got, want, DOT, magnitude=1.0)
    assert (result.status, result.wrong, result.first) == (Status.WRONG, 1, (77_777,))
    assert result.bound == pytest.approx(2 * 8 * U_F32 + U_BF16)
    assert "times the allowance" in result.message


def test_zeros_fail_where_the_golden_is_small():
    """An absolute tolerance of 1e-2 would pass them."""
    want = np.full(10, 1e-3)
    result = judge(np.zeros(10, BF16), want, DOT, magnitude=1e-3)
    assert (result.status, result.wrong) == (Status.WRONG, 10)
    assert "got 0.0 everywhere" in result.message


def test_rounding_twice_is_seen_where_the_allowance_is_small():
    """Truncation instead of rounding: off by up to a whole unit of the store format."""
    want = np.linspace(1, 2, 999)
    got = (want.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(BF16)
    assert judge(got, want, DOT, magnitude=1.0).status is Status.WRONG


def test_zero_is_no_rounding_of_a_normal_number():
    match = Match("companion", store="float16", slack=1e-9)
    want = np.array([2.0**-10])
    assert judge(np.zeros(1, np.float16), want, match, magnitude=1.0).status is Status.WRONG


def test_an_error_where_the_bound_is_zero_fails():
    result = judge(
        np.array([1e-6], np.float32), np.zeros(1), COMPANION, dtype="float32", magnitude=0.0
    )
    assert result.status is Status.WRONG
    assert result.headroom > 1e30


def test_a_companion_bound_is_its_magnitude():
    want, magnitude = np.array([1.0, 1.0]), np.array([0.1, 0.01])
    got = np.array([1.05, 1.05], np.float32)
    result = judge(got, want, COMPANION, magnitude=magnitude)
    assert (result.wrong, result.first) == (1, (1,))


def test_the_exact_regime_allows_no_error_at_all():
    want = np.array([256.0])
    got = values(258.0)
    assert judge(got, want, DOT, magnitude=2e6).status is Status.PASSED
    assert judge(got, want, DOT, exact=True).status is Status.WRONG
    assert judge(got, want, Match("ulp", ulp=8), exact=True).status is Status.WRONG


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("match", [Match("exact"), Match("ulp", ulp=9), DOT], ids=lambda m: m.kind)
def test_a_nonfinite_value_where_the_golden_is_finite_fails(odd, match):
    result = judge(values(1.0, odd), np.ones(2), match, magnitude=1e9)
    assert (result.status, result.wrong, result.first) == (Status.NONFINITE, 1, (1,))


@pytest.mark.parametrize(
    ("got", "want"),
    [(1.0, np.nan), (np.nan, np.inf), (-np.inf, np.inf), (np.inf, 1.0), (3e38, np.inf)],
)
def test_the_masks_of_nan_and_infinity_must_be_the_same(got, want):
    for match in (
        Match("exact", nonfinite=True),
        Match("ulp", ulp=1 << 14, nonfinite=True),
        Match("companion", store="bfloat16", slack=1.0, nonfinite=True),
    ):
        result = judge(values(got), np.array([want]), match, magnitude=np.inf)
        assert result.status is Status.NONFINITE


def test_a_finite_error_beside_declared_infinities_fails():
    match = Match("companion", store="float32", slack=1.0, nonfinite=True)
    got = np.array([-np.inf, 1.0, 2.0], np.float32)
    result = judge(got, np.array([-np.inf, 1.0, 1.0]), match, magnitude=0.5)
    assert (result.status, result.first) == (Status.WRONG, (2,))


def test_another_shape_fails_even_if_it_broadcasts():
    assert judge(np.ones((1,), np.float32), np.ones((3,))).status is Status.WRONG_SHAPE
    assert judge(np.ones((3, 1), np.float32), np.ones((1, 3))).status is Status.WRONG_SHAPE
    assert judge(np.ones((0,), np.float32), np.ones((3,))).status is Status.WRONG_SHAPE
    assert judge(np.float32(1), np.ones((3,))).status is Status.WRONG_SHAPE


def test_a_transposed_layout_fails():
    got = np.ones((3, 4), np.float32, order="F")
    result = judge(got, np.ones((3, 4)))
    assert result.status is Status.WRONG_SHAPE
    assert "strides" in result.message


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32"])
def test_another_dtype_fails_even_with_equal_values(dtype):
    got = np.ones(3).astype(BF16 if dtype == "bfloat16" else dtype)
    assert judge(got, np.ones(3), dtype="float32").status is Status.WRONG_DTYPE


def test_a_missing_output_fails():
    output = Output("y", (2,), "int32", Match("exact"))
    spec = spec_of(output)
    golden = Golden({}, {"y": np.ones(2, np.int64)}, {})
    (result,) = compare(spec, Case("c", {}), golden, Actual({}, "host"))
    assert result.status is Status.UNWRITTEN


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64", "uint64"])
def test_one_integer_off_by_one_fails(dtype):
    want = np.arange(50).astype(dtype)
    got = want.copy()
    got[-1] += 1
    result = judge(got, want)
    assert (result.status, result.first, result.got, result.want) == (Status.WRONG, (49,), 50, 49)


def test_large_integers_do_not_pass_through_floats():
    want = np.array([2**63 - 1], np.int64)
    assert judge(want - 1, want).status is Status.WRONG


def test_a_bool_that_is_neither_true_nor_false_fails():
    got = np.array([1, 2], np.uint8).view(bool)
    assert judge(got, np.array([True, True])).wrong == 1


def test_what_was_never_written_is_unwritten_and_not_merely_wrong():
    got = values(1.0, np.nan, 5.0)
    result = judge(got, np.ones(3), unwritten=[False, True, False])
    assert (result.status, result.wrong, result.first) == (Status.UNWRITTEN, 1, (1,))
    assert "1 more are wrong" in result.message


def test_two_runs_with_different_bits_fail_though_both_are_within_the_bound():
    result = judge(values(1.0, 1.0), np.ones(2), DOT, magnitude=1.0, unstable=[False, True])
    assert (result.status, result.wrong, result.first) == (Status.NONDETERMINISTIC, 1, (1,))


def test_a_wrong_value_outranks_an_unstable_one():
    result = judge(values(9.0, 1.0), np.ones(2), unstable=[True, True])
    assert result.status is Status.WRONG


# -- what the wrong elements look like -----------------------------------------------------------


def test_a_missing_factor_is_named():
    want = np.linspace(1, 2, 50)
    result = judge((want * 0.125).astype(np.float32), want, F32_DOT, magnitude=2.0)
    assert "got is about 0.125 * want in the wrong elements" in result.message


def test_an_element_in_the_wrong_place_is_named():
    want = np.linspace(1, 2, 12).reshape(3, 4)
    got = want.astype(np.float32)
    got[1, [2, 3]] = got[1, [3, 2]]
    for match in (Match("exact"), Match("ulp", ulp=2), F32_DOT):
        result = judge(got, want, match, magnitude=2.0)
        assert "got is what belongs at (1, 3)" in result.message


def test_a_value_that_could_come_from_many_places_is_not_guessed():
    want = np.array([1, 2, 2, 3, 4])
    assert "belongs" not in judge(np.array([2, 2, 2, 3, 9]), want).message
