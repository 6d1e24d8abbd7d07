"""Bundles: what is written is read back, and every way a file can be wrong is one clear error."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from engine import bundle, tensorfile
from engine.bundle import Bundle
from engine.tensorfile import InvalidFile, TensorFile

BF16 = ml_dtypes.bfloat16
CONFIG = {
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "lora_rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
GOLDEN = np.array([[9, 10], [11, 12]])
MARGINS = np.array([[0.5, 0.25], [0.125, 2.0]])


def random_weights(packed=True, dtype=BF16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = {}
    for name, (shape, packable, float32, _) in bundle.layout(CONFIG):
        if packed and packable:
            out, inner = shape
            base = name.removesuffix(".weight")
            words = rng.integers(-(2**31), 2**31, (out, inner // 8)).astype(np.int32)
            weights[f"{base}.qw"] = words
            weights[f"{base}.sc"] = rng.random((out, inner // 32)).astype(BF16)
        else:
            weights[name] = rng.standard_normal(shape).astype(np.float32 if float32 else dtype)
    return weights


def write(path: Path, weights=None, config=CONFIG) -> Path:
    bundle.write(
        path,
        random_weights() if weights is None else weights,
        config,
        name="small",
        prompts=PROMPTS,
        golden_tokens=GOLDEN,
        golden_margins=MARGINS,
    )
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("bundle") / "small.kdtr")


@pytest.mark.parametrize(
    ("packed", "dtype", "quantization"),
    [(True, BF16, "int4-g32"), (False, BF16, "none"), (False, np.float32, "none")],
)
def test_what_is_written_is_read_back(tmp_path, packed, dtype, quantization):
    weights = random_weights(packed, dtype)
    opened = Bundle(write(tmp_path / "a.kdtr", weights))
    opened.verify()
    assert set(opened) == set(weights)
    for name, array in weights.items():
        assert opened[name].dtype == array.dtype, name
        assert opened[name].tobytes() == array.tobytes(), name
    assert opened.config == CONFIG
    assert (opened.name, opened.quantization) == ("small", quantization)
    assert [prompt.tolist() for prompt in opened.prompts] == PROMPTS
    np.testing.assert_array_equal(opened.golden_tokens, GOLDEN)
    np.testing.assert_array_equal(opened.golden_margins, MARGINS)
    assert opened.golden_tokens.dtype == np.int32
    assert opened.golden_margins.dtype == np.float32


def test_the_same_input_gives_the_same_bytes(path, tmp_path):
    shuffled = dict(reversed(random_weights().items()))
    config = dict(reversed(CONFIG.items()))
    assert write(tmp_path / "b.kdtr", shuffled, config).read_bytes() == path.read_bytes()


def test_another_safetensors_reader_opens_it(path):
    ours = Bundle(path)
    with safetensors.safe_open(path, "np") as theirs:
        assert theirs.metadata()["format"] == "kdtr"
        digests = json.loads(theirs.metadata()["sha256"])
        for name in theirs.keys():
            if theirs.get_slice(name).get_dtype() != "BF16":  # some versions cannot read it
                raw = theirs.get_tensor(name).tobytes()
                assert hashlib.sha256(raw).hexdigest() == digests[name]
    assert set(digests) == {*ours, *bundle.GOLDEN}


def test_a_file_of_the_safetensors_package_is_read(tmp_path):
    tensors = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": np.array([1.5, -2], np.float32).astype(BF16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(7, np.int64),
    }
    file = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    opened = TensorFile(file)
    assert opened.metadata == {"format": "pt"}
    for name, array in tensors.items():
        assert opened[name].dtype == array.dtype
        assert opened[name].shape == array.shape
        assert opened[name].tobytes() == array.tobytes()


def test_arrays_view_the_file_and_cannot_be_written(path):
    embedding = Bundle(path)["model.embed_tokens.weight"]
    assert embedding.base is not None
    assert not embedding.flags.writeable


def test_opening_touches_no_weight(path, tmp_path):
    """A corrupted weight is no news to who does not use it, and an error to who does."""
    file = tmp_path / "c.kdtr"
    raw = bytearray(path.read_bytes())
    raw[TensorFile(path).entries["lm_head.weight"].begin + 5] ^= 1
    file.write_bytes(raw)
    opened = Bundle(file)
    opened["model.norm.weight"]
    with pytest.raises(InvalidFile, match=r"c\.kdtr: corrupted: tensor 'lm_head.weight' has sha"):
        opened["lm_head.weight"]
    with pytest.raises(InvalidFile, match=r"corrupted: tensor 'lm_head.weight'"):
        opened.verify()
    assert Bundle(file, verify=False)["lm_head.weight"].shape == (24, 64)


def test_any_flipped_bit_is_found(path, tmp_path):
    file = tmp_path / "flipped.kdtr"
    raw = path.read_bytes()
    rng = np.random.default_rng(1)
    length = 8 + int.from_bytes(raw[:8], "little")
    places = [*range(8), *rng.integers(8, length, 60), *rng.integers(length, len(raw), 60)]
    for place in places:
        flipped = bytearray(raw)
        flipped[place] ^= 1 << rng.integers(8)
        file.write_bytes(flipped)
        with pytest.raises(InvalidFile, match=r"flipped.kdtr: "):
            Bundle(file).verify()


def test_any_truncation_is_found_when_opened(path, tmp_path):
    file = tmp_path / "short.kdtr"
    raw = path.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    for size in (0, 7, 8, 100, length - 1, length, length + 1, len(raw) - 1):
        file.write_bytes(raw[:size])
        with pytest.raises(InvalidFile, match=r"short.kdtr: .*(truncated|too few)") as caught:
            Bundle(file)
        if size >= length:
            named = re.search("tensor '(.*)' ends", str(caught.value)).group(1)
            entry = TensorFile(path).entries[named]
            assert entry.begin <= size < entry.end
    file.write_bytes(raw + b"x")
    with pytest.raises(InvalidFile, match="1 bytes follow the last tensor"):
        Bundle(file)


def raw_file(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def row(dtype="U8", shape=(4,), offsets=(0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "the header is not JSON"),
        (b"\xff\xfe", "the header is not JSON"),
        (b"[" * 100_000, "the header is not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "the header is not JSON"),
        (b"[]", "the header is not a JSON object"),
        (b'{"a":1,"a":2}', "the header lists 'a' twice"),
        ({"a": 3}, "tensor 'a': expected dtype, shape and data_offsets"),
        ({"a": row(dtype=5)}, "tensor 'a': dtype 5 is not a string"),
        ({"a": row(shape=[-1])}, r"tensor 'a': bad shape \[-1\]"),
        ({"a": row(shape=[2.0, 2])}, r"tensor 'a': bad shape \[2.0, 2\]"),
        ({"a": row(shape=[True, 4])}, r"tensor 'a': bad shape \[True, 4\]"),
        ({"a": row(shape=[1] * 65)}, "tensor 'a': bad shape"),
        ({"a": row(shape=[2**70])}, "tensor 'a': U8 .* is 1180591620717411303424 bytes, but"),
        ({"a": row(offsets=[4, 0])}, r"tensor 'a': bad data_offsets \[4, 0\]"),
        ({"a": row(offsets=[-4, 0])}, r"tensor 'a': bad data_offsets \[-4, 0\]"),
        ({"a": row(offsets=[0])}, r"tensor 'a': bad data_offsets \[0\]"),
        ({"a": row("F32")}, r"tensor 'a': F32 \[4\] is 16 bytes, but its data_offsets span 4"),
        ({"a": row(offsets=[1, 5])}, "tensor 'a' leaves a gap after the header"),
        ({"a": row(), "b": row(offsets=[3, 7])}, "tensor 'b' overlaps 'a'"),
        ({"a": row(), "b": row(offsets=[4, 8])}, "truncated: tensor 'b' ends at byte"),
        ({"__metadata__": {"a": 1}, "a": row()}, "__metadata__ is not an object of strings"),
        ({"__metadata__": [], "a": row()}, "__metadata__ is not an object of strings"),
    ],
)
def test_hostile_header(tmp_path, header, message):
    with pytest.raises(InvalidFile, match=message):
        TensorFile(raw_file(tmp_path / "hostile", header, b"data"))


def test_hostile_length(tmp_path):
    file = tmp_path / "hostile"
    file.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(InvalidFile, match="header would be 9223372036854775808 bytes long"):
        TensorFile(file)


def test_unknown_dtype_is_an_error_only_when_read(tmp_path):
    opened = TensorFile(raw_file(tmp_path / "f8", {"a": row("F8_E4M3")}, b"data"))
    assert opened.entries["a"].dtype == "F8_E4M3"
    with pytest.raises(InvalidFile, match="tensor 'a' has dtype F8_E4M3, which is not read here"):
        opened["a"]


def test_no_file(tmp_path):
    with pytest.raises(InvalidFile, match=r"absent.kdtr: No such file or directory"):
        Bundle(tmp_path / "absent.kdtr")
    with pytest.raises(InvalidFile, match="Is a directory"):
        Bundle(tmp_path)


def test_other_format_and_version(path, tmp_path):
    file = tmp_path / "other.safetensors"
    tensorfile.write(file, random_weights(), {"format": "pt"})
    with pytest.raises(InvalidFile, match=r"not a bundle: metadata format is 'pt'.*kdtr import"):
        Bundle(file)
    tensorfile.write(file, random_weights(), {**TensorFile(path).metadata, "version": "2"})
    with pytest.raises(InvalidFile, match="bundle version '2'; this program reads '1'"):
        Bundle(file)


WEIRD = [None, True, 0, -1, 1, 3.5, "", "x", [], {}, [1], {"a": 1}, 10**30, float("nan"), 1e400]


def mutated(value: object, rng: random.Random) -> object:
    """A copy of a JSON value with one to four entries deleted or replaced by something weird."""

    def places(value: object, way: tuple = ()) -> Iterator[tuple]:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield (*way, key)
            if isinstance(entry, dict | list):
                yield from places(entry, (*way, key))

    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        *way, last = rng.choice(list(places(value)) or [(None,)])
        table = value
        for key in way:
            table = table[key]
        if last is not None and rng.random() < 0.3:
            del table[last]
        elif last is not None:
            table[last] = json.loads(json.dumps(rng.choice(WEIRD)))
    return value


def test_whatever_the_header_says_the_error_is_ours(path, tmp_path, monkeypatch):
    """Without the header's digest, which finds all of these first."""
    monkeypatch.setattr(TensorFile, "check_header", lambda self: None)
    rng = random.Random(0)
    raw, file = path.read_bytes(), tmp_path / "mutated.kdtr"
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    errors = []
    for turn in range(300):
        part = ("config", "sha256", None)[turn % 3]
        other = json.loads(json.dumps(header))
        if part is None:
            other = mutated(header, rng)
        else:
            inner = json.loads(header["__metadata__"][part])
            other["__metadata__"][part] = json.dumps(mutated(inner, rng))
        text = json.dumps(other).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
        try:
            Bundle(file).verify()
        except InvalidFile as error:
            errors.append(str(error))
    assert 270 < len(errors)
    assert all(error.startswith(f"{file}: ") for error in errors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "{"}, "metadata config is not JSON"),
        ({"config": "[]"}, "config is list, expected a JSON object"),
        ({"quantization": "int4-g64"}, "quantization is 'int4-g64', its weights are 'int4-g32'"),
    ],
)
def test_bad_metadata(path, tmp_path, change, message):
    file = tmp_path / "bad.kdtr"
    tensorfile.write(file, random_weights(), {**TensorFile(path).metadata, **change})
    with pytest.raises(InvalidFile, match=message):
        Bundle(file)


