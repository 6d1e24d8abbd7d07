"""The `.kdtr` bundle: a model's weights, its config and its golden tokens in one safetensors file.

Metadata: `format` = "kdtr", `version` = "1", `name`, `config` (JSON, the field names of the public
config.json plus lora_rms_norm_eps), `quantization` ("none" or "int4-g32"), `sha256` (JSON, tensor
-> hex digest), `header_sha256` (of the header with these 64 digits zero).

Tensors: `<name>.weight` in the dtype of the activations, bfloat16 or float32;
`...mlp.gate.e_score_correction_bias` float32; a quantised matrix [out, in] as `<name>.qw` int32
[out, in/8] and `<name>.sc` bfloat16 [out, in/32]. Element 8j+i of a row is bits 4i..4i+3 of word j,
stored as q+8; its value is q*sc[k//32] rounded to bfloat16. Optional `prompts` int32 [prompts,
longest] padded with -1, `golden_tokens` int32 [prompts, steps], `golden_margins` float32, same
shape: greedy tokens after each prompt and the distance of the two highest logits at each step.

A bundle with a drafter has a table `drafter` in its config and tensors `drafter.*`, all bfloat16.

Any safetensors reader opens the file. This one maps it, checks structure when it opens and a
tensor's digest when it is first touched, so that neither costs more than what is used.
"""

import json
import os
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from engine.tensorfile import NAMES, InvalidFile, TensorFile
from engine.tensorfile import write as write_tensors

FORMAT, VERSION = "kdtr", "1"
GROUP = 32  # weights along the input axis that share a scale
CHUNK = 1 << 20  # values looked at together
NOT_QUANTISED, INT4 = "none", "int4-g32"
GOLDEN = {"prompts": "I32", "golden_tokens": "I32", "golden_margins": "F32"}

_SIZES = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers "
    "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "n_routed_experts n_shared_experts num_experts_per_tok max_position_embeddings"
).split()
_REALS = ("rms_norm_eps", "lora_rms_norm_eps", "routed_scaling_factor", "rope_theta")
_YARN = (
    "factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
)
# What the model is built for. A config may leave these out; it may not say otherwise.
_FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
}


_DRAFTER_SIZES = (
    "block_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "intermediate_size"
).split()


class Matrix(NamedTuple):
    """What a weight must be: shape, whether it may be INT4, whether it is float32 or bfloat16 in
    any model."""

    shape: tuple[int, ...]
    packable: bool = False
    float32: bool = False
    bfloat16: bool = False


