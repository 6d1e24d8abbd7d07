"""The decode loop in numpy and the command on it: lossless in every mode, for every drafter."""

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from engine.decode import _Pace
from goldens import bundles, sample
from goldens.decode import CONTEXT, EOS, MAX_NEW, Pace, accept, decode, grown, sizes
from goldens.drafters import Ngram, Replay, nothing, replay_table
from goldens.forward import forward
from goldens.model import Weights
from goldens.numerics import Stream
from harness import cli_bundle, cli_decode, devices

LENGTH = 7
FAITHFUL = [True, False]


def model(name: str) -> tuple[Weights, dict]:
    return bundles.weights(name), bundles.config(name)


@cache
def alone(name: str, faithful: bool, new: int = 40, temperature: float = 0.0):
    """All three prompts, one token at a time."""
    return decode(
        *model(name), bundles.prompts(name), None, budget=0, max_new=new, mode="ar", eos=(),
        faithful=faithful, temperature=temperature, seed=5,
    )  # fmt: skip


def replay(name: str, faithful: bool, accuracy, k: int = 16, **more) -> Replay:
    vocabulary = bundles.config(name)["vocab_size"]
    runs = alone(name, faithful, **more)
    tables = [
        replay_table(run.tokens, vocabulary, k, accuracy, Stream("test", number))
        for number, run in enumerate(runs)
    ]
    lengths = [len(run.prompt) for run in runs]
    return Replay([t[0] for t in tables], [t[1] for t in tables], lengths, LENGTH)


def strict(runs, others) -> None:
    """Same tokens; cache and logits as near as float64 sums of another order can be."""
    for one, other in zip(runs, others, strict=True):
        assert one.tokens == other.tokens
        assert one.ended == other.ended
        assert np.allclose(one.logits, other.logits, rtol=0, atol=1e-9)
        assert one.cache.shape == other.cache.shape
        assert np.allclose(one.cache, other.cache, rtol=0, atol=1e-9)


# -- lossless --------------------------------------------------------------------------------------


@pytest.mark.parametrize("faithful", FAITHFUL)
@pytest.mark.parametrize("name", ["tiny-int4", "tiny2-fp32"])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_a_tree_gives_the_text_that_one_token_at_a_time_gives(name, faithful, budget):
    for drafter in (replay(name, faithful, (0.5, 0.3), k=budget), Ngram(LENGTH)):
        runs = decode(
            *model(name), bundles.prompts(name), drafter, budget=budget, max_new=40, eos=(),
            faithful=faithful,
        )  # fmt: skip
        strict(runs, alone(name, faithful))


def test_the_golden_tokens_are_what_it_decodes():
    for run, golden in zip(alone("tiny-int4", True), bundles.golden("tiny-int4")[0], strict=True):
        assert run.tokens[: len(golden)] == golden.tolist()


@pytest.mark.parametrize("mode", ["tree", "chain"])
def test_sampling_draws_the_same_text_through_a_tree(mode):
    name, more = "tiny-int4", {"temperature": 0.8}
    drafter = replay(name, True, 0.7, **more)
    runs = decode(
        *model(name), bundles.prompts(name), drafter, budget=16, max_new=40, eos=(), mode=mode,
        temperature=0.8, seed=5,
    )  # fmt: skip
    strict(runs, alone(name, True, **more))
    assert runs[0].tokens != alone(name, True)[0].tokens
    assert len(runs[0].rounds) < 30  # drafts were accepted on the way


def test_a_certain_drafter_is_accepted_whole_and_a_wrong_one_not_at_all():
    name = "tiny-fp32"
    for accuracy, accepted in ((1, LENGTH + 1), (0, 1)):
        runs = decode(
            *model(name), bundles.prompts(name)[:1], replay(name, True, accuracy), budget=16,
            max_new=33, eos=(),
        )  # fmt: skip
        assert {len(done.accepted) for done in runs[0].rounds} == {accepted}


def test_breadth_pays_where_the_right_token_is_not_the_first():
    name = "tiny-fp32"
    rounds = {}
    for mode in ("tree", "chain"):
        runs = decode(
            *model(name), bundles.prompts(name), replay(name, True, (0.4, 0.5)), budget=16,
            max_new=40, eos=(), mode=mode,
        )  # fmt: skip
        rounds[mode] = sum(len(run.rounds) for run in runs)
    assert rounds["tree"] < 0.8 * rounds["chain"]