EXPERT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("model.norm.weight", None, "tensor 'model.norm.weight' is missing"),
        (f"{EXPERT}.sc", None, f"tensor '{EXPERT}.sc' is missing"),
        (f"{EXPERT}.qw", None, f"tensor '{EXPERT}.qw' is missing"),
        (f"{EXPERT}.weight", np.zeros((32, 64), BF16), "there both plain and as"),
        (
            f"{EXPERT}.sc",
            np.zeros((32, 4), BF16),
            r"up_proj.sc': expected shape \(32, 2\), got \(32, 4\)",
        ),
        (
            f"{EXPERT}.sc",
            np.zeros((32, 2), np.float16),
            "up_proj.sc': expected dtype BF16, got F16",
        ),
        (
            "lm_head.weight",
            np.zeros((64, 24), BF16),
            r"tensor 'lm_head.weight': expected shape \(24, 64\), got \(64, 24\)",
        ),
        (
            "model.layers.1.mlp.gate.e_score_correction_bias",
            np.zeros(3, BF16),
            "e_score_correction_bias': expected dtype F32, got BF16",
        ),
        ("model.norm.weight", np.zeros(64, np.float32), "expected dtype BF16, got F32"),
        ("model.extra", np.zeros(1, BF16), "tensor 'model.extra' is no weight of this model"),
        ("prompts", np.zeros((1, 1), np.int32), "'prompts' is no weight of this model"),
        ("model.norm.weight", np.zeros(64, np.complex64), "expected dtype BF16, got complex64"),
    ],
)
def test_wrong_weights_are_neither_written_nor_read(path, tmp_path, name, array, message):
    weights = random_weights()
    weights.pop(name, None)
    if array is not None:
        weights[name] = array
    file = tmp_path / "wrong.kdtr"
    with pytest.raises(InvalidFile, match=message):
        bundle.write(file, weights, CONFIG)
    assert not file.exists()
    if name != "prompts" and "complex" not in message:
        tensorfile.write(file, weights, TensorFile(path).metadata)
        with pytest.raises(InvalidFile, match=message):
            Bundle(file)


