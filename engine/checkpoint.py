"""Import of a public-format checkpoint directory into a bundle.

Layout read (Kimi K2-Thinking, K2.5, K2.6; compressed-tensors' `pack-quantized`): config.json with
the text model's keys under `text_config` or at the top; one safetensors file, or shards with
model.safetensors.index.json; weight names with the prefix `language_model.` or none; a quantised
matrix [out, in] as `weight_packed` int32 [out, in/8], `weight_scale` bfloat16 [out, in/32] and
`weight_shape` = [out, in], everything else bfloat16 (or float32), the router bias float32.
`quantization_config` may sit at the top or in `text_config`.

The bytes of a packed matrix are those of the bundle, so nothing is converted: all weights are views
of the mapped shards. What is quantised is decided by which tensors are there, because the public
`ignore` list leaves out matrices that are stored plain (the router).

A drafter comes from a directory of its own, in the format of the public DFlash drafters:
config.json with `dflash_config` (mask_token_id, target_layer_ids), block_size and a Qwen3 layer's
sizes; `fc`, `hidden_norm`, `layers.*` and `norm` in bfloat16. Embedding and head are the target's.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine import bundle
from engine.tensorfile import InvalidFile, TensorFile

INDEX = "model.safetensors.index.json"
PREFIX = "language_model."
MODEL_TYPES = ("kimi_k2", "deepseek_v3")
LORA_RMS_NORM_EPS = 1e-6  # of the two latent norms; no key of the public config.json
# The one scheme: the key of `weights` in a config group -> the value it must have.
SCHEME = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": bundle.GROUP,
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
}
OPTIONAL = ("dynamic", "actorder", "block_structure")  # absent means the value above
# How the scales were found, and in which dtype (the tensor itself says that).
NO_MATTER = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
# Tensors that other schemes store beside a matrix, or in place of it.
FOREIGN = {
    "bias": "the engine's matrices have no bias",
    "weight_zero_point": "asymmetric quantisation",
    "weight_g_idx": "activation reordering",
    "weight_global_scale": "a second scale for the whole matrix",
    "weight_scale_inv": "fp8 blocks",
    "input_scale": "quantised activations",
    "qweight": "GPTQ or AWQ packing",
}


class Source(NamedTuple):
    """Where a weight comes from: the file, and the tensor's name in it."""

    file: TensorFile
    name: str

    def error(self, message: str) -> InvalidFile:
        """The error to raise for this tensor."""
        return self.file.error(f"tensor {self.name!r}: {message}")


class Checkpoint(NamedTuple):
    """A directory whose names, shapes and dtypes were found sound."""

    directory: Path
    config: dict[str, Any]  # text_config without the quantisation, plus lora_rms_norm_eps
    sources: dict[str, Source]  # by the bundle's name of the weight
    prefix: str
    shards: list[Path]
    unused: dict[str, tuple[int, int]]  # what was not used, grouped: tensors, bytes
    notes: list[str]  # what a person should know

    def weights(self) -> dict[str, np.ndarray]:
        """Read-only views of the mapped shards, by the bundle's names."""
        return {ours: source.file[source.name] for ours, source in self.sources.items()}


