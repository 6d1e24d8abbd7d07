"""kdtr bundle, import, forward and quant sweep, as a person calls them."""

import csv
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from engine import bundle
from goldens import bundles
from goldens.forward import forward
from harness import cli_bundle, cli_forward, cli_quant

ROOT = Path(__file__).parents[1]
PINNED = ROOT / "goldens" / "pinned"


def kdtr(*arguments: object, code: int = 0) -> str:
    """Standard output; standard error where the exit code is not 0."""
    command, *rest = map(str, arguments)
    app = {"forward": cli_forward.app, "quant": cli_quant.app}.get(command, cli_bundle.app)
    result = CliRunner().invoke(app, rest if app is not cli_bundle.app else [command, *rest])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    paths = {}
    for name in ("tiny-fp32", "tiny-int4", "tiny_k26"):
        paths[name] = folder / f"{name}.kdtr"
        kdtr("bundle", "make", name, "--out", paths[name])
    return paths


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("imported") / "sample.kdtr"
    kdtr("import", PINNED, out)
    return out


# -- bundle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "packed"), [("tiny-fp32", 0), ("tiny-int4", 84), ("tiny_k26", 72)]
)
def test_make_writes_the_model_of_that_name(made, name, packed):
    opened = bundle.Bundle(made[name])
    tensors = bundles.tensors(name)
    assert set(opened) == set(tensors)
    assert all(opened[key].tobytes() == tensors[key].tobytes() for key in tensors)
    assert opened.config == bundles.config(name)
    tokens, margins = bundles.golden(name)
    np.testing.assert_array_equal(opened.golden_tokens, tokens)
    np.testing.assert_array_equal(opened.golden_margins, margins.astype(np.float32))
    for stored, prompt in zip(opened.prompts, bundles.prompts(name), strict=True):
        np.testing.assert_array_equal(stored, prompt)
    assert sum(key.endswith(".qw") for key in opened) == packed


def test_make_says_what_it_made_and_gives_the_same_bytes(made, tmp_path):
    out = kdtr("bundle", "make", "tiny-int4", "--out", tmp_path / "again.kdtr")
    assert "84 INT4 matrices" in out
    assert re.search(r"smallest top-2 margin 0\.\d+ \(prompt \d, step \d+\)", out)
    assert (tmp_path / "again.kdtr").read_bytes() == made["tiny-int4"].read_bytes()


def test_make_of_an_unknown_name_or_place(tmp_path):
    error = kdtr("bundle", "make", "huge", "--out", tmp_path / "a.kdtr", code=2)
    assert error.startswith("kdtr: no model 'huge'; there are tiny-fp32, tiny-int4, ")
    error = kdtr("bundle", "make", "tiny-fp32", "--out", tmp_path / "no" / "a.kdtr", code=1)
    assert "there is no directory" in error
    assert not list(tmp_path.iterdir())


def test_inspect(made):
    out = kdtr("bundle", "inspect", made["tiny-int4"])
    assert re.search(r"tiny-int4, 3\.\d MB, int4-g32", out)
    assert re.search(r"model\.layers\.\*\.mlp\.experts\.\*\.up_proj\.qw +24 +I32 +128 x 32", out)
    assert "all, 84 matrices INT4" in out
    assert out.count("golden ") == 3
    every = kdtr("bundle", "inspect", made["tiny-int4"], "--tensors")
    assert "model.layers.3.mlp.experts.7.up_proj.sc" in every
    table = json.loads(kdtr("bundle", "inspect", made["tiny-int4"], "--json"))
    assert table["tensors"]["model.norm.weight"] == {"dtype": "BF16", "shape": [256], "bytes": 512}
    assert len(table["golden_tokens"]) == len(table["prompts"]) == 3


def test_verify(made, imported):
    out = kdtr("bundle", "verify", made["tiny-int4"], "--golden")
    assert "213 weights, every digest right, every value finite" in out
    assert "golden tokens are the reference's" in out
    error = kdtr("bundle", "verify", imported, "--golden", code=1)
    assert "sample.kdtr: has no golden tokens" in error


