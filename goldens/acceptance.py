"""What a drafter that was calibrated on one target is worth for another: accepted length a round.

Greedy text does not hang on the drafts, so a target's texts are made once, and rounds are then
played along them: the drafter's proposals behind the text so far, the tree for the budget, and how
far the text that follows goes into it. tests/test_dflash.py holds that against whole decoding runs.
Nothing is rounded but the weights: what differs between two targets is due to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from goldens import dflash, draft_top_k
from goldens.calibrate import TOGETHER, greedy_texts
from goldens.decode import accept, grown
from goldens.model import Config, Weights
from goldens.numerics import BF16, pack_int4, quantise, round_to
from goldens.quantise import MATRICES


@dataclass(frozen=True)
class Accepted:
    """Rounds at one budget: accepted tokens a round of each text, the root's own included."""

    budget: int
    lengths: list[list[int]]

    @property
    def mean(self) -> float:
        return float(np.mean([n for text in self.lengths for n in text]))

    @property
    def error(self) -> float:
        """Standard error of the mean, from the texts' own means: rounds of a text are alike."""
        return _error(self.means)

    @property
    def means(self) -> np.ndarray:
        return np.array([np.mean(text) for text in self.lengths])

    def change(self, other: "Accepted") -> tuple[float, float]:
        """By what part the other's mean is larger, and the standard error of that over the prompts,
        which both share."""
        by = other.mean / self.mean - 1
        return by, _error((other.means - self.means) / self.mean)


def _error(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def int4(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A model in float32 as the INT4 model of the same weights: experts, shared experts and dense
    MLPs in 4 bits (group 32, amax / 7.5), everything else but router bias and drafter in bf16."""
    chosen, made = MATRICES["routed, shared, dense"], {}
    for name, value in tensors.items():
        matrix = name.removesuffix(".weight")
        if chosen.fullmatch(matrix):
            codes, made[f"{matrix}.sc"] = quantise(value)
            made[f"{matrix}.qw"] = pack_int4(codes)
        else:
            kept = name.endswith("bias") or name.startswith("drafter.")
            made[name] = value if kept else round_to(value, BF16)
    return made


class Texts:
    """A target's greedy texts, and what its drafter proposes along them."""

    def __init__(
        self, weights: Mapping[str, np.ndarray] | Weights, config: Config, prompts: np.ndarray,
        new: int,
    ):  # fmt: skip
        """prompts int [n, p]; `new` tokens behind each."""
        self.weights, self.config, self.start = Weights.of(weights), config, prompts.shape[1]
        length = self.start + new
        made = [
            greedy_texts(self.weights, config, prompts[at : at + TOGETHER], length)
            for at in range(0, len(prompts), TOGETHER)
        ]
        self.tokens = np.concatenate([tokens for tokens, _ in made])
        hidden = np.concatenate([streams for _, streams in made], axis=1)
        self._contexts = [
            dflash.context_rows(hidden[:, text], self.weights, config, 0)
            for text in range(len(self.tokens))
        ]
        self._logits: dict[tuple[int, int], np.ndarray] = {}

    def logits(self, text: int, root: int) -> np.ndarray:
        """float32 [b - 1, vocab] of the block whose root stands at position `root`."""
        if (text, root) not in self._logits:
            context = self._contexts[text][:, :root]
            made = dflash.block_logits(
                int(self.tokens[text, root]), context, self.weights, self.config
            )
            self._logits[text, root] = made.astype(np.float32)
        return self._logits[text, root]

    def first_slot(self) -> float:
        """How often the best guess at the first slot is the token that follows."""
        hits = [
            self.logits(text, root)[0].argmax() == tokens[root + 1]
            for text, tokens in enumerate(self.tokens)
            for root in range(self.start, len(tokens) - 1)
        ]
        return float(np.mean(hits))

    def play(self, budget: int) -> Accepted:
        """Rounds from the first generated token on, as long as a whole block of text follows."""
        slots, k = self.config["drafter"]["block_size"], max(1, budget)
        k = min(k, self.config["vocab_size"])
        floors = np.full(budget + 1, -np.inf, np.float32)
        rounds = []
        for text, tokens in enumerate(self.tokens):
            lengths, root = [], self.start
            while root + slots < len(tokens):
                if not budget:
                    lengths.append(1)
                    root += 1
                    continue
                drafts = draft_top_k.reference(logits=self.logits(text, root)[None], top_k=k)
                tree = grown(
                    int(tokens[root]), drafts["log_probs"][0], drafts["tokens"][0], budget, floors
                )
                targets = tokens[root + 1 + tree["depths"]]  # right wherever the path is the text
                path, _ = accept(tree, targets)
                lengths.append(len(path))
                root += len(path)
            rounds.append(lengths)
        return Accepted(budget, rounds)


def compare(
    tensors: Mapping[str, np.ndarray], config: Config, prompts: np.ndarray, new: int,
    budgets: Sequence[int],
) -> tuple[Texts, Texts, list[tuple[Accepted, Accepted]]]:  # fmt: skip
    """The texts of a target and of its INT4 model, and the rounds of both at each budget."""
    plain = Texts(tensors, config, prompts, new)
    packed = Texts(int4(tensors), config, prompts, new)
    return plain, packed, [(plain.play(budget), packed.play(budget)) for budget in budgets]


def agreement(one: Texts, other: Texts) -> Any:
    """Tokens until the two targets' texts part, for each text; the number of new ones if never."""
    differ = one.tokens[:, one.start :] != other.tokens[:, other.start :]
    return np.where(differ.any(1), differ.argmax(1), differ.shape[1])