def test_a_tree_that_is_a_spine_is_chain_mode():
    name = "tiny-int4"
    drafter = replay(name, True, 0.6, k=1)
    runs = [
        decode(
            *model(name), bundles.prompts(name), drafter, budget=LENGTH, max_new=40, eos=(),
            mode=mode,
        )
        for mode in ("tree", "chain")
    ]  # fmt: skip
    for tree, chain in zip(*runs, strict=True):
        assert [list(a.tokens) for a in tree.rounds] == [list(b.tokens) for b in chain.rounds]
        assert [len(a.accepted) for a in tree.rounds] == [len(b.accepted) for b in chain.rounds]
        assert tree.tokens == chain.tokens
        assert np.array_equal(tree.cache, chain.cache)


def test_the_cache_is_that_of_a_fresh_prefill():
    name = "tiny2-int4"
    drafter = replay(name, False, (0.4, 0.3))
    runs = decode(
        *model(name), bundles.prompts(name), drafter, budget=16, max_new=40, eos=(), faithful=False
    )
    jumps = [np.diff(done.accepted) for run in runs for done in run.rounds]
    assert any((jump > 1).any() for jump in jumps)  # paths that are not the first rows
    for run in runs:
        fresh = forward(*model(name), run.text[:-1])
        assert np.allclose(run.cache, fresh["latents"], rtol=0, atol=1e-9)


def test_hidden_states_reach_the_drafter_row_by_row():
    name = "tiny-fp32"
    seen: dict[int, list] = {0: [], 1: [], 2: []}

    class Watching(Replay):
        def observe(self, request, hidden):
            seen[request].append(hidden)

    guesses = replay(name, False, (0.5, 0.3))
    guesses.__class__ = Watching
    runs = decode(
        *model(name), bundles.prompts(name), guesses, budget=16, max_new=20, eos=(), faithful=False
    )
    for number, run in enumerate(runs):
        fresh = forward(*model(name), run.text[:-1])["hidden"]
        assert np.allclose(np.concatenate(seen[number], axis=1), fresh, rtol=0, atol=1e-8)


# -- where a text ends -----------------------------------------------------------------------------


def test_a_request_that_ends_in_the_middle_leaves_the_others_alone():
    name = "tiny-int4"
    whole = alone(name, True)
    others = whole[0].tokens + whole[2].tokens
    tokens = whole[1].tokens
    stop = next(  # of the middle request only, amid a path of eight
        t for i, t in enumerate(tokens) if i > 8 and i % 8 == 3 and t not in others + tokens[:i]
    )
    runs = decode(
        *model(name), bundles.prompts(name), replay(name, True, 1), budget=16, max_new=40,
        eos=(stop,),
    )  # fmt: skip
    assert [run.ended for run in runs] == [MAX_NEW, EOS, MAX_NEW]
    assert runs[1].tokens == whole[1].tokens[: whole[1].tokens.index(stop) + 1]
    assert runs[1].rounds[-1].emitted < len(runs[1].rounds[-1].accepted)  # amid an accepted path
    assert runs[1].cache.shape[1] == len(runs[1].text) - 1
    assert runs[0].tokens == whole[0].tokens
    assert runs[2].tokens == whole[2].tokens


@pytest.mark.parametrize("new", [1, 2, 8, 9])
def test_max_new_is_exact(new):
    name = "tiny-fp32"
    whole = alone(name, True)
    guesses = replay(name, True, 1)
    runs = decode(
        *model(name), bundles.prompts(name), guesses, budget=16, max_new=[new, 3, 5], eos=()
    )
    assert [run.tokens for run in runs] == [
        other.tokens[:count] for other, count in zip(whole, (new, 3, 5), strict=True)
    ]


def test_no_node_stands_past_the_context():
    name = "tiny-fp32"
    whole = alone(name, True)
    runs = decode(
        *model(name), bundles.prompts(name), replay(name, True, 1), budget=16, max_new=40, eos=(),
        context=17,
    )  # fmt: skip
    for run, other in zip(runs, whole, strict=True):
        assert (run.ended, len(run.text)) == (CONTEXT, 17)
        assert run.tokens == other.tokens[: 17 - len(run.prompt)]
        end = len(run.prompt)
        for done in run.rounds:
            assert end + done.depths.max() < 17
            end += done.emitted


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mode": "beam"}, "mode"),
        ({"budget": -1}, "budget"),
        ({"max_new": 0}, "max_new"),
        ({"context": 5000}, "context"),
        ({"context": 5}, "prompt 0"),
        ({"prompts": [[]]}, "prompt 0"),
        ({"max_new": [3, 4]}, "max_new"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, says):
    settings = {"prompts": [[3, 4, 5, 6, 7]], "budget": 4, "max_new": 4, **wrong}
    with pytest.raises(ValueError, match=says):
        decode(*model("tiny-fp32"), settings.pop("prompts"), Ngram(3), **settings)


