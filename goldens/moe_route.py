"""Slots grouped by expert into blocks: integers."""

import numpy as np

from goldens.numerics import Stream


def choose(rng: Stream, *, rows: int, top_k: int, count: int, routing: str) -> np.ndarray:
    """int32 [rows, top_k], ascending ids of distinct experts for every row.

    routing "uniform"; "one": all rows choose the same experts, count // 2 and those after it;
    "distinct": no expert is chosen twice while there are enough; "last": the highest ids, and one
    other; "absent": as uniform, but in every second row the last choice is count, outside.
    """
    if routing == "one":
        chosen = np.tile(count // 2 + np.arange(top_k), (rows, 1)) % count
    elif routing == "distinct":
        chosen = np.arange(rows * top_k).reshape(rows, top_k) * 7 % count
        assert np.gcd(7, count) == 1
    else:
        drawn = [rng.permutation(count)[:top_k] for _ in range(rows)]
        chosen = np.array(drawn, np.int64).reshape(rows, top_k)
        if routing == "last":
            chosen[:, 1:] = count - 1 - np.arange(top_k - 1)
            chosen[:, 0] = np.arange(rows) % (count - top_k + 1)
    chosen = np.sort(chosen, axis=1)
    if routing == "absent":
        chosen[::2, -1] = count
    return chosen.astype(np.int32)


def inputs(
    rng: Stream, *, rows: int, top_k: int, count: int, routing: str
) -> dict[str, np.ndarray]:
    return {"experts": choose(rng, rows=rows, top_k=top_k, count=count, routing=routing)}


def derived(
    *, rows: int, top_k: int, count: int, routing: str, width: int = 8, hidden: int = 0
) -> dict[str, int | str]:
    """Also for the specs of what is done with the choices. At most 8 choices of all there are;
    "distinct" takes every seventh expert."""
    top_k = min(top_k, count)
    slots = rows * top_k
    return {
        "top_k": top_k,
        "routing": "uniform" if routing == "distinct" and count % 7 == 0 else routing,
        "slots": width,
        "blocks": (slots + (width - 1) * min(count, slots)) // width,
        "padded": -(-hidden // 128) * 128,
    }


def group(experts: np.ndarray, count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """block_expert int32 [blocks] and block_slot int32 [blocks, width]; -1 where nothing is.

    blocks is the worst case over all choices: every expert's last block holds one slot.
    """
    blocks = (experts.size + (width - 1) * min(count, experts.size)) // width
    block_expert = np.full(blocks, -1, np.int32)
    block_slot = np.full((blocks, width), -1, np.int32)
    block = 0
    for expert in range(count):
        slots = np.flatnonzero(experts.reshape(-1) == expert)
        for start in range(0, len(slots), width):
            some = slots[start : start + width]
            block_expert[block], block_slot[block, : len(some)] = expert, some
            block += 1
    return block_expert, block_slot


def reference(*, experts: np.ndarray, count: int, width: int) -> dict:
    block_expert, block_slot = group(experts, count, width)
    return {"block_expert": block_expert, "block_slot": block_slot}


def work(*, experts: np.ndarray) -> dict[str, int]:
    """M: rows."""
    return {"M": len(experts)}
