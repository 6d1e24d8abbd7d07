"""Decoding with draft trees (DDTree, arXiv 2604.12989) on the engine.

A round, for all requests at once: drafts -> tree_build -> the model over all nodes -> argmax or
sample -> greedy_accept -> cache_commit -> close_round. Roots, prefix lengths, trees and the cache
stay on the device. The launches of a round are the same every time, so on a GPU they are captured
into one CUDA graph, with the copies of what a host drafter proposes and of what was accepted: a
round is a graph launch and one wait. Nothing is allocated after start-up.

Every request has as many rows of the pass as the largest tree of the round may have nodes: budget +
1, or, where the budget adapts to costs, the smallest power of two that holds twice the last round's
largest tree, each size with a graph of its own. Rows behind a tree, and those of a request that has
ended, are padding: they see themselves alone, and no row's bits depend on its neighbours.

The text is the one that decoding one token at a time gives, bit for bit in the logits.

A drafter (engine.draft) proposes on the host, or has launches of its own:
  attach(decoder)                 once, when the model and its memory are there: allocate
  launches(step)                  {"draft": [...], "commit": [...]}, for each size of a round. The
                                  first fill decoder.log_probs and .tokens from decoder.root_tokens
                                  and step.sent.device["reaches"]; the others run between
                                  cache_commit and close_round, see step.got.device["accepted"] and
                                  ["accepted_counts"], and prefix_len as it was in the round
  prefilled(request, plan, start, count)
                                  after each pass over a prompt: positions start .. start + count
                                  of that request are the plan's rows
  check(step)                     after each round: RuntimeError if a launch found a fault
and, if it reads the target's hidden states, `taps`: the layers of which plan.taps has the stream.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from engine.device import cdiv, copy_to_device, empty, to_device, to_host
from engine.graph import Packed, Staged, download, pinned, upload
from engine.kernels.cache_commit import ENTRY, cache_commit
from engine.kernels.close_round import close_round
from engine.kernels.embedding import embedding
from engine.kernels.greedy_accept import NODE, greedy_accept
from engine.kernels.sample import sample
from engine.kernels.tree_build import tree_build
from engine.kernels.tree_verify_mla import MAX_WINDOW
from engine.layers import Config, Launch
from engine.model import Model, Tree
from engine.prepared import Prepared

MODES = ("tree", "chain", "ar")
EOS, MAX_NEW, CONTEXT = "eos", "max_new", "context"  # why a request ended
PREFILL_ROWS = 64  # tokens of a prompt in one pass


class DecodeError(RuntimeError):
    """A kernel met something that only the device could see; says which request and node."""


@dataclass(frozen=True)
class Round:
    """One round of one request: the tree [n], what the target said, what was accepted."""

    tokens: np.ndarray  # int32 [n], the root first
    parents: np.ndarray  # int32 [n]
    depths: np.ndarray  # int32 [n]
    targets: np.ndarray  # int32 [n]
    accepted: np.ndarray  # int32 [a], nodes of the accepted path, the root (0) first
    next_token: int  # the target token behind them
    emitted: int  # tokens that joined the text: a, or fewer where it ended


@dataclass
class Decoded:
    """What became of one request. `logits` and `cache` are filled if they were asked for; the
    cache [layers, P, rank + rope] covers prompt + tokens[:-1]."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    cache: np.ndarray | None = None
    ended: str = ""

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens


