"""Import of public checkpoints: the sample, directories made here, and hostile ones."""

import json
import random
import shutil
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from test_bundle import CONFIG, mutated

from engine import bundle, checkpoint
from engine.bundle import Bundle
from engine.tensorfile import InvalidFile

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "goldens" / "pinned"
BF16 = ml_dtypes.bfloat16
PREFIX = "language_model."
TEXT = {
    **{key: value for key, value in CONFIG.items() if key != "lora_rms_norm_eps"},
    "model_type": "kimi_k2",
    "num_key_value_heads": 2,
    "n_group": 1,
    "topk_group": 1,
    "hidden_act": "silu",
}
SCHEME = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:vision_tower.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": SCHEME,
        }
    },
}
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
PACKED, SCALE = f"{PREFIX}{EXPERT}.weight_packed", f"{PREFIX}{EXPERT}.weight_scale"
NORM = f"{PREFIX}model.norm.weight"


def public_tensors(prefix: str = PREFIX) -> dict[str, np.ndarray]:
    """Random weights under the public names, the routed experts packed."""
    rng = np.random.default_rng(0)
    tensors = {}
    config = {**TEXT, "lora_rms_norm_eps": 1e-6}
    for name, (shape, _, float32, _) in bundle.layout(config):
        module = prefix + name.removesuffix(".weight")
        if ".mlp.experts." in name:
            out, inner = shape
            words = rng.integers(-(2**31), 2**31, (out, inner // 8)).astype(np.int32)
            tensors[f"{module}.weight_packed"] = words
            tensors[f"{module}.weight_scale"] = rng.random((out, inner // 32)).astype(BF16)
            tensors[f"{module}.weight_shape"] = np.array([out, inner], np.int32)
        else:
            value = rng.standard_normal(shape)
            tensors[prefix + name] = value.astype(np.float32 if float32 else BF16)
    return tensors


def nested(text: dict | None = None, quantisation: dict | None = QUANTISATION) -> dict:
    """A config.json of the Kimi K2.5 kind."""
    text = {**(TEXT if text is None else text), "quantization_config": quantisation}
    return {"model_type": "kimi_k25", "text_config": text}


def save(
    directory: Path, tensors: dict[str, np.ndarray] | None = None, config=None, shards: int = 3
) -> Path:
    """A checkpoint directory; tensors dealt to the shards in turn, one file without an index."""
    directory.mkdir(exist_ok=True)
    tensors = public_tensors() if tensors is None else tensors
    text = json.dumps(nested() if config is None else config)
    (directory / "config.json").write_text(text)
    names = list(tensors)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    for at, file in enumerate(files):
        part = {name: tensors[name] for name in names[at::shards]}
        safetensors.numpy.save_file(part, directory / file, metadata={"format": "pt"})
    if shards > 1:
        table = {name: files[i % shards] for i, name in enumerate(names)}
        index = {"metadata": {"total_size": 1}, "weight_map": table}
        (directory / checkpoint.INDEX).write_text(json.dumps(index))
    return directory


def changed(*path_and_value) -> dict:
    """config.json with one entry of the quantisation changed; the last argument is its value."""
    *path, value = path_and_value
    config = json.loads(json.dumps(nested()))
    table = config["text_config"]["quantization_config"]
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return config


# -- what is read ----------------------------------------------------------------------------------


def test_the_sample_is_imported_bit_for_bit(tmp_path):
    """Through the package's own reader: packed words and scales as on disk, all else as it was."""
    out = tmp_path / "sample.kdtr"
    started = time.process_time()
    read = checkpoint.convert(SAMPLE, out)
    assert time.process_time() - started < 2
    opened = Bundle(out)
    opened.verify()
    assert opened.quantization == "int4-g32"
    assert (read.prefix, read.unused, read.notes) == (PREFIX, {}, [])
    assert opened.config["lora_rms_norm_eps"] == 1e-6
    assert opened.config["rope_scaling"]["beta_fast"] == 32
    public = safetensors.deserialize((SAMPLE / "model.safetensors").read_bytes())
    theirs = {name.removeprefix(PREFIX): tensor for name, tensor in public}
    renamed = {".weight_packed": ".qw", ".weight_scale": ".sc"}
    seen = set()
    for name, tensor in theirs.items():
        if name.endswith(".weight_shape"):
            continue
        for old, new in renamed.items():
            name = name.replace(old, new)
        assert opened[name].tobytes() == bytes(tensor["data"]), name
        seen.add(name)
    assert seen == set(opened)
    assert sum(name.endswith(".qw") for name in opened) == 72


@pytest.mark.parametrize("prefix", [PREFIX, ""])
@pytest.mark.parametrize("shards", [1, 3])
def test_shards_and_prefixes(tmp_path, prefix, shards):
    tensors = public_tensors(prefix)
    directory = save(tmp_path / "in", tensors, shards=shards)
    read = checkpoint.convert(directory, tmp_path / "out.kdtr")
    assert (read.prefix, len(read.shards)) == (prefix, shards)
    opened = Bundle(tmp_path / "out.kdtr")
    opened.verify()
    assert opened.name == "in"
    assert opened[f"{EXPERT}.qw"].tobytes() == tensors[f"{prefix}{EXPERT}.weight_packed"].tobytes()
    assert opened[f"{EXPERT}.sc"].tobytes() == tensors[f"{prefix}{EXPERT}.weight_scale"].tobytes()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert opened[bias].dtype == np.float32
    assert opened[bias].tobytes() == tensors[prefix + bias].tobytes()


@pytest.mark.parametrize(
    "config",
    [
        {**nested(quantisation=None), "quantization_config": QUANTISATION},
        {**nested(), "quantization_config": QUANTISATION},
        {**TEXT, "quantization_config": QUANTISATION},
    ],
    ids=["at the top", "at both places", "no text_config"],
)
def test_where_the_quantisation_may_stand(tmp_path, config):
    read = checkpoint.read(save(tmp_path / "in", config=config))
    assert sum(name.endswith(".qw") for name in read.sources) == 9
    assert "quantization_config" not in read.config


def test_rope_as_transformers_5_writes_it(tmp_path):
    scaling = {key: value for key, value in TEXT["rope_scaling"].items() if key != "type"}
    text = {key: value for key, value in TEXT.items() if not key.startswith("rope_")}
    text["rope_parameters"] = {**scaling, "rope_type": "yarn", "rope_theta": 50000.0}
    read = checkpoint.read(save(tmp_path / "in", config=nested(text)))
    assert read.config["rope_scaling"] == TEXT["rope_scaling"]
    assert read.config["rope_theta"] == 50000.0
    assert "rope_parameters" not in read.config


def test_a_checkpoint_that_is_not_quantised(tmp_path):
    rng = np.random.default_rng(0)
    layout = dict(bundle.layout({**TEXT, "lora_rms_norm_eps": 1e-6}))
    tensors = {n: rng.standard_normal(m.shape).astype(np.float32) for n, m in layout.items()}
    directory = save(tmp_path / "in", tensors, nested(quantisation=None))
    checkpoint.convert(directory, tmp_path / "out.kdtr")
    assert Bundle(tmp_path / "out.kdtr").quantization == "none"


def test_weight_shape_may_be_int64(tmp_path):
    tensors = public_tensors()
    name = f"{PREFIX}{EXPERT}.weight_shape"
    tensors[name] = tensors[name].astype(np.int64)
    checkpoint.read(save(tmp_path / "in", tensors))


def test_what_is_not_used_is_reported(tmp_path):
    tensors = {
        **public_tensors(),
        "vision_tower.patch_embed.weight": np.zeros((4, 3), BF16),
        "vision_tower.patch_embed.bias": np.zeros(4, BF16),
        "mm_projector.weight": np.zeros(8, BF16),
        f"{PREFIX}model.layers.2.eh_proj.weight": np.zeros(6, BF16),
        f"{PREFIX}model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32),
    }
    directory = save(tmp_path / "in", tensors)
    index = json.loads((directory / checkpoint.INDEX).read_text())
    del index["weight_map"]["mm_projector.weight"]
    (directory / checkpoint.INDEX).write_text(json.dumps(index))
    assert checkpoint.read(directory).unused == {
        "vision_tower": (2, 32),
        f"{PREFIX}model.layers.2": (1, 12),
        "rotary_emb.inv_freq": (1, 8),
        f"not in {checkpoint.INDEX}": (1, 16),
    }


def test_tensors_decide_and_the_ignore_list_is_compared(tmp_path):
    """A shared expert is packed though ignored, a routed one is plain though it is not."""
    tensors = public_tensors()
    shared = f"{PREFIX}model.layers.1.mlp.shared_experts.up_proj"
    del tensors[f"{shared}.weight"]
    tensors[f"{shared}.weight_packed"] = tensors[PACKED]
    tensors[f"{shared}.weight_scale"] = tensors[SCALE]
    tensors[f"{shared}.weight_shape"] = np.array([32, 64], np.int32)
    for part in ("packed", "scale", "shape"):
        del tensors[f"{PREFIX}{EXPERT}.weight_{part}"]
    tensors[f"{PREFIX}{EXPERT}.weight"] = np.zeros((32, 64), BF16)
    read = checkpoint.read(save(tmp_path / "in", tensors))
    assert {"model.layers.1.mlp.shared_experts.up_proj.qw", f"{EXPERT}.weight"} <= set(read.sources)
    assert read.notes == [
        f"{shared}: INT4 although the ignore list matches; the tensors decide",
        f"{PREFIX}{EXPERT}: in 16 bits although the ignore list does not match; the tensors decide",
    ]


@pytest.mark.parametrize(
    ("entry", "matched"),
    [
        (f"re:{EXPERT}", None),  # behind a prefix it does not begin there
        ("up_proj", None),
        (EXPERT, None),
        (f"re:{PREFIX}{EXPERT}", f"{PREFIX}{EXPERT}"),
        (f"{PREFIX}{EXPERT}", f"{PREFIX}{EXPERT}"),
        ("re:.*up_proj$", f"{PREFIX}model.layers.1.mlp.experts.0.up_proj and 2 more matrices"),
    ],
)
def test_what_an_ignore_entry_matches(tmp_path, entry, matched):
    """`re:` is a pattern from the beginning of the name, everything else a whole name."""
    config = changed("ignore", [*QUANTISATION["ignore"], entry])
    notes = checkpoint.read(save(tmp_path / "in", config=config)).notes
    fact = "INT4 although the ignore list matches; the tensors decide"
    assert notes == ([f"{matched}: {fact}"] if matched else [])


# -- what is refused -------------------------------------------------------------------------------


def refuse(directory: Path, message: str) -> None:
    """The import ends in one error, and neither a bundle nor a part of one is left."""
    out = directory.parent / "out" / "out.kdtr"
    out.parent.mkdir(exist_ok=True)
    with pytest.raises(InvalidFile, match=message):
        checkpoint.convert(directory, out)
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("quant_method", "fp8"), "quant_method: expected 'compressed-tensors', got 'fp8'"),
        (changed("format", "int-quantized"), "format: expected 'pack-quantized', got 'int-q"),
        (changed("quantization_status", "frozen"), "quantization_status: expected 'compressed'"),
        (changed("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme: expected None, got"),
        (changed("sparsity_config", {"format": "2:4"}), "sparsity_config: expected None, got"),
        (changed("transform_config", {"R1": {}}), "transform_config: expected None, got"),
        (changed("config_groups", {}), "config_groups: expected a dict, got {}"),
        (changed("config_groups", "group_0", 7), "config_groups.group_0: expected a dict, got 7"),
        (
            changed("config_groups", "group_0", "input_activations", {"num_bits": 8}),
            r"group_0\.input_activations: expected None, got \{'num_bits': 8\}",
        ),
        (
            changed("config_groups", "group_0", "weights", "group_size", 128),
            r"group_0\.group_size: expected 32, got 128",
        ),
        (
            changed("config_groups", "group_0", "weights", "num_bits", 8),
            r"group_0\.num_bits: expected 4, got 8",
        ),
        (
            changed("config_groups", "group_0", "weights", "symmetric", False),
            r"group_0\.symmetric: expected True, got False",
        ),
        (
            changed("config_groups", "group_0", "weights", "actorder", "group"),
            r"group_0\.actorder: expected None, got 'group'",
        ),
        (
            changed("config_groups", "group_0", "weights", "strategy", "channel"),
            r"group_0\.strategy: expected 'group', got 'channel'",
        ),
        (
            changed("config_groups", "group_0", "weights", "rotation", "hadamard"),
            r"group_0\.weights\.rotation: unknown, 'hadamard'",
        ),
        (changed("ignore", ["re:("]), r"ignore: 're:\(': .*unterminated"),
        (changed("ignore", [7]), "ignore: 7 is not a string"),
        ({**nested(), "quantization_config": {}}, "differ"),
        (nested(quantisation=None), "weight_packed': INT4, but .*config.json has no quantization_"),
        (nested({**TEXT, "model_type": "llama"}), "model_type 'llama' is not one of kimi_k2, deep"),
        (nested({**TEXT, "hidden_act": "gelu"}), "'hidden_act': expected 'silu', got 'gelu'"),
        (nested({**TEXT, "n_group": 8}), "'n_group': expected 1, got 8"),
        (
            nested({**TEXT, "hidden_size": "64"}),
            "'hidden_size': expected an integer >= 1, got '64'",
        ),
        (
            nested({**TEXT, "vocab_size": 25}),
            r"embed_tokens.weight': expected shape \[25, 64\], got",
        ),
        (nested({**TEXT, "num_hidden_layers": 10**9}), r"model.layers.2.input_layernorm.*missing"),
        (nested({**TEXT, "n_routed_experts": 2}), r"mlp.gate.weight': expected shape \[2, 64\]"),
        ({"text_config": 7}, "'text_config' is not an object"),
    ],
)
def test_configs_that_are_refused(tmp_path, config, message):
    refuse(save(tmp_path / "in", config=config), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, f"tensor '{NORM}' is missing"),
        ({PACKED: None}, f"tensor '{PACKED}' is missing"),
        ({SCALE: None}, f"tensor '{SCALE}' is missing"),
        ({f"{PREFIX}{EXPERT}.weight_shape": None}, "up_proj.weight_shape' is missing"),
        (
            {SCALE: np.ones((32, 1), BF16)},
            r"weight_scale': expected shape \[32, 2\], got \[32, 1\]",
        ),
        ({SCALE: np.ones((32, 2), np.float16)}, "weight_scale': expected dtype BF16, got F16"),
        ({PACKED: np.ones((32, 8), np.int64)}, "weight_packed': expected dtype I32, got I64"),
        ({PACKED: np.ones((8, 32), np.int32)}, r"weight_packed': expected shape \[32, 8\], got"),
        (
            {f"{PREFIX}{EXPERT}.weight_shape": np.array([64, 32], np.int32)},
            r"weight_shape': expected the values \[32, 64\], got \[64, 32\]",
        ),
        ({NORM: np.ones(64, np.float32)}, "model.norm.weight': expected dtype BF16, got F32"),
        ({NORM: np.ones(64, np.float16)}, "model.norm.weight': expected dtype BF16, got F16"),
        (
            {f"{PREFIX}model.embed_tokens.weight": np.ones((24, 64), np.float16)},
            "embed_tokens.weight': expected dtype BF16 or F32, got F16",
        ),
        (
            {f"{PREFIX}model.layers.1.mlp.gate.e_score_correction_bias": np.ones(3, BF16)},
            "e_score_correction_bias': expected dtype F32, got BF16",
        ),
        (
            {f"{PREFIX}{EXPERT}.weight": np.ones((32, 64), BF16)},
            "weight_packed': .*up_proj.weight' is there too; which of them counts?",
        ),
        (
            {f"{PREFIX}{EXPERT}.weight_zero_point": np.ones((4, 2), np.int32)},
            "up_proj.weight_zero_point': not supported: asymmetric quantisation",
        ),
        (
            {f"{PREFIX}{EXPERT}.weight_g_idx": np.ones(64, np.int32)},
            "up_proj.weight_g_idx': not supported: activation reordering",
        ),
        (
            {PACKED: None, SCALE: None, f"{PREFIX}{EXPERT}.qweight": np.ones(64, np.int32)},
            "up_proj.qweight': not supported: GPTQ or AWQ packing",
        ),
        (
            {f"{PREFIX}model.layers.0.self_attn.o_proj.bias": np.ones(64, BF16)},
            "o_proj.bias': not supported: the engine's matrices have no bias",
        ),
        (
            {f"{PREFIX}model.layers.1.mlp.experts.3.up_proj.weight": np.ones((32, 64), BF16)},
            "experts.3.up_proj.weight': not supported: the engine's model has no such weight",
        ),
        (
            {"model.embed_tokens.weight": np.ones((24, 64), BF16)},
            "'model.embed_tokens.weight' is there both with and without the prefix",
        ),
        (
            {f"{PREFIX}model.embed_tokens.weight": None},
            "'model.embed_tokens.weight' is there neither with nor without the prefix",
        ),
        (
            {SCALE: np.full((32, 2), np.nan, BF16)},
            r"model-0000\d-of-00003.safetensors: tensor .*_scale' holds nan at \[0, 0\]",
        ),
    ],
)
def test_tensors_that_are_refused(tmp_path, change, message):
    tensors = public_tensors()
    for name, array in change.items():
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = array
    refuse(save(tmp_path / "in", tensors), message)


