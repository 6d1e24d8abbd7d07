"""Drafters: `replay` knows the answer, `ngram` looks it up in the text, `dflash` reads the target.

A drafter has `length`, the number of positions L that it drafts, and

  propose(request, text, k) -> log_probs float32 [L, k], tokens int32 [L, k]

the k most probable tokens at each of the L positions after `text` (prompt and everything that was
generated, the root of the next tree last), most probable first; -inf and -1 where there are fewer.

  observe(request, hidden)

follows every commit with the target's residual stream [layers + 1, t, hidden] of the t tokens that
joined the cache; a drafter that reads the target's hidden states keeps what it needs of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from goldens import dflash, draft_top_k
from goldens.model import Config, Weights
from goldens.numerics import Stream
from goldens.rounding import Rounding


class Replay:
    """Proposals from tables by generated position: log_probs [request][steps, k], tokens the same.

    Position i is that of the i-th generated token. A table ends where its answer does; behind it
    there are no proposals.
    """

    def __init__(
        self,
        log_probs: Sequence[np.ndarray],
        tokens: Sequence[np.ndarray],
        prompt_lengths: Sequence[int],
        length: int,
    ):
        self.length = length
        self._tables = list(zip(log_probs, tokens, strict=True))
        self._prompts = list(prompt_lengths)

    def propose(self, request: int, text: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        log_probs, tokens = nothing(self.length, k)
        start = len(text) - self._prompts[request]
        for array, table in zip((log_probs, tokens), self._tables[request], strict=True):
            part = table[start : start + self.length, :k]
            array[: part.shape[0], : part.shape[1]] = part
        return log_probs, tokens

    def observe(self, request: int, hidden: np.ndarray) -> None:
        """The answer is known; nothing to learn from the target."""


def nothing(length: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """log_probs [length, k] of -inf and tokens of -1: proposals of which none becomes a node."""
    return np.full((length, k), -np.inf, np.float32), np.full((length, k), -1, np.int32)


def replay_table(
    answer: Sequence[int] | np.ndarray,
    vocabulary: int,
    k: int,
    accuracy: Sequence[float] | float,
    stream: Stream,
) -> tuple[np.ndarray, np.ndarray]:
    """log_probs float32 and tokens int32 [steps, k]: an answer [steps] as a drafter would guess it.

    accuracy   probability that the right token stands at rank 0, at rank 1, ..; one number means
        rank 0. With what remains it is not among the k at all. 1 accepts everything, 0 nothing;
        (0.5, 0.3) makes a tree of breadth 2 better than a chain.

    The ranks have the probabilities q, (1 - q) / 2, (1 - q) / 4, ... With an accuracy of p at rank
    0, 1 - q is uniform in [0.05, 0.4) (1 - p), at least 2^-10, where the right token is at rank 0,
    and q is uniform in [0.35, 0.7) elsewhere: a confident guess is a better one, as of real
    drafters, and at p = 1 the path of the answer comes before everything else. Every position is
    drawn by itself.
    """
    chances = np.atleast_1d(np.asarray(accuracy, np.float64))
    if (chances < 0).any() or chances.sum() > 1 + 1e-9 or len(chances) >= vocabulary:
        raise ValueError(f"replay: {accuracy} are no probabilities of ranks")
    if k >= vocabulary:
        raise ValueError(f"replay: {k} candidates leave no wrong token among {vocabulary}")
    answer = np.asarray(answer, np.int64)
    log_probs, tokens = np.zeros((len(answer), k)), np.zeros((len(answer), k), np.int32)
    for i, right in enumerate(answer):
        draw = (stream.uniform() + 1) / 2  # [0, 1)
        rank = int(np.searchsorted(np.cumsum(chances), draw, side="right"))
        spread = 0.35 * (stream.uniform() + 1) / 2
        top = 0.35 + spread if rank else 1 - max((0.05 + spread) * (1 - chances[0]), 2.0**-10)
        log_probs[i] = np.log(1 - top) - np.arange(k) * np.log(2)
        log_probs[i, 0] = np.log(top)
        wrong = stream.permutation(vocabulary)
        tokens[i] = wrong[wrong != right][:k]
        if rank < min(k, len(chances)):
            tokens[i, rank] = right
    return log_probs.astype(np.float32), tokens


class Ngram:
    """Prompt lookup: what followed the last `order` tokens wherever they stand in the text before.

    Position i of a proposal counts the tokens i places behind each earlier occurrence of the
    text's longest suffix, of at most `order` tokens, that occurs; the log-probability is that of
    the counts (equal counts: the lower id first). Without an occurrence there are no proposals.
    """

    def __init__(self, length: int, order: int = 3):
        self.length, self.order = length, order

    def propose(self, request: int, text: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        log_probs, tokens = nothing(self.length, k)
        text = [int(token) for token in text]
        ends: list[int] = []
        for size in range(min(self.order, len(text) - 1), 0, -1):
            suffix = text[-size:]
            ends = [e for e in range(size, len(text)) if text[e - size : e] == suffix]
            if ends:
                break
        for ahead in range(self.length):
            counts = Counter(text[e + ahead] for e in ends if e + ahead < len(text))
            ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
            for rank, (token, count) in enumerate(ranked):
                log_probs[ahead, rank] = np.log(count / counts.total())
                tokens[ahead, rank] = token
        return log_probs, tokens

    def observe(self, request: int, hidden: np.ndarray) -> None:
        """The text is all it reads."""


class DFlash:
    """The drafter of a bundle (goldens.dflash); one object for one run.

    Context rows are made when their token joins the text, and kept; a block's are not. Proposals
    are those of draft_top_k, for logits in float32.
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray] | Weights,
        config: Config,
        rounding: Rounding = dflash.FAITHFUL,
    ):
        if "drafter" not in config:
            raise ValueError("this bundle has no drafter: kdtr bundle make NAME --drafter adds one")
        self.weights, self.config, self.rounding = Weights.of(weights), config, rounding
        self.length = config["drafter"]["block_size"] - 1
        self.contexts: dict[int, np.ndarray] = {}  # [layers, P, 2 G D] of each request

    def propose(self, request: int, text: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        """ValueError if the context is not that of all tokens before the root."""
        context = self.contexts[request]
        if context.shape[1] != len(text) - 1:
            raise ValueError(f"dflash: context of {context.shape[1]} for a text of {len(text)}")
        logits = dflash.block_logits(
            int(text[-1]), context, self.weights, self.config, self.rounding
        )
        done = draft_top_k.reference(logits=logits.astype(np.float32)[None], top_k=k)
        if done["status"].any():
            raise ArithmeticError(f"dflash: request {request} has logits of no distribution")
        return done["log_probs"][0], done["tokens"][0]

    def observe(self, request: int, hidden: np.ndarray) -> None:
        """hidden [layers + 1, t, hidden] of the tokens that joined the text."""
        layers, width = dflash.sizes(self.config)
        before = self.contexts.get(request, np.zeros((layers, 0, width)))
        rows = dflash.context_rows(
            hidden, self.weights, self.config, before.shape[1], self.rounding
        )
        self.contexts[request] = np.concatenate([before, rows], axis=1)