def test_quantised_float32_is_refused(tmp_path):
    with pytest.raises(InvalidFile, match="a quantised model is BF16, got F32"):
        write(tmp_path / "a.kdtr", random_weights(dtype=np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "'hidden_size': expected an integer >= 1, got None"),
        ({"hidden_size": True}, "'hidden_size': expected an integer >= 1, got True"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers': expected an integer >= 1, got 0"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps': expected a finite number >= 0, got nan"),
        ({"rope_theta": float("inf")}, "'rope_theta': expected a finite number"),
        ({"rope_scaling": None}, "'rope_scaling': expected a table of type yarn, got None"),
        ({"rope_scaling": {"type": "linear"}}, "expected a table of type yarn"),
        ({"rope_scaling": {"type": "yarn"}}, "'rope_scaling.factor': .* it is missing"),
        ({"anything": float("nan")}, "Out of range float values are not JSON compliant"),
        ({"hidden_act": "gelu"}, "'hidden_act': expected 'silu', got 'gelu'"),
        ({"n_group": 8}, "'n_group': expected 1, got 8"),
        ({"num_key_value_heads": 1}, "'num_key_value_heads': expected num_attention_heads = 2"),
        ({"qk_rope_head_dim": 5}, "'qk_rope_head_dim': expected an even size, got 5"),
        ({"num_experts_per_tok": 4}, "4 is more than n_routed_experts = 3"),
        ({"first_k_dense_replace": 3}, "3 is more than num_hidden_layers = 2"),
    ],
)
def test_config_that_the_engine_cannot_run(tmp_path, change, message):
    with pytest.raises(InvalidFile, match=message):
        bundle.write(tmp_path / "a.kdtr", random_weights(), {**CONFIG, **change})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("golden", "message"),
    [
        ({"prompts": PROMPTS}, "'golden_tokens' is missing, although 'prompts' is there"),
        (
            {"prompts": PROMPTS, "golden_tokens": GOLDEN, "golden_margins": MARGINS[:1]},
            r"'golden_margins': expected shape \(2, 2\) of golden_tokens, got \(1, 2\)",
        ),
        (
            {"prompts": PROMPTS[:1], "golden_tokens": GOLDEN, "golden_margins": MARGINS},
            "'prompts': expected 2 rows as in golden_tokens, got 1",
        ),
    ],
)
def test_goldens_fit_each_other(tmp_path, golden, message):
    with pytest.raises(InvalidFile, match=message):
        bundle.write(tmp_path / "a.kdtr", random_weights(), CONFIG, **golden)