def test_verify_finds_a_flipped_bit_and_a_golden_that_is_not_the_models(made, tmp_path):
    file = tmp_path / "bad.kdtr"
    raw = bytearray(made["tiny-int4"].read_bytes())
    raw[-1000] ^= 4
    file.write_bytes(raw)
    assert re.search(
        r"bad\.kdtr: corrupted: tensor '.*' has", kdtr("bundle", "verify", file, code=1)
    )
    opened = bundle.Bundle(made["tiny-int4"])
    tokens = opened.golden_tokens.copy()
    tokens[1, 5] += 1
    bundle.write(
        file,
        dict(opened),
        opened.config,
        prompts=opened.prompts,
        golden_tokens=tokens,
        golden_margins=opened.golden_margins,
    )
    kdtr("bundle", "verify", file)
    error = kdtr("bundle", "verify", file, "--golden", code=1)
    assert f"prompt 1, step 5: golden token {tokens[1, 5]}, the reference gives" in error


def test_diff_of_a_bundle_with_itself(made):
    out = kdtr("bundle", "diff", made["tiny-fp32"], made["tiny-fp32"])
    assert out.count("diverge at: none") == 3
    assert re.search(r"3 +MoE +0\.00e\+00", out)
    assert "mean 0, largest 0 nats" in out


def test_diff_of_two_models_says_where_their_tokens_part(made):
    """Against the goldens themselves: the printed lists and the printed places."""
    out = kdtr("bundle", "diff", made["tiny-fp32"], made["tiny-int4"])
    a, b = bundles.golden("tiny-fp32")[0], bundles.golden("tiny-int4")[0]
    for tokens in (*a, *b):
        assert " ".join(map(str, tokens)) in out
    places = [int(text) for text in re.findall(r"diverge at: (\d+)", out)]
    expected = [int((x != y).argmax()) for x, y in zip(a, b, strict=True) if (x != y).any()]
    assert places == expected
    assert places
    errors = [float(x) for x in re.findall(r"^ *\d +\w+ +(\d\.\d\de-\d\d)", out, re.MULTILINE)]
    assert len(errors) == 4
    assert errors[0] < errors[3] < 0.5
    assert re.search(r"same argmax at \d+ of \d+ positions", out)


def test_diff_computes_golden_tokens_that_are_not_there(made, imported):
    out = kdtr("bundle", "diff", made["tiny-int4"], imported)
    assert "note: config key 'max_position_embeddings' is 4096 in A, 262144 in B" in out
    assert "sample.kdtr (pinned, int4-g32, golden tokens computed now)" in out
    assert out.count("diverge at: ") == 3


def test_diff_of_models_of_different_shape(made, tmp_path):
    other = tmp_path / "tiny2.kdtr"
    bundle.write(other, bundles.tensors("tiny2-fp32"), bundles.config("tiny2-fp32"))
    error = kdtr("bundle", "diff", made["tiny-fp32"], other, code=1)
    assert "model.embed_tokens.weight is [512, 256] in" in error
    config = {**bundles.config("tiny-fp32"), "num_experts_per_tok": 3}
    bundle.write(other, bundles.tensors("tiny-fp32"), config)
    error = kdtr("bundle", "diff", made["tiny-fp32"], other, code=1)
    assert "config key 'num_experts_per_tok' is 2 in A, 3 in B: not comparable" in error


# -- import ----------------------------------------------------------------------------------------


def test_import_says_what_it_did(tmp_path):
    out = kdtr("import", PINNED, tmp_path / "sample.kdtr")
    assert re.search(r"sample\.kdtr: 4\.7 MB in \d\.\d s", out)
    assert "201 tensors from 1 file, prefix 'language_model.', 72 INT4 matrices" in out
    assert "not used: nothing" in out
    opened = bundle.Bundle(tmp_path / "sample.kdtr")
    tensors = bundles.tensors("k26_sample")
    assert set(opened) == set(tensors)
    assert all(opened[key].tobytes() == tensors[key].tobytes() for key in tensors)
    config = bundles.config("k26_sample")
    assert {key: opened.config[key] for key in opened.config} == {
        key: value for key, value in config.items() if key != "quantization_config"
    }