def test_packed_attention_is_refused(tmp_path):
    tensors = public_tensors()
    module = f"{PREFIX}model.layers.0.self_attn.o_proj"
    tensors[f"{module}.weight_packed"] = np.ones((64, 20 // 8), np.int32)
    refuse(save(tmp_path / "in", tensors), "o_proj.weight_packed': INT4, but the engine keeps")


def test_quantised_float32_is_refused(tmp_path):
    tensors = {
        name: array.astype(np.float32)
        if array.dtype == BF16 and not name.endswith("scale")
        else array
        for name, array in public_tensors().items()
    }
    message = "embed_tokens.weight': a quantised model is BF16, got F32"
    refuse(save(tmp_path / "in", tensors), message)


def test_shards_that_are_missing_cut_or_foreign(tmp_path):
    directory = save(tmp_path / "in")
    second = directory / "model-00002-of-00003.safetensors"
    raw = second.read_bytes()
    second.unlink()
    message = (
        r"model-00002-of-00003.safetensors: shard is missing; .* puts \d+ tensors there, 'lang"
    )
    refuse(directory, message)
    second.write_bytes(raw[:-3])
    refuse(directory, r"model-00002-of-00003.safetensors: truncated: tensor 'lang.*' ends at byte")
    second.write_bytes(raw[:50])
    refuse(directory, r"model-00002-of-00003.safetensors: truncated in the header")
    second.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refuse(directory, r"model-00002-of-00003.safetensors: not a safetensors file")
    shutil.copy(directory / "model-00001-of-00003.safetensors", second)
    refuse(directory, r"model-00002-of-00003.safetensors: tensor 'lang.*' is missing; model.safe")


def test_an_index_that_is_wrong(tmp_path):
    directory = save(tmp_path / "in")
    index = directory / checkpoint.INDEX
    table = json.loads(index.read_text())
    for broken, message in (
        ("{", "index.json: not JSON"),
        ("[]", "index.json: not a JSON object"),
        ("{}", "index.json: expected an object 'weight_map', got None"),
        (json.dumps({"weight_map": {NORM: 3}}), f"tensor '{NORM}' is in 3, which is no file name"),
        (
            json.dumps({"weight_map": {**table["weight_map"], NORM: "../secret.safetensors"}}),
            "is in '../secret.safetensors', which is no file name",
        ),
    ):
        index.write_text(broken)
        refuse(directory, message)
    index.unlink()
    refuse(directory, r"expected model.safetensors.index.json or one safetensors file, got model-0")
    for shard in directory.glob("*.safetensors"):
        shard.unlink()
    refuse(directory, r"or one safetensors file, got no \*.safetensors")


def test_whatever_the_json_says_the_error_is_ours(tmp_path):
    rng = random.Random(0)
    directory = save(tmp_path / "in")
    index = json.loads((directory / checkpoint.INDEX).read_text())
    errors = []
    for turn in range(200):
        config = mutated(nested(), rng) if turn % 3 else nested()
        other = index if turn % 3 else mutated(index, rng)
        (directory / "config.json").write_text(json.dumps(config))
        (directory / checkpoint.INDEX).write_text(json.dumps(other))
        try:
            checkpoint.read(directory)
        except InvalidFile as error:
            errors.append(str(error))
    assert 160 < len(errors) < 200
    assert all(error.startswith(str(directory)) for error in errors)


def test_a_directory_that_is_none(tmp_path):
    refuse(tmp_path / "absent", "absent: no such directory")
    (tmp_path / "in").mkdir()
    refuse(tmp_path / "in", "config.json: No such file or directory")
    (tmp_path / "in" / "config.json").write_bytes(b"\xff")
    refuse(tmp_path / "in", "config.json: not JSON")


def test_the_checkpoint_itself_is_not_replaced(tmp_path):
    directory = save(tmp_path / "in", shards=1)
    for name in ("model.safetensors", "config.json"):
        before = (directory / name).read_bytes()
        with pytest.raises(InvalidFile, match="is part of the checkpoint, and would be replaced"):
            checkpoint.convert(directory, directory / name)
        assert (directory / name).read_bytes() == before


def test_an_old_bundle_survives_a_failed_import(tmp_path):
    out = tmp_path / "out.kdtr"
    checkpoint.convert(save(tmp_path / "in"), out)
    before = out.read_bytes()
    tensors = public_tensors()
    tensors[SCALE][0, 0] = np.inf
    with pytest.raises(InvalidFile, match="holds inf"):
        checkpoint.convert(save(tmp_path / "bad", tensors), out)
    assert out.read_bytes() == before


def test_the_checkpoint_is_never_whole_in_memory(tmp_path):
    """70 MB pass through; what Python and numpy allocate on the way stays under a tenth of that."""
    text = {**TEXT, "vocab_size": 250_000}
    tensors = public_tensors()
    for name in (f"{PREFIX}model.embed_tokens.weight", f"{PREFIX}lm_head.weight"):
        tensors[name] = np.ones((250_000, 64), BF16)
    directory = save(tmp_path / "in", tensors, nested(text))
    total = sum(path.stat().st_size for path in directory.iterdir())
    assert total > 60e6
    del tensors
    tracemalloc.start()
    try:
        checkpoint.convert(directory, tmp_path / "out.kdtr")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < total / 10


# -- a drafter beside it ---------------------------------------------------------------------------

DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": TEXT["hidden_size"],
    "vocab_size": TEXT["vocab_size"],
    "num_target_layers": TEXT["num_hidden_layers"],
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "block_size": 8,
    "layer_types": ["full_attention"],
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
}


def save_drafter(directory: Path, config: dict | None = None, change=None) -> Path:
    """A public DFlash drafter with random weights; `change` edits its tensors."""
    own = DRAFTER if config is None else config
    table = {**{k: DRAFTER[k] for k in DRAFTER}, **DRAFTER["dflash_config"]}
    rng, tensors = np.random.default_rng(1), {}
    for name, matrix in bundle.layout({**TEXT, "drafter": table}):
        if name.startswith("drafter."):
            value = rng.standard_normal(matrix.shape).astype(BF16)
            tensors[name.removeprefix("drafter.")] = value
    if change is not None:
        change(tensors)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(own))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_drafter_is_imported_beside_its_target(tmp_path):
    target, drafter = save(tmp_path / "target"), save_drafter(tmp_path / "drafter")
    read = checkpoint.convert(target, tmp_path / "both.kdtr", drafter=drafter)
    opened = bundle.Bundle(tmp_path / "both.kdtr")
    opened.verify()
    assert opened.config["drafter"]["target_layer_ids"] == [0, 1]
    assert opened.config["drafter"]["block_size"] == 8
    with safetensors.safe_open(drafter / "model.safetensors", "np") as file:
        for name in file.keys():
            np.testing.assert_array_equal(opened[f"drafter.{name}"], file.get_tensor(name))
    assert drafter / "model.safetensors" in read.shards
    with pytest.raises(InvalidFile, match="would be replaced"):
        checkpoint.convert(target, drafter / "config.json", drafter=drafter)


