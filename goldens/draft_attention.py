"""Attention of a drafter's block over context and block (goldens.dflash.attend)."""

import numpy as np

from goldens import dflash
from goldens.numerics import BF16, Stream, round_to, unit_roundoff

TINY = 2.0**-126  # an fp32 exponential below it is 0
HOSTILE = (-1, 2**31 - 1)  # entries of the page table that nothing may look up


def inputs(
    rng: Stream,
    *,
    rows: int,
    requests: int,
    heads: int,
    groups: int,
    size: int,
    cached: int,
    max_pages: int,
    page_size: int,
    prefixes: str,
    values: str,
    exact: bool = False,
) -> dict[str, np.ndarray]:
    """prefixes: "63,64", the context of each request.

    values: plain; climbing (scores grow along the keys, so that the running maximum moves in every
    tile); loud (the block's keys are larger than the context's); uniform (equal scores: the output
    is the mean of small integers); one_hot (each query's scores pick one key by more than exp can
    bridge). The last two are exact. What no row may read is NaN, and hostile in the page table;
    pages are scattered.
    """
    if exact != (values in ("uniform", "one_hot")):
        raise ValueError(f"values {values!r} and exact = {exact} do not go together")
    lengths = [int(part) for part in prefixes.split(",")]
    if len(lengths) != requests:
        raise ValueError(f"{prefixes!r} has {len(lengths)} numbers for {requests} requests")
    slots = rows // requests
    page_table = rng.choice(HOSTILE, (requests, max_pages)).astype(np.int32)
    free = rng.permutation(cached // page_size)
    cache = np.full((cached, 2 * groups * size), np.nan, BF16)
    block = np.zeros((rows, 2 * groups * size), BF16)
    q = 0.5 * rng.bell((rows, heads, size))
    for r, prefix in enumerate(lengths):
        used = -(-prefix // page_size)
        page_table[r, :used], free = free[:used], free[used:]
        made = _rows(rng, values, prefix, slots, groups, size)
        cache[_slots(page_table[r], prefix, page_size)] = round_to(made[:prefix], BF16)
        block[r * slots : (r + 1) * slots] = round_to(made[prefix:], BF16)
        if values == "one_hot":
            keys = made[:, : groups * size].reshape(-1, groups, size)
            for row in range(r * slots, (r + 1) * slots):
                for head in range(heads):
                    picked = keys[int(rng.integers(0, len(keys))), head // (heads // groups)]
                    q[row, head] = 2**14 * np.sign(picked)  # a score more is e^-1000 less
    if values == "uniform":
        q[:] = 0
    return {
        "q": round_to(q, BF16),
        "cache": cache,
        "block": block,
        "page_table": page_table,
        "prefix_len": np.array(lengths, np.int32),
    }


def derived(
    *, prefixes: str, rows: int, groups: int, heads: int, size: int, page_size: int,
    max_pages: int, values: str,
) -> dict[str, int | bool]:  # fmt: skip
    """rows and heads are drawn as those of a request and a group, max_pages as what is beyond what
    the longest context needs."""
    pages = [-(-int(part) // page_size) for part in prefixes.split(",")]
    return {
        "requests": len(pages),
        "rows": rows * len(pages),
        "heads": heads * groups,
        "entry": 2 * groups * size,
        "max_pages": max(1, *pages) + max_pages,
        "cached": page_size * (sum(pages) + 2),
        "exact": values in ("uniform", "one_hot"),
    }


def _rows(rng: Stream, values: str, prefix: int, slots: int, groups: int, size: int) -> np.ndarray:
    shape = (prefix + slots, 2 * groups * size)
    if values == "uniform":
        return rng.integers(-4, 5, shape).astype(np.float64)
    if values == "one_hot":
        return rng.signs(shape) * 2.0 ** rng.integers(0, 3, shape)
    made = rng.bell(shape)
    if values == "climbing":
        made *= np.linspace(0.25, 4, len(made))[:, None]
    if values == "loud":
        made[prefix:] *= 4
    return made


def _slots(pages: np.ndarray, prefix: int, page_size: int) -> np.ndarray:
    places = np.arange(prefix)
    return pages[places // page_size].astype(np.int64) * page_size + places % page_size


def reference(
    *,
    q: np.ndarray,
    cache: np.ndarray,
    block: np.ndarray,
    page_table: np.ndarray,
    prefix_len: np.ndarray,
    scale: float,
    page_size: int,
) -> dict[str, np.ndarray]:
    """The magnitude is that of four errors: rounding each probability to bf16, independent of each
    other, u sqrt(sum p^2 v^2); the fp32 scores and the exponential, which move a probability by a
    factor, (sqrt(size) u32 |q||k| scale + 2^-22) sum p |v|; fp32 sums over the keys,
    sqrt(keys) u32 sum p |v|; what is lost below 2^-126, of a key's exponential, of its split's and
    of their product with v, 2^-126 sum (2 |v| + 1) / l before the division by their sum l."""
    requests, (rows, heads, size) = len(prefix_len), q.shape
    slots = rows // requests
    out, magnitude = np.zeros(q.shape), np.zeros(q.shape)
    u16, u32 = unit_roundoff(BF16), unit_roundoff(np.float32)
    for r in range(requests):
        own = slice(r * slots, (r + 1) * slots)
        context = cache[_slots(page_table[r], prefix_len[r], page_size)]
        given = np.concatenate([context, block[own]]).astype(np.float64)
        query = q[own].astype(np.float64)
        out[own] = dflash.attend(query, given, scale)
        k, v = given.reshape(len(given), 2, -1, size).transpose(1, 2, 0, 3)  # [G, S, D]
        share = heads // len(k)
        for head in range(heads):
            keys, mixed = k[head // share], v[head // share]
            scores = query[:, head] @ keys.T * scale
            p = np.exp(scores - scores.max(-1, keepdims=True))
            total = p.sum(-1, keepdims=True)
            p /= total
            reach = (np.abs(query[:, head]) @ np.abs(keys).T).max(-1) * abs(scale)
            factor = u32 * (np.sqrt(size) * reach + 4 + np.sqrt(len(keys)))
            magnitude[own, head] = u16 * np.sqrt(p**2 @ mixed**2)
            magnitude[own, head] += factor[:, None] * (p @ np.abs(mixed))
            magnitude[own, head] += TINY * (2 * np.abs(mixed) + 1).sum(0) / total
    return {"o": out, "o.magnitude": magnitude}


def work(*, q: np.ndarray, block: np.ndarray, prefix_len: np.ndarray) -> dict[str, int]:
    """Bytes of the context, of the block and of q and o; 4 size operations a query head and key."""
    rows, heads, size = q.shape
    slots = rows // len(prefix_len)
    keys = int(prefix_len.sum()) + rows
    pairs = sum(slots * (int(prefix) + slots) for prefix in prefix_len)
    return {
        "bytes": keys * block.shape[1] * block.itemsize + 2 * q.nbytes,
        "flops": 4 * pairs * heads * size,
    }