def check_config(config: Any) -> None:
    """Raise ValueError, naming the key, unless this is a model that the engine can run."""
    if not isinstance(config, dict):
        raise ValueError(f"config is {type(config).__name__}, expected a JSON object")

    def number(
        table: dict, key: str, kinds: tuple[type, ...], least: float, where: str = ""
    ) -> None:
        value: Any = table.get(key)
        if type(value) not in kinds or not least <= value < float("inf"):
            kind = "an integer" if kinds == (int,) else "a finite number"
            got = f"got {value!r}" if key in table else "it is missing"
            raise ValueError(f"config key {where + key!r}: expected {kind} >= {least}, {got}")

    for key in _SIZES:
        number(config, key, (int,), 1)
    number(config, "first_k_dense_replace", (int,), 0)
    for key in _REALS:
        number(config, key, (int, float), 0)

    def yarn(scaling: Any, where: str = "") -> None:
        if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) != "yarn":
            raise ValueError(
                f"config key '{where}rope_scaling': expected a table of type yarn, got {scaling}"
            )
        for key in _YARN:
            number(scaling, key, (int, float), 0, f"{where}rope_scaling.")

    yarn(config.get("rope_scaling"))
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            raise ValueError(f"config key {key!r}: expected {expected!r}, got {config[key]!r}")
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) != heads:
        raise ValueError(
            f"config key 'num_key_value_heads': expected num_attention_heads = {heads} (latent "
            f"attention has no grouped heads), got {config['num_key_value_heads']!r}"
        )
    if config["qk_rope_head_dim"] % 2:
        raise ValueError(
            f"config key 'qk_rope_head_dim': expected an even size, got "
            f"{config['qk_rope_head_dim']}"
        )
    for key, limit in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("first_k_dense_replace", "num_hidden_layers"),
    ):
        if config[key] > config[limit]:
            raise ValueError(
                f"config key {key!r}: {config[key]} is more than {limit} = {config[limit]}"
            )
    drafter = config.get("drafter")
    if drafter is None:
        return
    if not isinstance(drafter, dict):
        raise ValueError(f"config key 'drafter': expected a table, got {drafter!r}")
    for key in _DRAFTER_SIZES:
        number(drafter, key, (int,), 1, "drafter.")
    number(drafter, "mask_token_id", (int,), 0, "drafter.")
    for key in ("rms_norm_eps", "rope_theta"):
        number(drafter, key, (int, float), 0, "drafter.")
    if drafter.get("rope_scaling") is not None:
        yarn(drafter["rope_scaling"], "drafter.")
    taps, layers = drafter.get("target_layer_ids"), config["num_hidden_layers"]
    if (
        not isinstance(taps, list)
        or not taps
        or not all(type(tap) is int and 0 <= tap < layers for tap in taps)
    ):
        raise ValueError(
            f"config key 'drafter.target_layer_ids': expected layers of 0 to {layers - 1}, got "
            f"{taps!r}"
        )
    for key, holds, why in (
        ("block_size", drafter["block_size"] > 1, "at least 2: the root and one guess"),
        ("mask_token_id", drafter["mask_token_id"] < config["vocab_size"], "one of the vocabulary"),
        ("head_dim", drafter["head_dim"] % 2 == 0, "an even size"),
        (
            "num_attention_heads",
            drafter["num_attention_heads"] % drafter["num_key_value_heads"] == 0,
            "a multiple of num_key_value_heads",
        ),
    ):
        if not holds:
            raise ValueError(f"config key 'drafter.{key}': expected {why}, got {drafter[key]!r}")


