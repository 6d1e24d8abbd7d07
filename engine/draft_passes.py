"""Passes and runs with a drafter as launchers: what its specs of stages layer, model and decode
call.

Like those of engine/passes.py they allocate: they stand for a process that answers once and ends.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from engine.decode import Decoder, decode
from engine.device import cdiv, copy_to_device, empty, to_device, to_host
from engine.dflash import DFlash, draft_layer
from engine.kernels.rms_norm import rms_norm
from engine.layers import Buffers, Config
from engine.model import rope_tables
from engine.prepared import prepare_drafter


def dflash_layer(
    x,
    context,
    input_norm,
    q_proj,
    k_proj,
    v_proj,
    q_norm,
    k_norm,
    o_proj,
    post_norm,
    gate_proj,
    up_proj,
    down_proj,
    *,
    eps: float,
    rope_theta: float,
    page_size: int,
    y,
    stream=None,
) -> None:
    """One drafter layer over the block of a request. x, y [slots, hidden] fp32; context
    [keys, 2 groups size] and the weights, by their public names, bf16."""
    name, (slots, hidden), (keys, entry) = "drafter.layers.0", x.shape, context.shape
    size, heads = q_norm.shape[0], q_proj.shape[0] // q_norm.shape[0]
    config = {
        "drafter": {
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "head_dim": size,
            "rms_norm_eps": eps,
        }
    }
    tensors = {
        f"{name}.input_layernorm.weight": input_norm,
        f"{name}.self_attn.q_proj.weight": q_proj,
        f"{name}.self_attn.k_proj.weight": k_proj,
        f"{name}.self_attn.v_proj.weight": v_proj,
        f"{name}.self_attn.q_norm.weight": q_norm,
        f"{name}.self_attn.k_norm.weight": k_norm,
        f"{name}.self_attn.o_proj.weight": o_proj,
        f"{name}.post_attention_layernorm.weight": post_norm,
        f"{name}.mlp.gate_proj.weight": gate_proj,
        f"{name}.mlp.up_proj.weight": up_proj,
        f"{name}.mlp.down_proj.weight": down_proj,
        "drafter.fc.weight": o_proj,  # a layer has none of these three
        "drafter.hidden_norm.weight": input_norm,
        "drafter.norm.weight": input_norm,
    }
    weights = prepare_drafter(tensors, config, "bfloat16").layers[0]
    pages = cdiv(keys, page_size)
    order = np.argsort(np.arange(pages) * 7919 % 104729)  # scattered
    cache = np.full((pages * page_size, entry), np.nan).astype(context.dtype)
    where = np.arange(keys)
    cache[order[where // page_size] * page_size + where % page_size] = to_host(context)
    like = {"qk_rope_head_dim": size, "rope_theta": rope_theta, "rope_scaling": None}
    cos, sin = (to_device(table) for table in rope_tables(like, keys + slots))
    stream_x, h = to_device(to_host(x)), empty((slots, hidden), "bfloat16")
    rms_norm(stream_x, input_norm, eps=eps, y=h)
    launches = draft_layer(
        "layer", stream_x, h, weights, None, to_device(cache),
        to_device((keys + np.arange(slots)).astype(np.int32)), to_device(np.arange(slots)),
        to_device(np.array([keys], np.int32)), to_device(order[None].astype(np.int32)), page_size,
        cos, sin, config["drafter"], empty((slots,), "int32"), Buffers("bfloat16"),
    )  # fmt: skip
    for launch in launches:
        launch.call(stream=None)
    copy_to_device(to_host(stream_x), y)


def dflash_logits(
    text, *, page_size: int, weights: Mapping[str, Any], config: Config, logits, context,
    stream=None,
) -> None:  # fmt: skip
    """The drafter behind a text, of which the target has seen all but the last token. text [length]
    int32; logits [block_size - 1, vocab] fp32; context [layers, length - 1, 2 groups size] bf16."""
    tokens, drafter = to_host(text).tolist(), DFlash(weights, config)
    decoder = Decoder(
        weights, config, drafter, requests=1, budget=1, context=len(tokens) + 1, page_size=page_size
    )
    decoder.prefill(0, tokens[:-1])
    copy_to_device(drafter.draft(tokens[-1:], [len(tokens) - 1])[0], logits)
    copy_to_device(drafter.context(0, len(tokens) - 1), context)


def dflash_runs(
    text,
    prompt_start,
    limits,
    *,
    budget: int,
    chain: bool,
    weights: Mapping[str, Any],
    config: Config,
    tokens,
    cache,
    logits,
    context,
    drafts,
    stream=None,
) -> None:
    """A whole run with the drafter. text [tokens] int32, request r from prompt_start[r], limits
    [requests]: tokens to generate. Written: tokens [requests, new], -1 where unused; cache
    [requests, layers, rows, rank + rope], logits [requests, new, vocab], the drafter's context
    [requests, its layers, rows, 2 groups size] and its logits behind each whole text, drafts
    [requests, block_size - 1, vocab], all fp32 and 0 where unused."""
    given, starts = to_host(text), to_host(prompt_start).tolist()
    prompts = [given[a:b].tolist() for a, b in pairwise(starts)]
    drafter = DFlash(weights, config)
    runs = decode(
        weights, config, prompts, drafter, budget=budget, max_new=to_host(limits).tolist(),
        mode="chain" if chain else "tree", eos=(), page_size=4,
    )  # fmt: skip
    made = {
        name: np.full(tuple(array.shape), -1 if array.dtype == np.int32 else 0, array.dtype)
        for name, array in (
            ("tokens", tokens), ("cache", cache), ("logits", logits), ("context", context)
        )
    }  # fmt: skip
    for r, run in enumerate(runs):
        assert run.cache is not None  # it was asked for
        rows = run.cache.shape[1]
        made["tokens"][r, : len(run.tokens)] = run.tokens
        made["logits"][r, : len(run.tokens)] = run.logits
        made["cache"][r, :, :rows] = run.cache.astype(np.float32)
        made["context"][r, :, :rows] = drafter.context(r, rows).astype(np.float32)
    for array, out in zip(made.values(), (tokens, cache, logits, context), strict=True):
        copy_to_device(array, out)
    last, before = [run.text[-1] for run in runs], [len(run.text) - 1 for run in runs]
    copy_to_device(drafter.draft(last, before), drafts)