class Step:
    """A round for trees of at most `nodes` nodes: its launches, and what they read and write.

    `sent` goes to the device and `got` comes back in the round's own graph:
      sent  budgets (-1: no tree), reaches (positions that could still be emitted), floors
      got   tree_tokens, parents, targets [requests, nodes], counts, accepted [requests, path],
            accepted_counts, next_tokens, and what went wrong
    """

    def __init__(self, decoder: "Decoder", nodes: int):
        self.decoder, self.nodes = decoder, nodes
        self.path = min(nodes, decoder.length + 1)
        requests = decoder.requests
        each, trees = ((requests,), "int32"), ((requests, nodes), "int32")
        self.sent = Packed(budgets=each, reaches=each, floors=((nodes,), "float32"))
        self.got = Packed(
            tree_tokens=trees,
            parents=trees,
            targets=trees,
            counts=each,
            accepted=((requests, self.path), "int32"),
            accepted_counts=each,
            next_tokens=each,
            tree_status=each,
            accept_status=each,
            commit_status=each,
            fault=each,
        )
        self.row_start = pinned(requests + 1)
        self.row_start[:] = np.arange(requests + 1) * nodes
        self.row_request = to_device(np.repeat(np.arange(requests, dtype=np.int32), nodes))
        self.plan = decoder.model.plan(requests * nodes, requests, cdiv(nodes, 32))
        self.staged = Staged(self._stages(), direct=self.plan.direct)

    def _stages(self) -> dict[str, list[Launch]]:
        """The launches of the round in order, by stage."""
        decoder, plan, window = self.decoder, self.plan, self.plan.window
        got, sent, proposals = self.got.device, self.sent.device, decoder.proposals
        shape = (decoder.requests, self.nodes)
        rows = shape[0] * shape[1]
        site = plan.status[plan.status.shape[0] - 1]  # of the last site, argmax
        targets = got["targets"].reshape(rows)
        embed = partial(
            embedding, got["tree_tokens"].reshape(rows), decoder.model.weights.embedding,
            x=plan.x, status=plan.status[0],
        )  # fmt: skip
        choose = partial(plan.launches[-1].call, token=targets)  # the plan's argmax
        if decoder.temperature > 0:
            choose = partial(
                sample, plan.logits, self.row_request, window.position, token=targets, status=site,
                temperature=decoder.temperature, seed=decoder.seed,
            )  # fmt: skip
        own: Mapping[str, list[Launch]] = {
            "draft": [Launch("proposals", partial(upload, proposals.host, proposals.flat))]
        }
        if hasattr(decoder.drafter, "launches"):
            own = decoder.drafter.launches(self)
        return {
            "draft": [
                Launch("sent", partial(upload, self.sent.host, self.sent.flat)),
                Launch("row_start", partial(upload, self.row_start, window.row_start)),
                *own["draft"],
            ],
            "build": [
                Launch(
                    "tree_build",
                    partial(
                        tree_build, decoder.log_probs, decoder.tokens, decoder.root_tokens,
                        sent["budgets"], sent["floors"], tree_tokens=got["tree_tokens"],
                        parents=got["parents"], depths=window.depth.reshape(shape),
                        ancestors=window.ancestors.reshape((*shape, cdiv(self.nodes, 32))),
                        counts=got["counts"], status=got["tree_status"],
                    ),
                )
            ],
            "verify": [Launch("embedding", embed), *plan.launches[1:-1], Launch("choose", choose)],
            "accept": [
                Launch(
                    "greedy_accept",
                    partial(
                        greedy_accept, got["targets"], site.reshape(shape), got["tree_tokens"],
                        got["parents"], got["counts"], max_accepted=self.path,
                        accepted=got["accepted"], accepted_counts=got["accepted_counts"],
                        next_tokens=got["next_tokens"], status=got["accept_status"],
                    ),
                )
            ],
            "commit": [
                Launch(
                    "cache_commit",
                    partial(
                        cache_commit, window.page_table, window.prefix_len, got["accepted"],
                        got["accepted_counts"], page_size=window.page_size,
                        cache=decoder.model.cache.latents, new_prefix_len=decoder.new_prefix_len,
                        status=got["commit_status"],
                    ),
                ),
                *own.get("commit", ()),
                Launch(
                    "close_round",
                    partial(
                        close_round, plan.status, got["counts"], got["next_tokens"],
                        decoder.new_prefix_len, root_tokens=decoder.root_tokens,
                        prefix_len=window.prefix_len, fault=got["fault"],
                    ),
                ),
                Launch("got", partial(download, self.got.flat, self.got.host)),
            ],
        }  # fmt: skip

    def run(self) -> dict[str, float]:
        """Upload what was drafted, run the round, wait for it: seconds of each stage. DecodeError
        if a kernel found a fault."""
        self.staged.launch()
        seconds = self.staged.wait()
        got = self.got.array
        for request in range(self.decoder.requests):
            where = f"request {request}"
            if fault := int(got["fault"][request]):
                site, node = divmod(fault - 1, self.nodes)
                name = self.plan.sites[site]
                raise DecodeError(f"{where}, node {node}: {name} sets a status, see its file")
            if code := int(got["tree_status"][request]):
                raise DecodeError(f"{where}: tree_build gives status {code}, see its file")
            for name, file, of_node in (
                ("accept", "greedy_accept", NODE),
                ("commit", "cache_commit", ENTRY),
            ):
                if fault := int(got[name + "_status"][request]):
                    node, code = divmod(fault, of_node)
                    raise DecodeError(
                        f"{where}, node {node}: {name} gives status {code}, see {file}"
                    )
        if hasattr(self.decoder.drafter, "check"):
            self.decoder.drafter.check(self)
        return seconds