def test_import_fails_in_one_line(tmp_path):
    error = kdtr("import", tmp_path / "absent", tmp_path / "out.kdtr", code=1)
    assert re.fullmatch(r"kdtr: .*absent: no such directory\n", error)
    assert not list(tmp_path.iterdir())


# -- forward ---------------------------------------------------------------------------------------

TREE = ["--tree-tokens", "7,8,9,10", "--tree-parents=-1,0,0,2"]


@pytest.mark.parametrize("exact", [False, True])
def test_forward_saves_what_the_reference_gives(made, tmp_path, exact):
    path, save = made["tiny-int4"], tmp_path / "run.npz"
    options = ["--exact"] if exact else []
    out = kdtr("forward", path, "--tokens", "3,4,5", *TREE, "--save", save, *options)
    run, opened = np.load(save), bundle.Bundle(path)
    prompt = forward(opened, opened.config, [3, 4, 5], faithful=not exact)
    tree = forward(
        opened,
        opened.config,
        [7, 8, 9, 10],
        parents=[-1, 0, 0, 2],
        prefix_cache=prompt["latents"],
        faithful=not exact,
    )
    expected = {f"prompt/{key}": value for key, value in prompt.items()}
    expected |= {f"tree/{key}": value for key, value in tree.items()}
    assert set(run) == set(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(run[key], value, err_msg=key)
    assert list(tmp_path.iterdir()) == [save]
    last = re.search(r"^ *5 +node 3 +10 +2 +2 +(\d+)", out, re.MULTILINE)
    assert int(last.group(1)) == tree["logits"][3].argmax()


def test_forward_of_a_tree_is_forward_of_its_paths(made, tmp_path):
    """Exact mode: a node's logits are those of its path as a plain prompt."""
    save = tmp_path / "run.npz"
    kdtr("forward", made["tiny_k26"], "--tokens", "3,4,5", *TREE, "--exact", "--save", save)
    tree = np.load(save)["tree/logits"]
    for node, path in enumerate(([7], [7, 8], [7, 9], [7, 9, 10])):
        tokens = ",".join(map(str, [3, 4, 5, *path]))
        kdtr("forward", made["tiny_k26"], "--tokens", tokens, "--exact", "--save", save)
        np.testing.assert_allclose(np.load(save)["prompt/logits"][-1], tree[node], atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "3,a"], "--tokens: expected numbers with commas between, like 1,2,3, got"),
        (["--tokens", "3,,4"], "--tokens: expected numbers"),
        (["--tokens", "512"], "token 512 is not one of the 512 of"),
        (["--tokens", "-1"], "token -1 is not one of the 512 of"),
        (["--tokens", "3", "--tree-tokens", "4"], "--tree-tokens and --tree-parents go together"),
        (["--tokens", "3", "--tree-tokens", "4,5", "--tree-parents=-1"], "2 tree tokens but 1 par"),
        (["--tokens", "3", "--tree-tokens", "4", "--tree-parents=0"], "node 0 has parent 0, exp"),
        (
            ["--tokens", "3", "--tree-tokens", "4,5,6", "--tree-parents=-1,2,0"],
            "node 1 has parent 2, expected 0..0",
        ),
        (["--tokens", "3", "--save", "run.txt"], "--save: expected a name that ends in .npz"),
        (["--tokens", "3", "--exact", "--device", "sim"], "--exact: only the reference"),
        (["--tokens", ",".join(["3"] * 4097)], "past max_position_embeddings, 4096"),
    ],
)
def test_forward_calls_that_make_no_sense(made, options, message):
    assert message in kdtr("forward", made["tiny-int4"], *options, code=2)


@pytest.fixture
def engine_passes(monkeypatch):
    """Stands in for engine.passes; what the environment says of the simulator is put back."""
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    module = types.ModuleType("engine.passes")
    monkeypatch.setitem(sys.modules, "engine.passes", module)
    return module