def test_a_config_of_a_billion_layers_is_found_wanting_at_once(tmp_path):
    with pytest.raises(InvalidFile, match=r"'model.layers.2.input_layernorm.weight' is missing"):
        write(tmp_path / "a.kdtr", config={**CONFIG, "num_hidden_layers": 10**9})


@pytest.mark.parametrize("name", ["prompts", "golden_tokens"])
def test_goldens_are_tokens_of_the_model(path, tmp_path, name):
    tensors = {key: TensorFile(path)[key] for key in TensorFile(path)}
    tensors[name] = tensors[name].copy()
    tensors[name][0, 1] = 24
    tensorfile.write(tmp_path / "a.kdtr", tensors, TensorFile(path).metadata)
    with pytest.raises(InvalidFile, match=f"tensor '{name}' has ids outside the 24 tokens"):
        Bundle(tmp_path / "a.kdtr")


def test_a_bundle_may_have_no_goldens(tmp_path):
    bundle.write(tmp_path / "a.kdtr", random_weights(), CONFIG)
    opened = Bundle(tmp_path / "a.kdtr")
    assert (opened.prompts, opened.golden_tokens, opened.golden_margins) == ([], None, None)


def test_a_weight_that_is_not_finite_is_neither_written_nor_verified(path, tmp_path):
    weights = random_weights()
    weights[f"{EXPERT}.sc"][3, 1] = np.nan
    file = tmp_path / "nan.kdtr"
    with pytest.raises(InvalidFile, match=rf"tensor '{EXPERT}.sc' holds nan at \[3, 1\]"):
        write(file, weights)
    assert not list(tmp_path.iterdir())
    golden = {name: TensorFile(path)[name] for name in bundle.GOLDEN}
    tensorfile.write(file, {**weights, **golden}, TensorFile(path).metadata)
    with pytest.raises(InvalidFile, match=rf"tensor '{EXPERT}.sc' holds nan at \[3, 1\]"):
        Bundle(file).verify()


