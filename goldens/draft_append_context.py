"""Keys and values of a drafter's context rows: goldens.draft_append without queries."""

import numpy as np

from goldens import draft_append
from goldens.numerics import Stream


def inputs(
    rng: Stream, *, parts: int, rows: int, groups: int, size: int, slots: int, positions: int,
    pattern: str,
) -> dict[str, np.ndarray]:  # fmt: skip
    made = draft_append.inputs(
        rng, parts=parts, rows=rows, heads=0, groups=groups, size=size, slots=slots,
        positions=positions, pattern=pattern,
    )  # fmt: skip
    del made["q_weight"]
    return {"kv": made.pop("qkv"), **made}


derived = draft_append.derived


def reference(
    *,
    kv: np.ndarray,
    k_weight: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    position: np.ndarray,
    slot: np.ndarray,
    cache: np.ndarray,
    eps: float,
) -> dict[str, np.ndarray]:
    made = draft_append.reference(
        qkv=kv, q_weight=k_weight, k_weight=k_weight, cos=cos, sin=sin, position=position,
        slot=slot, cache=cache, eps=eps,
    )  # fmt: skip
    return {name: made[name] for name in ("cache", "cache.magnitude", "status")}


def work(*, kv: np.ndarray, cache: np.ndarray) -> dict[str, int]:
    """Bytes: the projection's parts once, keys and values written."""
    return {"bytes": kv.nbytes + kv.shape[1] * kv.shape[2] * cache.itemsize}