class Decoder:
    """A model, its cache and its rounds, for a number of requests, a drafter and a budget."""

    def __init__(
        self,
        weights: Mapping[str, Any] | Prepared,
        config: Config,
        drafter: Any,
        *,
        requests: int,
        budget: int,
        context: int,
        mode: str = "tree",
        temperature: float = 0.0,
        seed: int = 0,
        adaptive: bool = False,
        page_size: int = 16,
        group: Any = None,
    ):
        """context: longest text. adaptive: rounds of several sizes. NotImplementedError for larger
        trees than attention takes."""
        if mode not in MODES:
            raise ValueError(f"decode: mode {mode!r}, expected one of {', '.join(MODES)}")
        if budget < 0:
            raise ValueError(f"decode: budget {budget}, expected 0 or more")
        self.drafter: Any = None if mode == "ar" or budget == 0 else drafter
        self.length = 1 if self.drafter is None else self.drafter.length
        self.budget = 0 if mode == "ar" else budget
        self.k = 1 if mode == "chain" else max(1, min(self.budget, config["vocab_size"]))
        if mode == "chain":
            self.budget = min(self.budget, self.length)
        self.config, self.requests = config, requests
        self.context, self.temperature, self.seed = context, temperature, seed
        if self.budget + 1 > MAX_WINDOW:
            raise NotImplementedError(
                f"decode: a budget of {self.budget} makes trees of {self.budget + 1} nodes; "
                f"attention takes at most {MAX_WINDOW}"
            )
        rows = requests * (self.budget + 1)
        self.model = Model(
            weights, config, rows=max(rows, min(context, PREFILL_ROWS)), requests=requests,
            positions=context + self.budget + 1, page_size=page_size, group=group,
            taps=getattr(self.drafter, "taps", ()),
        )  # fmt: skip
        drafts = (requests, self.length, self.k)
        self.proposals = Packed(log_probs=(drafts, "float32"), tokens=(drafts, "int32"))
        self.log_probs = self.proposals.device["log_probs"]
        self.tokens = self.proposals.device["tokens"]
        self.root_tokens = empty((requests,), "int32")
        self.new_prefix_len = empty((requests,), "int32")
        self.first = empty((2, 1), "int32")  # token and status of a prompt's last row
        self.number = to_device(np.arange(requests, dtype=np.int32))
        if self.drafter is not None and hasattr(self.drafter, "attach"):
            self.drafter.attach(self)
        rooms = sizes(self.budget + 1) if adaptive else [self.budget + 1]
        self.steps = {nodes: Step(self, nodes) for nodes in rooms}

    def prefill(self, request: int, prompt: Sequence[int]) -> tuple[int, np.ndarray]:
        """Put a prompt into the cache; its first token and the logits [vocab] it came from."""
        model = self.model
        model.release(request)
        trees: list[Tree | None] = [None] * self.requests
        for start in range(0, len(prompt), PREFILL_ROWS):
            part = list(prompt[start : start + PREFILL_ROWS])
            trees[request] = Tree.chain(part)
            # Rows up to a power of two: prompts of all lengths, and all requests, share few graphs.
            rows = min(1 << (len(part) - 1).bit_length(), model.rows)
            plan = model.forward(trees, rows=rows)
            plan.check()
            if hasattr(self.drafter, "prefilled"):
                self.drafter.prefilled(request, plan, start, len(part))
            model.advance(request, len(part))
        last = len(part) - 1
        logits = to_host(plan.logits[last])
        if self.temperature <= 0:
            return int(to_host(plan.token)[last]), logits
        sample(
            plan.logits[last : last + 1], self.number[request : request + 1],
            plan.window.position[last : last + 1], temperature=self.temperature, seed=self.seed,
            token=self.first[0], status=self.first[1],
        )  # fmt: skip
        token, status = to_host(self.first)[:, 0].tolist()
        if status:
            raise DecodeError(f"request {request}, prompt: sample gives status {status}")
        return token, logits

    def start(self, roots: Sequence[int], texts: Sequence[int]) -> None:
        """Begin rounds: the root of each request, and how long its text may become. Loads and
        captures the rounds. CacheFull if there are not enough pages."""
        for request, most in enumerate(texts):
            self.model.cache.reserve(request, most + self.budget + 1)
        self._rewind(roots)
        self.proposals.array["log_probs"][:] = -np.inf
        self.proposals.array["tokens"][:] = -1
        for step in self.steps.values():
            step.sent.array["budgets"][:] = -1  # no trees: nothing moves, no root changes
            step.sent.array["reaches"][:] = 0
            step.sent.array["floors"][:] = -np.inf
            step.staged.load()

    def _rewind(self, roots: Sequence[int]) -> None:
        prefixes = self.steps[self.budget + 1].plan.window.prefix_len
        copy_to_device(np.asarray(self.model.prefix_len, np.int32), prefixes)
        copy_to_device(np.asarray(roots, np.int32), self.root_tokens)

    def measure(self, roots: Sequence[int], runs: int) -> dict[int, float]:
        """Seconds of a round by nodes below the root, all requests having full trees; the median of
        `runs`. After start; leaves prefixes and roots as they were."""
        log_probs, tokens = (self.proposals.array[name] for name in ("log_probs", "tokens"))
        rank = np.arange(self.k)
        log_probs[:] = -np.log(2 + rank)
        shift = 17 * np.arange(self.length)[:, None] + 5 * np.arange(self.requests)[:, None, None]
        tokens[:] = (rank + shift) % self.config["vocab_size"]
        found = {}
        for nodes, step in self.steps.items():
            step.sent.array["budgets"][:] = nodes - 1
            step.sent.array["reaches"][:] = self.length
            step.sent.array["floors"][:] = -np.inf
            times = []
            for _ in range(runs):
                self._rewind(roots)
                times.append(sum(step.run().values()))
            found[nodes - 1] = float(np.median(times))
        self._rewind(roots)
        return found


