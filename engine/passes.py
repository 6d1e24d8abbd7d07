"""Whole passes and runs as launchers: what the specs of stages layer, model and decode call.

Each builds a `Model` from the weights that it is given, runs it and copies what is asked for into
its outputs. Unlike the launchers of kernels these allocate: they stand for a process that starts,
answers once and ends. Cache pages are handed out in a scattered order on purpose.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from engine.cache import LatentCache
from engine.decode import CONTEXT, EOS, MAX_NEW, decode
from engine.device import cdiv, copy_to_device, to_host
from engine.draft import Ngram, Replay
from engine.layers import Config
from engine.model import Model, Tree
from engine.prepared import Prepared, prepare


def _scatter(cache: LatentCache, tokens: Sequence[int]) -> None:
    """Give request r pages for tokens[r] positions, in an order without pattern."""
    order = np.argsort(np.arange(cache.pages) * 7919 % 104729).tolist()
    for request, count in enumerate(tokens):
        need = cdiv(count, cache.page_size)
        cache.map_pages(request, order[:need])
        order = order[need:]


def _fill(model: Model, request: int, prefix: np.ndarray) -> None:
    """Make prefix [layers, tokens, rank + rope] the prefix of a request whose pages are mapped."""
    count = prefix.shape[1]
    slots = model.cache.slots(request, count)
    for layer in range(prefix.shape[0]):
        rows = to_host(model.cache.layer(layer))
        rows[slots] = prefix[layer]
        copy_to_device(rows, model.cache.layer(layer))
    model.prefix_len[request] = count


def ready(
    weights: Mapping[str, Any] | Prepared,
    config: Config,
    trees: Sequence[Tree],
    prefixes: Sequence[np.ndarray],
    page_size: int,
    group: Any = None,
) -> Model:
    """A model whose requests have these prefixes, ready for these windows."""
    totals = [len(t.tokens) + p.shape[1] for t, p in zip(trees, prefixes, strict=True)]
    model = Model(
        weights,
        config,
        rows=sum(len(tree.tokens) for tree in trees),
        requests=len(trees),
        positions=max(totals),
        page_size=page_size,
        group=group,
    )
    _scatter(model.cache, totals)
    for request, prefix in enumerate(prefixes):
        _fill(model, request, prefix)
    return model


def window_logits(
    tokens,
    parents,
    row_start,
    key_start,
    prefix,
    *,
    page_size: int,
    weights: Mapping[str, Any],
    config: Config,
    logits,
    token,
    stream=None,
) -> None:
    """One pass over a window of each request.

    tokens, parents [rows] int32: request r has rows row_start[r]..row_start[r + 1]; its prefix is
    keys key_start[r]..key_start[r + 1] of prefix [layers, keys, rank + rope], in the activations'
    dtype. logits [rows, vocab] fp32, token [rows] int32: the largest logit's id.
    """
    tokens, parents, row_start, key_start, prefix = (
        to_host(array) for array in (tokens, parents, row_start, key_start, prefix)
    )
    requests = range(len(row_start) - 1)
    rows = [slice(row_start[r], row_start[r + 1]) for r in requests]
    keys = [slice(key_start[r], key_start[r + 1]) for r in requests]
    trees = [Tree(tokens[part].tolist(), parents[part].tolist()) for part in rows]
    model = ready(weights, config, trees, [prefix[:, k] for k in keys], page_size)
    plan = model.forward(trees)
    plan.check()
    copy_to_device(to_host(plan.logits), logits)
    copy_to_device(to_host(plan.token), token)


def layer_output(
    x,
    parents,
    prefix,
    *,
    layer: int,
    page_size: int,
    weights: Mapping[str, Any],
    config: Config,
    y,
    latent,
    attention,
    mlp,
    stream=None,
) -> None:
    """One decoder layer over a window of one request.

    x [rows, hidden] fp32, the residual stream before the layer; parents [rows] int32; prefix
    [keys, rank + rope]. y [rows, hidden] fp32: the stream after the layer; latent
    [rows, rank + rope]: what the window adds to the cache; attention, mlp [rows, hidden] fp32: what
    the two blocks add to the stream.
    """
    run_layer(
        prepare(weights, config, only=[layer]), config, x, parents, prefix, page_size,
        {"y": y, "latent": latent, "attention": attention, "mlp": mlp},
    )  # fmt: skip


def run_layer(
    weights: Prepared,
    config: Config,
    x: Any,
    parents: Any,
    prefix: Any,
    page_size: int,
    outputs: Mapping[str, Any],
) -> None:
    """`layer_output` for the one layer of `weights`; outputs: y, latent, attention, mlp."""
    made = layer_values(weights, config, to_host(x), to_host(parents), to_host(prefix), page_size)
    for name, array in outputs.items():
        copy_to_device(made[name], array)


def layer_values(
    weights: Prepared,
    config: Config,
    x: np.ndarray,
    parents: np.ndarray,
    prefix: np.ndarray,
    page_size: int,
    group: Any = None,
) -> dict[str, np.ndarray]:
    """y, latent, attention and mlp of `layer_output` as host arrays; of a rank with `group`."""
    tree = Tree([0] * len(parents), parents.tolist())
    model = ready(weights, config, [tree], [prefix[None]], page_size, group)
    plan = model.fill([tree])
    names = [launch.name for launch in plan.launches]
    copy_to_device(x, plan.x)
    record: dict[str, list] = {}
    layer = slice(names.index("slot_mapping"), names.index("head"))
    plan.run(record=record, launches=layer)
    plan.check()
    slots = model.cache.slots(0, len(prefix) + len(parents))[len(prefix) :]
    made = {"y": to_host(plan.x), "latent": to_host(model.cache.layer(0))[slots]}
    return made | {name: _summed(record[name][0]) for name in ("attention", "mlp")}


def greedy_tokens(
    prompt, *, new: int, weights: Mapping[str, Any], config: Config, tokens, stream=None
) -> None:
    """prompt [length] int32; tokens [new] int32, one at a time, each the largest logit's id."""
    text = to_host(prompt).tolist()
    model = Model(weights, config, rows=len(text), positions=len(text) + new, page_size=4)
    found: list[int] = []
    window = text
    for _ in range(new):
        plan = model.forward([Tree.chain(window)])
        plan.check()
        model.advance(0, len(window))
        window = [int(to_host(plan.token)[-1])]
        found += window
    copy_to_device(np.array(found, np.int32), tokens)


