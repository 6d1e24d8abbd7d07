"""A drafter of transformers' own Qwen3 modules, and goldens.dflash beside it.

    tox -e oracle            (after tests/transformers_oracle.py)

DFlash's drafter is a stack of Qwen3 decoder layers whose keys and values are those of the context
followed by the block's, without a causal mask. Here the projections, norms, rotation, grouped-query
attention and MLP are transformers' (Qwen3Attention, Qwen3RMSNorm, Qwen3RotaryEmbedding with YaRN,
Qwen3MLP), in float64 but for what it computes in float32 anyway (norms, tables, softmax).
"""

import sys

import numpy as np
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from goldens import bundles, dflash
from goldens.calibrate import greedy_texts

SHAPES = ("micro-fp32-dflash", "tiny-fp32-dflash", "tiny2-fp32-dflash")
CLOSE = 3e-6  # of the largest logit: float32 in the places above


def drafted(name: str, hidden: np.ndarray, root: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [b - 1, vocab] of transformers' modules and of goldens.dflash; hidden
    [layers + 1, P, hidden]."""
    config, tensors = bundles.config(name), bundles.tensors(name)
    own = config["drafter"]
    made = Qwen3Config(
        vocab_size=config["vocab_size"], hidden_size=config["hidden_size"],
        intermediate_size=own["intermediate_size"], num_hidden_layers=own["num_hidden_layers"],
        num_attention_heads=own["num_attention_heads"],
        num_key_value_heads=own["num_key_value_heads"], head_dim=own["head_dim"],
        rms_norm_eps=own["rms_norm_eps"], max_position_embeddings=262144,
        rope_parameters={
            "rope_theta": own["rope_theta"],
            **{("rope_type" if k == "type" else k): v for k, v in own["rope_scaling"].items()},
        },
    )  # fmt: skip
    made._attn_implementation = "eager"

    def tensor(key: str) -> torch.Tensor:
        return torch.from_numpy(tensors[key].astype(np.float64))

    def norm(x: torch.Tensor, key: str) -> torch.Tensor:
        module = Qwen3RMSNorm(x.shape[-1], own["rms_norm_eps"])
        module.weight.data = tensor(key)
        return module(x)

    taps = torch.from_numpy(
        np.concatenate([hidden[layer + 1] for layer in own["target_layer_ids"]], axis=-1)
    )
    context = norm(taps @ tensor("drafter.fc.weight").T, "drafter.hidden_norm.weight")[None]
    count, slots = context.shape[1], own["block_size"]
    block = torch.tensor([root] + [own["mask_token_id"]] * (slots - 1))
    x = tensor("model.embed_tokens.weight")[block][None]
    cos, sin = Qwen3RotaryEmbedding(made)(x, torch.arange(count + slots)[None])
    for number in range(own["num_hidden_layers"]):
        layer = Qwen3DecoderLayer(made, number).to(torch.float64)
        base = f"drafter.layers.{number}."
        layer.load_state_dict(
            {k.removeprefix(base): tensor(k) for k in tensors if k.startswith(base)}, strict=True
        )
        h, attention = layer.input_layernorm(x), layer.self_attn
        rows = torch.cat([context, h], dim=1)

        def heads(x: torch.Tensor, attention: torch.nn.Module = attention) -> torch.Tensor:
            return x.view(*x.shape[:-1], -1, attention.head_dim)

        q = attention.q_norm(heads(attention.q_proj(h))).transpose(1, 2)
        k = attention.k_norm(heads(attention.k_proj(rows))).transpose(1, 2)
        v = heads(attention.v_proj(rows)).transpose(1, 2)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, count:], sin[:, count:])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        mixed, _ = eager_attention_forward(attention, q, k, v, None, attention.scaling)
        x = x + attention.o_proj(mixed.reshape(1, slots, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    final = norm(x[0, 1:], "drafter.norm.weight")
    theirs = (final @ tensor("lm_head.weight").T).detach().numpy()
    ours, _ = dflash.text_logits(hidden, root, bundles.weights(name), config)
    return theirs, ours


def main() -> int:
    failed = 0
    with torch.no_grad():
        for name in SHAPES:
            config = bundles.config(name)
            prompts = np.arange(2, 2 + 8).reshape(2, 4)
            tokens, hidden = greedy_texts(bundles.weights(name), config, prompts, 40)
            worst = 0.0
            for text in range(2):
                for root in (1, 7, 39):
                    theirs, ours = drafted(name, hidden[:, text, :root], int(tokens[text, root]))
                    worst = max(worst, float(np.abs(theirs - ours).max() / np.abs(ours).max()))
            failed += worst > CLOSE
            said = "agrees" if worst <= CLOSE else "DISAGREES"
            print(f"{name}: {said}, largest difference {worst:.1e} of the largest logit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
