"""Query latent and cache row from the first MLA projection (goldens.model.rms_norm and rope)."""

import numpy as np

from goldens import model
from goldens.numerics import Stream, round_to, unit_roundoff
from goldens.rope import tables
from goldens.rounding import Rounding

NO_SUCH_POSITION, NO_SUCH_SLOT = 1, 2


def inputs(
    rng: Stream,
    *,
    parts: int,
    rows: int,
    width: int,
    q_rank: int,
    rank: int,
    pairs: int,
    slots: int,
    positions: int,
    pattern: str,
    dtype: str,
) -> dict[str, np.ndarray]:
    """Slots are scattered and never shared. pattern "small": latents so small that eps counts;
    "edges": positions and slots outside the tables and the cache among good ones; "zeros": every
    second row is zero; "spiked": one number of a row is far above the others."""
    act = np.dtype(dtype)
    size = 1e-3 if pattern == "small" else 1.0
    slot = rng.permutation(slots)[:rows]
    position = rng.integers(0, positions, rows)
    if pattern == "edges":
        position[1::4], slot[2::4], slot[3::4] = positions, slots, -1
        position[0::8], position[5::8] = positions - 1, -1
    cos, sin = tables(rng, positions, pairs)
    qkv = size * rng.bell((parts, rows, width))
    if pattern == "zeros":
        qkv[:, ::2] = 0
    elif pattern == "spiked":
        qkv[0, :, [0, q_rank, width - 1]] = 3e4
    return {
        "qkv": round_to(qkv, np.float32),
        "q_weight": round_to(1 + 0.25 * rng.uniform(q_rank), act),
        "kv_weight": round_to(1 + 0.25 * rng.uniform(rank), act),
        "cos": cos,
        "sin": sin,
        "position": position.astype(np.int32),
        "slot": slot,
        "cache": round_to(rng.bell((slots, rank + 2 * pairs)), act),
    }


def derived(*, rows: int, q_rank: int, rank: int, pairs: int, slots: int) -> dict[str, int]:
    entry = rank + 2 * pairs
    return {"width": q_rank + entry, "entry": entry, "slots": rows + slots}


def reference(
    *,
    qkv: np.ndarray,
    q_weight: np.ndarray,
    kv_weight: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    position: np.ndarray,
    slot: np.ndarray,
    cache: np.ndarray,
    eps: float,
) -> dict[str, np.ndarray]:
    total = qkv[0]
    for part in qkv[1:]:
        total = total + part  # fp32, in ascending order, as the kernel adds them
    row = Rounding(q_weight.dtype).act(total.astype(np.float64))  # [rows, width]
    q_rank, rank = len(q_weight), len(kv_weight)
    small = np.float32(eps)
    q = model.rms_norm(row[:, :q_rank], q_weight.astype(np.float64), small)
    c = model.rms_norm(row[:, q_rank : q_rank + rank], kv_weight.astype(np.float64), small)
    placed = (position >= 0) & (position < len(cos))
    mapped = (slot >= 0) & (slot < len(cache))
    at = np.where(placed, position, 0)
    x = row[:, q_rank + rank :]
    cosine, sine = cos[at].astype(np.float64), sin[at].astype(np.float64)
    r = model.rope(x, cosine, sine)
    swapped = x.reshape(len(x), cos.shape[1], 2)[..., ::-1].reshape(x.shape)
    size = np.abs(x) * np.repeat(np.abs(cosine), 2, -1)
    size += np.abs(swapped) * np.repeat(np.abs(sine), 2, -1)
    good = placed & mapped
    out, magnitude = cache.astype(np.float64), np.zeros(cache.shape)
    out[slot[good]] = np.concatenate([c, r], axis=-1)[good]
    unit = unit_roundoff(np.float32)
    magnitude[slot[good]] = unit * np.concatenate([np.abs(c), size], axis=-1)[good]
    return {
        "q": q,
        "q.magnitude": unit * np.abs(q),
        "cache": out,
        "cache.magnitude": magnitude,
        "status": np.where(~placed, NO_SUCH_POSITION, np.where(mapped, 0, NO_SUCH_SLOT)),
    }


def work(
    *, qkv: np.ndarray, q_weight: np.ndarray, kv_weight: np.ndarray, cos: np.ndarray
) -> dict[str, int]:
    """Bytes: the projections and the weights once, a table row for each of cos and sin a token,
    the normed queries and the cache rows written."""
    rows = qkv.shape[1]
    item = q_weight.dtype.itemsize
    written = rows * (len(q_weight) + len(kv_weight) + 2 * cos.shape[1]) * item
    tables = 2 * rows * cos.shape[1] * cos.dtype.itemsize
    moved = qkv.nbytes + q_weight.nbytes + kv_weight.nbytes + tables + written
    return {"bytes": moved, "T": rows}
