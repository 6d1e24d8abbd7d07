"""Drafters that need no weights, on the host. What a drafter is to `engine.decode`:

length                           positions L that it drafts
propose(request, text, k)        log_probs float32 [L, k] and tokens int32 [L, k]: the k most
                                 probable tokens at each position behind `text` (the prompt and
                                 all that was generated), best first; -inf and -1 where there are
                                 fewer. Called once a round for each request that goes on.

The drafter that has weights, and proposes on the device, is engine/dflash.py.
"""

from collections.abc import Sequence

import numpy as np


class Replay:
    """Proposals from tables by generated position: log_probs [request][steps, k], tokens the same.

    Row i is about the i-th generated token. Behind a table there are no proposals.
    """

    def __init__(
        self,
        log_probs: Sequence[np.ndarray],
        tokens: Sequence[np.ndarray],
        prompt_lengths: Sequence[int],
        length: int,
    ):
        self.length = length
        self.log_probs, self.tokens = list(log_probs), list(tokens)
        self.prompt_lengths = list(prompt_lengths)

    def propose(self, request: int, text: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        at = len(text) - self.prompt_lengths[request]
        rows = slice(at, at + self.length)
        return _padded(
            self.log_probs[request][rows, :k], self.tokens[request][rows, :k], self.length, k
        )


class Ngram:
    """Prompt lookup: counts of what followed the text's longest suffix that occurs in it before.

    The suffix has at most `order` tokens. An index of what ends where grows with the text, so a
    round costs as much as there are occurrences and not as much as there is text.
    """

    def __init__(self, length: int, order: int = 3):
        self.length, self.order = length, order
        self._texts: dict[int, list[int]] = {}
        self._ends: dict[int, dict[tuple[int, ...], list[int]]] = {}

    def propose(self, request: int, text: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        known = self._texts.get(request, [])
        if list(text[: len(known)]) != known:  # another text under the same number
            known, self._ends[request] = [], {}
        index = self._ends.setdefault(request, {})
        text = [int(token) for token in text]
        for end in range(max(len(known), 1), len(text)):
            for size in range(1, min(self.order, end) + 1):
                index.setdefault(tuple(text[end - size : end]), []).append(end)
        self._texts[request] = text
        ends: list[int] = []
        for size in range(min(self.order, len(text) - 1), 0, -1):
            ends = index.get(tuple(text[-size:]), [])
            if ends:
                break
        log_probs, tokens = _padded(np.zeros((0, 0)), np.zeros((0, 0)), self.length, k)
        for ahead in range(self.length):
            followed = [text[end + ahead] for end in ends if end + ahead < len(text)]
            if not followed:
                break
            ids, counts = np.unique(followed, return_counts=True)
            best = np.argsort(-counts, kind="stable")[:k]
            log_probs[ahead, : len(best)] = np.log(counts[best] / len(followed))
            tokens[ahead, : len(best)] = ids[best]
        return log_probs, tokens


def _padded(
    log_probs: np.ndarray, tokens: np.ndarray, length: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Arrays [length, k] that begin with these and go on with -inf and -1."""
    padded = np.full((length, k), -np.inf, np.float32), np.full((length, k), -1, np.int32)
    for array, part in zip(padded, (log_probs, tokens), strict=True):
        array[: part.shape[0], : part.shape[1]] = part
    return padded
