"""Routed experts with INT4 weights: gate and up, SwiGLU, down, weighted sum."""

import hashlib
from typing import Any

import numpy as np

from goldens import bundles, model, moe_route
from goldens.numerics import (
    BF16,
    Gathered,
    Stream,
    dequantise,
    round_to,
    unit_roundoff,
    widen,
)
from goldens.w4a16_gemm import int4

POOL = 8  # different experts where there are many: their float64 weights fit no machine
LARGE = 1 << 27  # weights
DRIFT = 1e-6  # silu is rounded to float32, and exp differs between CPUs in its last bit
SAMPLE_LAYER = "model.layers.2.mlp.experts"


def inputs(
    rng: Stream,
    *,
    rows: int,
    top_k: int,
    count: int,
    hidden: int,
    inner: int,
    routing: str,
    weights_of: str,
    exact: bool = False,
) -> dict[str, Any]:
    """weights_of "random", or "checkpoint": the packed experts of the pinned checkpoint.

    exact: g = W_gate x is a power of two, at least 2^5 and so silu(g) = g in float32, or so far
    below zero that silu(g) = 0; |W_up x| is at most 256, so that the product is a bf16 number; and
    what follows are integers times powers of two.
    """
    experts = moe_route.choose(rng, rows=rows, top_k=top_k, count=count, routing=routing)
    pick = rng.integers(0, POOL, count) if count * hidden * inner > LARGE else np.arange(count)
    some = POOL if count * hidden * inner > LARGE else count
    if weights_of == "checkpoint":
        gate_up_qw, gate_up_sc, down_qw, down_sc = _checkpoint(count)
    else:
        up_qw, up_sc = int4(rng, (some, inner, hidden), exact=exact)
        down_qw, down_sc = int4(rng, (some, hidden, inner), exact=exact)
        if exact:
            gate_qw, gate_sc = _exact_gate(rng, (some, inner, hidden))
            up_sc = np.ones_like(up_sc)
        else:
            gate_qw, gate_sc = int4(rng, (some, inner, hidden), exact=False)
        gate_up_qw = np.concatenate([gate_qw, up_qw], axis=1)
        gate_up_sc = np.concatenate([gate_sc, up_sc], axis=1)
    if exact:
        x = np.zeros((rows, hidden))
        for row in x:  # eight entries that add up to 32
            row[rng.permutation(hidden)[:8]] = np.array([2, 2, 4, 4, 4, 4, 6, 6])
        weights = 2.0 ** rng.integers(-2, 2, (rows, top_k))
    else:
        x, weights = rng.bell((rows, hidden)), np.abs(rng.bell((rows, top_k)))
    return {
        "x": round_to(x, BF16),
        "experts": experts,
        "expert_weights": round_to(weights, np.float32),
        **{
            name: Gathered(pool, pick) if some < count else pool
            for name, pool in (
                ("gate_up_qw", gate_up_qw),
                ("gate_up_sc", gate_up_sc),
                ("down_qw", down_qw),
                ("down_sc", down_sc),
            )
        },
    }


