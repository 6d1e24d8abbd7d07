"""How the golden prompts were found: the first seeds whose decoding no honest engine can flip.

    python -m goldens.prompts tiny-int4 tiny-fp32        (about a minute a prompt)

prints, for each prompt length, the first seed for which all named bundles decode LONGER tokens such
that every top-2 margin and every router gap on the way is above its threshold, no eos appears and
the text does not loop. Its output is the table `_PROMPTS` of goldens/bundles.py; the reasons for
the thresholds are with them.
"""

import sys
from collections.abc import Sequence

import numpy as np

from goldens import bundles
from goldens.forward import forward
from goldens.model import Config, Weights
from goldens.numerics import Stream

# Logits of the bf16 models scatter by 0.0157 (tiny; tiny2 0.0130) under sampled rounding errors,
# the difference of two by sqrt(2) times that: these margins are 7.2 and 6.0 standard deviations.
# Biased router scores scatter by 0.0009 at most, in the last layer: the gap is more than 8.
LEAST_MARGIN = {"tiny": 0.16, "tiny2": 0.11}
LEAST_MARGIN_F32 = 2e-4
LEAST_GAP = {"bfloat16": 0.0075, "float32": 2e-5}
LONGER = 64  # tokens that longer runs may rely on; the golden ones are the first STEPS


def loops(tokens: Sequence[int]) -> bool:
    """True if the text repeats itself: a period of 1 to 8 tokens three times in a row, or twice
    and at least 8 tokens, or fewer than half of the tokens are distinct."""
    tokens = list(tokens)
    if 2 * len(set(tokens)) < len(tokens):
        return True
    for period in range(1, 9):
        repeated = 0
        for i in range(period, len(tokens)):
            repeated = repeated + 1 if tokens[i] == tokens[i - period] else 0
            if repeated >= max(2 * period, 4) or (repeated >= period and period >= 4):
                return True
    return False


def comfortable(
    weights: Weights, config: Config, prompt: np.ndarray, steps: int, margin: float
) -> list[int] | None:
    """The greedy tokens in faithful mode, or None at the first near-tie, eos or loop."""
    gap = LEAST_GAP[weights.activations.name]
    tokens, cache, fed = [], None, prompt
    for _ in range(steps):
        run = forward(weights, config, fed, prefix_cache=cache, faithful=True)
        runner_up, best = np.partition(run["logits"][-1], -2)[-2:]
        token = int(run["logits"][-1].argmax())
        near_tie = best - runner_up < margin
        if (
            near_tie
            or run["router_gap"].min(initial=np.inf) < gap
            or token == config["eos_token_id"]
        ):
            return None
        tokens.append(token)
        if loops(tokens[-16:]):
            return None
        latents = run["latents"]
        cache = latents if cache is None else np.concatenate([cache, latents], axis=1)
        fed = np.array([token])
    return None if loops(tokens) else tokens


def clear_tokens(
    weights: Weights,
    config: Config,
    stream: Stream,
    count: int,
    *,
    parents: Sequence[int] | None = None,
    prefix_cache: np.ndarray | None = None,
) -> np.ndarray:
    """int32 [count]: random tokens for a prompt or a tree whose choices of experts are no
    near-ties, so that values in which an engine may be compared do not hang on one.

    ValueError if 100 rounds of drawing the nodes in doubt again do not settle it.
    """
    least = LEAST_GAP[weights.activations.name]
    tokens = stream.integers(2, config["vocab_size"], count)
    for _ in range(100):
        run = forward(
            weights, config, tokens, parents=parents, prefix_cache=prefix_cache, faithful=True
        )
        doubtful = (run["router_gap"] < least).any(0)
        if not doubtful.any():
            return tokens.astype(np.int32)
        tokens[doubtful] = stream.integers(2, config["vocab_size"], int(doubtful.sum()))
    raise ValueError(f"clear_tokens: {int(doubtful.sum())} of {count} nodes stay near-ties")


def least_margin(name: str) -> float:
    """What the top-2 margins of a bundle's golden tokens exceed."""
    return LEAST_MARGIN_F32 if name.endswith("fp32") else LEAST_MARGIN[bundles.shape_of(name)]


def find(names: Sequence[str], length: int, limit: int = 100_000) -> int:
    """The first seed that is comfortable for all of `names`; ValueError if there is none."""
    for seed in range(limit):
        prompt = bundles.prompt(bundles.shape_of(names[0]), seed, length)
        if all(
            comfortable(bundles.weights(n), bundles.config(n), prompt, LONGER, least_margin(n))
            for n in names
        ):
            return seed
    raise ValueError(f"no seed below {limit} is comfortable for {', '.join(names)}")


if __name__ == "__main__":
    for length in bundles.PROMPT_LENGTHS:
        print(length, find(sys.argv[1:], length), flush=True)
