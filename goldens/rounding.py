"""Where the model rounds, and what that does to its results.

The maths of `goldens.model` is written once and takes a `Rounding`, which is one of three things:

exact     nothing is rounded: plain float64.
faithful  every store of the engine is rounded as the engine rounds it (activations to bf16, or to
          float32 in a float32 model; accumulators, scores and the residual stream to float32), and
          sums between two stores are float64.
sampled   the same places, but each error is drawn at random instead of made: Monte Carlo
          arithmetic. What the results scatter by is the bound for an engine that has the same
          rounding points and its own order of summation (`companions`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from goldens.numerics import Stream, round_to, unit_roundoff

ACCUMULATOR = np.dtype(np.float32)
SAMPLES = 8


@dataclass(frozen=True)
class Rounding:
    """`activations` None: exact. `noise` None: faithful. Both given: sampled."""

    activations: np.dtype | None = None
    noise: Stream | None = None

    def act(self, x: np.ndarray) -> np.ndarray:
        """x as an activation is stored; float64 in, float64 out."""
        return self._store(x, self.activations)

    def single(self, x: np.ndarray) -> np.ndarray:
        """x as a float32 is stored; float64 in, float64 out."""
        return self._store(x, ACCUMULATOR)

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a [..., m, K] times b [..., n, K] transposed -> [..., m, n], before it is stored.

        Sampled: with the error of a float32 sum of K products in any order, which is at most
        about sqrt(K) u |a||b| with high probability (Higham and Mary, SIAM J. Sci. Comput. 41,
        2019, theorem 2.4; the certain bound has K for sqrt(K) and is never met).
        """
        sums = a @ np.swapaxes(b, -1, -2)
        if self.noise is None:
            return sums
        size = np.abs(a) @ np.swapaxes(np.abs(b), -1, -2)
        unit = np.sqrt(a.shape[-1]) * unit_roundoff(ACCUMULATOR)
        return sums + unit * size * self.noise.uniform(sums.shape)

    def _store(self, x: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
        if self.activations is None or dtype is None:
            return x
        if self.noise is None:
            return round_to(x, dtype).astype(np.float64)
        return x * (1 + unit_roundoff(dtype) * self.noise.uniform(x.shape))


EXACT = Rounding()


def companions(
    run: Callable[[Rounding], Mapping[str, np.ndarray]],
    activations: np.dtype,
    stream: Stream,
    *,
    samples: int = SAMPLES,
) -> dict[str, np.ndarray]:
    """The magnitude of an engine's rounding error in each value that `run` returns.

    run(rounding) -> {name: float64 array}; it is called once exact and `samples` times sampled.
    It must take the same decisions every time (hand it the experts that were chosen), or the
    magnitude is that of a changed decision.

    Derived: the places that round and the size of one rounding (the unit roundoff of the dtype
    there, sqrt(K) u |a||b| in a sum). Sampled: how the errors add up through the model. That is
    Monte Carlo arithmetic (Parker, UCLA CSD-970002, 1997; Denis, Castro and Petit, "Verificarlo",
    ARITH 23, 2016). Errors are drawn uniformly from [-u, u), the worst case of each rounding and
    1.4 to 2.8 times its usual root mean square, so the result errs on the large side.

    Returned is the root mean square over the samples, and at least that over the last axis too:
    with 8 samples one element's own estimate may be off by a factor of 2, its row's is not.
    Both the exact and the faithful result lie within a few magnitudes of what an engine gives:
    3.7 is the most that was seen among 1.6e5 values of the small models' forward passes
    (tests/test_reference.py). Slack 8 leaves that a headroom under a half.
    """
    exact = run(EXACT)
    squares = {name: np.zeros(np.shape(value)) for name, value in exact.items()}
    for i in range(samples):
        sampled = run(Rounding(np.dtype(activations), stream.fork("sample", i)))
        for name, value in sampled.items():
            squares[name] += (value - exact[name]) ** 2 / samples
    return {
        name: np.sqrt(np.maximum(square, square.mean(-1, keepdims=True)))
        for name, square in squares.items()
    }


def bounded(
    run: Callable[[Rounding], Mapping[str, np.ndarray]],
    activations: np.dtype,
    stream: Stream,
    *,
    samples: int = SAMPLES,
) -> dict[str, np.ndarray]:
    """What the oracle of a layer or model returns: faithful values, and their `.magnitude`.

    For outputs that match with { bound = "companion", slack = 8 }; see `companions` for `run`.
    """
    size = companions(run, activations, stream, samples=samples)
    values = dict(run(Rounding(np.dtype(activations))))
    return values | {f"{name}.magnitude": magnitude for name, magnitude in size.items()}