def derived(
    *, rows: int, top_k: int, count: int, hidden: int, inner: int, routing: str, width: int = 8
) -> dict[str, int | str]:
    made = moe_route.derived(rows=rows, top_k=top_k, count=count, routing=routing, width=width)
    sizes = {"slots": rows * made["top_k"], "gate_up_rows": 2 * inner}
    for name, size in (("hidden", hidden), ("inner", inner)):
        sizes |= {f"{name}_words": size // 8, f"{name}_groups": size // 32}
        sizes[f"{name}_padded"] = -(-size // 128) * 128
    return {**made, **sizes}


def _exact_gate(rng: Stream, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose weights are all one of 1, 2, 4, 8, as q s with q in 1, 2, 4; or all -8.

    Of many rows only about 32 are not -8: what they make is added up by down_proj, and every sum
    must stay below 2^24 of its unit.
    """
    groups = (*shape[:-1], shape[-1] // 32)
    log_q = rng.integers(0, 3, groups)
    value = 2.0 ** (rng.integers(0, 4, (*shape[:-1], 1)) - log_q)
    inner = shape[-2]
    draw = rng.integers(0, inner // 32 if inner > 256 else 4, (*shape[:-1], 1))
    dead = draw != 0 if inner > 256 else draw == 0
    q = np.where(dead, -8, 2**log_q)
    words = (q + 8).astype(np.uint32) * np.uint32(0x11111111)  # eight equal codes
    scales = round_to(np.where(dead, 1.0, value), BF16)
    return np.repeat(words, 4, axis=-1).view(np.int32), scales


def _checkpoint(count: int) -> tuple[np.ndarray, ...]:
    sample = bundles.tensors("k26_sample")

    def stack(*names: str) -> np.ndarray:
        return np.stack(
            [
                np.concatenate([sample[f"{SAMPLE_LAYER}.{e}.{name}"] for name in names])
                for e in range(count)
            ]
        )

    return (
        stack("gate_proj.qw", "up_proj.qw"),
        stack("gate_proj.sc", "up_proj.sc"),
        stack("down_proj.qw"),
        stack("down_proj.sc"),
    )


def reference(
    *,
    x: np.ndarray,
    experts: np.ndarray,
    expert_weights: np.ndarray,
    gate_up_qw: np.ndarray,
    gate_up_sc: np.ndarray,
    down_qw: np.ndarray,
    down_sc: np.ndarray,
) -> dict[str, np.ndarray]:
    """Only silu is rounded on the way, to float32; the magnitude says what roundings do."""
    packed = (gate_up_qw, gate_up_sc, down_qw, down_sc)
    alike: dict[bytes, list[int]] = {}  # experts with the same weights, which are converted once
    for e in np.unique(experts[experts < len(gate_up_qw)]):
        if isinstance(gate_up_qw, Gathered):
            key = b"%d" % gate_up_qw.index[e]
        else:
            key = hashlib.sha256(b"".join(hashlib.sha256(a[e]).digest() for a in packed)).digest()
        alike.setdefault(key, []).append(int(e))

    def weights(e: int) -> tuple[np.ndarray, np.ndarray]:
        gate_up = widen(dequantise(gate_up_qw[e], gate_up_sc[e]))
        return gate_up, widen(dequantise(down_qw[e], down_sc[e]))

    groups = ((weights(same[0]), np.isin(experts, same)) for same in alike.values())
    return combine(x, experts, expert_weights, groups, act=BF16)


def combine(
    x: np.ndarray, experts: np.ndarray, expert_weights: np.ndarray, groups, *, act: np.dtype
) -> dict[str, np.ndarray]:
    """groups: ((gate_up [2 inner, hidden], down [hidden, inner]), chosen bool [rows, top_k])...

    The magnitude of the error of y is that of a sum of independent roundings: of each activation
    when it is stored as `act` (at most u |a|, in the mean square a third of that squared), and
    sqrt(K) u |a||b| for each float32 sum of K products; the latter pass through SwiGLU, whose
    slope in the gate is at most 1.1.
    """
    h, h_size = x.astype(np.float64), np.abs(x.astype(np.float32))  # a bound needs few digits
    y = np.zeros(x.shape)
    variance, size = np.zeros(x.shape), np.zeros(x.shape)
    unit = unit_roundoff(np.float32)
    for (gate_up, down), chosen in groups:
        rows, choice = np.nonzero(chosen)
        gate, up = np.split(h[rows] @ gate_up.T, 2, axis=-1)  # [slots, inner]
        sizes = h_size[rows] @ np.abs(gate_up.astype(np.float32)).T
        gate_size, up_size = np.split(sizes.astype(np.float64), 2, axis=-1)
        silu = round_to(model.silu(gate), np.float32).astype(np.float64)
        a = silu * up
        slack = np.sqrt(h.shape[1]) * unit
        error = 1.1 * gate_size * np.abs(up) + np.abs(silu) * up_size
        squared = (unit_roundoff(act) * a) ** 2 / 3 + (slack * error + 8 * unit * np.abs(a)) ** 2
        w = expert_weights[rows, choice].astype(np.float64)[:, None]
        np.add.at(y, rows, w * (a @ down.T))
        rough = down.astype(np.float32)
        np.add.at(variance, rows, w**2 * (squared.astype(np.float32) @ (rough**2).T))
        np.add.at(size, rows, np.abs(w) * (np.abs(a, dtype=np.float32) @ np.abs(rough).T))
    magnitude = np.sqrt(variance) + np.sqrt(down.shape[1]) * unit * size
    return {"y": y, "y.magnitude": magnitude}


def work(
    *,
    x: np.ndarray,
    experts: np.ndarray,
    gate_up_qw: np.ndarray,
    gate_up_sc: np.ndarray,
    down_qw: np.ndarray,
    down_sc: np.ndarray,
) -> dict[str, int]:
    """Bytes of the weights of the experts that are hit, of x and of y; 2 operations a weight and
    choice."""
    chosen = experts[(experts >= 0) & (experts < len(gate_up_qw))]
    of_one = sum(a[0].nbytes for a in (gate_up_qw, gate_up_sc, down_qw, down_sc))
    weights = 8 * (gate_up_qw[0].size + down_qw[0].size)
    return {
        "bytes": len(np.unique(chosen)) * of_one + x.nbytes + 4 * x.size,
        "flops": 2 * weights * chosen.size,
        "M": len(x),
    }
