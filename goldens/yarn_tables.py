"""RoPE with YaRN: what goldens.model rotates by, and the same in complex numbers."""

import cmath
import math
from typing import Any

import numpy as np

from goldens import model
from goldens.numerics import Stream, unit_roundoff


def inputs(
    rng: Stream, *, tokens: int, heads: int, rope: int, largest: int
) -> dict[str, np.ndarray]:
    positions = np.concatenate([[0, 1, largest], rng.integers(2, largest, tokens - 3)])
    return {
        "positions": positions.astype(np.int32),
        "x": rng.uniform((tokens, heads, rope)),
    }


def derived() -> dict[str, int]:
    return {"one": 1}


def reference(
    *,
    positions: np.ndarray,
    x: np.ndarray,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original: int,
) -> dict[str, np.ndarray]:
    """theta^x has a relative error of u (1 + |x ln theta|) or so, in either source; the angle has
    it too, and an angle off by e moves a pair by e times its length."""
    dim = x.shape[-1]
    config: dict[str, Any] = {
        "qk_rope_head_dim": dim,
        "qk_nope_head_dim": 2 * dim,
        "rope_theta": theta,
        "rope_scaling": {
            "factor": factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": original,
        },
    }
    angles = positions[:, None] * model.yarn_inverse_frequencies(config)
    length = np.hypot(x[..., 0::2], x[..., 1::2])
    error = unit_roundoff(np.float64) * (8 + 2 * (3 + np.log(theta)) * angles)
    size = error[:, None] * length
    return {
        "turned": model.rope(x, *model.rope_tables(config, positions)),
        "turned.magnitude": size.repeat(2, axis=-1),
        "scale": np.array([model.softmax_scale(config)]),
    }


def witness(
    *,
    positions: np.ndarray,
    x: np.ndarray,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original: int,
) -> dict[str, np.ndarray]:
    """Pair i of `pairs` turns theta^(-i / pairs) radians a position, so original / (2 pi theta^..)
    times in the original context; which i turns n times is that equation solved for i."""
    pairs = x.shape[-1] // 2

    def solved(times: float) -> float:
        return pairs * math.log(original / (2 * math.pi * times), theta)

    first, last = max(math.floor(solved(beta_fast)), 0), math.ceil(solved(beta_slow))
    turned = np.empty_like(x)
    for token, head, i in np.ndindex(x.shape[0], x.shape[1], pairs):
        slowed = min(max((i - first) / (last - first), 0), 1) if last > first else float(i > first)
        speed = math.exp(-math.log(theta) * i / pairs)
        speed = speed * slowed / factor + speed * (1 - slowed)
        pair = complex(x[token, head, 2 * i], x[token, head, 2 * i + 1])
        pair *= cmath.exp(1j * speed * int(positions[token]))
        turned[token, head, 2 * i : 2 * i + 2] = pair.real, pair.imag
    temperature = 1 + math.log(factor) / 10
    return {
        "turned": turned,
        "scale": np.array([temperature * temperature / math.sqrt(6 * pairs)]),
    }