def read(
    directory: str | os.PathLike[str], drafter: str | os.PathLike[str] | None = None
) -> Checkpoint:
    """Check every name, shape and dtype of a checkpoint, and of a drafter for it; their values are
    not touched.

    Raises InvalidFile naming the file and the tensor or key: a missing or truncated shard, a tensor
    that is missing or of another shape or dtype, a quantisation, group size or activation that the
    engine has no kernel for, a tensor of the model that would be left out.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InvalidFile(f"{directory}: no such directory")
    path = directory / "config.json"
    public = _json(path)
    text = public.get("text_config", public)
    if not isinstance(text, dict):
        raise InvalidFile(f"{path}: 'text_config' is not an object")
    ignore = _ignore_list(path, public, text)
    config = _config(path, text)
    owners, unindexed = _owners(directory)

    embedding = "model.embed_tokens.weight"
    prefixes = [prefix for prefix in (PREFIX, "") if prefix + embedding in owners]
    if len(prefixes) != 1:
        how = "both with and without" if prefixes else "neither with nor without"
        raise InvalidFile(f"{directory}: {embedding!r} is there {how} the prefix {PREFIX!r}")
    prefix = prefixes[0]
    plain_dtype = owners[prefix + embedding].entries[prefix + embedding].dtype
    if plain_dtype not in ("BF16", "F32"):
        raise Source(owners[prefix + embedding], prefix + embedding).error(
            f"expected dtype BF16 or F32, got {plain_dtype}"
        )

    sources: dict[str, Source] = {}
    used: set[str] = set()

    def take(theirs: str, ours: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> Source:
        if theirs not in owners:
            module = theirs.rpartition(".")[0]
            for part, scheme in FOREIGN.items():
                other = f"{module}.{part}"
                if other in owners:
                    raise Source(owners[other], other).error(f"not supported: {scheme}")
            raise InvalidFile(f"{directory}: tensor {theirs!r} is missing")
        source = Source(owners[theirs], theirs)
        entry = source.file.entries[theirs]
        if entry.dtype not in dtypes:
            raise source.error(f"expected dtype {' or '.join(dtypes)}, got {entry.dtype}")
        if entry.shape != shape:
            raise source.error(f"expected shape {list(shape)}, got {list(entry.shape)}")
        used.add(theirs)
        if ours:
            sources[ours] = source
        return source

    ignored, untouched = [], []
    for name, matrix in bundle.layout(config):
        base = name.removesuffix(".weight")
        module = prefix + base
        parts = [f"{module}.{part}" for part in ("weight_packed", "weight_scale")]
        parts = [part for part in parts if part in owners]
        if not parts:
            dtype = "F32" if matrix.float32 else plain_dtype
            take(prefix + name, name, (dtype,), matrix.shape)
            if ignore is not None and matrix.packable and not _matches(ignore, module):
                untouched.append(module)
            continue
        packed = Source(owners[parts[0]], parts[0])
        if not matrix.packable:
            raise packed.error("INT4, but the engine keeps this matrix in 16 bits")
        if ignore is None:
            raise packed.error(f"INT4, but {path} has no quantization_config that says which")
        if prefix + name in owners:
            raise packed.error(f"{prefix + name!r} is there too; which of them counts?")
        out, inner = matrix.shape
        if inner % bundle.GROUP:
            raise packed.error(f"{inner} inputs are no multiple of the group, {bundle.GROUP}")
        take(f"{module}.weight_packed", f"{base}.qw", ("I32",), (out, inner // 8))
        take(f"{module}.weight_scale", f"{base}.sc", ("BF16",), (out, inner // bundle.GROUP))
        stored = take(f"{module}.weight_shape", "", ("I32", "I64"), (2,))
        if stored.file[stored.name].tolist() != [out, inner]:
            raise stored.error(
                f"expected the values {[out, inner]}, got {stored.file[stored.name].tolist()}"
            )
        if _matches(ignore, module):
            ignored.append(module)

    quantised = sum(name.endswith(".qw") for name in sources)
    if quantised and plain_dtype != "BF16":
        raise sources[embedding].error(f"a quantised model is BF16, got {plain_dtype}")
    unused = _unused(owners, used, prefix, config["num_hidden_layers"])
    if unindexed:
        unused[f"not in {INDEX}"] = unindexed
    notes = []
    for modules, fact in (
        (ignored, "INT4 although the ignore list matches"),
        (untouched, "in 16 bits although the ignore list does not match"),
    ):
        if modules:
            more = f" and {len(modules) - 1} more matrices" if len(modules) > 1 else ""
            notes.append(f"{modules[0]}{more}: {fact}; the tensors decide")
    shards = sorted({file.path for file in owners.values()})
    if drafter is not None:
        config["drafter"], own = _drafter(Path(drafter), config)
        sources |= own
        shards += sorted({source.file.path for source in own.values()})
    return Checkpoint(directory, config, sources, prefix, shards, unused, notes)


def _drafter(
    directory: Path, config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Source]]:
    """The config's table `drafter` and its tensors; InvalidFile unless the engine can run it."""
    if not directory.is_dir():
        raise InvalidFile(f"{directory}: no such directory")
    path = directory / "config.json"
    public = _json(path)
    own = public.get("dflash_config")
    if not isinstance(own, dict):
        raise InvalidFile(f"{path}: expected a table 'dflash_config', got {own!r}")
    for key, expected in (
        ("hidden_size", config["hidden_size"]),
        ("vocab_size", config["vocab_size"]),
        ("num_target_layers", config["num_hidden_layers"]),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("use_sliding_window", False),
        ("quantization_config", None),
    ):
        if public.get(key, expected) != expected:
            raise InvalidFile(f"{path}: {key!r}: expected {expected!r}, got {public[key]!r}")
    kinds = set(public.get("layer_types") or ()) - {"full_attention"}
    if kinds or own.get("fc_layernorm"):
        what = f"layers of {', '.join(map(str, kinds))}" if kinds else "norms before fc"
        raise InvalidFile(f"{path}: not supported: {what}")
    table = {
        key: public.get(key)
        for key in (
            "block_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
            "intermediate_size rms_norm_eps rope_theta"
        ).split()
    }
    table |= {key: own.get(key) for key in ("mask_token_id", "target_layer_ids")}
    if table["block_size"] is None:
        table["block_size"] = own.get("block_size")
    scaling = public.get("rope_scaling")
    if isinstance(scaling, dict):  # without mscale: YaRN's own factor of cos and sin
        kind = scaling.get("type", scaling.get("rope_type"))
        rest = {key: value for key, value in scaling.items() if key != "rope_type"}
        scaling = {"mscale": 1.0, "mscale_all_dim": 0.0, **rest, "type": kind}
    table["rope_scaling"] = scaling
    try:
        bundle.check_config({**config, "drafter": table})
    except ValueError as error:
        raise InvalidFile(f"{path}: {error}") from None
    owners, _ = _owners(directory)
    sources = {}
    for name, matrix in bundle.layout({**config, "drafter": table}):
        theirs = name.removeprefix("drafter.")
        if theirs == name:
            continue
        if theirs not in owners:
            raise InvalidFile(f"{directory}: tensor {theirs!r} is missing")
        sources[name] = source = Source(owners.pop(theirs), theirs)
        entry = source.file.entries[theirs]
        if entry.dtype != "BF16":  # float16 does not hold what bfloat16 does
            raise source.error(f"expected dtype BF16, got {entry.dtype}")
        if entry.shape != matrix.shape:
            raise source.error(f"expected shape {list(matrix.shape)}, got {list(entry.shape)}")
    for name, file in owners.items():
        raise Source(file, name).error("not supported: the engine's drafter has no such weight")
    return table, sources