def sizes(nodes: int) -> list[int]:
    """Nodes that the rounds of an adaptive budget have room for: powers of two, then `nodes`."""
    return [1 << i for i in range(nodes.bit_length()) if 1 << i < nodes] + [nodes]


def measured_costs(
    weights: Mapping[str, Any] | Prepared,
    config: Config,
    prompts: Sequence[Sequence[int] | np.ndarray],
    drafter: Any,
    *,
    budget: int,
    mode: str = "tree",
    temperature: float = 0.0,
    runs: int = 9,
    page_size: int = 16,
    group: Any = None,
) -> dict[int, float]:
    """Seconds of a round behind these prompts, by nodes below the root of each request's tree:
    0, 1, 3, 7, .. and the budget. Stages of the device alone, the drafter's included if it has
    any. What lies between is for np.interp: `decode` wants every number of nodes. group: this
    rank of several; they must decode with the costs of one of them."""
    longest = max(len(prompt) for prompt in prompts)
    decoder = Decoder(
        weights, config, drafter, requests=len(prompts), budget=budget, mode=mode,
        context=longest + 1, temperature=temperature, adaptive=True, page_size=page_size,
        group=group,
    )  # fmt: skip
    roots = [decoder.prefill(r, [int(t) for t in p])[0] for r, p in enumerate(prompts)]
    decoder.start(roots, [longest + 1] * len(prompts))
    return decoder.measure(roots, runs)