def test_forward_hands_the_engine_the_bundle(made, engine_passes):
    calls = []

    def forward_tree(weights, config, prompt, tree):
        calls.append((weights["model.norm.weight"].shape, config["hidden_size"], prompt, tree))
        return {"prompt/logits": np.eye(3, 512), "tree/logits": np.eye(4, 512)}

    engine_passes.forward_tree = forward_tree
    kdtr("forward", made["tiny-int4"], "--tokens", "3,4,5", *TREE, "--device", "sim")
    assert calls == [((256,), 256, [3, 4, 5], ([7, 8, 9, 10], [-1, 0, 0, 2]))]
    assert os.environ["NUMBA_ENABLE_CUDASIM"] == "1"


def test_forward_on_a_device_without_an_engine(made, engine_passes):
    error = kdtr("forward", made["tiny-int4"], "--tokens", "3", "--device", "cuda", code=1)
    assert "--device cuda: this version of the engine has no engine.passes:forward_tree" in error


# -- quant -----------------------------------------------------------------------------------------


def test_sweep(made, tmp_path, monkeypatch):
    from goldens import quantise

    monkeypatch.setattr(quantise, "KINDS", (("amax/7.5", True), ("range/15", False)))  # for time
    plot, table = tmp_path / "sweep.png", tmp_path / "sweep.csv"
    arguments = ("--plot", plot, "--csv", table, "--steps", 4)
    groups = ("--group", 32, "--group", 96)
    out = kdtr("quant", "sweep", made["tiny-fp32"], *groups, *arguments)
    assert "group 96 left out: model.layers.0.mlp.down_proj has 512 inputs" in out
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2
    assert {row["count"] for row in rows} == {"72", "81", "84"}
    line = re.search(r"^ routed, shared, dense +84 +32 +symmetric amax/7\.5 +4\.500.*$", out, re.M)
    assert line is not None
    assert "*" in out
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert sorted(tmp_path.iterdir()) == [table, plot]


def test_sweep_of_a_quantised_bundle_without_prompts_says_so(imported, tmp_path, monkeypatch):
    from goldens import quantise

    monkeypatch.setattr(quantise, "KINDS", (("amax/7", True),))
    plot = tmp_path / "sweep.svg"
    options = ("--group", 32, "--steps", 2, "--plot", plot)
    out = kdtr("quant", "sweep", imported, *options)
    assert "72 matrices of" in out
    assert "are INT4 already; the sweep quantises their INT4 values again" in out
    assert "has no prompts; 3 from a fixed seed stand in" in out
    assert "<svg" in plot.read_text()


def test_sweep_calls_that_make_no_sense(made, tmp_path):
    path = made["tiny-fp32"]
    assert ".png, .svg or .pdf" in kdtr("quant", "sweep", path, "--plot", "a.txt", code=2)
    assert "a size >= 1, got 0" in kdtr("quant", "sweep", path, "--group", 0, code=2)
    assert "no group size divides" in kdtr("quant", "sweep", path, "--group", 96, code=1)


def test_a_star_is_for_rows_that_no_other_beats():
    points = [(8, 0.3), (9, 0.2), (9, 0.2), (9, 0.25), (10, 0.2), (10, 0.1)]
    rows = [types.SimpleNamespace(model_bits=bits, kl=kl) for bits, kl in points]
    assert cli_quant.unbeaten(rows) == {0, 1, 2, 5}


# -- the command itself ----------------------------------------------------------------------------


def test_kdtr_mounts_them(made):
    """In a process of its own, as the console script does it."""
    for arguments, expected in (
        (["bundle", "verify", made["tiny-int4"]], "every digest right"),
        (["forward", made["tiny-int4"], "--tokens", "1,2"], "argmax"),
        (["quant", "sweep", "--help"], "--csv"),
        (["import", "--help"], "OUT.kdtr"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "harness.cli", *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert expected in result.stdout
