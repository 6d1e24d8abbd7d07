"""kdtr forward: a bundle's model over a prompt and a tree, in numpy, the simulator or on a GPU.

Reached by name when it runs: `goldens.forward`, and `engine.passes:forward_tree` on a device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from harness.cli_bundle import BundlePath, open_bundle
from harness.console import columns, fail, ids, row, show, told
from harness.report import replacing

app = typer.Typer()


class Device(StrEnum):
    reference = "reference"
    sim = "sim"
    cuda = "cuda"


@app.command("forward")
def forward(
    path: BundlePath,
    tokens: Annotated[str, typer.Option(metavar="IDS", help="The prompt, like 1,2,3.")],
    tree_tokens: Annotated[
        str | None, typer.Option(metavar="IDS", help="A tree of tokens after the prompt.")
    ] = None,
    tree_parents: Annotated[
        str | None,
        typer.Option(metavar="NODES", help="Each node's parent; -1 for the first, like -1,0,0,1."),
    ] = None,
    device: Annotated[Device, typer.Option(metavar="reference|sim|cuda")] = Device.reference,
    exact: Annotated[
        bool, typer.Option("--exact", help="Reference only: float64, round nothing.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="OUT.npz", help="Logits, hidden states, router, latents.")
    ] = None,
) -> None:
    """Run a bundle's model over a prompt, and over a tree of tokens behind it.

    OUT.npz holds, for "prompt/" and "tree/": logits [t, vocab], hidden [layers + 1, t, hidden] (the
    residual stream before each layer and after the last), attention and mlp [layers, t, hidden],
    latents [layers, t, kv_lora_rank + qk_rope_head_dim], router_index and router_weight
    [MoE layers, t, k].
    """
    prompt = ids(tokens, "--tokens")
    if (tree_tokens is None) != (tree_parents is None):
        fail("--tree-tokens and --tree-parents go together")
    tree = None
    if tree_tokens is not None and tree_parents is not None:
        tree = (ids(tree_tokens, "--tree-tokens"), ids(tree_parents, "--tree-parents"))
        if len(tree[0]) != len(tree[1]):
            fail(f"{len(tree[0])} tree tokens but {len(tree[1])} parents")
    if save is not None and save.suffix != ".npz":
        fail(f"--save: expected a name that ends in .npz, got {save}")
    if exact and device is not Device.reference:
        fail("--exact: only the reference can leave its values unrounded")
    depth = depths(tree[1]) if tree else []
    opened = open_bundle(path)
    vocabulary, limit = opened.config["vocab_size"], opened.config["max_position_embeddings"]
    for token in prompt + (tree[0] if tree else []):
        if not 0 <= token < vocabulary:
            fail(f"token {token} is not one of the {vocabulary} of {path}")
    if len(prompt) + max(depth, default=-1) >= limit:
        fail(f"the last token is past max_position_embeddings, {limit}")
    run = reference_run(exact) if device is Device.reference else engine_run(device)
    with told():
        result = run(opened, opened.config, prompt, tree)
    result = {name: np.asarray(array) for name, array in result.items()}
    if save is not None:
        with told():
            save_arrays(save, result)
    table = columns(f"{path} on {device.value}", "at", "<", "token", "parent", "depth", "argmax")
    for name in ("logit", "runner-up", "margin"):
        table.add_column(name, justify="right")
    for at, token in enumerate(prompt):
        row(table, at, "prompt", token, "", "", *best(result["prompt/logits"][at]))
    for at, (token, parent) in enumerate(zip(*(tree or ((), ())), strict=True)):
        node = (len(prompt) + depth[at], f"node {at}", token, parent, depth[at])
        row(table, *node, *best(result["tree/logits"][at]))
    show(table)


def depths(parents: list[int]) -> list[int]:
    """Depth of each node; leaves with a message unless parents come before their children."""
    depth: list[int] = []
    for node, parent in enumerate(parents):
        if (parent != -1) if node == 0 else not 0 <= parent < node:
            expected = "-1" if node == 0 else f"0..{node - 1}"
            fail(f"--tree-parents: node {node} has parent {parent}, expected {expected}")
        depth.append(depth[parent] + 1 if node else 0)
    return depth


def best(logits: np.ndarray) -> tuple[str, ...]:
    """Argmax (ties: the lowest id), its logit, the runner-up and the margin."""
    order = np.argsort(-logits, kind="stable")[:2]
    top, second = logits[order]
    return str(order[0]), f"{top:.4f}", str(order[1]), f"{top - second:.4f}"


Run = Callable[[Any, dict[str, Any], list[int], tuple[list[int], list[int]] | None], dict]


def reference_run(exact: bool) -> Run:
    """The numpy model; rounds where the engine rounds unless `exact`."""
    golden = importlib.import_module("goldens.forward")

    def run(weights, config, prompt, tree):
        faithful = not exact
        weights = importlib.import_module("goldens.model").Weights.of(weights)
        before = golden.forward(weights, config, prompt, faithful=faithful)
        result = {f"prompt/{name}": array for name, array in before.items()}
        if tree is not None:
            after = golden.forward(
                weights,
                config,
                tree[0],
                parents=tree[1],
                prefix_cache=before["latents"],
                faithful=faithful,
            )
            result |= {f"tree/{name}": array for name, array in after.items()}
        return result

    return run


def engine_run(device: Device) -> Run:
    """`engine.passes:forward_tree(weights, config, prompt, tree)` in the simulator or on a GPU.

    tree is None or (tokens, parents); it returns numpy arrays named as --save names them.
    """
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1" if device is Device.sim else "0"
    try:
        return importlib.import_module("engine.passes").forward_tree
    except (ModuleNotFoundError, AttributeError) as error:
        missing = getattr(error, "name", None)
        if missing not in ("engine.passes", "forward_tree"):
            fail(f"--device {device.value}: {error}", 1)
        fail(
            f"--device {device.value}: this version of the engine has no engine.passes:forward_tree"
            " (its kernels are judged one by one); --device reference runs the model in numpy",
            1,
        )


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """np.savez, all or nothing."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
