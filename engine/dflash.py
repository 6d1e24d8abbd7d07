"""DFlash, a drafter on the device: a block of guesses a round from the target's hidden states.

The maths is in goldens/dflash.py. A block has a root token and mask tokens; its layers attend to
the block and to the context, which is a row of keys and values for each token in the target's
cache. A context row hangs on its own token alone, so it is made once, when the token joins the
text, and lies in the page that the token has in the target's cache: `prefix_len` says for both what
counts. The block's rows lie in a buffer of their own, which the next block overwrites.

    draft   block -> embedding -> layers -> final norm -> the target's head -> draft_top_k -> limit
    commit  taps of the accepted nodes -> fc -> norm -> keys and values of every layer -> cache

All of it is launches of the captured round. Bits of a row hang on the text alone, as the target's
do; the trees may then differ from the numpy loop's, where two guesses lie within a rounding of each
other.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from engine import layers
from engine.device import copy_to_device, empty, fill_nan, to_device, to_host
from engine.graph import download, pinned
from engine.kernels.add_rms_norm import add_rms_norm
from engine.kernels.draft_append import draft_append, draft_append_context
from engine.kernels.draft_attention import draft_attention
from engine.kernels.draft_block import draft_block
from engine.kernels.draft_gather import draft_gather
from engine.kernels.draft_limit import draft_limit
from engine.kernels.draft_top_k import draft_top_k, workspace_words
from engine.kernels.embedding import embedding
from engine.kernels.rms_norm import rms_norm
from engine.layers import Buffers, Config, Drafter, DraftLayer, Launch
from engine.model import rope_tables
from engine.prepared import prepare_drafter
from engine.splits import MAX_SPLITS


class DraftError(RuntimeError):
    """A kernel of the drafter met something that only the device could see; says which and
    where."""


class _Status:
    """int32 [rows] for each launch that sets one, side by side, and a host copy."""

    def __init__(self, sizes: Mapping[str, int]):
        total = sum(sizes.values())
        self.flat, self.host, self._parts = empty((total,), "int32"), pinned(total), {}
        for (name, size), end in zip(sizes.items(), np.cumsum(list(sizes.values())), strict=True):
            self._parts[name] = slice(int(end) - size, int(end))

    def __call__(self, name: str) -> Any:
        return self.flat[self._parts[name]]

    def fault(self, live: np.ndarray, first: int = 0) -> str:
        """What went wrong first, of the requests that are live, bool [requests], from `first`."""
        for name, part in self._parts.items():
            found = self.host[part].reshape(len(live), -1)
            bad = np.argwhere((found != 0) & live[:, None])
            if bad.size:
                request, row = bad[0]
                where = f"request {first + request}, {name}, row {row}"
                return f"{where}: status {found[request, row]}"
        return ""


class DFlash:
    """The drafter of a bundle, for engine.decode."""

    def __init__(self, weights: Mapping[str, Any] | Drafter, config: Config):
        """weights: the bundle's tensors, `drafter.*` among them, or prepared. ValueError if the
        config has no drafter."""
        if "drafter" not in config:
            raise ValueError("this bundle has no drafter: kdtr bundle make NAME --drafter adds one")
        self._tensors, self.config, self.drafter = weights, config, config["drafter"]
        self.length = self.drafter["block_size"] - 1
        self.taps = self.drafter["target_layer_ids"]

    # -- memory ------------------------------------------------------------------------------------

    def attach(self, decoder: Any) -> None:
        """Prepare the weights, and allocate for the rounds of an engine.decode.Decoder."""
        model, drafter, block = decoder.model, self.drafter, self.drafter["block_size"]
        self.decoder, self.model = decoder, model
        given = self._tensors
        if not isinstance(given, Drafter):
            given = prepare_drafter(given, self.config, model.act)
        self.weights: Drafter = given
        size, groups = drafter["head_dim"], drafter["num_key_value_heads"]
        self.entry = 2 * groups * size
        shape = (len(self.weights.layers), model.cache.latents.shape[1], self.entry)
        self.cache = empty(shape, "bfloat16")
        fill_nan(self.cache)  # what is read before it is written shows
        like = {
            "qk_rope_head_dim": size,
            "rope_theta": drafter["rope_theta"],
            "rope_scaling": drafter.get("rope_scaling"),
        }
        positions = model.cache.page_table.shape[1] * model.cache.page_size + block
        self.cos, self.sin = (to_device(table) for table in rope_tables(like, positions))
        self.own_slot = to_device(np.arange(decoder.requests * block))
        self.buffers = Buffers("bfloat16")
        self.count = to_device(np.arange(model.rows + 1, dtype=np.int32))
        most = max(model.rows, decoder.requests * (self.length + 1))
        self._context(most, _Status(self._context_sites(most)))
        self._block(decoder.k, _Status(self._block_sites()))
        self.buffers.freeze()
        self._status: dict[int, _Status] = {}

    def _context_sites(self, rows: int) -> dict[str, int]:
        names = ["gather", *(f"context{i}" for i in range(len(self.weights.layers)))]
        return dict.fromkeys(names, rows)

    def _block_sites(self) -> dict[str, int]:
        requests = self.decoder.requests
        names = ["embedding", *(f"block{i}" for i in range(len(self.weights.layers)))]
        sizes = dict.fromkeys(names, requests * (self.length + 1))
        return {**sizes, "draft_top_k": requests * self.length}

    # -- launches ----------------------------------------------------------------------------------

    def _context(self, rows: int, status: _Status) -> list[Launch]:
        """From features, position and slot [rows] to rows of keys and values in the cache."""
        b, weights, drafter = self.buffers, self.weights, self.drafter
        hidden, eps = self.config["hidden_size"], drafter["rms_norm_eps"]
        features = b.view("features", rows, len(self.taps) * hidden, dtype="bfloat16")
        position, slot = b.view("context_position", rows, dtype="int32"), self._slots(rows)
        mixed, c = b.activations("mixed", rows, hidden), b.activations("c", rows, hidden)
        launches = [
            *layers.gemm("fc", features, weights.fc, mixed),
            Launch("hidden_norm", partial(rms_norm, mixed, weights.hidden_norm, eps=eps, y=c)),
        ]
        for i, layer in enumerate(weights.layers):
            kv = b.view("kv", layer.kv.parts, rows, self.entry)
            launches += [
                *layers.project(f"context{i}.kv", c, layer.kv, kv, b),
                Launch(
                    f"context{i}.append",
                    partial(
                        draft_append_context, kv, layer.k_norm, self.cos, self.sin, position, slot,
                        eps=eps, cache=self.cache[i], status=status(f"context{i}"),
                    ),
                ),
            ]  # fmt: skip
        return launches

    def _slots(self, rows: int) -> Any:
        return self.buffers.view("context_slot", rows, dtype="int64")

    def _gather(
        self, taps: Any, accepted: Any, counts: Any, prefix_len: Any, page_table: Any, status: Any
    ) -> Launch:
        """The taps of accepted nodes [requests, room] and where their rows go."""
        (requests, room), b = accepted.shape, self.buffers
        rows = requests * room
        features = b.view("features", rows, taps.shape[1], dtype="bfloat16")
        position = b.view("context_position", rows, dtype="int32")
        call = partial(
            draft_gather, taps, accepted, counts, prefix_len, page_table,
            page_size=self.model.cache.page_size,
            features=features.reshape(requests, room, taps.shape[1]),
            position=position.reshape(requests, room),
            slot=self._slots(rows).reshape(requests, room),
            status=status.reshape(requests, room),
        )  # fmt: skip
        return Launch("gather", call)

    def _block(self, k: int, status: _Status) -> list[Launch]:
        """From roots and prefixes to proposals, decoder.log_probs and .tokens."""
        decoder, model, b, drafter = self.decoder, self.model, self.buffers, self.drafter
        requests, slots = decoder.requests, drafter["block_size"]
        rows, hidden, eps = requests * slots, self.config["hidden_size"], drafter["rms_norm_eps"]
        vocabulary = self.config["vocab_size"]
        prefix_len = model.prefixes(requests)
        tokens, position = (b.view(n, rows, dtype="int32") for n in ("tokens", "position"))
        x, h = b.view("x", rows, hidden), b.activations("h", rows, hidden)
        final = b.view("final", requests * self.length, hidden, dtype=model.act)
        self.logits = b.view("logits", requests * self.length, vocabulary)
        launches = [
            Launch(
                "block",
                partial(
                    draft_block, decoder.root_tokens, prefix_len,
                    mask_token=drafter["mask_token_id"], block_size=slots,
                    tokens=tokens.reshape(requests, slots),
                    position=position.reshape(requests, slots),
                ),
            ),
            Launch(
                "embedding",
                partial(
                    embedding, tokens, model.weights.embedding, x=x, status=status("embedding")
                ),
            ),
            Launch("norm", partial(rms_norm, x, self.weights.layers[0].input_norm, eps=eps, y=h)),
        ]  # fmt: skip
        norms = [layer.input_norm for layer in self.weights.layers[1:]]
        for i, layer in enumerate(self.weights.layers):
            launches += draft_layer(
                f"block{i}", x, h, layer, [*norms, None][i], self.cache[i], position,
                self.own_slot, prefix_len, model.cache.page_table[:requests],
                model.cache.page_size, self.cos, self.sin, drafter, status(f"block{i}"), b,
            )  # fmt: skip
        launches += [
            Launch(
                f"final_norm{r}",
                partial(
                    rms_norm, x[r * slots + 1 : (r + 1) * slots], self.weights.norm, eps=eps,
                    y=final[r * self.length : (r + 1) * self.length],
                ),
            )
            for r in range(requests)
        ]  # fmt: skip
        shape = (requests, self.length)
        workspace = b.view("workspace", *shape, workspace_words(vocabulary), dtype="uint32")
        return [
            *launches,
            *model.head(final, self.logits, b),
            Launch(
                "draft_top_k",
                partial(
                    draft_top_k, self.logits.reshape(*shape, vocabulary), top_k=k,
                    log_probs=decoder.log_probs, tokens=decoder.tokens,
                    status=status("draft_top_k").reshape(shape), workspace=workspace,
                ),
            ),
        ]  # fmt: skip

    # -- what a decoder calls ----------------------------------------------------------------------

    def launches(self, step: Any) -> dict[str, list[Launch]]:
        """A round's: see engine.decode."""
        decoder, window = self.decoder, step.plan.window
        accepted, counts = step.got.device["accepted"], step.got.device["accepted_counts"]
        rows = accepted.shape[0] * accepted.shape[1]
        status = _Status({**self._block_sites(), **self._context_sites(rows)})
        self._status[step.nodes] = status
        limit = partial(
            draft_limit, step.sent.device["reaches"], log_probs=decoder.log_probs,
            tokens=decoder.tokens,
        )  # fmt: skip
        gather = self._gather(
            step.plan.taps, accepted, counts, window.prefix_len, window.page_table, status("gather")
        )
        return {
            "draft": [*self._block(decoder.k, status), Launch("draft_limit", limit)],
            "commit": [
                gather,
                *self._context(rows, status),
                Launch("draft_status", partial(download, status.flat, status.host)),
            ],
        }

    def prefilled(self, request: int, plan: Any, start: int, count: int) -> None:
        """The context of a prompt's tokens at positions start .. start + count, rows of a pass."""
        status = _Status(self._context_sites(count))
        window, one = plan.window, slice(request, request + 1)
        gather = self._gather(
            plan.taps, self.count[:count].reshape(1, count), self.count[count : count + 1],
            window.prefix_len[one], window.page_table[one], status("gather"),
        )  # fmt: skip
        for launch in [gather, *self._context(count, status)]:
            launch.call(stream=None)
        status.host[:] = to_host(status.flat)
        if fault := status.fault(np.ones(1, bool), request):
            raise DraftError(f"dflash: prompt of {fault}; see its kernel's file")

    def check(self, step: Any) -> None:
        """DraftError if a launch of the round set a status for a request that has a tree."""
        live = step.sent.array["budgets"] >= 0
        if fault := self._status[step.nodes].fault(live):
            raise DraftError(f"dflash: {fault}; see its kernel's file")

    # -- for specs and tests -----------------------------------------------------------------------

    def context(self, request: int, tokens: int) -> np.ndarray:
        """Keys and values [layers, tokens, 2 groups size] of a request's first tokens."""
        return to_host(self.cache)[:, self.model.cache.slots(request, tokens)]

    def draft(self, roots: Any, prefixes: Any) -> np.ndarray:
        """Logits fp32 [requests, length, vocab] of a block behind each request's first tokens."""
        copy_to_device(np.asarray(roots, np.int32), self.decoder.root_tokens)
        prefix_len = self.model.prefixes(self.decoder.requests)
        copy_to_device(np.asarray(prefixes, np.int32), prefix_len)
        status = _Status(self._block_sites())
        for launch in self._block(self.decoder.k, status):
            launch.call(stream=None)
        status.host[:] = to_host(status.flat)
        if fault := status.fault(np.ones(len(roots), bool)):
            raise DraftError(f"dflash: {fault}")
        return to_host(self.logits).reshape(self.decoder.requests, self.length, -1)


