"""The drafter in numpy: its two forward passes agree, its gradient is one, its hazards show."""

import numpy as np
import pytest
from typer.testing import CliRunner

from engine import bundle
from engine.tensorfile import InvalidFile
from goldens import acceptance, bundles, calibrate, dflash, dflash_logits
from goldens.decode import decode
from goldens.drafters import DFlash
from goldens.forward import forward
from goldens.model import Weights
from goldens.numerics import Stream
from goldens.rounding import EXACT
from harness.cli_decode import app

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


def test_rounds_played_along_a_text_are_those_of_decoding():
    name = "tiny-fp32-dflash"
    weights, config = bundles.weights(name), bundles.config(name)
    prompts = np.stack([prompt[:5] for prompt in bundles.prompts(name)[:2]])
    texts = acceptance.Texts(weights, config, prompts, 32)
    for budget in (1, 16):
        played = texts.play(budget).lengths
        drafter = DFlash(weights, config, EXACT)
        runs = decode(
            weights, config, prompts, drafter, budget=budget, max_new=32, eos=(), faithful=False
        )
        for run, lengths, tokens in zip(runs, played, texts.tokens, strict=True):
            assert run.text == tokens.tolist()
            real = [len(done.accepted) for done in run.rounds]
            assert len(lengths) > 4
            assert real[: len(lengths)] == lengths


def test_the_int4_model_of_a_float32_bundle_is_the_int4_bundle():
    made = acceptance.int4(bundles.tensors("tiny2-fp32-dflash"))
    other = bundles.tensors("tiny2-int4-dflash")
    assert made.keys() == other.keys()
    for name, value in made.items():
        np.testing.assert_array_equal(value, other[name])