def test_layout_counts_the_matrices_that_may_be_int4():
    """3 of each dense layer, 3 of each routed and shared expert."""
    assert sum(matrix.packable for _, matrix in bundle.layout(CONFIG)) == 3 + 3 * (3 + 1)


# Atomic writes: whatever happens, the old file or the new one is there, and nothing beside it.


def test_an_error_while_writing_leaves_the_old_file(path, tmp_path):
    file = tmp_path / "a.kdtr"
    file.write_bytes(path.read_bytes())

    class Fails(dict):
        reads = 0

        def __getitem__(self, name):
            self.reads += 1
            if self.reads > 2.5 * len(self):  # once to check, once for the header, then the data
                raise KeyboardInterrupt
            return super().__getitem__(name)

    with pytest.raises(KeyboardInterrupt):
        bundle.write(file, Fails(random_weights()), CONFIG)
    assert file.read_bytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [file]


def child(script: str, *arguments: object) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[1]
    prelude = "import sys; sys.path[:0] = sys.argv[1:3]; from tests.test_bundle import *\n"
    prelude = prelude.replace("tests.test_bundle", "test_bundle")
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(script), root, root / "tests", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_a_full_disk_leaves_the_old_file(path, tmp_path):
    file = tmp_path / "a.kdtr"
    file.write_bytes(path.read_bytes())
    result = child(
        """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # bytes
        write(Path(sys.argv[3]))
        """,
        file,
    )
    assert result.returncode == 1
    assert re.search(
        r"a\.kdtr: File too large after \d+ of \d+ bytes; nothing was replaced", result.stderr
    )
    assert file.read_bytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [file]


def test_a_killed_writer_leaves_the_old_file(path, tmp_path):
    file = tmp_path / "a.kdtr"
    file.write_bytes(path.read_bytes())
    result = child(
        """
        import os, signal
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # all written, not yet replaced
        write(Path(sys.argv[3]), random_weights(packed=False))
        """,
        file,
    )
    assert result.returncode == -signal.SIGKILL
    assert file.read_bytes() == path.read_bytes()
    rest = [entry.name for entry in tmp_path.iterdir() if entry != file]
    assert len(rest) == 1
    assert re.fullmatch(r"\.a\.kdtr\.\w{12}\.partial", rest[0])


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(tensorfile.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"a\.kdtr: needs \d+ bytes, the disk has 1000 free"):
        write(tmp_path / "a.kdtr")
    assert not list(tmp_path.iterdir())


def test_where_a_bundle_cannot_be_written(tmp_path):
    with pytest.raises(InvalidFile, match="is a directory"):
        write(tmp_path)
    with pytest.raises(InvalidFile, match="there is no directory"):
        write(tmp_path / "nowhere" / "a.kdtr")
