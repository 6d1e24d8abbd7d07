"""How the small drafters were made: trained on the greedy texts of the FP32 target.

    python -m goldens.calibrate tiny2 tiny            (about two minutes each on one core)

writes goldens/pinned/drafter_<shape>.npz: the drafter's bf16 weights, as their 16 bits. Matrix
products in float32 differ in their last bits from one BLAS to the next, and training amplifies
that, so the weights are kept and not made anew; a second run gives a drafter that is as good.

Prompts come from a seed of their own: none of them is a golden prompt. The loss is the
cross-entropy of slot i, weighted by e^(-(i - 1) / 4) as DFlash does: an early mistake costs all
that follows. Forward and backward pass are written out here for many blocks at a time;
tests/test_dflash.py holds the forward pass against goldens.dflash, and the gradient against
differences.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from goldens import bundles, dflash, model
from goldens.model import Config, Weights, Window
from goldens.numerics import BF16, Stream, round_to
from goldens.rounding import EXACT

Arrays = dict[str, np.ndarray]

TEXTS, LENGTH = 384, 72  # greedy texts, and tokens of each with its prompt
TOGETHER = 32  # texts that are made in one window: attention costs grow with its square
PROMPT = 4
STEPS, BATCH, BLOCKS = 900, 12, 8  # texts a step, and blocks in each
RATE, WARM_UP = 3e-3, 40
DECAY = 4.0
HELD_OUT = 16  # texts that training never sees


def greedy_texts(
    weights: Weights, config: Config, prompts: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int64 [n, length] after prompts [n, p], and hidden [layers + 1, n, length, hidden].

    The texts share a window: a row sees the rows of its own text, so that n texts take one pass a
    token. In float64, nothing rounded.
    """
    count, layers = len(prompts), config["num_hidden_layers"]
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    tokens = np.zeros((count, length), np.int64)
    tokens[:, : prompts.shape[1]] = prompts
    cache = np.zeros((layers, 0, width))
    hidden = np.zeros((layers + 1, count, length, config["hidden_size"]))
    owner = np.arange(count)
    for at in range(length):
        own = np.tile(owner, at + 1)
        window = Window(np.full(count, at), owner[:, None] == own)
        x, rows = model.embed(tokens[:, at], weights), []
        hidden[0, :, at] = x
        for number in range(layers):
            done = model.decoder_layer(x, cache[number], weights, number, config, window, EXACT)
            x = done.x
            hidden[number + 1, :, at] = x
            rows.append(done.latent)
        cache = np.concatenate([cache, np.stack(rows)], axis=1)
        if prompts.shape[1] <= at + 1 < length:
            tokens[:, at + 1] = model.head(x, weights, config).argmax(-1)
    return tokens, hidden


# -- one step --------------------------------------------------------------------------------------


def _norm(x: np.ndarray, w: np.ndarray, eps: float) -> tuple[np.ndarray, tuple]:
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps))
    return x * inverse * w, (x, w, inverse)


def _norm_back(dy: np.ndarray, kept: tuple) -> tuple[np.ndarray, np.ndarray]:
    x, w, inverse = kept
    dw = (dy * x * inverse).reshape(-1, len(w)).sum(0)
    scaled = dy * w * inverse
    dx = scaled - x * inverse**2 * (scaled * x).mean(-1, keepdims=True)
    return dx, dw


