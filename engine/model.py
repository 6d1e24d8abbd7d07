"""The model on a device: weights prepared once, memory allocated once, one launch list a pass.

    model = Model(weights, config, rows=64)
    model.forward([Tree(tokens, parents)])    # a window of request 0, behind its prefix
    model.advance(0, 3)                       # its first three nodes are prefix from now on

A window is a tree of nodes of any size; a prompt is a tree without branches. For each (rows,
requests, words of an ancestor row) there is one launch list, `model.plan(rows, requests).launches`,
which is the whole forward pass in order. On a GPU it is captured into a CUDA graph when it is first
used. Whatever changes from pass to pass lies in device memory, so that the graph is replayed as it
is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from engine import layers
from engine.cache import LatentCache
from engine.device import SIMULATED, cdiv, copy_to_device, to_device, to_host
from engine.graph import queue, recorded
from engine.kernels.argmax import CHUNKS, argmax
from engine.kernels.embedding import embedding
from engine.kernels.rms_norm import rms_norm
from engine.kernels.slot_mapping import slot_mapping
from engine.kernels.tap import tap
from engine.layers import Buffers, Config, Launch, Window
from engine.prepared import Prepared, prepare


class ForwardError(RuntimeError):
    """A kernel met something that only the device could see; says where and at which node."""


@dataclass(frozen=True)
class Tree:
    """A window: tokens [t], parents [t] with parents[0] = -1 and parents[i] < i."""

    tokens: Sequence[int]
    parents: Sequence[int]

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "Tree":
        return cls(tokens, range(-1, len(tokens) - 1))

    def compiled(self, words: int) -> tuple[np.ndarray, np.ndarray]:
        """depth int32 [t] and ancestors uint32 [t, words]: bit j of word j // 32 in row i is set
        if j is i or an ancestor of i. ValueError for parents that are no such tree."""
        count = len(self.tokens)
        if len(self.parents) != count or count > 32 * words:
            raise ValueError(f"tree: {count} tokens, {len(self.parents)} parents, {words} words")
        depth, ancestors = np.zeros(count, np.int32), np.zeros((count, words), np.uint32)
        for i, parent in enumerate(self.parents):
            if not (parent == -1 if i == 0 else 0 <= parent < i):
                raise ValueError(f"tree: parent of node {i} is {parent}, not an earlier node")
            if i:
                depth[i] = depth[parent] + 1
                ancestors[i] = ancestors[parent]
            ancestors[i, i // 32] |= np.uint32(1 << i % 32)
        return depth, ancestors


@dataclass
class Plan:
    """A forward pass for a number of rows and requests: its memory and its launches, in order."""

    window: Window
    tokens: Any  # int32 [rows]
    x: Any  # fp32 [rows, hidden], the residual stream
    logits: Any  # fp32 [rows, vocab]
    token: Any  # int32 [rows], the largest logit's id
    status: Any  # int32 [sites, rows], 0 where all is well
    sites: list[str]  # names of the launches that set a status
    launches: list[Launch]
    direct: bool = False  # never as a graph
    taps: Any = None  # bf16 [rows, taps hidden], x after each tap layer, if the model has any
    starts: list[int] = field(default_factory=list)  # first row of each request, of the last pass
    nodes: int = 0  # of all its windows; rows behind them are padding
    ranks: bool = False  # several: the first pass connects them, which no capture should hold
    _graph: Any = field(default=None, repr=False)

    def run(
        self,
        stream: Any = None,
        *,
        record: dict[str, list] | None = None,
        launches: slice = slice(None),
    ) -> None:
        """Queue the pass on `stream` (None: the default one). With `record`, launch by launch, some
        of them if `launches` says so, and append host copies of their `records` to record[name]."""
        if record is not None or SIMULATED or self.direct or self.ranks:
            self.ranks = False
            for launch in self.launches[launches]:
                launch.call(stream=stream)
                if record is not None:
                    for name, array in launch.records.items():
                        record.setdefault(name, []).append(to_host(array))
            return
        from cuda.core import LEGACY_DEFAULT_STREAM

        if self._graph is None:
            self._graph = recorded(partial(queue, self.launches))
        self._graph.launch(LEGACY_DEFAULT_STREAM if stream is None else stream)

    def check(self) -> None:
        """Wait for the pass. ForwardError if a launch set a status."""
        status = to_host(self.status)[:, : self.nodes]
        bad = np.argwhere(status)
        if bad.size:
            site, row = bad[0]
            request = int(np.searchsorted(self.starts, row, side="right")) - 1
            raise ForwardError(
                f"request {request}, node {row - self.starts[request]}: {self.sites[site]} gives "
                f"status {status[site, row]}, see its file ({len(bad)} in all)"
            )


class Model:
    def __init__(
        self,
        weights: Mapping[str, Any] | Prepared,
        config: Config,
        *,
        rows: int = 64,
        requests: int = 1,
        positions: int | None = None,
        page_size: int = 16,
        pages: int | None = None,
        group: Any = None,
        taps: Sequence[int] = (),
    ):
        """weights: a bundle's tensors by name, in host or device memory, or prepared.
        taps: layers behind which every pass keeps the residual stream, for a drafter.
        group: this rank of several, see engine/parallel.py; all ranks do the same passes, and have
        the same results.

        rows: most nodes of a pass, all requests together. positions: longest prefix and window of a
        request (default: what the config allows, at most 8192). pages: of the cache (default:
        enough for all).
        """
        self.config = config
        positions = positions or min(config["max_position_embeddings"], 8192)
        self.rows, self.requests, self.words = rows, requests, cdiv(rows, 32)
        max_pages = cdiv(positions, page_size)
        if not isinstance(weights, Prepared):
            weights = prepare(weights, config, group=group)
        self.group, self.taps = group, list(taps)
        if not all(0 <= layer < len(weights.layers) for layer in taps):
            raise ValueError(f"model: taps {list(taps)} of {len(weights.layers)} layers")
        self.weights, self.act = weights, weights.act
        self.layers = weights.layers
        self.cos, self.sin = (to_device(t) for t in rope_tables(config, positions))
        self.cache = LatentCache(
            layers=len(self.layers),
            width=config["kv_lora_rank"] + config["qk_rope_head_dim"],
            dtype=self.act,
            requests=requests,
            pages=pages or requests * max_pages,
            page_size=page_size,
            max_pages=max_pages,
        )
        self.prefix_len = [0] * requests
        self._buffers = Buffers(self.act)
        self._plans: dict[tuple[int, int, int], Plan] = {}
        for layer in self.layers:
            if layer.moe:
                layers.reserve_experts(layer.moe, rows, self._buffers)
        layers.reserve_int4(self.layers, rows, self._buffers)
        most = 3 + 3 * len(self.layers)
        copy_to_device(
            np.zeros((most, rows), np.int32),
            self._buffers.view("status", most, rows, dtype="int32"),
        )
        self._planned(rows, requests, self.words)  # the largest pass fixes every buffer's size
        self._buffers.freeze()

    def forward(
        self,
        trees: Sequence[Tree | None],
        *,
        rows: int | None = None,
        record: dict[str, list] | None = None,
    ) -> Plan:
        """Run the windows of requests 0, 1, ...; None: that request has no window in this pass.
        rows: of the pass (default: its nodes); those behind the windows mean nothing.

        Fills the plan's device arrays and queues its launches; `plan.check()` waits for them.
        """
        plan = self.fill(trees, rows)
        plan.run(record=record)
        return plan

    def fill(self, trees: Sequence[Tree | None], rows: int | None = None) -> Plan:
        """The plan of a pass over these windows, its device arrays filled, nothing launched."""
        counts = [0 if tree is None else len(tree.tokens) for tree in trees]
        nodes = sum(counts)
        rows = nodes if rows is None else rows
        if not 1 <= nodes <= rows <= self.rows or len(trees) > self.requests:
            raise ValueError(
                f"forward: {nodes} nodes of {len(trees)} requests; the model has memory for "
                f"{self.rows} of {self.requests}"
            )
        for request, count in enumerate(counts):
            if count:
                self.cache.reserve(request, self.prefix_len[request] + count)
        plan = self.plan(rows, len(trees))
        compiled = [tree.compiled(self.words) for tree in trees if tree]
        window, behind = plan.window, rows - nodes
        compiled.append((np.zeros(behind, np.int32), np.zeros((behind, self.words), np.uint32)))
        tokens = [token for tree in trees if tree for token in tree.tokens] + [0] * behind
        for array, values in (
            (plan.tokens, tokens),
            (window.row_start, np.cumsum([0, *counts])),
            (window.prefix_len, self.prefix_len[: len(trees)]),
            (window.depth, np.concatenate([depth for depth, _ in compiled])),
            (window.ancestors, np.concatenate([ancestors for _, ancestors in compiled])),
        ):
            copy_to_device(np.asarray(values, np.dtype(array.dtype)), array)
        plan.starts, plan.nodes = np.cumsum([0, *counts[:-1]]).tolist(), nodes
        return plan

    def advance(self, request: int, nodes: int) -> None:
        """Make the first `nodes` nodes of the last window, a path, part of the prefix."""
        self.prefix_len[request] += nodes

    def prefixes(self, requests: int) -> Any:
        """int32 [requests]: the prefix_len of every plan for so many requests."""
        return self._buffers.view("prefix_len", requests, dtype="int32")

    def release(self, request: int) -> None:
        """Forget a request; its pages are free again."""
        self.prefix_len[request] = 0
        self.cache.release(request)

    def plan(self, rows: int, requests: int, words: int | None = None) -> Plan:
        """The launches of a pass over `rows` nodes of `requests` requests; made once. words: of an
        ancestor row (default: enough for a window of all the model's rows)."""
        words = self.words if words is None else words
        key = (rows, requests, words)
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        return self._plans[key]

    def _planned(self, rows: int, requests: int, words: int) -> Plan:
        config, b = self.config, self._buffers
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        sites: list[str] = []
        count = 3 + 3 * len(self.layers)
        status = b.view("status", count, rows, dtype="int32")

        def site(name: str) -> Any:
            sites.append(name)
            return status[len(sites) - 1]

        tokens = b.view("tokens", rows, dtype="int32")
        window = Window(
            rows=rows,
            requests=requests,
            row_start=b.view("row_start", requests + 1, dtype="int32"),
            prefix_len=self.prefixes(requests),
            depth=b.view("depth", rows, dtype="int32"),
            ancestors=b.view("ancestors", rows, words, dtype="uint32"),
            page_table=self.cache.page_table[:requests],
            page_size=self.cache.page_size,
            position=b.view("position", rows, dtype="int32"),
            slot=b.view("slot", rows, dtype="int64"),
            cos=self.cos,
            sin=self.sin,
            status=site,
        )
        x, h = b.view("x", rows, hidden), b.activations("h", rows, hidden)
        logits = b.view("logits", rows, config["vocab_size"])
        token = b.view("token", rows, dtype="int32")
        norms = [layer.input_norm for layer in self.layers] + [self.weights.final_norm]
        launches = [
            Launch(
                "embedding",
                partial(embedding, tokens, self.weights.embedding, x=x, status=site("embedding")),
                {"hidden": x},
            ),
            Launch(
                "slot_mapping",
                partial(
                    slot_mapping, window.row_start, window.prefix_len, window.depth,
                    window.page_table, page_size=window.page_size, position=window.position,
                    slot=window.slot, status=site("slot_mapping"),
                ),
                {"slot": window.slot},
            ),
            Launch("norm", partial(rms_norm, x, norms[0], eps=eps, y=h)),
        ]  # fmt: skip
        taps = None
        if self.taps:
            taps = b.view("taps", rows, len(self.taps) * hidden, dtype="bfloat16")
        for i, layer in enumerate(self.layers):
            launches += layers.decoder_layer(
                f"layer{i}", x, h, layer, norms[i + 1], self.cache.layer(i), window, config, b,
                self.group,
            )  # fmt: skip
            launches += [
                Launch(f"layer{i}.tap", partial(tap, x, tap=n, taps=taps))
                for n, tapped in enumerate(self.taps)
                if tapped == i
            ]
        launches += [
            *self.head(h, logits, b),
            Launch(
                "argmax",
                partial(
                    argmax, logits, token=token, status=site("argmax"),
                    best=b.view("best", rows, CHUNKS),
                    best_id=b.view("best_id", rows, CHUNKS, dtype="int32"),
                ),
                {"token": token},
            ),
        ]  # fmt: skip
        if len(sites) < count:  # dense layers have no router
            status = status[: len(sites)]
        direct = self.group is not None and not self.group.captured
        return Plan(
            window, tokens, x, logits, token, status, sites, launches, direct=direct, taps=taps,
            ranks=self.group is not None,
        )  # fmt: skip

    def head(self, h: Any, logits: Any, b: Buffers) -> list[Launch]:
        """Launches from h [rows, hidden] to logits fp32 [rows, vocab], wherever lm_head is."""
        head = self.weights.head
        if head.shape[0] == self.config["vocab_size"]:
            return layers.gemm("head", h, head, logits, logits=logits)
        part = b.view("projected", h.shape[0], head.shape[0])
        launches = [
            *layers.gemm("head", h, head, part),
            *layers.gathered("head", part, logits, b, self.group),
        ]
        launches[-1].records["logits"] = logits
        return launches


# -- rotary position ---------------------------------------------------------------------------


def rope_tables(config: Config, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, fp32 [positions, rope / 2], of YaRN (arXiv 2309.00071, section 3.2).

    Pairs that turn more than beta_fast times in the original context keep their frequency, those
    that turn less than beta_slow times are slowed by `factor`, with a linear ramp between. Angles
    are float64; at 262144 positions float32 ones would be off by a hundredth of a radian.
    """
    dim, theta, scaling = (
        config["qk_rope_head_dim"],
        config["rope_theta"],
        config["rope_scaling"],
    )
    pairs = np.arange(dim // 2)
    frequency, size = theta ** (-2 * pairs / dim), 1.0
    if scaling:
        context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        fast, slow = (
            dim * np.log(context / (scaling[beta] * 2 * np.pi)) / (2 * np.log(theta))
            for beta in ("beta_fast", "beta_slow")
        )
        low, high = max(np.floor(fast), 0), min(np.ceil(slow), dim - 1)
        ramp = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
        frequency = frequency * (1 - ramp) + frequency / factor * ramp
        size = layers.mscale(factor, scaling.get("mscale", 1))
        size /= layers.mscale(factor, scaling.get("mscale_all_dim", 0))
    angles = np.arange(positions)[:, None] * frequency
    return (np.cos(angles) * size).astype(np.float32), (np.sin(angles) * size).astype(np.float32)
