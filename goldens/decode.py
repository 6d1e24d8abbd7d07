"""Decoding with draft trees (DDTree, arXiv 2604.12989), one round after the other.

A round of a request whose text ends in the root token:

  draft    log-probabilities of the k most probable tokens at each of the next L positions
  build    the best prefixes of those, at most `budget` nodes below the root     goldens.tree_build
  verify   the model over all nodes at once, behind the cache; a target token a node: the argmax,
           or one draw from softmax(logits / temperature)                        goldens.sample
  accept   from the root, follow the target token while it names a child      goldens.greedy_accept
  commit   the rows of that path join the cache; the target token behind it is the next root

Every token of the text is a target token of a node whose path is the text before it, drawn with
random numbers that depend on its position alone: tree, chain (k = 1) and ar (no drafts) give the
same text, at any temperature.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldens import greedy_accept, sample, tree_build
from goldens.drafters import nothing
from goldens.forward import forward
from goldens.model import Config, Weights
from goldens.rounding import EXACT, Rounding

MODES = ("tree", "chain", "ar")
EOS, MAX_NEW, CONTEXT = "eos", "max_new", "context"  # why a request ended


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
    """What became of one request. `cache` covers prompt + tokens[:-1]."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)  # [vocab] that each token came from
    cache: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0)))  # [layers, P, R + rope]
    ended: str = ""  # EOS, MAX_NEW or CONTEXT

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens


