"""Absorbed attention of tree nodes over a paged latent cache: the oracle of tree_verify_mla.

Row i of request r is node n = i - row_start[r]. It sees the keys at logical positions 0..P-1 of its
request (P = prefix_len[r]) and P + j for every bit j <= n of its ancestor row. The key at logical
position p lies in cache slot page_table[r, p // page_size] * page_size + p % page_size. The values
are the first `rank` columns of the keys:
  o[i, h] = sum_p softmax_p(scale * q[i, h] . key_p) key_p[:rank]
A row that sees no key, and a row past row_start[-1], gives zeros. A node that the mask has no bit
for, or beyond MAX_WINDOW, gives NaN.
"""

from typing import Any

import numpy as np

from goldens.numerics import Gathered, Stream, round_to, unit_roundoff, widen

MAX_WINDOW = 288  # a tree of 256 nodes and its root need nine words of mask
TINY = 2.0**-126  # an fp32 exponential below it is 0
HOSTILE = (-1, 2**31 - 1)  # entries of the page table that nothing may look up


def inputs(
    rng: Stream,
    *,
    rows: int,
    requests: int,
    heads: int,
    width: int,
    slots: int,
    max_pages: int,
    words: int,
    page_size: int,
    dtype: str,
    prefixes: str,
    nodes: str,
    tree: str,
    values: str,
    exact: bool = False,
    scale: float = 1.0,
) -> dict[str, Any]:
    """prefixes, nodes: "63,64,65", P and T of each request.

    tree: chain, star (all children of the root), random, or wide (random, parents near the root).
    values: plain; climbing (scores grow along the keys, so that the running maximum moves in every
    tile); loud (window keys up to 32 times larger than the prefix's); faint (the first key takes
    all, half of its values are 0, and the others' shares straddle 2^-126); uniform (equal scores:
    the output is the mean of small integers); one_hot (each head's scores pick one visible key by
    more than exp can bridge). The last two are exact.
    Whatever no row may read is NaN, and hostile in the page table; pages are scattered.
    """
    if exact != (values in ("uniform", "one_hot")):
        raise ValueError(f"values {values!r} and exact = {exact} do not go together")
    lengths, counts = _integers(prefixes, requests), _integers(nodes, requests)
    row_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    page_table = rng.choice(HOSTILE, (requests, max_pages)).astype(np.int32)
    kind = np.dtype(dtype)
    free = rng.permutation(slots // page_size)
    far = free * page_size * width >= 2**32  # elements: these pages come first
    free = np.concatenate([free[far], free[~far]])
    places_of, keys_of = [], []  # cache slots and what they hold
    ancestors = rng.integers(0, 2**32, (rows, words)).astype(np.uint32)  # above a node: noise
    q = rng.bell((rows, heads, width))
    for r in range(requests):
        total = lengths[r] + counts[r]
        used = -(-total // page_size)
        page_table[r, :used], free = free[:used], free[used:]
        places = np.arange(total)
        slot = page_table[r, places // page_size] * page_size + places % page_size
        keys = round_to(_keys(rng, values, lengths[r], counts[r], width, scale), kind)
        places_of.append(slot)
        keys_of.append(keys)
        for n, parent in enumerate(_parents(rng, tree, counts[r])):
            own = _bits(ancestors[row_start[r] + parent], words) if n else np.zeros(32 * words)
            own = np.where(np.arange(32 * words) <= parent, own, 0)
            own[n : n + 1] = 1  # nothing where the mask is too narrow for it
            row = row_start[r] + n
            above = _bits(ancestors[row], words) * (np.arange(32 * words) > n)
            packed = np.packbits((own + above).astype(np.uint8), bitorder="little")
            ancestors[row] = packed.view("<u4")
            if values == "one_hot":
                seen = np.concatenate([np.arange(lengths[r]), lengths[r] + np.flatnonzero(own)])
                target = keys[rng.choice(seen, heads)]
                q[row] = 512 * np.sign(target.astype(np.float64))
    if values == "uniform":
        q[:] = 0
    elif values == "faint":
        rank = _rank(width)
        q[..., :rank], q[..., rank:] = 0, 1
    elif values != "one_hot":
        q *= 0.5
    return {
        "q": round_to(q, kind),
        "cache": _cache(np.concatenate(places_of), np.concatenate(keys_of), slots),
        "page_table": page_table,
        "row_start": row_start,
        "prefix_len": np.array(lengths, np.int32),
        "ancestors": ancestors,
    }


ROPE = {512: 64, 128: 32, 64: 16}  # by rank, of the models there are


def derived(
    *, prefixes: str, nodes: str, rows: int, words: int, max_pages: int, rank: int, page_size: int,
    values: str,
) -> dict[str, int | str | bool]:  # fmt: skip
    """A request for each prefix, with the nodes repeated or cut to as many. rows, words and
    max_pages are drawn as what there is beyond what is needed."""
    lengths = [int(part) for part in prefixes.split(",")]
    some = [int(part) for part in nodes.split(",")]
    counts = [some[r % len(some)] for r in range(len(lengths))]
    pages = [-(-(p + t) // page_size) for p, t in zip(lengths, counts, strict=True)]
    return {
        "requests": len(lengths),
        "bounds": len(lengths) + 1,
        "nodes": ",".join(map(str, counts)),
        "rows": sum(counts) + rows,
        "words": max(1, -(-max(counts) // 32)) + words,
        "max_pages": max(1, *pages) + max_pages,
        "slots": page_size * (sum(pages) + 2),
        "width": rank + ROPE[rank],
        "exact": values in ("uniform", "one_hot"),
    }


def _cache(places: np.ndarray, keys: np.ndarray, slots: int) -> np.ndarray | Gathered:
    """[slots, width], NaN where nothing is."""
    nothing = np.full((1, keys.shape[1]), np.nan, keys.dtype)
    index = np.zeros(slots, np.int64)
    index[places] = 1 + np.arange(len(places))
    cache = Gathered(np.concatenate([nothing, keys]), index)
    return cache if cache.nbytes > 2**30 else np.asarray(cache)


def _integers(text: str, count: int) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if len(numbers) != count:
        raise ValueError(f"{text!r} has {len(numbers)} numbers for {count} requests")
    return numbers


def _bits(row: np.ndarray, words: int) -> np.ndarray:
    return np.unpackbits(row.view(np.uint8), bitorder="little")[: 32 * words]


def _parents(rng: Stream, tree: str, count: int) -> list[int]:
    if tree == "chain":
        return [n - 1 for n in range(count)]
    if tree == "star":
        return [-1] + [0] * (count - 1) if count else []
    reach = {"random": 12, "wide": 10**9}[tree]
    return [int(rng.integers(max(0, n - reach), n)) if n else -1 for n in range(count)]


def _rank(width: int) -> int:
    """The largest power of two below the width, as in every model that has this attention."""
    return 1 << (width - 1).bit_length() - 1


def _keys(
    rng: Stream, values: str, prefix: int, nodes: int, width: int, scale: float
) -> np.ndarray:
    count = prefix + nodes
    if values == "uniform":
        return rng.integers(-4, 5, (count, width)).astype(np.float64)
    if values == "one_hot":
        return rng.signs((count, width)) * 2.0 ** rng.integers(0, 3, (count, width))
    keys = rng.bell((count, width))
    if values == "climbing":
        keys *= np.linspace(0.25, 4, count)[:, None]
    if values == "faint":
        rank = _rank(width)
        keys[:, rank:] = -np.linspace(86, 100, count)[:, None] / (scale * (width - rank))
        keys[:1, rank:], keys[:1, : rank // 2] = 0, 0
    if values == "loud":
        keys[prefix:] *= 2.0 ** rng.integers(0, 6, (nodes, 1))
    return keys


def _window(ancestors: np.ndarray) -> int:
    """Nodes of a request that can be told apart."""
    return min(MAX_WINDOW, 32 * ancestors.shape[1])


def keys_of_rows(
    page_table: np.ndarray,
    row_start: np.ndarray,
    prefix_len: np.ndarray,
    ancestors: np.ndarray,
    page_size: int,
) -> list[np.ndarray]:
    """The cache slots that each row sees, int64, in the order of its path; none for padding and for
    nodes beyond the mask."""
    seen = [np.zeros(0, np.int64)] * len(ancestors)
    window = _window(ancestors)
    for r in range(len(prefix_len)):
        for row in range(row_start[r], min(row_start[r] + window, row_start[r + 1])):
            own = _bits(np.ascontiguousarray(ancestors[row]), ancestors.shape[1])
            own = np.flatnonzero(own[: row - row_start[r] + 1])
            places = np.concatenate([np.arange(prefix_len[r]), prefix_len[r] + own])
            page = page_table[r, places // page_size].astype(np.int64)
            seen[row] = page * page_size + places % page_size
    return seen


def reference(
    *,
    q: np.ndarray,
    cache: np.ndarray,
    page_table: np.ndarray,
    row_start: np.ndarray,
    prefix_len: np.ndarray,
    ancestors: np.ndarray,
    scale: float,
    page_size: int,
) -> dict[str, np.ndarray]:
    """o [rows, heads, rank]. The magnitude is that of four errors:

    rounding each probability to an activation, independent of each other: u sqrt(sum p^2 v^2);
    the fp32 scores and the exponential, which move a probability by a factor:
      (sqrt(width) u32 |q||k| scale + 2^-22) sum p |v|;
    fp32 sums over the keys: sqrt(keys) u32 sum p |v|;
    what is lost below 2^-126, of a key's exponential, of its split's and of their product with v
    (before the division by the sum l of exponentials): 2^-126 sum (2 |v| + 1) / l.
    """
    rows, heads, width = q.shape
    rank = _rank(width)
    out, magnitude = np.zeros((rows, heads, rank)), np.zeros((rows, heads, rank))
    u_act, u32 = unit_roundoff(q.dtype), unit_roundoff(np.float32)
    slots = keys_of_rows(page_table, row_start, prefix_len, ancestors, page_size)
    for r, length in enumerate(prefix_len):
        out[row_start[r] + _window(ancestors) : row_start[r + 1]] = np.nan
        mine = [row for row in range(row_start[r], row_start[r + 1]) if len(slots[row])]
        if not mine:
            continue
        shared = _Keys(cache[slots[mine[0]][:length]], rank)  # the prefix, which all of them see
        for row in mine:
            parts = (shared, _Keys(cache[slots[row][length:]], rank))
            query = q[row].astype(np.float64)
            scores = np.concatenate([query @ k.keys.T for k in parts], axis=-1) * scale
            p = np.exp(scores - scores.max(-1, keepdims=True))  # [heads, S]
            total = p.sum(-1, keepdims=True)
            split = (p[:, :length], p[:, length:])
            # Divided last: exact where all p are 0 or 1.
            out[row] = sum(a @ k.keys[:, :rank] for a, k in zip(split, parts, strict=True)) / total
            rough = [(a / total).astype(np.float32) for a in split]  # a bound needs few digits
            of_query = np.abs(query.astype(np.float32))
            reached = np.concatenate([of_query @ k.size.T for k in parts], axis=-1)
            size = reached.max(-1) * abs(scale)  # [heads]
            factor = u32 * (np.sqrt(width) * size + 4 + np.sqrt(len(slots[row])))
            squares = sum(a**2 @ k.squares for a, k in zip(rough, parts, strict=True))
            sums = sum(a @ k.size[:, :rank] for a, k in zip(rough, parts, strict=True))
            lost = TINY * sum(2 * k.whole + len(k.keys) for k in parts) / total
            magnitude[row] = u_act * np.sqrt(squares) + factor[:, None] * sums + lost
    return {"o": out, "o.magnitude": magnitude}


class _Keys:
    """Keys [S, width] as numbers, and what their part of the magnitude is made of."""

    def __init__(self, keys: np.ndarray, rank: int):
        self.keys = widen(keys)
        self.size = np.abs(widen(keys, np.float32))
        self.squares = self.size[:, :rank] ** 2
        self.whole = self.size[:, :rank].sum(0, dtype=np.float64)


def work(
    *,
    q: np.ndarray,
    page_table: np.ndarray,
    row_start: np.ndarray,
    prefix_len: np.ndarray,
    ancestors: np.ndarray,
    page_size: int,
) -> dict[str, int]:
    """Bytes of the keys that anybody sees, of q and of o; 2 (width + rank) operations a row, head
    and key."""
    _, heads, width = q.shape
    rank = _rank(width)
    seen = keys_of_rows(page_table, row_start, prefix_len, ancestors, page_size)
    pairs = sum(len(keys) for keys in seen)
    keys = len(set().union(*(set(map(int, each)) for each in seen)))
    item = q.dtype.itemsize
    return {
        "bytes": keys * width * item + q.nbytes + q.shape[0] * heads * rank * item,
        "flops": 2 * pairs * heads * (width + rank),
        "T": q.shape[0],
        "P": int(prefix_len.max()),
        "R": len(prefix_len),
        "H": heads,
    }
