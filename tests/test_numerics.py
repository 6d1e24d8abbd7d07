"""goldens.numerics against known answers, numpy's own casts and exact rational arithmetic."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldens.numerics import (
    BF16,
    Gathered,
    Stream,
    dequantise,
    pack_int4,
    quantise,
    round_to,
    softmax,
    ulp,
    ulp_distance,
    unit_roundoff,
    unpack_int4,
    widen,
)

POSITIVE = np.arange(0x7F80, dtype=np.uint16).view(BF16).astype(np.float64)  # finite
PINNED_RAW = ["0x96d492af2859ef10", "0xa11d9c243221aff4"]
PINNED_INTEGERS = [958, 9, 1, 428, 182]
FINITE_BF16 = np.unique(np.concatenate([-POSITIVE, POSITIVE]))


def nearest_even_bf16(x: float) -> float:
    """By search in the list of all bf16 numbers and exact fractions; no floating-point rounding."""
    grid = FINITE_BF16
    i = np.searchsorted(grid, x)
    below, above = grid[max(i - 1, 0)], grid[min(i, len(grid) - 1)]
    down, up = abs(Fraction(x) - Fraction(below)), abs(Fraction(above) - Fraction(x))
    if down != up:
        return below if down < up else above
    even = {int(np.array(v, BF16).view(np.uint16)) & 1: v for v in (below, above)}
    return even[0]


def test_widening_is_exact_for_every_bfloat16():
    every = np.arange(2**16, dtype=np.uint16).view(BF16)
    for dtype in (np.float32, np.float64):
        wide = widen(every.reshape(256, 256), dtype)
        assert wide.shape == (256, 256)
        with np.errstate(invalid="ignore"):  # signalling NaN
            expected = every.astype(dtype)
        assert np.array_equal(wide.reshape(-1), expected, equal_nan=True)


def test_a_gathered_array_is_its_pool_indexed():
    pool = np.arange(12).reshape(3, 4)
    each = Gathered(pool, np.array([2, 0, 0, 1]))
    whole = pool[[2, 0, 0, 1]]
    assert (each.shape, each.dtype, each.size) == (whole.shape, whole.dtype, whole.size)
    assert each.nbytes == whole.nbytes
    assert np.array_equal(each, whole)
    assert np.array_equal(each[1:3], whole[1:3])
    assert np.array_equal(each[3], whole[3])
    with pytest.raises(ValueError, match="below 3"):
        Gathered(pool, np.array([3]))


def test_a_stream_is_pinned_to_its_key():
    """The first numbers of one key, written down: a different numpy or CPU must give them too."""
    stream = Stream("rms_norm", "odd_tail", 0)
    assert [hex(v) for v in stream.raw(2)] == PINNED_RAW
    assert Stream("x", 1).integers(0, 1000, 5).tolist() == PINNED_INTEGERS
    assert Stream("x", "1").integers(0, 1000, 5).tolist() != PINNED_INTEGERS
    assert Stream("x", 1).fork("y").raw(3).tolist() != Stream("x", 1).raw(3).tolist()


def test_streams_stay_in_range_and_are_exact():
    stream = Stream("ranges")
    drawn = stream.integers(-3, 4, 5000)
    assert set(drawn.tolist()) == set(range(-3, 4))
    uniform = stream.uniform((40, 50))
    assert uniform.shape == (40, 50)
    assert uniform.min() >= -1
    assert uniform.max() < 1
    assert np.array_equal(uniform.astype(np.float32).astype(np.float64), uniform)
    assert np.array_equal(uniform * 2**24, np.rint(uniform * 2**24))
    bell = stream.bell(20000)
    assert abs(bell.mean()) < 0.03
    assert abs(bell.std() - 2 / np.sqrt(3)) < 0.03
    assert np.array_equal(bell.astype(np.float32).astype(np.float64), bell)
    assert sorted(stream.permutation(100).tolist()) == list(range(100))
    assert set(stream.signs(100).tolist()) == {-1.0, 1.0}
    assert set(stream.choice([2, 5], 64).tolist()) == {2, 5}
    assert stream.integers(0, 10).shape == ()
    with pytest.raises(ValueError, match="hi - lo"):
        stream.integers(3, 3)


def test_every_bf16_and_every_midpoint_rounds_right():
    """All 65279 finite bf16 numbers, the midpoints of neighbours, and a hair to either side."""
    grid = FINITE_BF16
    assert np.array_equal(round_to(grid, BF16).astype(np.float64), grid)
    middle = (grid[:-1] + grid[1:]) / 2  # exact in float64
    odd_below = round_to(grid[:-1], BF16).view(np.uint16) & 1
    expected = np.where(odd_below == 1, grid[1:], grid[:-1])
    assert np.array_equal(round_to(middle, BF16).astype(np.float64), expected)
    up = round_to(np.nextafter(middle, np.inf), BF16).astype(np.float64)
    down = round_to(np.nextafter(middle, -np.inf), BF16).astype(np.float64)
    assert np.array_equal(up, grid[1:])
    assert np.array_equal(down, grid[:-1])


def test_double_rounding_through_float32_is_avoided():
    x = np.array([1 + 2**-8 + 2**-40])  # just above a tie; float32 sees the tie and rounds to even
    assert round_to(x, BF16).astype(float)[0] == 1 + 2**-7
    assert x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(float)[0] == 1.0


def test_special_values_survive_rounding():
    x = np.array([np.inf, -np.inf, np.nan, -0.0, 3.4e38, -1e300, 2.0**-134, 2.0**-133, 1e-320])
    got = round_to(x, BF16).astype(np.float64)
    want = [np.inf, -np.inf, np.nan, -0.0, np.inf, -np.inf, 0.0, 2.0**-133, 0.0]
    assert np.array_equal(got, want, equal_nan=True)
    assert np.signbit(got[3])


@settings(max_examples=300, deadline=None)
@given(st.floats(allow_nan=False, width=64, min_value=-3.38e38, max_value=3.38e38))
def test_rounding_to_bf16_agrees_with_exact_arithmetic(x):
    assert round_to(np.array(x), BF16).astype(np.float64) == nearest_even_bf16(x)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_roundings_are_single(dtype):
    """A tie plus a hair, where rounding twice would go to the even neighbour."""
    u = unit_roundoff(dtype)
    assert round_to(np.array(1 + u + 2.0**-52), dtype) == dtype(1 + 2 * u)
    assert round_to(np.array(1 + u), dtype) == dtype(1)


def test_integers_are_cast_only_if_exact():
    assert round_to(np.array([1.0, -2.0]), np.int8).tolist() == [1, -2]
    for bad in ([0.5], [300.0], [np.nan], [-1.0]):
        with pytest.raises(ValueError, match="exactly"):
            round_to(np.array(bad), np.uint8)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64])
def test_ulp_distance_counts_neighbours(dtype):
    def of(*values):
        return np.array(values, dtype)

    one, u = of(1.0), 2 * unit_roundoff(dtype)
    assert ulp_distance(one, of(1 + u)) == 1
    assert ulp_distance(of(0.0), of(-0.0)) == 0
    tiny = ulp(np.zeros(1), dtype).astype(dtype)
    assert ulp_distance(tiny, -tiny) == 2
    assert ulp_distance(of(np.nan), of(np.nan)) == 0
    assert ulp_distance(of(np.nan), one) == 2**64 - 1
    top = ml_dtypes.finfo(dtype).max
    assert ulp_distance(of(top), of(np.inf)) == 1
    assert ulp_distance(of(-1.0), of(1.0)) == 2 * ulp_distance(of(0.0), of(1.0))
    assert ulp(np.array([1.0, 1.5, 0.75]), dtype).tolist() == [u, u, u / 2]
    with pytest.raises(ValueError, match="one float dtype"):
        ulp_distance(one, np.array([1]))


def test_int4_known_answers():
    packed = pack_int4(np.array([[1, 2, 3, 4, 5, 6, 7, 0], [-1, -2, -3, -4, -5, -6, -7, -8]]))
    assert packed.dtype == np.int32
    assert packed.view(np.uint32).ravel().tolist() == [0x8FEDCBA9, 0x01234567]


@given(st.lists(st.integers(-8, 7), min_size=16, max_size=16))
def test_int4_packing_round_trips(values):
    q = np.array(values).reshape(2, 8)
    assert np.array_equal(unpack_int4(pack_int4(q)), q)


def test_int4_refuses_what_does_not_fit():
    for bad in (np.full((1, 8), 8), np.full((1, 8), -9), np.zeros((1, 7), int)):
        with pytest.raises(ValueError, match="pack_int4"):
            pack_int4(bad)
    with pytest.raises(ValueError, match="multiple"):
        quantise(np.zeros((1, 40)))
    with pytest.raises(ValueError, match="divide"):
        dequantise(np.zeros((2, 8), np.int32), np.zeros((3, 2), BF16))


def test_dequantised_weights_are_the_rounded_product():
    """All 16 codes times awkward scales, against exact fractions."""
    scale = round_to(np.array([[1.0078125, 3e-39], [0.3, 2.0**127]]), BF16)
    q = np.tile(np.arange(-8, 8), (2, 4))
    got = dequantise(pack_int4(q), scale).astype(np.float64)
    for row in range(2):
        for column in range(64):
            exact = q[row, column] * float(scale[row, column // 32])
            with np.errstate(over="ignore"):
                want = (
                    nearest_even_bf16(exact) if abs(exact) < 3.39e38 else np.copysign(np.inf, exact)
                )
            assert got[row, column] == want


def test_quantise_uses_every_code_and_stays_within_half_a_step():
    weight = Stream("quantise").bell((64, 256))
    weight[0, :32] = 0
    q, scale = quantise(weight)
    assert set(q.ravel().tolist()) == set(range(-8, 8))
    assert scale.dtype == BF16
    assert scale[0, 0] == 1
    assert not q[0, :32].any()
    step = scale.astype(np.float64).repeat(32, axis=1)
    # the last 2^-8 is the rounding of the scale itself: amax may be 7.5 * (1 + 2^-8) steps
    assert (np.abs(q * step - weight) <= step * (0.5 + 7.5 * 2**-8)).all()


def test_masked_softmax():
    scores = np.array([[1.0, 2.0, 3.0], [1e300, -np.inf, 0.0], [5.0, 5.0, 5.0]])
    visible = np.array([[True, True, False], [True, True, True], [False, False, False]])
    got = softmax(scores, visible)
    assert got[0].tolist() == pytest.approx([1 / (1 + np.e), np.e / (1 + np.e), 0])
    assert got[1].tolist() == [1, 0, 0]
    assert got[2].tolist() == [0, 0, 0]
