"""Queries, keys and values of a drafter's rows (goldens.dflash.rotate_half, model.rms_norm)."""

import numpy as np

from goldens import dflash, model
from goldens.numerics import BF16, Stream, round_to, unit_roundoff
from goldens.rope import tables
from goldens.rounding import Rounding

NO_SUCH_POSITION, NO_SUCH_SLOT = 1, 2


def inputs(
    rng: Stream, *, parts: int, rows: int, heads: int, groups: int, size: int, slots: int,
    positions: int, pattern: str,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Slots are scattered and never shared. pattern "small": heads so small that eps counts;
    "edges": padding, and positions and slots outside the tables and the cache among good ones. cos
    and sin are no rotation here, but independent: a swap shows."""
    scale = 1e-3 if pattern == "small" else 1.0
    slot, position = rng.permutation(slots)[:rows], rng.integers(0, positions, rows)
    if pattern == "edges":
        position[1::4], slot[2::4], slot[3::4] = positions, slots, -1
        position[0::8], position[5::8] = positions - 1, -1
    cos, sin = tables(rng, positions, size // 2)
    width = (heads + 2 * groups) * size
    return {
        "qkv": round_to(scale * rng.bell((parts, rows, width)), np.float32),
        "q_weight": round_to(1 + 0.25 * rng.uniform(size), BF16),
        "k_weight": round_to(1 + 0.25 * rng.uniform(size), BF16),
        "cos": cos,
        "sin": sin,
        "position": position.astype(np.int32),
        "slot": slot,
        "cache": round_to(rng.bell((slots, 2 * groups * size)), BF16),
    }


def derived(*, rows: int, groups: int, half: int, slots: int, heads: int = 0) -> dict[str, int]:
    """heads is drawn as those of a group, slots as those that no row takes."""
    entry = 4 * groups * half
    heads *= groups
    return {
        "heads": heads,
        "size": 2 * half,
        "entry": entry,
        "width": 2 * heads * half + entry,
        "slots": rows + slots,
    }


def reference(
    *,
    qkv: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    position: np.ndarray,
    slot: np.ndarray,
    cache: np.ndarray,
    eps: float,
) -> dict[str, np.ndarray]:
    """The magnitude is that of fp32 errors before the one rounding: in the norm's factor and in
    each product of the rotation."""
    total = qkv[0]
    for part in qkv[1:]:
        total = total + part  # fp32, in ascending order, as the kernel adds them
    rows, size, entry = len(total), len(k_weight), cache.shape[1]
    groups = entry // (2 * size)
    x = Rounding(BF16).act(total.astype(np.float64)).reshape(rows, total.shape[1] // size, size)
    heads = x.shape[1] - 2 * groups
    placed = (position >= 0) & (position < len(cos))
    mapped = (slot >= 0) & (slot < len(cache))
    at = np.where(placed, position, 0)
    c, s = cos[at].astype(np.float64), sin[at].astype(np.float64)

    def turned(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n = model.rms_norm(x, weight.astype(np.float64), np.float32(eps))
        swapped = np.roll(n, size // 2, axis=-1)
        cc, ss = np.tile(np.abs(c), 2)[:, None], np.tile(np.abs(s), 2)[:, None]
        return dflash.rotate_half(n, c, s), np.abs(n) * cc + np.abs(swapped) * ss

    q, q_size = turned(x[:, :heads], q_weight)
    k, k_size = turned(x[:, heads : heads + groups], k_weight)
    v = x[:, heads + groups :]
    good = placed & mapped
    out, magnitude = cache.astype(np.float64), np.zeros(cache.shape)
    unit = unit_roundoff(np.float32)
    out[slot[good]] = np.concatenate([k, v], axis=1).reshape(rows, entry)[good]
    sizes = np.concatenate([k_size, np.zeros(v.shape)], axis=1).reshape(rows, entry)
    magnitude[slot[good]] = unit * sizes[good]
    there = good[:, None, None]
    padding = slot == -1
    status = np.where(~placed, NO_SUCH_POSITION, np.where(mapped, 0, NO_SUCH_SLOT))
    return {
        "q": np.where(there, q, 0.0),
        "q.magnitude": np.where(there, unit * q_size, 0.0),
        "cache": out,
        "cache.magnitude": magnitude,
        "status": np.where(padding, 0, status),
    }


def work(*, qkv: np.ndarray, cache: np.ndarray) -> dict[str, int]:
    """Bytes: the projection's parts once, queries, keys and values written."""
    return {"bytes": qkv.nbytes + qkv.shape[1] * qkv.shape[2] * cache.itemsize}
