"""The reference beside a run of transformers: what both computed, and how far apart.

Errors are bounded, element by element, by `goldens.rounding.companions` with float32 activations:
what the model's own roundings do to each stored value. transformers runs in float32, its RoPE
angles too, which the engine's tables are not: rotated keys get that error on top.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from goldens import bundles
from goldens.forward import forward
from goldens.model import Weights, yarn_inverse_frequencies
from goldens.numerics import Stream, unit_roundoff
from goldens.rounding import EXACT, Rounding, companions


@dataclass
class Sample:
    """A checkpoint and its `golden.npz`, by the names in goldens/pinned/ORIGIN.md."""

    config: Mapping[str, Any]
    weights: Weights
    golden: Mapping[str, np.ndarray]
    magnitudes: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def layers(self) -> range:
        return range(self.config["num_hidden_layers"])

    @property
    def moe_layers(self) -> range:
        return self.layers[self.config["first_k_dense_replace"] :]


def read(folder: Path) -> Sample:
    with np.load(folder / "golden.npz") as file:
        golden = dict(file)
    weights = Weights(bundles.public_tensors(folder))
    sample = Sample(bundles.public_config(folder), weights, golden)
    exact = ours(sample)

    def run(r: Rounding) -> dict[str, np.ndarray]:
        values = ours(sample, r, like=exact)
        return {name: value for name, value in values.items() if value.dtype == np.float64}

    sample.magnitudes = companions(run, np.dtype(np.float32), Stream("independent"))
    angles = np.arange(golden["prompt"].shape[1])[:, None] * yarn_inverse_frequencies(sample.config)
    for layer in sample.layers:  # frequency and product are rounded; a pair moves by its length
        pairs = exact[f"latent_r/{layer}"].reshape(*angles.shape, 2)
        moved = 2 * unit_roundoff(np.float32) * angles * np.hypot(pairs[..., 0], pairs[..., 1])
        sample.magnitudes[f"latent_r/{layer}"] += moved.repeat(2, axis=-1)
    return sample


def ours(
    sample: Sample, r: Rounding = EXACT, like: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Our values for every float that is stored, by the name under `float32/` there.

    `like`: a result of this function whose experts are chosen again.
    """
    golden, got, cache = sample.golden, {}, None
    for part, tokens, parents in (
        ("prompt", golden["prompt"][0], None),
        ("tree", golden["tree_tokens"], golden["tree_parent"]),
    ):
        run = forward(
            sample.weights,
            sample.config,
            tokens,
            parents=parents,
            prefix_cache=cache,
            rounding=r,
            chosen=like[f"{part}/experts"] if like else None,
        )
        cache = run["latents"] if cache is None else cache
        got[f"{part}/experts"] = run["router_index"]
        got[f"{part}/logits"] = run["logits"]
        for layer in sample.layers:
            got[f"{part}/hidden{layer}"] = run["hidden"][layer + 1]
            got[f"{part}/attn{layer}"] = run["attention"][layer]
            got[f"{part}/mlp{layer}"] = run["mlp"][layer]
        for i, layer in enumerate(sample.moe_layers):
            got[f"{part}/rlogit{layer}"] = run["router_logits"][i]
            got[f"{part}/rweight{layer}"] = run["router_weight"][i]
    for layer, latent in enumerate(cache):
        parts = np.split(latent, [sample.config["kv_lora_rank"]], axis=1)
        got[f"latent_c/{layer}"], got[f"latent_r/{layer}"] = parts
    got["path_logits"] = got["tree/logits"]  # the same nodes, as plain causal runs of their paths
    return got


def theirs(sample: Sample, name: str) -> np.ndarray:
    """A stored value in our order: experts ascending, RoPE pairs interleaved, no batch axis."""
    value = sample.golden[f"float32/{name}"].astype(np.float64)
    if name.startswith("latent_"):
        value = value[0, 0]
    if name.startswith("latent_r"):  # [evens | odds]
        value = np.stack(np.split(value, 2, axis=-1), axis=-1).reshape(value.shape)
    if "rweight" in name:
        order = sample.golden[f"float32/{name.replace('rweight', 'rindex')}"].argsort(-1)
        value = np.take_along_axis(value, order, axis=-1)
    return value.reshape(-1, value.shape[-1])


def disagreements(sample: Sample) -> dict[str, float]:
    """Largest error over magnitude of every stored value, and 0 or inf for every discrete one."""
    got = ours(sample)
    found = {
        name: float((np.abs(got[name] - theirs(sample, name)) / magnitude).max())
        for name, magnitude in sample.magnitudes.items()
    }
    for part in ("prompt", "tree"):
        for i, layer in enumerate(sample.moe_layers):
            stored = np.sort(sample.golden[f"float32/{part}/rindex{layer}"], axis=-1)
            equal = np.array_equal(got[f"{part}/experts"][i], stored)
            found[f"{part}/rindex{layer}"] = 0.0 if equal else np.inf
    return found


def errors(sample: Sample) -> dict[str, float]:
    """Largest error of every stored value over its root mean square."""
    got = ours(sample)
    return {
        name: float(
            np.abs(got[name] - theirs(sample, name)).max() / np.sqrt((got[name] ** 2).mean())
        )
        for name in sample.magnitudes
    }