def _times(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return (x.reshape(-1, x.shape[-1]) @ w.T).reshape(*x.shape[:-1], len(w))


def _times_back(dy: np.ndarray, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = dy.reshape(-1, dy.shape[-1])
    return (flat @ w).reshape(x.shape), flat.T @ x.reshape(-1, x.shape[-1])


def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Half rotation of x [.., t, heads, D] by tables [.., t, D/2]; with -sin it is undone."""
    a, b = np.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def loss_and_gradient(
    p: Arrays,
    config: Config,
    taps: np.ndarray,
    embedded: np.ndarray,
    anchors: np.ndarray,
    head: np.ndarray,
    wanted: np.ndarray,
    weight: np.ndarray,
) -> tuple[float, np.ndarray, Arrays]:
    """Loss, logits [S, A, b - 1, vocab] and the gradient of each of the drafter's tensors.

    p: tensors by name without "drafter." and ".weight", float32. taps [S, T, taps hidden]: S texts;
    A blocks each, the root of which stands at anchors [S, A]; embedded [S, A, b, hidden]; wanted
    [S, A, b - 1] token ids, weight [b - 1].
    """
    drafter = config["drafter"]
    eps, size = drafter["rms_norm_eps"], drafter["head_dim"]
    heads, groups = drafter["num_attention_heads"], drafter["num_key_value_heads"]
    texts, blocks, slots, _ = embedded.shape
    length = taps.shape[1]
    span = np.arange(length + slots)
    cos, sin = (t.astype(taps.dtype) for t in dflash.rope_tables(drafter, span))
    place = anchors[..., None] + np.arange(slots)  # [S, A, b]
    block_cos, block_sin = cos[place], sin[place]
    cos, sin = cos[:length], sin[:length]
    seen = np.ones((texts, 1, blocks, 1, 1, length + slots), bool)
    seen[..., :length] = (np.arange(length) < anchors[..., None])[:, None, :, None, None]
    scale = np.asarray(size**-0.5, taps.dtype)

    mixed = _times(taps, p["fc"])
    c, c_kept = _norm(mixed, p["hidden_norm"], eps)
    x, kept = embedded, []
    for number in range(drafter["num_hidden_layers"]):
        n = f"layers.{number}."
        a = n + "self_attn."
        h, h_kept = _norm(x, p[n + "input_layernorm"], eps)

        def keys(rows: np.ndarray, cos: np.ndarray, sin: np.ndarray, a: str = a) -> tuple:
            raw = _times(rows, p[a + "k_proj"]).reshape(*rows.shape[:-1], groups, size)
            k, k_kept = _norm(raw, p[a + "k_norm"], eps)
            v = _times(rows, p[a + "v_proj"]).reshape(*rows.shape[:-1], groups, size)
            return _turn(k, cos, sin), v, k_kept

        q = _times(h, p[a + "q_proj"]).reshape(texts, blocks, slots, heads, size)
        q, q_kept = _norm(q, p[a + "q_norm"], eps)
        q = _turn(q, block_cos, block_sin)
        q = q.reshape(texts, blocks, slots, groups, heads // groups, size)
        k_far, v_far, far_kept = keys(c, cos, sin)
        k_own, v_own, own_kept = keys(h, block_cos, block_sin)
        far = np.einsum("sabgqd,stgd->sgaqbt", q, k_far, optimize=True)
        own = np.einsum("sabgqd,sacgd->sgaqbc", q, k_own, optimize=True)
        scores = np.where(seen, np.concatenate([far, own], -1) * scale, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        prob = e / e.sum(-1, keepdims=True)
        o = np.einsum("sgaqbt,stgd->sabgqd", prob[..., :length], v_far, optimize=True)
        o = o + np.einsum("sgaqbc,sacgd->sabgqd", prob[..., length:], v_own, optimize=True)
        o = o.reshape(texts, blocks, slots, heads * size)
        x1 = x + _times(o, p[a + "o_proj"])
        h2, h2_kept = _norm(x1, p[n + "post_attention_layernorm"], eps)
        gate, up = _times(h2, p[n + "mlp.gate_proj"]), _times(h2, p[n + "mlp.up_proj"])
        gated = 1 / (1 + np.exp(-gate))
        act = gate * gated * up
        x = x1 + _times(act, p[n + "mlp.down_proj"])
        kept.append(
            (h, h_kept, q, q_kept, k_far, v_far, far_kept, k_own, v_own, own_kept, prob, o, h2,
             h2_kept, gate, up, gated, act)
        )  # fmt: skip
    final, final_kept = _norm(x[:, :, 1:], p["norm"], eps)
    logits = _times(final, head)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    prob = e / e.sum(-1, keepdims=True)
    right = np.take_along_axis(prob, wanted[..., None], -1)[..., 0]
    share = weight / (weight.sum() * texts * blocks)
    loss = float(-(np.log(np.maximum(right, 1e-30)) * share).sum())

    g: Arrays = {}
    d = prob
    np.put_along_axis(d, wanted[..., None], right[..., None] - 1, -1)
    d = d * share[:, None].astype(d.dtype)
    d_final = (d.reshape(-1, d.shape[-1]) @ head).reshape(final.shape)
    dx = np.zeros_like(x)
    dx[:, :, 1:], g["norm"] = _norm_back(d_final, final_kept)
    dc = np.zeros_like(c)
    for number in reversed(range(drafter["num_hidden_layers"])):
        n = f"layers.{number}."
        a = n + "self_attn."
        (h, h_kept, q, q_kept, k_far, v_far, far_kept, k_own, v_own, own_kept, prob, o, h2,
         h2_kept, gate, up, gated, act) = kept[number]  # fmt: skip
        da, g[n + "mlp.down_proj"] = _times_back(dx, act, p[n + "mlp.down_proj"])
        d_up = da * gate * gated
        d_gate = da * up * gated * (1 + gate * (1 - gated))
        one, g[n + "mlp.gate_proj"] = _times_back(d_gate, h2, p[n + "mlp.gate_proj"])
        two, g[n + "mlp.up_proj"] = _times_back(d_up, h2, p[n + "mlp.up_proj"])
        through, g[n + "post_attention_layernorm"] = _norm_back(one + two, h2_kept)
        dx = dx + through
        do, g[a + "o_proj"] = _times_back(dx, o, p[a + "o_proj"])
        do = do.reshape(q.shape)
        dp = np.concatenate(
            [
                np.einsum("sabgqd,stgd->sgaqbt", do, v_far, optimize=True),
                np.einsum("sabgqd,sacgd->sgaqbc", do, v_own, optimize=True),
            ],
            axis=-1,
        )
        ds = prob * (dp - (dp * prob).sum(-1, keepdims=True)) * scale
        far, own = ds[..., :length], ds[..., length:]
        dq = np.einsum("sgaqbt,stgd->sabgqd", far, k_far, optimize=True)
        dq = dq + np.einsum("sgaqbc,sacgd->sabgqd", own, k_own, optimize=True)
        dq = _turn(dq.reshape(texts, blocks, slots, heads, size), block_cos, -block_sin)
        dq, g[a + "q_norm"] = _norm_back(dq, q_kept)
        dh, g[a + "q_proj"] = _times_back(dq.reshape(texts, blocks, slots, -1), h, p[a + "q_proj"])
        for name in ("k_norm", "k_proj", "v_proj"):
            g[a + name] = np.zeros_like(p[a + name])
        own_k = np.einsum("sgaqbc,sabgqd->sacgd", own, q, optimize=True)
        own_v = np.einsum("sgaqbc,sabgqd->sacgd", prob[..., length:], do, optimize=True)
        far_k = np.einsum("sgaqbt,sabgqd->stgd", far, q, optimize=True)
        far_v = np.einsum("sgaqbt,sabgqd->stgd", prob[..., :length], do, optimize=True)
        for rows, into, dk, dv, its, (its_cos, its_sin) in (
            (h, dh, own_k, own_v, own_kept, (block_cos, block_sin)),
            (c, dc, far_k, far_v, far_kept, (cos, sin)),
        ):
            dk, dw = _norm_back(_turn(dk, its_cos, -its_sin), its)
            g[a + "k_norm"] += dw
            for name, part in (("k_proj", dk), ("v_proj", dv)):
                d_rows, dw = _times_back(part.reshape(*rows.shape[:-1], -1), rows, p[a + name])
                into += d_rows
                g[a + name] += dw
        through, g[n + "input_layernorm"] = _norm_back(dh, h_kept)
        dx = dx + through
    d_mixed, g["hidden_norm"] = _norm_back(dc, c_kept)
    g["fc"] = d_mixed.reshape(-1, d_mixed.shape[-1]).T @ taps.reshape(-1, taps.shape[-1])
    return loss, logits, g


# -- training --------------------------------------------------------------------------------------


def first_weights(config: Config, stream: Stream) -> Arrays:
    """float32 by name without "drafter." and ".weight": norms of 1, matrices of sd 1 / sqrt(in)."""
    made = {}
    for name, shape in dflash.shapes(config):
        short = name.removeprefix("drafter.").removesuffix(".weight")
        value = np.ones(shape)
        if len(shape) == 2:
            value = stream.bell(shape) * np.sqrt(0.75 / shape[1])
            if short.endswith(("o_proj", "down_proj")):
                value *= 0.3
        made[short] = value.astype(np.float32)
    return made


def batches(
    config: Config, tokens: np.ndarray, taps: np.ndarray, embedding: np.ndarray, stream: Stream,
    texts: int, blocks: int,
) -> Iterator[Mapping[str, Any]]:  # fmt: skip
    """Random blocks of random texts, for loss_and_gradient."""
    drafter = config["drafter"]
    slots, (count, length) = drafter["block_size"], tokens.shape
    while True:
        chosen = stream.integers(0, count, texts)
        anchors = stream.integers(1, length - slots + 1, (texts, blocks))
        wanted = tokens[chosen[:, None, None], anchors[..., None] + np.arange(1, slots)]
        roots = tokens[chosen[:, None], anchors]
        block = np.full((texts, blocks, slots), drafter["mask_token_id"])
        block[..., 0] = roots
        yield {
            "taps": taps[chosen],
            "embedded": embedding[block],
            "anchors": anchors,
            "wanted": wanted,
        }


def train(
    weights: Weights, config: Config, stream: Stream, *, steps: int = STEPS, texts: int = TEXTS
) -> Arrays:
    """The drafter's tensors as a bundle names them, bf16."""
    started = time.perf_counter()
    vocabulary, slots = config["vocab_size"], config["drafter"]["block_size"]
    prompts = stream.integers(2, vocabulary, (texts, PROMPT))
    made = [
        greedy_texts(weights, config, prompts[at : at + TOGETHER], LENGTH)
        for at in range(0, texts, TOGETHER)
    ]
    tokens = np.concatenate([part[0] for part in made])
    taps = np.concatenate([dflash.features(part[1], config["drafter"]) for part in made])
    taps = taps.astype(np.float32)
    print(f"{texts} texts in {time.perf_counter() - started:.0f} s", flush=True)
    embedding, head = (
        weights(name).astype(np.float32) for name in ("model.embed_tokens", "lm_head")
    )
    p = first_weights(config, stream.fork("first"))
    moments = {name: np.zeros((2, *value.shape), np.float32) for name, value in p.items()}
    weight = np.exp(-np.arange(slots - 1) / DECAY).astype(np.float32)
    source = batches(
        config, tokens[HELD_OUT:], taps[HELD_OUT:], embedding, stream.fork("blocks"), BATCH, BLOCKS
    )
    seen = next(
        iter(
            batches(
                config, tokens[:HELD_OUT], taps[:HELD_OUT], embedding, stream.fork("held"), 12, 8
            )
        )
    )
    for step in range(1, steps + 1):
        loss, _, gradient = loss_and_gradient(p, config, head=head, weight=weight, **next(source))
        rate = RATE * min(1, step / WARM_UP) * (0.02 + 0.98 * np.cos(np.pi / 2 * step / steps) ** 2)
        for name, g in gradient.items():
            m = moments[name]
            m[0] += 0.1 * (g - m[0])
            m[1] += 0.02 * (g * g - m[1])
            step_size = rate * np.sqrt(1 - 0.98**step) / (1 - 0.9**step)
            p[name] -= np.float32(step_size) * m[0] / (np.sqrt(m[1]) + 1e-9)
        if step % 100 == 0 or step == steps:
            held, logits, _ = loss_and_gradient(p, config, head=head, weight=weight, **seen)
            hit = (logits.argmax(-1) == seen["wanted"]).mean((0, 1))
            shares, seconds = (
                " ".join(f"{share:.2f}" for share in hit),
                time.perf_counter() - started,
            )
            print(
                f"step {step}: loss {loss:.3f}, held out {held:.3f}, right at each slot {shares}, "
                f"{seconds:.0f} s",
                flush=True,
            )
    return {f"drafter.{name}.weight": round_to(value, BF16) for name, value in p.items()}


def main(shapes: list[str]) -> None:
    for shape in shapes:
        name = f"{shape}-fp32"
        config = bundles.config(f"{name}-dflash")
        made = train(bundles.weights(name), config, Stream("calibrate", shape))
        path = bundles.PINNED / f"drafter_{shape}.npz"
        bits: dict[str, Any] = {name: value.view(np.uint16) for name, value in made.items()}
        partial = path.with_name(f".{path.name}")  # replaced whole
        np.savez_compressed(partial, **bits)
        partial.replace(path)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:] or ["tiny", "tiny2"])