def layout(config: Mapping[str, Any]) -> Iterator[tuple[str, Matrix]]:
    """Every weight of the model with its public name, in the order of the forward pass; then those
    of the drafter, if the config has one."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value, q_rank = config["v_head_dim"], config["q_lora_rank"]
    expert, experts = config["moe_intermediate_size"], config["n_routed_experts"]

    def mlp(base: str, inner: int) -> Iterator[tuple[str, Matrix]]:
        yield f"{base}.gate_proj.weight", Matrix((inner, hidden), packable=True)
        yield f"{base}.up_proj.weight", Matrix((inner, hidden), packable=True)
        yield f"{base}.down_proj.weight", Matrix((hidden, inner), packable=True)

    yield "model.embed_tokens.weight", Matrix((vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        attention = f"{base}.self_attn"
        yield f"{base}.input_layernorm.weight", Matrix((hidden,))
        yield f"{attention}.q_a_proj.weight", Matrix((q_rank, hidden))
        yield f"{attention}.q_a_layernorm.weight", Matrix((q_rank,))
        yield f"{attention}.q_b_proj.weight", Matrix((heads * (nope + rope), q_rank))
        yield f"{attention}.kv_a_proj_with_mqa.weight", Matrix((rank + rope, hidden))
        yield f"{attention}.kv_a_layernorm.weight", Matrix((rank,))
        yield f"{attention}.kv_b_proj.weight", Matrix((heads * (nope + value), rank))
        yield f"{attention}.o_proj.weight", Matrix((hidden, heads * value))
        yield f"{base}.post_attention_layernorm.weight", Matrix((hidden,))
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{base}.mlp", config["intermediate_size"])
            continue
        yield f"{base}.mlp.gate.weight", Matrix((experts, hidden))
        yield f"{base}.mlp.gate.e_score_correction_bias", Matrix((experts,), float32=True)
        for e in range(experts):
            yield from mlp(f"{base}.mlp.experts.{e}", expert)
        yield from mlp(f"{base}.mlp.shared_experts", expert * config["n_shared_experts"])
    yield "model.norm.weight", Matrix((hidden,))
    yield "lm_head.weight", Matrix((vocab, hidden))
    if config.get("drafter") is not None:
        yield from _drafter_layout(config)


def _drafter_layout(config: Mapping[str, Any]) -> Iterator[tuple[str, Matrix]]:
    drafter, hidden = config["drafter"], config["hidden_size"]
    size, inner = drafter["head_dim"], drafter["intermediate_size"]
    queries = drafter["num_attention_heads"] * size
    keys = drafter["num_key_value_heads"] * size

    def bf16(*shape: int) -> Matrix:
        return Matrix(shape, bfloat16=True)

    yield "drafter.fc.weight", bf16(hidden, len(drafter["target_layer_ids"]) * hidden)
    yield "drafter.hidden_norm.weight", bf16(hidden)
    for layer in range(drafter["num_hidden_layers"]):
        base = f"drafter.layers.{layer}"
        yield f"{base}.input_layernorm.weight", bf16(hidden)
        yield f"{base}.self_attn.q_proj.weight", bf16(queries, hidden)
        yield f"{base}.self_attn.k_proj.weight", bf16(keys, hidden)
        yield f"{base}.self_attn.v_proj.weight", bf16(keys, hidden)
        yield f"{base}.self_attn.q_norm.weight", bf16(size)
        yield f"{base}.self_attn.k_norm.weight", bf16(size)
        yield f"{base}.self_attn.o_proj.weight", bf16(hidden, queries)
        yield f"{base}.post_attention_layernorm.weight", bf16(hidden)
        yield f"{base}.mlp.gate_proj.weight", bf16(inner, hidden)
        yield f"{base}.mlp.up_proj.weight", bf16(inner, hidden)
        yield f"{base}.mlp.down_proj.weight", bf16(hidden, inner)
    yield "drafter.norm.weight", bf16(hidden)


def check_weights(
    found: Mapping[str, tuple[str, tuple[int, ...]]], config: Mapping[str, Any]
) -> str:
    """Compare {name: (dtype as safetensors spells it, shape)} with the layout; the quantization.

    Raises ValueError naming the tensor that is missing, unknown or of another shape or dtype. All
    16/32-bit weights share the dtype of the embedding; a quantised model is bfloat16.
    """
    embedding = found.get("model.embed_tokens.weight", ("BF16",))[0]
    known: set[str] = set()
    quantised = 0

    def expect(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        if name not in found:
            raise ValueError(f"tensor {name!r} is missing")
        for what, is_, should in zip(("dtype", "shape"), found[name], (dtype, shape), strict=True):
            if is_ != should:
                raise ValueError(f"tensor {name!r}: expected {what} {should}, got {is_}")
        known.add(name)

    if embedding not in ("BF16", "F32"):
        raise ValueError(
            f"tensor 'model.embed_tokens.weight': expected BF16 or F32, got {embedding}"
        )
    for name, (shape, packable, float32, bfloat16) in layout(config):
        base = name.removesuffix(".weight")
        packed = [part for part in (f"{base}.qw", f"{base}.sc") if part in found]
        if not packable or not packed:
            expect(name, "F32" if float32 else "BF16" if bfloat16 else embedding, shape)
            continue
        if name in found:
            raise ValueError(f"tensor {name!r} is there both plain and as {packed[0]!r}")
        out, inner = shape
        if inner % GROUP:
            raise ValueError(f"tensor {packed[0]!r}: {inner} inputs are no multiple of {GROUP}")
        expect(f"{base}.qw", "I32", (out, inner // 8))
        expect(f"{base}.sc", "BF16", (out, inner // GROUP))
        quantised += 1
    unknown = [name for name in found if name not in known]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ValueError(f"tensor {unknown[0]!r} is no weight of this model{more}")
    if quantised and embedding != "BF16":
        raise ValueError(
            f"tensor 'model.embed_tokens.weight': a quantised model is BF16, got {embedding}"
        )
    return INT4 if quantised else NOT_QUANTISED


def _check_golden(found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise ValueError unless the golden tensors are all absent or fit each other."""
    present = [name for name in GOLDEN if name in found]
    if not present:
        return
    for name, dtype in GOLDEN.items():
        if name not in found:
            raise ValueError(f"tensor {name!r} is missing, although {present[0]!r} is there")
        if found[name][0] != dtype or len(found[name][1]) != 2:
            raise ValueError(f"tensor {name!r}: expected {dtype} of two axes, got {found[name]}")
    tokens = found["golden_tokens"][1]
    if found["golden_margins"][1] != tokens:
        raise ValueError(
            f"tensor 'golden_margins': expected shape {tokens} of golden_tokens, got "
            f"{found['golden_margins'][1]}"
        )
    if found["prompts"][1][0] != tokens[0]:
        raise ValueError(
            f"tensor 'prompts': expected {tokens[0]} rows as in golden_tokens, got "
            f"{found['prompts'][1][0]}"
        )