def decode(
    weights: Mapping[str, Any] | Prepared,
    config: Config,
    prompts: Sequence[Sequence[int] | np.ndarray],
    drafter: Any,
    *,
    budget: int,
    max_new: int | Sequence[int],
    mode: str = "tree",
    eos: Sequence[int] | None = None,
    context: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    costs: np.ndarray | None = None,
    on_token: Callable[[int, int], None] | None = None,
    on_round: Callable[[int, Round], None] | None = None,
    times: dict[str, float] | None = None,
    keep: bool = True,
    page_size: int = 16,
    group: Any = None,
) -> list[Decoded]:
    """Decode all prompts side by side, a round for all at a time, until all have ended.

    drafter   see engine.draft; not asked in mode "ar".
    max_new   tokens to generate, for each request if a sequence.
    eos       tokens that end a text (default: the config's eos_token_id); they are its last.
    context   longest text (default: max_position_embeddings).
    costs     [budget + 1], the measured time of a round with n nodes below the root: no tree grows
              beyond what pays.
    on_token(request, token) is called for each token as it comes, on_round(request, round) after
    each round. `times` gains the seconds of each stage: the device's own of build, verify, accept
    and commit, the host's of load, prefill and emit, both of draft; launch is what a round took
    beyond them. `keep`: return the logits of every token, which waits once more for each, and the
    cache. group: this rank of several (engine/parallel.py), which all decode alike; `costs` must be
    the same ones. ValueError for settings that make no sense.
    """
    limits = [max_new] * len(prompts) if isinstance(max_new, int) else list(max_new)
    if not prompts or len(limits) != len(prompts) or min(limits) < 1:
        raise ValueError(
            f"decode: max_new {max_new}, expected 1 or more for {len(prompts)} prompts"
        )
    longest = config["max_position_embeddings"]
    context = longest if context is None else context
    if not 1 <= context <= longest:
        raise ValueError(f"decode: context {context}, expected 1 to {longest}")
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context:
            raise ValueError(
                f"decode: prompt {number} has {len(prompt)} tokens, expected 1 to {context - 1}"
            )
    if eos is None:
        eos = config.get("eos_token_id", ())
    ends = frozenset(np.atleast_1d(np.asarray(eos, np.int64)).tolist())
    requests = [Decoded([int(token) for token in prompt]) for prompt in prompts]
    most = [
        min(context, len(request.prompt) + limit)
        for request, limit in zip(requests, limits, strict=True)
    ]
    times = {} if times is None else times
    since = time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal since
        now = time.perf_counter()
        times[stage], since = times.get(stage, 0.0) + now - since, now

    decoder = Decoder(
        weights, config, drafter, requests=len(prompts), budget=budget, mode=mode,
        context=max(most), temperature=temperature, seed=seed, adaptive=costs is not None,
        page_size=page_size, group=group,
    )  # fmt: skip
    lap("load")

    def emit(number: int, tokens: Iterable[int], rows: Iterable[np.ndarray | None]) -> int:
        """Add tokens to the text until it ends; how many."""
        request, before = requests[number], len(requests[number].tokens)
        for token, row in zip(tokens, rows, strict=True):
            request.tokens.append(int(token))
            if row is not None:
                request.logits.append(row)
            if on_token:
                on_token(number, int(token))
            if token in ends:
                request.ended = EOS
            elif len(request.tokens) == limits[number]:
                request.ended = MAX_NEW
            elif len(request.prompt) + len(request.tokens) == context:
                request.ended = CONTEXT
            if request.ended:
                break
        return len(request.tokens) - before

    for number, request in enumerate(requests):
        token, row = decoder.prefill(number, request.prompt)
        emit(number, [token], [row if keep else None])
    lap("prefill")
    decoder.start([request.tokens[-1] for request in requests], most)
    lap("load")
    pace, proposals = _Pace(costs), decoder.proposals.array
    while any(not request.ended for request in requests):
        step = decoder.steps[pace.size(decoder.steps)]
        sent, got = step.sent.array, step.got.array
        sent["floors"][:] = pace.floors(step.nodes)
        proposals["log_probs"][:], proposals["tokens"][:] = -np.inf, -1
        for number, request in enumerate(requests):
            room = min(limits[number] - len(request.tokens), context - len(request.text))
            reach = min(decoder.length, room - 1)  # deeper nodes could never be emitted
            sent["budgets"][number] = -1 if request.ended else step.nodes - 1
            sent["reaches"][number] = 0 if request.ended else reach
            if request.ended or decoder.drafter is None or hasattr(drafter, "launches"):
                continue
            log_probs, tokens = drafter.propose(number, request.text, decoder.k)
            proposals["log_probs"][number, :reach] = log_probs[:reach]
            proposals["tokens"][number, :reach] = tokens[:reach]
        lap("draft")
        for stage, seconds in step.run().items():
            times[stage] = times.get(stage, 0.0) + seconds
            since += seconds
        lap("launch")
        for number, request in enumerate(requests):
            if request.ended:
                continue
            count = int(got["counts"][number])
            path = got["accepted"][number, : got["accepted_counts"][number]].copy()
            tree_tokens, parents, targets = (
                got[name][number, :count].copy() for name in ("tree_tokens", "parents", "targets")
            )
            rows = [
                to_host(step.plan.logits[number * step.nodes + node]) if keep else None
                for node in path.tolist()
            ]
            emitted = emit(number, targets[path], rows)
            pace.spend(count - 1, emitted)
            done = Round(
                tree_tokens, parents, _depths(parents), targets, path,
                int(got["next_tokens"][number]), emitted,
            )  # fmt: skip
            request.rounds.append(done)
            if on_round:
                on_round(number, done)
        lap("emit")
    if keep:
        latents = to_host(decoder.model.cache.latents)
        for number, request in enumerate(requests):
            slots = decoder.model.cache.slots(number, len(request.text) - 1)
            request.cache = latents[:, slots]
    return requests