def draft_layer(
    name: str,
    x: Any,
    h: Any,
    weights: DraftLayer,
    next_norm: Any,
    cache: Any,
    position: Any,
    own_slot: Any,
    prefix_len: Any,
    page_table: Any,
    page_size: int,
    cos: Any,
    sin: Any,
    drafter: Mapping[str, Any],
    status: Any,
    b: Buffers,
) -> list[Launch]:
    """From h = norm of x by this layer's input norm to x after the layer and h by `next_norm`
    (None: there is no next, and h is what it may). x, h [requests * slots, hidden]; cache
    [slots, 2 groups size], the layer's."""
    rows, hidden = x.shape
    heads, size, eps = drafter["num_attention_heads"], drafter["head_dim"], drafter["rms_norm_eps"]
    qkv = b.view("qkv", weights.qkv.parts, rows, weights.qkv.n)
    q, o = b.activations("q", rows, heads, size), b.activations("o", rows, heads, size)
    own = b.activations("own", rows, cache.shape[1])
    delta = b.view("delta", weights.o.parts, rows, hidden)
    down = b.view("down", weights.mlp.down.parts, rows, hidden)
    partial_sums = b.view("attention_partial", rows, MAX_SPLITS, heads, size)
    stats = b.view("attention_stats", rows, MAX_SPLITS, heads, 2)

    def add(what: str, parts: Any, norm: Any) -> Launch:
        return Launch(f"{name}.{what}", partial(add_rms_norm, parts, norm, eps=eps, x=x, y=h))

    return [
        *layers.project(f"{name}.qkv", h, weights.qkv, qkv, b),
        Launch(
            f"{name}.append",
            partial(
                draft_append, qkv, weights.q_norm, weights.k_norm, cos, sin, position, own_slot,
                eps=eps, q=q, cache=own, status=status,
            ),
        ),
        Launch(
            f"{name}.attention",
            partial(
                draft_attention, q, cache, own, page_table, prefix_len, scale=size**-0.5,
                page_size=page_size, o=o, partial=partial_sums, stats=stats,
            ),
        ),
        *layers.project(f"{name}.o", o.reshape(rows, heads * size), weights.o, delta, b),
        add("add_attention", delta, weights.post_norm),
        *layers.mlp(f"{name}.mlp", h, weights.mlp, down, b),
        add("add_mlp", down, weights.post_norm if next_norm is None else next_norm),
    ]  # fmt: skip