# -- drafters --------------------------------------------------------------------------------------


def test_replay_is_right_as_often_as_it_says():
    answer = Stream("answer").integers(0, 300, 4000)
    log_probs, tokens = replay_table(answer, 300, 8, (0.5, 0.2), Stream("guess"))
    right = tokens == answer[:, None]
    assert abs(right[:, 0].mean() - 0.5) < 0.03
    assert abs(right[:, 1].mean() - 0.2) < 0.03
    assert not right[:, 2:].any()
    assert (np.diff(log_probs, axis=1) < 0).all()
    assert (np.exp(log_probs.astype(np.float64)).sum(-1) <= 1 + 1e-6).all()
    assert all(len(set(row)) == 8 for row in tokens.tolist())
    assert log_probs[right[:, 0], 0].mean() > log_probs[~right[:, 0], 0].mean()


@pytest.mark.parametrize("accuracy", [-0.1, 1.1, (0.6, 0.6), (0.001,) * 300])
def test_replay_refuses_what_is_no_distribution(accuracy):
    with pytest.raises(ValueError, match="probabilities"):
        replay_table([1, 2], 300, 8, accuracy, Stream("guess"))


def test_ngram_counts_what_followed():
    log_probs, tokens = Ngram(3).propose(0, [5, 6, 7, 9, 5, 6, 7, 8, 5, 6, 7, 9, 1, 5, 6, 7], 2)
    assert tokens.tolist() == [[9, 8], [5, 1], [6, 5]]
    assert np.allclose(np.exp(log_probs), [2 / 3, 1 / 3])


@pytest.mark.parametrize("text", [[4], [1, 2, 3, 4]])
def test_ngram_says_nothing_where_it_has_seen_nothing(text):
    log_probs, tokens = Ngram(3).propose(0, text, 2)
    assert np.isneginf(log_probs).all()
    assert (tokens == -1).all()
    tree = grown(4, log_probs, tokens, 8, np.full(9, -np.inf, np.float32))
    assert tree["tree_tokens"].tolist() == [4]


# -- the tree --------------------------------------------------------------------------------------


def test_the_path_follows_the_targets_over_rows_that_are_not_neighbours():
    tree = {
        "tree_tokens": np.array([9, 1, 2, 3, 4], np.int32),
        "parents": np.array([-1, 0, 0, 1, 2], np.int32),
    }
    path, following = accept(tree, np.array([2, 0, 4, 0, 7], np.int32))
    assert (path.tolist(), following) == ([0, 2, 4], 7)


def test_costs_stop_a_tree_where_the_next_node_does_not_pay():
    log_probs, tokens = nothing(2, 3)
    log_probs[:] = np.log([0.6, 0.3, 0.1])
    tokens[:] = [1, 2, 3]
    free = grown(0, log_probs, tokens, 8, Pace(np.ones(9)).floors(9))
    assert len(free["tree_tokens"]) == 9
    dear = Pace(1 + 0.32 * np.arange(9))  # a node costs what 0.32 of a token did
    assert len(grown(0, log_probs, tokens, 8, dear.floors(9))["tree_tokens"]) == 3  # .6, .36
    dear.spend(0, 2)  # twice the pace: a node must bring 0.64
    assert len(grown(0, log_probs, tokens, 8, dear.floors(9))["tree_tokens"]) == 1


def _trees(nodes: list[tuple[int, ...]], most: int):
    """Every tree of up to `most` nodes: sets that hold the parent of each of their nodes."""
    for count in range(most + 1):
        for some in itertools.combinations(nodes, count):
            if all(len(node) == 1 or node[:-1] in some for node in some):
                yield some