def convert(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    drafter: str | os.PathLike[str] | None = None,
    watch: Callable[[str, np.ndarray], None] | None = None,
) -> Checkpoint:
    """Write a checkpoint, and a drafter for it, as a bundle without goldens, all or nothing; what
    was read.

    InvalidFile (as `read`, or a value that is not finite) and OSError leave `out` as it was.
    `watch` gets each weight's name and array before its bytes are written.
    """
    checkpoint = read(directory, drafter)
    target = Path(out)
    folders = [checkpoint.directory, *([] if drafter is None else [Path(drafter)])]
    others = [folder / name for folder in folders for name in ("config.json", INDEX)]
    if target.resolve() in [path.resolve() for path in (*checkpoint.shards, *others)]:
        raise InvalidFile(f"{target}: is part of the checkpoint, and would be replaced")

    def check(name: str, array: np.ndarray) -> None:
        source = checkpoint.sources[name]
        bundle.check_finite(array, f"{source.file.path}: tensor {source.name!r}")
        if watch is not None:
            watch(name, array)

    name = checkpoint.directory.resolve().name
    bundle.write(target, checkpoint.weights(), checkpoint.config, name=name, watch=check)
    return checkpoint


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidFile(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidFile(f"{path}: not a JSON object")
    return value


def _config(path: Path, text: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's keys as the bundle keeps them; raises unless the engine can run it."""
    model_type = text.get("model_type")
    if model_type not in MODEL_TYPES:
        raise InvalidFile(
            f"{path}: model_type {model_type!r} is not one of {', '.join(MODEL_TYPES)}"
        )
    ours = ("quantization_config", "text_config", "drafter")
    config = {k: v for k, v in text.items() if k not in ours}
    config.setdefault("lora_rms_norm_eps", LORA_RMS_NORM_EPS)
    rope = config.pop("rope_parameters", None)  # the same in transformers 5
    if isinstance(rope, dict):
        config.setdefault("rope_theta", rope.get("rope_theta"))
        config.setdefault("rope_scaling", {k: v for k, v in rope.items() if k != "rope_theta"})
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "rope_type" in scaling:
        rest = {k: v for k, v in scaling.items() if k != "rope_type"}
        config["rope_scaling"] = {"type": scaling["rope_type"], **rest}
    try:
        bundle.check_config(config)
    except ValueError as error:
        raise InvalidFile(f"{path}: {error}") from None
    return config


def _ignore_list(
    path: Path, public: Mapping[str, Any], text: Mapping[str, Any]
) -> list[str | re.Pattern[str]] | None:
    """Names and patterns of the modules that are not quantised; None without a quantisation."""
    places = {"quantization_config": public.get("quantization_config")}
    if text is not public:
        places["text_config.quantization_config"] = text.get("quantization_config")
    tables = {where: table for where, table in places.items() if table is not None}
    if not tables:
        return None
    if len(tables) == 2 and len({json.dumps(t, sort_keys=True) for t in tables.values()}) == 2:
        raise InvalidFile(f"{path}: {' and '.join(map(repr, tables))} differ")
    where, table = next(iter(tables.items()))

    def expect(found: Any, key: str, expected: Any) -> None:
        if found != expected or type(found) is not type(expected):
            raise InvalidFile(f"{path}: {where}.{key}: expected {expected!r}, got {found!r}")

    def sub(parent: Mapping[str, Any], key: str, name: str, kind: type) -> Any:
        value = parent.get(name)
        if not isinstance(value, kind) or not value:
            raise InvalidFile(f"{path}: {where}.{key}: expected a {kind.__name__}, got {value!r}")
        return value

    if not isinstance(table, dict):
        raise InvalidFile(f"{path}: {where}: expected a dict, got {table!r}")
    expect(table.get("quant_method"), "quant_method", "compressed-tensors")
    expect(table.get("format"), "format", "pack-quantized")
    expect(table.get("quantization_status", "compressed"), "quantization_status", "compressed")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        expect(table.get(key) or None, key, None)
    for name, group in sub(table, "config_groups", "config_groups", dict).items():
        key = f"config_groups.{name}"
        if not isinstance(group, dict):
            raise InvalidFile(f"{path}: {where}.{key}: expected a dict, got {group!r}")
        expect(group.get("format") or "pack-quantized", f"{key}.format", "pack-quantized")
        for activation in ("input_activations", "output_activations"):
            expect(group.get(activation), f"{key}.{activation}", None)
        scheme = sub(group, f"{key}.weights", "weights", dict)
        for field, value in SCHEME.items():
            expect(scheme.get(field, value if field in OPTIONAL else None), f"{key}.{field}", value)
        for field, value in scheme.items():
            if value is not None and field not in SCHEME and field not in NO_MATTER:
                raise InvalidFile(f"{path}: {where}.{key}.weights.{field}: unknown, {value!r}")

    ignore: list[str | re.Pattern[str]] = []
    entries = table.get("ignore") or []
    if not isinstance(entries, list):
        raise InvalidFile(f"{path}: {where}.ignore: expected a list, got {entries!r}")
    for entry in entries:
        if not isinstance(entry, str):
            raise InvalidFile(f"{path}: {where}.ignore: {entry!r} is not a string")
        try:
            ignore.append(re.compile(entry[3:]) if entry.startswith("re:") else entry)
        except re.error as error:
            raise InvalidFile(f"{path}: {where}.ignore: {entry!r}: {error}") from error
    return ignore


def _matches(ignore: Iterable[str | re.Pattern[str]], module: str) -> bool:
    """Whether an entry is the module's name, or a pattern that matches from its beginning."""
    return any(
        entry == module if isinstance(entry, str) else entry.match(module) is not None
        for entry in ignore
    )


def _owners(directory: Path) -> tuple[dict[str, TensorFile], tuple[int, int] | None]:
    """Tensor name -> the file that holds it; tensors and bytes that the index does not name."""
    index = directory / INDEX
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if len(files) != 1:
            what = ", ".join(path.name for path in files) or "no *.safetensors"
            raise InvalidFile(f"{directory}: expected {INDEX} or one safetensors file, got {what}")
        file = TensorFile(files[0])
        return dict.fromkeys(file, file), None
    table = _json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise InvalidFile(f"{index}: expected an object 'weight_map', got {table!r}")
    by_shard: dict[str, list[str]] = {}
    for name, shard in table.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InvalidFile(f"{index}: tensor {name!r} is in {shard!r}, which is no file name")
        by_shard.setdefault(shard, []).append(name)
    owners: dict[str, TensorFile] = {}
    extra = [0, 0]
    for shard, names in by_shard.items():
        if not (directory / shard).exists():
            raise InvalidFile(
                f"{directory / shard}: shard is missing; {INDEX} puts {len(names)} tensors there, "
                f"{names[0]!r} first"
            )
        file = TensorFile(directory / shard)
        for name in names:
            if name not in file:
                raise file.error(f"tensor {name!r} is missing; {INDEX} says that it is here")
            owners[name] = file
        for name in set(file) - set(names):
            entry = file.entries[name]
            extra = [extra[0] + 1, extra[1] + entry.end - entry.begin]
    return owners, (extra[0], extra[1]) if extra[0] else None


def _unused(
    owners: Mapping[str, TensorFile], used: set[str], prefix: str, layers: int
) -> dict[str, tuple[int, int]]:
    """Group the tensors that were not used; raise for one that belongs to the model itself.

    Outside are other towers, layers past num_hidden_layers (multi-token prediction), and the rotary
    frequencies that old checkpoints store though they follow from the config.
    """
    unused: dict[str, tuple[int, int]] = {}
    inside = re.compile(re.escape(prefix) + r"(?:model\.(?:layers\.(\d{1,9})\.)?|lm_head\.)")
    for name, file in owners.items():
        if name in used:
            continue
        match = inside.match(name)
        if match is None:
            group = name.partition(".")[0]
        elif match[1] is not None and int(match[1]) >= layers:
            group = match[0].rstrip(".")
        elif name.endswith(".rotary_emb.inv_freq"):
            group = "rotary_emb.inv_freq"
        else:
            scheme = FOREIGN.get(name.rpartition(".")[2], "the engine's model has no such weight")
            raise Source(file, name).error(f"not supported: {scheme}")
        entry = file.entries[name]
        count, size = unused.get(group, (0, 0))
        unused[group] = (count + 1, size + entry.end - entry.begin)
    return unused
