"""Rotation of the query's last columns into another buffer (goldens.model.rope)."""

import numpy as np

from goldens import model
from goldens.numerics import Stream, round_to, unit_roundoff

NO_SUCH_POSITION = 1


def tables(rng: Stream, positions: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of angles without pattern, fp32 [positions, pairs]."""
    angles = np.pi * rng.uniform((positions, pairs))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def inputs(
    rng: Stream,
    *,
    rows: int,
    heads: int,
    q_width: int,
    width: int,
    positions: int,
    pairs: int,
    pattern: str,
    dtype: str,
) -> dict[str, np.ndarray]:
    """pattern "edges": the first and last position and some outside; "siblings": all rows share
    one; else any. cos and sin are not a rotation here, but independent: a swap shows."""
    position = rng.integers(0, positions, rows)
    if pattern == "edges":
        position = np.resize(np.array([0, positions - 1, positions, -1, 2**31 - 1]), rows)
    elif pattern == "siblings":
        position = np.full(rows, positions - 2)
    cos, sin = tables(rng, positions, pairs)
    return {
        "q": round_to(rng.bell((rows, heads, q_width)), np.dtype(dtype)),
        "cos": cos,
        "sin": sin,
        "position": position.astype(np.int32),
        "query": round_to(rng.bell((rows, heads, width)), np.dtype(dtype)),
    }


def derived(*, pairs: int, q_width: int, width: int) -> dict[str, int]:
    """q_width and width are drawn as what they have besides the pairs."""
    return {"q_width": 2 * pairs + q_width, "width": 2 * pairs + width}


def reference(
    *,
    q: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    position: np.ndarray,
    query: np.ndarray,
) -> dict[str, np.ndarray]:
    columns = 2 * cos.shape[1]
    known = (position >= 0) & (position < len(cos))
    at = np.where(known, position, 0)
    x = q[..., -columns:].astype(np.float64)
    c, s = cos[at].astype(np.float64), sin[at].astype(np.float64)
    there = known[:, None, None]
    turned = np.where(there, model.rope(x, c, s), 0.0)
    swapped = x.reshape(*x.shape[:-1], cos.shape[1], 2)[..., ::-1].reshape(x.shape)
    c, s = (np.repeat(np.abs(table), 2, axis=-1)[:, None] for table in (c, s))
    size = np.where(there, np.abs(x) * c + np.abs(swapped) * s, 0.0)
    out, magnitude = query.astype(np.float64), np.zeros(query.shape)
    out[..., -columns:] = turned
    magnitude[..., -columns:] = size * unit_roundoff(np.float32)
    return {
        "query": out,
        "query.magnitude": magnitude,
        "status": np.where(known, 0, NO_SUCH_POSITION),
    }