def decode(
    weights: Mapping[str, np.ndarray] | Weights,
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
    faithful: bool = True,
    on_token: Callable[[int, int], None] | None = None,
    on_round: Callable[[int, Round], None] | None = None,
    times: dict[str, float] | None = None,
) -> list[Decoded]:
    """Decode all prompts, a round for each in turn until all have ended.

    drafter   see goldens.drafters; not asked in mode "ar".
    max_new   tokens to generate, for each request if a sequence.
    eos       tokens that end a text (default: the config's eos_token_id); they are its last.
    context   longest text (default: max_position_embeddings).
    costs     [budget + 1], the measured time of a round with n nodes below the root: no tree grows
              beyond what pays (`cost_floors`).
    faithful  round where the engine rounds.
    on_token(request, token) is called for each token as it comes, on_round(request, round) after
    each round; `times` gains the seconds spent in each stage. ValueError for settings that make no
    sense.
    """
    limits, ends = checked(config, prompts, budget, max_new, mode, eos, context)
    context = config["max_position_embeddings"] if context is None else context
    weights = Weights.of(weights)
    rounding = Rounding(weights.activations) if faithful else EXACT
    vocabulary = config["vocab_size"]
    budget = 0 if mode == "ar" else budget
    k = 1 if mode == "chain" else max(1, min(budget, vocabulary))
    requests = [Decoded([int(token) for token in prompt]) for prompt in prompts]
    pace, times = Pace(costs), {} if times is None else times
    since = time.perf_counter()

    def lap(stage: str) -> None:
        """Charge the time since the last lap to a stage."""
        nonlocal since
        now = time.perf_counter()
        times[stage], since = times.get(stage, 0.0) + now - since, now

    def choose(number: int, logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """A target token for each row of logits [n, vocab], of tokens at positions [n]."""
        if temperature <= 0:
            return logits.argmax(-1).astype(np.int32)
        drawn = sample.reference(
            logits=logits.astype(np.float32),
            request=np.full(len(logits), number),
            position=positions,
            temperature=temperature,
            seed=seed,
        )
        if drawn["status"].any():
            raise ArithmeticError(f"decode: request {number} has logits of no distribution")
        return drawn["token"]

    def emit(number: int, tokens: Iterable[int], logits: np.ndarray) -> int:
        """Add tokens and the rows of logits they came from until the text ends; how many."""
        request, before = requests[number], len(requests[number].tokens)
        for token, row in zip(tokens, logits, strict=True):
            request.tokens.append(int(token))
            request.logits.append(row)
            if on_token:
                on_token(number, int(token))
            if token in ends:
                request.ended = EOS
            elif len(request.tokens) == limits[number]:
                request.ended = MAX_NEW
            elif len(request.text) == context:
                request.ended = CONTEXT
            if request.ended:
                break
        return len(request.tokens) - before

    for number, request in enumerate(requests):
        run = forward(weights, config, request.prompt, rounding=rounding)
        request.cache = run["latents"]
        if mode != "ar":
            drafter.observe(number, run["hidden"])
        last = run["logits"][-1:]
        emit(number, choose(number, last, np.array([len(request.prompt) - 1])), last)
        lap("prefill")

    while any(not request.ended for request in requests):
        nodes = pace.size(sizes(budget + 1))  # of a tree in this round, at most
        floors = pace.floors(nodes)
        for number, request in enumerate(requests):
            if request.ended:
                continue
            text = request.text
            room = min(limits[number] - len(request.tokens), context - len(text))
            proposals = nothing(1, k) if not budget else drafter.propose(number, text, k)
            lap("draft")
            log_probs, tokens = (array[: max(room - 1, 0)] for array in proposals)
            tree = grown(text[-1], log_probs, tokens, nodes - 1, floors)
            lap("build")
            start = len(text) - 1
            run = forward(
                weights, config, tree["tree_tokens"], parents=tree["parents"],
                prefix_cache=request.cache, rounding=rounding,
            )  # fmt: skip
            targets = choose(number, run["logits"], start + tree["depths"])
            lap("verify")
            path, next_token = accept(tree, targets)
            lap("accept")
            new = [*tree["tree_tokens"][path[1:]], next_token]
            count = emit(number, new, run["logits"][path])
            kept = path[:count]
            request.cache = np.concatenate([request.cache, run["latents"][:, kept]], axis=1)
            if mode != "ar":
                drafter.observe(number, run["hidden"][:, kept])
            lap("commit")
            pace.spend(len(targets) - 1, count)
            done = Round(
                tree["tree_tokens"], tree["parents"], tree["depths"], targets, path,
                int(next_token), count,
            )  # fmt: skip
            request.rounds.append(done)
            if on_round:
                on_round(number, done)
    return requests


def checked(
    config: Config,
    prompts: Sequence[Sequence[int] | np.ndarray],
    budget: int,
    max_new: int | Sequence[int],
    mode: str,
    eos: Sequence[int] | None,
    context: int | None,
) -> tuple[list[int], frozenset[int]]:
    """Tokens to generate for each request, and what ends a text; ValueError if it cannot be."""
    if mode not in MODES:
        raise ValueError(f"decode: mode {mode!r}, expected one of {', '.join(MODES)}")
    if budget < 0:
        raise ValueError(f"decode: budget {budget}, expected 0 or more")
    limits = [max_new] * len(prompts) if isinstance(max_new, int) else list(max_new)
    if len(limits) != len(prompts) or min(limits, default=0) < 1:
        raise ValueError(
            f"decode: max_new {max_new}, expected 1 or more for {len(prompts)} prompts"
        )
    context = config["max_position_embeddings"] if context is None else context
    if not 1 <= context <= config["max_position_embeddings"]:
        raise ValueError(
            f"decode: context {context}, expected 1 to {config['max_position_embeddings']}"
        )
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context:
            raise ValueError(
                f"decode: prompt {number} has {len(prompt)} tokens, expected 1 to {context - 1}"
            )
    if eos is None:
        eos = config.get("eos_token_id", ())
    return limits, frozenset(np.atleast_1d(np.asarray(eos, np.int64)).tolist())


def grown(
    root: int, log_probs: np.ndarray, tokens: np.ndarray, budget: int, floors: np.ndarray
) -> dict[str, np.ndarray]:
    """The tree of one request without padding: tree_tokens, parents and depths [n]."""
    if not len(log_probs):
        log_probs, tokens = nothing(1, log_probs.shape[1])
    tree = tree_build.reference(
        log_probs=log_probs[None],
        tokens=tokens[None],
        root_tokens=np.array([root], np.int32),
        budgets=np.array([budget], np.int32),
        floors=floors,
    )
    if tree["status"][0]:
        raise ArithmeticError(f"decode: proposals of status {tree['status'][0]}, see tree_build")
    count = int(tree["counts"][0])
    return {name: tree[name][0, :count] for name in ("tree_tokens", "parents", "depths")}


def accept(tree: Mapping[str, np.ndarray], targets: np.ndarray) -> tuple[np.ndarray, int]:
    """Nodes of the path that the targets follow from the root, and the target behind it."""
    done = greedy_accept.reference(
        target_tokens=targets[None],
        target_status=np.zeros((1, len(targets)), np.int32),
        tree_tokens=tree["tree_tokens"][None],
        parents=tree["parents"][None],
        counts=np.array([len(targets)], np.int32),
        max_accepted=len(targets),
    )
    count = int(done["accepted_counts"][0])
    return done["accepted"][0, :count], int(done["next_tokens"][0])


def sizes(nodes: int) -> list[int]:
    """Nodes that the rounds of an adaptive budget have room for: powers of two, then `nodes`."""
    return [1 << i for i in range(nodes.bit_length()) if 1 << i < nodes] + [nodes]


class Pace:
    """Where to stop growing trees, by what rounds cost and what they have brought so far."""

    def __init__(self, costs: np.ndarray | None):
        """costs [n + 1]: time of a round with 0, 1, .. n nodes below the root; None: never stop."""
        self.costs = None if costs is None else np.asarray(costs, np.float64)
        self.tokens, self.time = 0, 0.0
        self.widest = 0  # nodes of the largest tree since `size`, the root included

    def size(self, rooms: Iterable[int]) -> int:
        """Which of these numbers of nodes the next round has room for: the smallest that holds
        twice the last round's largest tree. An engine pays for rows that it launches, not for the
        ones that a tree fills, and must know their number before the tree is grown."""
        wanted, self.widest = 2 * self.widest, 0
        most = max(rooms)
        if self.costs is None or not wanted:
            return most
        return min((room for room in rooms if room >= wanted), default=most)

    def spend(self, nodes: int, tokens: int) -> None:
        """A round with `nodes` below the root brought `tokens`."""
        self.widest = max(self.widest, nodes + 1)
        self.tokens += tokens
        self.time += 0.0 if self.costs is None else float(self.costs[nodes])

    def floors(self, nodes: int) -> np.ndarray:
        """float32 [nodes], the least score (nats) of the n-th node.

        A node of score s brings e^s tokens and costs costs[n] - costs[n - 1], a time in which the
        rounds so far brought that time times tokens / time: worse is not worth its while. Before
        the first round the pace is a token a bare round.
        """
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