class Bundle(Mapping[str, np.ndarray]):
    """Weight name -> read-only array over the mapped file; `config`, `quantization`, goldens.

    `Bundle(path)` raises InvalidFile, naming the tensor or key, for a file that is truncated, of
    another format or version, or whose weights are not those of its config. Each tensor is compared
    with its digest when it is first looked up (`verify=False` skips that). The goldens are not
    among the items: `prompts` is a list of int32 [length], `golden_tokens` int32 and
    `golden_margins` float32 [prompts, steps]; empty list and None where the bundle has none.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self._file = file = TensorFile(path)
        self.path: Path = file.path
        self._unverified = set(file.entries) if verify else set()
        metadata = file.metadata
        if metadata.get("format") != FORMAT:
            raise file.error(
                f"not a bundle: metadata format is {metadata.get('format')!r}, not {FORMAT!r} "
                "(a public checkpoint becomes one by `kdtr import`)"
            )
        if metadata.get("version") != VERSION:
            raise file.error(
                f"bundle version {metadata.get('version')!r}; this program reads {VERSION!r}"
            )
        file.check_header()
        try:
            self.config: dict[str, Any] = json.loads(metadata.get("config", ""))
        except json.JSONDecodeError as error:
            raise file.error(f"metadata config is not JSON ({error})") from error
        self.name = metadata.get("name", "")
        found = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
        self._weights = [name for name in found if name not in GOLDEN]
        try:
            check_config(self.config)
            quantization = check_weights({name: found[name] for name in self._weights}, self.config)
            _check_golden(found)
        except ValueError as error:
            raise file.error(str(error)) from None
        self.quantization = metadata.get("quantization")
        if self.quantization != quantization:
            raise file.error(
                f"metadata quantization is {self.quantization!r}, its weights are {quantization!r}"
            )
        self._digests = self._read_digests()
        self.prompts: list[np.ndarray] = []
        self.golden_tokens: np.ndarray | None = None
        self.golden_margins: np.ndarray | None = None
        if "prompts" in found:
            self.prompts = [row[row >= 0] for row in self._verified("prompts")]
            self.golden_tokens = self._verified("golden_tokens")
            self.golden_margins = self._verified("golden_margins")
            for name, least in (("prompts", -1), ("golden_tokens", 0)):
                ids, vocabulary = file[name], self.config["vocab_size"]
                if ids.min(initial=0) < least or ids.max(initial=0) >= vocabulary:
                    raise file.error(f"tensor {name!r} has ids outside the {vocabulary} tokens")

    def _read_digests(self) -> dict[str, str]:
        try:
            digests = json.loads(self._file.metadata.get("sha256", ""))
        except json.JSONDecodeError as error:
            raise self._file.error(f"metadata sha256 is not JSON ({error})") from error
        if not isinstance(digests, dict):
            raise self._file.error("metadata sha256 is not a JSON object")
        for name in self._file:
            if not isinstance(digests.get(name), str):
                raise self._file.error(f"metadata sha256 has no digest of tensor {name!r}")
        return digests

    def _verified(self, name: str) -> np.ndarray:
        if name in self._unverified:
            digest = self._file.sha256(name)
            if digest != self._digests[name]:
                raise self._file.error(
                    f"corrupted: tensor {name!r} has sha256 {digest[:12]}..., the header says "
                    f"{self._digests[name][:12]}..."
                )
            self._unverified.discard(name)
        return self._file[name]

    def __getitem__(self, name: str) -> np.ndarray:
        if name in GOLDEN:
            raise KeyError(name)
        return self._verified(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def verify(self) -> None:
        """Read every tensor: InvalidFile for a wrong digest or a weight that is not finite."""
        self._unverified = set(self._file.entries)
        for name in self._file:
            check_finite(self._verified(name), f"{self.path}: tensor {name!r}")

    def sizes(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Weight name -> (dtype as safetensors spells it, shape, bytes), from the header alone."""
        rows = {name: self._file.entries[name] for name in self._weights}
        return {name: (row.dtype, row.shape, row.end - row.begin) for name, row in rows.items()}


