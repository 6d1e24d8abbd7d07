"""Tokens and positions of a drafter's block (goldens.dflash.block_tokens)."""

import numpy as np

from goldens import dflash
from goldens.numerics import Stream


def inputs(rng: Stream, *, requests: int, vocabulary: int) -> dict[str, np.ndarray]:
    """No root is the mask token: a block of masks alone would look right otherwise."""
    return {
        "root_tokens": rng.integers(0, vocabulary - 1, requests).astype(np.int32),
        "prefix_len": rng.integers(0, 1 << 18, requests).astype(np.int32),
    }


def derived(*, slots: int) -> dict[str, int]:
    return {"block_size": slots}


def reference(
    *, root_tokens: np.ndarray, prefix_len: np.ndarray, mask_token: int, block_size: int
) -> dict[str, np.ndarray]:
    like = {"mask_token_id": mask_token, "block_size": block_size}
    tokens = [dflash.block_tokens(int(root), like) for root in root_tokens]
    return {
        "tokens": np.array(tokens, np.int64).reshape(len(root_tokens), block_size),
        "position": prefix_len[:, None] + np.arange(block_size),
    }