@pytest.mark.parametrize("pace_of", [Pace, _Pace], ids=["golden", "engine"])
@pytest.mark.parametrize("seed", range(30))
def test_no_tree_brings_more_for_its_cost_than_the_one_that_is_grown(seed, pace_of):
    """Against all trees, where each further node costs at least what the one before did."""
    rng = np.random.default_rng(seed)
    length, k, budget = 3, 2, 5
    probabilities = np.sort(rng.dirichlet(np.full(k + 1, 2.0), length))[:, :0:-1]
    costs = np.cumsum([1.0, *np.sort(rng.uniform(0.05, 0.3, budget))])
    pace = pace_of(costs)
    for _ in range(seed % 4):
        pace.spend(int(rng.integers(0, budget + 1)), int(rng.integers(1, length + 2)))
    rate = pace.tokens / pace.time if pace.tokens else 1 / costs[0]

    def brings(tree) -> float:
        shares = [np.prod([probabilities[d, i] for d, i in enumerate(node)]) for node in tree]
        return sum(shares) - rate * (costs[len(tree)] - costs[0])

    nodes = [n for d in range(length) for n in itertools.product(range(k), repeat=d + 1)]
    best = max(map(brings, _trees(nodes, budget)))
    log_probs = np.log(probabilities).astype(np.float32)
    ids = np.tile(np.arange(k, dtype=np.int32), (length, 1))
    tree = grown(0, log_probs, ids, budget, pace.floors(budget + 1))
    paths = [()]
    for token, parent in zip(tree["tree_tokens"][1:], tree["parents"][1:], strict=True):
        paths.append((*paths[parent], int(token)))
    assert brings(paths[1:]) == pytest.approx(best, abs=1e-6)


def test_an_adaptive_round_has_room_for_twice_the_last_tree():
    rooms = sizes(17)
    assert rooms == [1, 2, 4, 8, 16, 17]
    pace = Pace(1 + 0.01 * np.arange(17))
    assert pace.size(rooms) == 17  # nothing is known yet
    pace.spend(2, 1)
    pace.spend(0, 1)
    assert pace.size(rooms) == 8  # three nodes with the root
    pace.spend(0, 1)
    assert pace.size(rooms) == 2  # so that a tree can grow again
    fixed = Pace(None)
    fixed.spend(2, 1)
    assert fixed.size(rooms) == 17


def test_costs_change_the_trees_and_not_the_text():
    name = "tiny-fp32"
    runs = [
        decode(
            *model(name), bundles.prompts(name)[:1], replay(name, True, (0.5, 0.3)), budget=16,
            max_new=40, eos=(), costs=costs,
        )[0]
        for costs in (None, 1 + 0.2 * np.arange(17))
    ]  # fmt: skip
    nodes = [sum(len(done.tokens) for done in run.rounds) for run in runs]
    assert nodes[1] < nodes[0]
    assert runs[0].tokens == runs[1].tokens == alone(name, True)[0].tokens


# -- sampling --------------------------------------------------------------------------------------


def test_draws_have_the_distribution_of_the_softmax():
    logits = np.array([1.0, -2.0, 0.5, 3.0, -np.inf, 2.0], np.float32)
    count, temperature = 6000, 0.7
    got = sample.reference(
        logits=np.broadcast_to(logits, (count, 6)),
        request=np.arange(count) % 3,
        position=np.arange(count) // 3,
        temperature=temperature,
        seed=11,
    )["token"]
    want = np.exp(logits.astype(np.float64) / temperature)
    want /= want.sum()
    seen = np.bincount(got, minlength=6) / count
    assert seen[4] == 0
    chi = count * ((seen - want)[want > 0] ** 2 / want[want > 0]).sum()
    assert chi < 20.5  # 4 degrees of freedom: exceeded once in 2500