def check_finite(array: np.ndarray, what: str) -> None:
    """Raise InvalidFile saying `what` holds the first NaN or infinity, and where. Integers pass."""
    if array.dtype.kind in "iub":
        return
    flat = array.reshape(-1)
    for at in range(0, flat.size, CHUNK):
        bad = ~np.isfinite(flat[at : at + CHUNK])
        if bad.any():
            where = np.unravel_index(at + int(bad.argmax()), array.shape)
            raise InvalidFile(f"{what} holds {array[where]} at {[int(index) for index in where]}")


def write(
    path: str | os.PathLike[str],
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    *,
    name: str = "",
    prompts: Sequence[Sequence[int]] = (),
    golden_tokens: np.ndarray | None = None,
    golden_margins: np.ndarray | None = None,
    watch: Callable[[str, np.ndarray], None] | None = None,
) -> None:
    """Write a bundle, all or nothing (engine.tensorfile.write); the same bytes for the same input.

    weights: by bundle name; may make its arrays on access. prompts: one sequence of token ids each;
    golden_tokens and golden_margins: [prompts, steps]. InvalidFile names the tensor or config key
    that a reader would refuse, or a value that is not finite; OSError says how far it got. `watch`
    gets each name and array before its bytes are written, in place of the check of its values.
    """
    golden: dict[str, np.ndarray] = {}
    if len(prompts):
        padded = np.full((len(prompts), max(map(len, prompts))), -1, np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        golden["prompts"] = padded
    if golden_tokens is not None:
        golden["golden_tokens"] = np.asarray(golden_tokens, np.int32)
    if golden_margins is not None:
        golden["golden_margins"] = np.asarray(golden_margins, np.float32)

    def describe(table: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...]]]:
        found = {}
        for key in table:
            array = table[key]
            found[key] = (NAMES.get(array.dtype, str(array.dtype)), array.shape)
        return found

    try:
        check_config(config)
        quantization = check_weights(describe(weights), config)
        _check_golden(describe(golden))
        text = json.dumps(dict(config), sort_keys=True, allow_nan=False)
    except ValueError as error:
        raise InvalidFile(f"{path}: {error}") from None
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "config": text,
        "quantization": quantization,
    }

    def finite(key: str, array: np.ndarray) -> None:
        check_finite(array, f"{path}: tensor {key!r}")

    tensors = ChainMap(golden, cast(dict, weights))
    write_tensors(path, tensors, metadata, watch=watch or finite)