def test_decoding_with_the_drafter_is_lossless_and_worth_it(tmp_path):
    path = tmp_path / "tiny.kdtr"
    name = "tiny-int4-dflash"
    bundle.write(path, bundles.tensors(name), bundles.config(name))
    prompt = ",".join(map(str, bundles.prompts(name)[0]))
    arguments = [str(path), "--prompt-tokens", prompt, "--drafter", "dflash"]
    arguments += ["--device", "reference", "--max-new", "40", "--eos", "none", "--compare", "ar"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "STRICT: 40 tokens" in done.output
    mean = float(done.output.split("accepted a round: mean ")[1].split()[0])
    assert mean > 2, done.output


def test_a_request_that_ends_leaves_the_others_context(texts):
    weights, config, *_ = texts
    prompts = [prompt[:4] for prompt in bundles.prompts(NAME)]
    drafter = DFlash(weights, config)
    runs = decode(weights, config, prompts, drafter, budget=4, max_new=[9, 2, 7], eos=())
    for request, run in enumerate(runs):
        hidden = forward(weights, config, run.text[:-1], faithful=True)["hidden"]
        whole = dflash.context_rows(hidden, weights, config, 0, dflash.FAITHFUL)
        np.testing.assert_allclose(drafter.contexts[request], whole, rtol=0.02, atol=0.02)


def test_a_context_that_is_not_the_texts_is_refused(texts):
    weights, config, _, hidden = texts
    drafter = DFlash(weights, config)
    drafter.observe(0, hidden[:, 0, :5])
    drafter.propose(0, [1] * 6, 3)
    with pytest.raises(ValueError, match="context of 5 for a text of 7"):
        drafter.propose(0, [1] * 7, 3)
    with pytest.raises(ValueError, match="no drafter"):
        DFlash(weights, bundles.config("micro-fp32"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, "drafter.block_size"),
        ({"mask_token_id": 512}, "drafter.mask_token_id"),
        ({"target_layer_ids": [0, 4]}, "drafter.target_layer_ids"),
        ({"num_attention_heads": 3}, "drafter.num_attention_heads"),
        ({"head_dim": 0}, "drafter.head_dim"),
        ({"rope_scaling": {"type": "linear"}}, "drafter.rope_scaling"),
        ({"intermediate_size": 128}, "drafter.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_a_bundle_says_what_is_wrong_with_its_drafter(tmp_path, change, message):
    name = "tiny-int4-dflash"
    config = bundles.config(name)
    config["drafter"] |= change
    with pytest.raises(InvalidFile, match=message):
        bundle.write(tmp_path / "tiny.kdtr", bundles.tensors(name), config)


def test_a_drafter_stays_bf16_in_a_float32_bundle(tmp_path):
    path, name = tmp_path / "tiny.kdtr", "tiny-fp32-dflash"
    tensors = bundles.tensors(name)
    bundle.write(path, tensors, bundles.config(name))
    opened = bundle.Bundle(path)
    assert opened["drafter.fc.weight"].dtype == tensors["drafter.fc.weight"].dtype
    opened.verify()
    wrong = {**tensors, "drafter.norm.weight": tensors["drafter.norm.weight"].astype(np.float32)}
    with pytest.raises(InvalidFile, match=r"drafter\.norm\.weight.*BF16"):
        bundle.write(path, wrong, bundles.config(name))


# -- faults of the loop, each far outside the bound of specs/dflash_logits.toml and dflash_runs ----


@pytest.fixture(scope="module")
def bounds():
    """A text of tiny, its target's stream, and what the specs allow around the drafter's values."""
    name = "tiny-int4-dflash"
    weights, config = bundles.weights(name), bundles.config(name)
    text = np.concatenate([bundles.prompts(name)[0], bundles.golden(name)[0][0][:20]])
    golden = dflash_logits.drafted(text, weights, config, Stream("faults"))
    hidden = forward(weights, config, text[:-1], faithful=True)["hidden"]

    def beyond(logits: np.ndarray, context: np.ndarray) -> float:
        """The largest error as a part of what the loosest of the specs allows."""
        made = {"logits": logits, "context": context}
        return max(
            float((np.abs(made[n] - golden[n]) / (8 * golden[f"{n}.magnitude"])).max())
            for n in made
        )

    return weights, config, text, hidden, beyond


def test_the_faithful_drafter_is_well_inside_its_bound(bounds):
    weights, config, text, hidden, beyond = bounds
    root = int(text[-1])
    assert beyond(*dflash.text_logits(hidden, root, weights, config, dflash.FAITHFUL)) < 0.6


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_tap_index_off_by_one_shows(bounds, shift):
    weights, config, text, hidden, beyond = bounds
    moved = hidden.copy()
    for layer in config["drafter"]["target_layer_ids"]:
        moved[layer + 1] = hidden[layer + 1 + shift]
    assert beyond(*dflash.text_logits(moved, int(text[-1]), weights, config)) > 10


def test_a_mask_in_slot_0_shows(bounds):
    weights, config, _, hidden, beyond = bounds
    mask = config["drafter"]["mask_token_id"]
    assert beyond(*dflash.text_logits(hidden, mask, weights, config)) > 10


def test_logits_of_the_slots_before_show(bounds):
    """Slot i guesses the token i places behind the root: slot 0's own row is no guess."""
    weights, config, text, hidden, beyond = bounds
    good, context = dflash.text_logits(hidden, int(text[-1]), weights, config)
    assert beyond(np.roll(good, 1, axis=0), context) > 10


@pytest.mark.parametrize("wrong", ["one further", "all the root's"])
def test_wrong_positions_of_the_block_show(bounds, monkeypatch, wrong):
    weights, config, text, hidden, beyond = bounds
    context = dflash.context_rows(hidden, weights, config, 0)
    honest, prefix = dflash.layer, context.shape[1]

    def layer(x, context, weights, number, drafter, positions, r):
        positions = positions + 1 if wrong == "one further" else np.full_like(positions, prefix)
        return honest(x, context, weights, number, drafter, positions, r)

    monkeypatch.setattr(dflash, "layer", layer)
    logits = dflash.block_logits(int(text[-1]), context, weights, config)
    assert beyond(logits, context) > 10


@pytest.mark.parametrize("fault", ["rejected node's row", "block's row kept", "a row left out"])
def test_a_stale_context_shows(bounds, fault):
    """In the last row alone: what a gather by entry, an append of the block, or a prefix that was
    read too early leaves there."""
    weights, config, text, hidden, beyond = bounds
    context = dflash.context_rows(hidden, weights, config, 0)
    stale = context.copy()
    if fault == "rejected node's row":
        run = forward(weights, config, [*text[:-2], text[-2] + 1])
        stale[:, -1] = dflash.context_rows(run["hidden"], weights, config, 0)[:, -1]
    elif fault == "block's row kept":
        mask = weights("model.embed_tokens")[[config["drafter"]["mask_token_id"]]]
        h = dflash.rms_norm(mask, weights("drafter.layers.0.input_layernorm"), 1e-5)
        place = np.array([context.shape[1] - 1])
        stale[0, -1] = dflash.keys_values(h, weights, 0, config["drafter"], place)[0]
    else:
        stale[:, -1] = 0
    logits = dflash.block_logits(int(text[-1]), stale, weights, config)
    assert beyond(logits, context) > 1  # the guesses alone, the rows themselves left out
    assert beyond(logits, stale) > 10


def test_a_batch_that_loses_a_request_in_the_middle_shows(bounds):
    """Rows of another request in place of one's own."""
    weights, config, text, hidden, beyond = bounds
    other = bundles.prompts("tiny-int4")[1]
    run = forward(weights, config, other)
    moved = hidden.copy()
    moved[:, -1] = run["hidden"][:, -1]
    assert beyond(*dflash.text_logits(moved, int(text[-1]), weights, config)) > 10