def _depths(parents: np.ndarray) -> np.ndarray:
    depths = np.zeros(len(parents), np.int32)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths


class _Pace:
    """Where to stop growing trees, by what rounds cost and what they have brought so far.

    The n-th node costs costs[n] - costs[n - 1], a time in which the rounds so far brought that time
    times tokens / time; a node of score s brings e^s tokens, and one that brings less is left out.
    """

    def __init__(self, costs: np.ndarray | None):
        self.costs = None if costs is None else np.asarray(costs, np.float64)
        self.tokens, self.time = 0, 0.0
        self.widest = 0  # nodes of the largest tree since `size`, the root included

    def size(self, rooms: Iterable[int]) -> int:
        """Which of these numbers of nodes the next round has room for: the smallest that holds
        twice the last round's largest tree."""
        wanted, self.widest = 2 * self.widest, 0
        most = max(rooms)
        if self.costs is None or not wanted:
            return most
        return min((room for room in rooms if room >= wanted), default=most)

    def spend(self, nodes: int, tokens: int) -> None:
        self.widest = max(self.widest, nodes + 1)
        self.tokens += tokens
        self.time += 0.0 if self.costs is None else float(self.costs[nodes])

    def floors(self, nodes: int) -> np.ndarray:
        """float32 [nodes], the least score (nats) of the n-th node."""
        floors = np.full(nodes, -np.inf, np.float32)
        if self.costs is None:
            return floors
        if len(self.costs) < nodes:
            raise ValueError(f"decode: {len(self.costs)} costs for trees of {nodes} nodes")
        pace = self.tokens / self.time if self.tokens else 1 / self.costs[0]
        price = np.maximum(np.diff(self.costs[:nodes]) * pace, 0)
        with np.errstate(divide="ignore"):
            floors[1:] = np.log(price)
        return floors
