"""Run transformers on random models in the public format, and the reference beside it.

    tox -e oracle            (torch and transformers on the CPU, about a minute a model)

Three models: `pinned`, whose files must come out as they lie in goldens/pinned/; `dense2` with two
dense layers, six experts and other head sizes; `far_bias` with a router bias near 7 that spreads
by 0.25, which bf16 cannot tell apart. Each is written as a checkpoint (config.json,
model.safetensors) with golden.npz (goldens/pinned/ORIGIN.md names its arrays), then read by the
reference, which must agree in every stored value within one magnitude of float32 rounding.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from independent import disagreements, errors, read
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from goldens import bundles
from goldens.forward import greedy

GROUP = 32
PROMPT, STEPS = 48, 32
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
SLACK = 1
YARN = {
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
TEXT = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
}
DENSE2 = {
    "vocab_size": 384,
    "hidden_size": 192,
    "intermediate_size": 384,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
}


def small_bias(shape: torch.Size, g: torch.Generator) -> torch.Tensor:
    return 0.05 * torch.randn(shape, generator=g)


def far_bias(shape: torch.Size, g: torch.Generator) -> torch.Tensor:
    return 7 + 0.25 * torch.rand(shape, generator=g)


MODELS: dict[str, tuple[dict, int, Callable]] = {
    "pinned": (TEXT, 1234, small_bias),
    "dense2": (TEXT | DENSE2, 2, small_bias),
    "far_bias": (TEXT, 7, far_bias),
}


def quantised(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w [out, in] -> int32 words, bf16 scales amax / 7, and RN_bf16(q * s)."""
    rows, columns = w.shape
    grouped = w.view(rows, columns // GROUP, GROUP)
    scale = (grouped.abs().amax(-1) / 7.0).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = torch.clamp(torch.round(grouped / scale.float()[..., None]), -8, 7).to(torch.int64)
    value = (q.to(torch.bfloat16) * scale[..., None]).view(rows, columns)
    codes = (q + 8).view(rows, columns // 8, 8)
    packed = sum(codes[..., i] << (4 * i) for i in range(8))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return packed, scale, value


def write_model(folder: Path, text: dict, bias: Callable, g: torch.Generator):
    """Random weights that bf16 and INT4 hold exactly; returns the model that transformers runs."""
    rope = {"rope_theta": 50000.0, "rope_type": "yarn", **YARN}
    config = DeepseekV3Config(**text, rope_parameters=rope, num_mtp_layers=0)
    config._attn_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).eval()
    stored = {}
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            if "layernorm" in name or name == "model.norm.weight":
                value = (1.0 + 0.2 * torch.randn(p.shape, generator=g)).to(torch.bfloat16)
            elif "e_score_correction_bias" in name:
                value = bias(p.shape, g)  # stays float32
            elif ".mlp.experts." in name:  # all experts of a layer in one parameter
                w = torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5
                w *= torch.exp(0.5 * torch.randn(*p.shape[:2], 1, generator=g))
                value = torch.empty_like(w, dtype=torch.bfloat16)
                for expert, matrices in enumerate(w):
                    parts = {"down_proj": slice(None)}
                    if "gate_up" in name:
                        inner = text["moe_intermediate_size"]
                        parts = {"gate_proj": slice(0, inner), "up_proj": slice(inner, None)}
                    for part, rows in parts.items():
                        packed, scale, value[expert, rows] = quantised(matrices[rows])
                        base = f"language_model.{name.rsplit('.', 1)[0]}.{expert}.{part}"
                        stored[f"{base}.weight_packed"] = packed
                        stored[f"{base}.weight_scale"] = scale
                        shape = torch.tensor(matrices[rows].shape, dtype=torch.int32)
                        stored[f"{base}.weight_shape"] = shape
            elif "embed_tokens" in name:
                value = torch.randn(p.shape, generator=g).to(torch.bfloat16)
            else:
                value = (torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5).to(torch.bfloat16)
            p.copy_(value.to(p.dtype))
            if ".mlp.experts." not in name:
                stored[f"language_model.{name}"] = value.clone()
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    public = {**text, "rope_theta": 50000.0, "rope_scaling": {**YARN, "type": "yarn"}}
    (folder / "config.json").write_text(json.dumps({"text_config": public}), encoding="utf-8")
    return model


def recorded(model, part: str, tokens: torch.Tensor, cache, **how) -> dict[str, np.ndarray]:
    """One forward pass with every block's output, by name."""
    found, hooks = {}, []

    def keep(module, name: str, entry: int | None = None) -> None:
        def hook(_module, _inputs, output):
            output = output if entry is None else output[entry]
            found[f"{part}/{name}"] = output.detach().numpy().copy()

        hooks.append(module.register_forward_hook(hook))

    for i, layer in enumerate(model.model.layers):
        keep(layer, f"hidden{i}")
        keep(layer.self_attn, f"attn{i}", 0)
        keep(layer.mlp, f"mlp{i}")
        if hasattr(layer.mlp, "gate"):
            for entry, name in enumerate(("rlogit", "rweight", "rindex")):
                keep(layer.mlp.gate, f"{name}{i}", entry)
    with torch.no_grad():
        output = model(input_ids=tokens[None], cache=cache, use_cache=True, **how)
    for hook in hooks:
        hook.remove()
    return found | {f"{part}/logits": output.logits.numpy().copy()}


def goldens_of(model, prompt: torch.Tensor) -> dict[str, np.ndarray]:
    """Everything that golden.npz holds in float32; names without the leading `float32/`."""
    config = model.config
    cache = DynamicCache(config=config)
    found = recorded(model, "prompt", prompt, cache)
    for i, layer in enumerate(cache.layers):
        found[f"latent_c/{i}"] = layer.keys.numpy().copy()
        found[f"latent_r/{i}"] = layer.values.numpy().copy()

    logits, tokens, margins = found["prompt/logits"][0, -1], [], []
    for _ in range(STEPS):
        best = np.sort(logits)[-2:]
        margins.append(best[1] - best[0])
        tokens.append(int(logits.argmax()))
        with torch.no_grad():
            step = model(input_ids=torch.tensor([tokens[-1:]]), cache=cache, use_cache=True)
        logits = step.logits[0, -1].numpy()
    found |= {"greedy": np.array(tokens), "greedy_margin": np.array(margins)}

    count = len(PARENTS)
    ancestors = np.eye(count, dtype=bool)
    for node, parent in enumerate(PARENTS[1:], 1):
        ancestors[node] |= ancestors[parent]
    depth = ancestors.sum(1) - 1
    nodes = torch.randint(
        2, config.vocab_size, (count,), generator=torch.Generator().manual_seed(7)
    )
    nodes[0] = tokens[0]
    keep = np.concatenate([np.ones((count, len(prompt)), bool), ancestors], axis=1)
    mask = torch.full((1, 1, *keep.shape), torch.finfo(torch.float32).min)
    mask[0, 0][torch.from_numpy(keep)] = 0
    cache = DynamicCache(config=config)
    recorded(model, "prompt", prompt, cache)
    positions = torch.from_numpy(len(prompt) + depth)[None]
    found |= recorded(model, "tree", nodes, cache, position_ids=positions, attention_mask=mask)
    paths = []
    for node in range(count):  # the same node with no mask at all
        text = torch.cat([prompt, nodes[np.nonzero(ancestors[node])[0]]])
        with torch.no_grad():
            paths.append(model(input_ids=text[None], use_cache=False).logits[0, -1].numpy())
    found["path_logits"] = np.stack(paths)
    shared = {"prompt": prompt[None].numpy(), "tree_tokens": nodes.numpy()}
    shared["tree_parent"] = np.array(PARENTS)
    return shared | {f"float32/{name}": value for name, value in found.items()}


def same_as_pinned(folder: Path) -> str:
    """How the files made here differ from those pinned; the values must not."""
    weights = [(f / "model.safetensors").read_bytes() for f in (folder, bundles.PINNED)]
    made, kept = (dict(np.load(f / "golden.npz")) for f in (folder, bundles.PINNED))
    moved = {n: float(np.abs(v - kept[n]).max()) for n, v in made.items() if (v != kept[n]).any()}
    alike = "the same bytes" if weights[0] == weights[1] else "OTHER bytes"
    return f"model.safetensors {alike}; {len(made) - len(moved)} of {len(made)} arrays equal" + (
        f", others differ by at most {max(moved.values()):.1e}" if moved else ""
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, help="keep the files here, a folder a model")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    failed = 0
    for name in arguments.names or MODELS:
        text, seed, bias = MODELS[name]
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        g = torch.Generator().manual_seed(seed)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (arguments.out or Path(temporary)) / name
            folder.mkdir(parents=True, exist_ok=True)
            model = write_model(folder, text, bias, g)
            prompt = torch.randint(2, text["vocab_size"], (1, PROMPT), generator=g)[0]
            np.savez_compressed(folder / "golden.npz", **goldens_of(model, prompt))
            sample = read(folder)
            found, size = disagreements(sample), errors(sample)
            tokens, _ = greedy(sample.weights, sample.config, prompt.numpy(), STEPS)
            equal = np.array_equal(tokens, sample.golden["float32/greedy"])
            ok = max(found.values()) < SLACK and equal
            failed += not ok
            print(f"{name}: {'agrees' if ok else 'DISAGREES'} in {len(found)} arrays")
            for kind in ("logits", "hidden", "attn", "mlp", "rlogit", "rweight", "latent"):
                names = [n for n in size if kind in n]
                worst, room = max(size[n] for n in names), max(found[n] for n in names)
                print(f"  {kind:8s} largest error {worst:.1e} rms, {room:.2f} magnitudes")
            flips = [n for n in found if "rindex" in n and found[n]]
            same = "equal" if equal else f"not equal: {tokens}"
            print(f"  experts {flips or 'equal'}, {STEPS} greedy tokens {same}")
            if name == "pinned":
                print(f"  against goldens/pinned: {same_as_pinned(folder)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
