"""The drafter in numpy: its two forward passes agree, its gradient is one, its hazards show."""

import numpy as np
import pytest

from goldens import bundles, calibrate, dflash
from goldens.forward import forward
from goldens.model import Weights
from goldens.numerics import Stream

NAME = "micro-fp32-dflash"


@pytest.fixture(scope="module")
def texts():
    """Micro's weights and config, four texts of 20 tokens and the target's stream of each."""
    weights, config = bundles.weights(NAME), bundles.config(NAME)
    prompts = Stream("test_dflash").integers(2, config["vocab_size"], (4, 4))
    return weights, config, *calibrate.greedy_texts(weights, config, prompts, 20)


def test_texts_made_side_by_side_are_greedy_and_their_streams_are_forwards(texts):
    weights, config, tokens, hidden = texts
    for text, stream in zip(tokens, hidden.swapaxes(0, 1), strict=True):
        run = forward(weights, config, text)
        np.testing.assert_allclose(stream, run["hidden"], rtol=1e-9, atol=1e-9)
        assert (run["logits"].argmax(-1)[3:-1] == text[4:]).all()


def test_training_computes_the_drafter_and_its_gradient(texts):
    weights, config, tokens, hidden = texts
    taps = dflash.features(hidden, config["drafter"])
    stream = Stream("gradient")
    p = {
        name: value.astype(np.float64) * (1 + 0.3 * stream.uniform(value.shape))
        for name, value in calibrate.first_weights(config, stream).items()
    }
    embedding, head = weights("model.embed_tokens"), weights("lm_head")
    batch = next(calibrate.batches(config, tokens, taps, embedding, stream, 2, 2))
    share = np.array([1.0, 0.5, 0.25])

    def loss(p):
        return calibrate.loss_and_gradient(p, config, head=head, weight=share, **batch)

    _, logits, gradient = loss(p)
    whole = Weights(
        {**bundles.tensors(NAME), **{f"drafter.{n}.weight": value for n, value in p.items()}}
    )
    for text in range(2):
        which = next(i for i in range(4) if np.array_equal(taps[i], batch["taps"][text]))
        for block, anchor in enumerate(batch["anchors"][text]):
            alone, _ = dflash.text_logits(
                hidden[:, which, :anchor], tokens[which, anchor], whole, config
            )
            np.testing.assert_allclose(logits[text, block], alone, rtol=1e-9, atol=1e-9)
    for name, value in p.items():
        along, step = stream.bell(value.shape), 1e-5
        ahead, behind = (loss({**p, name: value + s * step * along})[0] for s in (1, -1))
        assert (ahead - behind) / (2 * step) == pytest.approx(
            (gradient[name] * along).sum(), rel=1e-4, abs=1e-7
        ), name


def test_a_slot_sees_the_whole_block_and_the_context_but_only_through_the_taps(texts):
    weights, config, tokens, hidden = texts
    stream, root = hidden[:, 0, :12], int(tokens[0, 12])
    logits, _ = dflash.text_logits(stream, root, weights, config)
    later, _ = dflash.text_logits(stream[:, :11], root, weights, config)
    assert np.abs(later - logits).max() > 1e-3  # a token of context
    other, _ = dflash.text_logits(stream, root + 1, weights, config)
    assert (np.abs(other - logits).max(-1) > 1e-3).all()  # the root reaches every slot
    moved = stream.copy()
    moved[0] += 1  # the embedding is no tap
    same, _ = dflash.text_logits(moved, root, weights, config)
    assert np.array_equal(same, logits)


def test_context_grows_row_by_row(texts):
    weights, config, _, hidden = texts
    stream = hidden[:, 0]
    whole = dflash.context_rows(stream, weights, config, 0, dflash.FAITHFUL)
    parts = [
        dflash.context_rows(stream[:, at : at + 3], weights, config, at, dflash.FAITHFUL)
        for at in range(0, 18, 3)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[:, :18])


@pytest.mark.parametrize("name", ["tiny-fp32", "tiny2-fp32"])
def test_the_pinned_drafters_guess_texts_that_they_were_not_trained_on(name):
    """On golden prompts: better than half at the first slot, and better there than at the last."""
    config, weights = bundles.config(f"{name}-dflash"), bundles.weights(f"{name}-dflash")
    slots = config["drafter"]["block_size"]
    right = np.zeros((0, slots - 1), bool)
    for prompt, golden in zip(bundles.prompts(name), bundles.golden(name)[0], strict=True):
        text = np.concatenate([prompt, golden])
        hidden = forward(weights, config, text)["hidden"]
        context = dflash.context_rows(hidden, weights, config, 0)
        for at in range(len(prompt), len(text) - slots + 1):
            logits = dflash.block_logits(text[at], context[:, :at], weights, config)
            right = np.vstack([right, logits.argmax(-1) == text[at + 1 : at + slots]])
    hits = right.mean(0)
    assert hits[0] > max(0.5, hits[-1]), hits