def forward_tree(
    weights: Mapping[str, Any],
    config: Config,
    prompt: Sequence[int],
    tree: tuple[Sequence[int], Sequence[int]] | None = None,
) -> dict[str, np.ndarray]:
    """A prompt, and a tree (tokens, parents) behind it, through the engine; every value on the way.

    Returns host arrays named "prompt/..." and "tree/...": logits [t, vocab], hidden
    [layers + 1, t, hidden], attention and mlp [layers, t, hidden], latents
    [layers, t, rank + rope], router_index and router_weight [MoE layers, t, k].
    """
    windows = {"prompt": Tree.chain(prompt)}
    if tree is not None:
        windows["tree"] = Tree(*tree)
    longest = max(len(window.tokens) for window in windows.values())
    total = sum(len(window.tokens) for window in windows.values())
    model = Model(weights, config, rows=longest, positions=total)
    result: dict[str, Any] = {}
    for name, window in windows.items():
        record: dict[str, list] = {}
        model.forward([window], record=record).check()
        model.advance(0, len(window.tokens))
        slots = record.pop("slot")[0]
        latents = to_host(model.cache.latents)[:, slots]
        for key in ("attention", "mlp"):
            record[key] = [_summed(parts) for parts in record[key]]
        values = {key: np.stack(arrays) for key, arrays in record.items()}
        values["logits"], values["token"] = values["logits"][0], values["token"][0]
        result |= {f"{name}/{key}": value for key, value in {**values, "latents": latents}.items()}
    return result


def decode_runs(
    text,
    prompt_start,
    limits,
    eos,
    log_probs,
    guesses,
    *,
    budget: int,
    length: int,
    chain: bool,
    ngram: bool,
    context: int,
    temperature: float,
    seed: int,
    slope: float,
    weights: Mapping[str, Any],
    config: Config,
    tokens,
    ended,
    trees,
    parents,
    accepted,
    cache,
    logits,
    stream=None,
) -> None:
    """A whole run as a launcher, for specs of stage decode. Allocates: it stands for a process.

    text [tokens] int32, request r from prompt_start[r], may generate limits[r]; eos [1] int32, -1
    for none; log_probs fp32 and guesses int32 [requests, new, k], tables for engine.draft.Replay;
    ngram: that drafter instead; context: 0 for what the model allows; slope: what a node costs, as
    a share of a round without nodes, 0 for a fixed budget. Written: tokens [requests, new], ended
    [requests] (0 eos, 1 limit, 2 context), trees and parents [requests, new, budget + 1], accepted
    [requests, new, length + 1] int32, -1 where unused; cache [requests, layers, rows, rank + rope]
    and logits [requests, new, vocab] fp32, 0 where unused.
    """
    given, starts = to_host(text), to_host(prompt_start).tolist()
    prompts = [given[a:b].tolist() for a, b in pairwise(starts)]
    drafter: Any = Replay(
        list(to_host(log_probs)), list(to_host(guesses)), [len(p) for p in prompts], length
    )
    if ngram:
        drafter = Ngram(length)
    runs = decode(
        weights, config, prompts, drafter, budget=budget, max_new=to_host(limits).tolist(),
        mode="chain" if chain else "tree", eos=[t for t in to_host(eos).tolist() if t >= 0],
        context=context or None, temperature=temperature, seed=seed,
        costs=1 + slope * np.arange(budget + 1) if slope else None, page_size=4,
    )  # fmt: skip
    outputs = {
        "tokens": tokens, "trees": trees, "parents": parents, "accepted": accepted, "cache": cache,
        "logits": logits,
    }  # fmt: skip
    made = {
        name: np.full(tuple(array.shape), -1 if array.dtype == np.int32 else 0, array.dtype)
        for name, array in outputs.items()
    }
    for r, run in enumerate(runs):
        count = len(run.tokens)
        made["tokens"][r, :count], made["logits"][r, :count] = run.tokens, run.logits
        for i, done in enumerate(run.rounds):
            made["trees"][r, i, : len(done.tokens)] = done.tokens
            made["parents"][r, i, : len(done.tokens)] = done.parents
            made["accepted"][r, i, : len(done.accepted)] = done.accepted
        if run.cache is not None:
            made["cache"][r, :, : run.cache.shape[1]] = run.cache.astype(np.float32)
    for name, out in outputs.items():
        copy_to_device(made[name], out)
    why = [(EOS, MAX_NEW, CONTEXT).index(run.ended) for run in runs]
    copy_to_device(np.array(why, np.int32), ended)


def _summed(parts: np.ndarray) -> np.ndarray:
    """As the kernels add them: fp32, in ascending order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