def test_draws_depend_on_each_part_of_their_key():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (2**40, 0, 0)]
    assert len({sample.random(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize("u", [0, 2**64 - 1])
def test_the_ends_of_the_unit_interval_never_draw_what_has_no_probability(u):
    logits = np.array([-np.inf, 0.0, 1.0, -np.inf], np.float32)
    assert sample.draw(logits, u) == (1 if u == 0 else 2)


def test_pairs_of_tokens_have_the_joint_distribution_of_the_model():
    """Mean of ln p(a, b) over seeds, against minus the entropy of the pair, in standard errors."""
    name, prompt, temperature, count = "tiny-fp32", [3, 4], 0.3, 250
    weights, config = model(name)

    def log_softmax(logits):
        x = logits / temperature
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    before = forward(weights, config, prompt, faithful=True)
    first = log_softmax(before["logits"][-1])
    everything = np.arange(config["vocab_size"])
    after = np.stack(
        [
            forward(weights, config, [a], prefix_cache=before["latents"], faithful=True)["logits"][
                0
            ]
            for a in everything
        ]
    )
    joint = first[:, None] + log_softmax(after)
    p = np.exp(joint)
    mean = (p * joint).sum()
    deviation = np.sqrt((p * (joint - mean) ** 2).sum() / count)
    likely = np.argsort(-p.sum(0))[:8].astype(np.int32)  # as second token
    guesses = np.full((3, 8), -9, np.float32), np.tile(likely, (3, 1))
    got, accepted = [], 0
    for seed in range(count):
        drafter = Replay([guesses[0]], [guesses[1]], [len(prompt)], 2)
        run = decode(
            weights, config, [prompt], drafter, budget=8, max_new=3, eos=(), seed=seed,
            temperature=temperature,
        )[0]  # fmt: skip
        got.append(joint[run.tokens[0], run.tokens[1]])
        accepted += len(run.rounds[0].accepted) > 1
    assert accepted > 10
    assert abs(np.mean(got) - mean) < 4 * deviation


# -- the command -----------------------------------------------------------------------------------


def kdtr(*arguments: object, code: int = 0) -> str:
    app = cli_bundle.app if arguments[0] == "bundle" else cli_decode.app
    given = [str(each) for each in arguments]
    result = CliRunner().invoke(app, given[1:] if given[0] == "decode" else given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("decode") / "tiny-fp32.kdtr"
    kdtr("bundle", "make", "tiny-fp32", "--out", out)
    return out


def test_the_command_streams_tokens_and_sums_up(path):
    prompt = bundles.prompts("tiny-fp32")[0].tolist()
    said = kdtr(
        "decode", path, "--prompt-tokens", ",".join(map(str, prompt)), "--drafter", "replay",
        "--accuracy", 1, "--max-new", 17, "--device", "reference", "--compare", "ar",
    )  # fmt: skip
    golden = bundles.golden("tiny-fp32")[0][0][:17]
    assert " ".join(map(str, golden)) in said
    assert "2 rounds, 34 nodes verified, accepted a round: mean 8.00" in said
    assert "STRICT: 17 tokens" in said
    assert "verify" in said


def test_the_command_takes_a_batch_of_texts(path):
    said = kdtr("decode", path, "--text", "ab", "--text", "abab", "--device", "reference")
    assert "0:" in said
    assert "1:" in said


def test_the_command_tells_a_difference(path, capsys):
    one, other = (
        decode(*model("tiny-fp32"), [[3, 4]], None, budget=0, max_new=4, mode="ar", eos=())
        for _ in range(2)
    )
    assert cli_decode.same(one, other)
    one[0].logits[2] = one[0].logits[2] + 1e-6
    assert not cli_decode.same(one, other)
    one[0].tokens[1] += 1
    assert not cli_decode.same(one, other)
    said = capsys.readouterr().out
    assert "STRICT: 4 tokens" in said
    assert "logits of token 2 differ by up to 1e-06" in said
    assert "DIFFERENT: request 0, token 1" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "prompt"),
        (["--prompt-tokens", "3,x"], "numbers"),
        (["--prompt-tokens", "3,9999"], "9999"),
        (["--prompt-tokens", "3", "--accuracy", "often"], "--accuracy"),
        (["--prompt-tokens", "3", "--costs", "0:1,3:2"], "--costs"),
        (["--prompt-tokens", "3", "--costs", "measure"], "--device cuda"),
        (["--prompt-tokens", "3", "--costs", "0:1,16:nan"], "--costs"),
        (["--prompt-tokens", "3", "--accuracy", "nan"], "--accuracy"),
        (["--prompt-tokens", "3", "--temperature", "-1"], "--temperature"),
        (["--prompt-tokens", "3", "--eos", "9999"], "9999"),
        (["--prompt-tokens", "3", "--length", "0"], "--length"),
        (["--prompt-tokens", "3", "--tp", "2"], "splits the engine alone"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_call(path, arguments, says):
    assert says in kdtr("decode", path, *arguments, "--device", "reference", code=2)


def test_a_gpu_that_is_not_there_is_told_in_a_line(monkeypatch, capsys):
    def none(request):
        raise devices.DeviceError(f"--device {request}: there is none")

    monkeypatch.setattr(devices, "choose", none)
    with pytest.raises(typer.Exit):
        cli_decode.chosen(cli_decode.Device.cuda, None)
    assert "--device cuda: there is none" in capsys.readouterr().err