def test_yarn_without_mscale_has_yarns_own_factor(tmp_path):
    yarn = {
        "rope_type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    drafter = save_drafter(tmp_path / "drafter", {**DRAFTER, "rope_scaling": yarn})
    read = checkpoint.read(save(tmp_path / "target"), drafter)
    scaling = read.config["drafter"]["rope_scaling"]
    assert (scaling["type"], scaling["mscale"], scaling["mscale_all_dim"]) == ("yarn", 1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": None}, "dflash_config"),
        ({"hidden_size": 1}, "'hidden_size': expected"),
        ({"vocab_size": 1}, "'vocab_size': expected"),
        ({"num_target_layers": 9}, "'num_target_layers': expected"),
        ({"attention_bias": True}, "'attention_bias': expected False"),
        ({"layer_types": ["sliding_attention"]}, "not supported: layers of sliding_attention"),
        ({"dflash_config": {**DRAFTER["dflash_config"], "fc_layernorm": True}}, "norms before fc"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [9]}}, "target_layer_ids"),
        ({"block_size": None}, "block_size"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config': expected None"),
    ],
)
def test_drafters_that_are_refused(tmp_path, change, message):
    drafter = save_drafter(tmp_path / "drafter", {**DRAFTER, **change})
    with pytest.raises(InvalidFile, match=message):
        checkpoint.read(save(tmp_path / "target"), drafter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "'fc.weight' is missing"),
        (lambda t: t.update({"fc.bias": np.zeros(3, BF16)}), "'fc.bias': not supported"),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"].astype(np.float16)}),
            "expected dtype BF16, got F16",
        ),
        (lambda t: t.update({"norm.weight": np.zeros(3, BF16)}), "expected shape"),
    ],
)
def test_drafter_tensors_that_are_refused(tmp_path, change, message):
    drafter = save_drafter(tmp_path / "drafter", change=change)
    with pytest.raises(InvalidFile, match=message):
        checkpoint.read(save(tmp_path / "target"), drafter)
