"""kdtr bundle make|inspect|verify|diff, and kdtr import.

The engine and the oracles are reached by name when a command runs, so that this module loads
neither: `engine.bundle`, `engine.checkpoint`, `goldens.bundles`, `goldens.forward`,
`goldens.quantise`.
"""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from harness.console import columns, fail, row, say, show, size, told

app = typer.Typer(no_args_is_help=True)
bundle_app = typer.Typer(no_args_is_help=True, help="Make, look into and check .kdtr bundles.")
app.add_typer(bundle_app, name="bundle")

STEPS = 32  # greedy tokens after a prompt where a bundle brings none
PROMPT_TOKENS = 8

BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A .kdtr file.")]


def open_bundle(path: Path) -> Any:
    with told():
        return importlib.import_module("engine.bundle").Bundle(path)


def listing(tokens: Sequence[int] | np.ndarray) -> str:
    return " ".join(str(int(token)) for token in tokens)


def greedy_goldens(
    weights: Any, config: dict[str, Any], prompts: Sequence[Any], steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Golden tokens and margins [prompts, steps]: the reference, rounding where the engine does."""
    greedy = importlib.import_module("goldens.forward").greedy
    runs = [greedy(weights, config, prompt, steps, faithful=True) for prompt in prompts]
    return np.stack([run[0] for run in runs]), np.stack([run[1] for run in runs])


def least_margin(margins: np.ndarray) -> str:
    prompt, step = np.unravel_index(int(margins.argmin()), margins.shape)
    return f"{margins[prompt, step]:.4g} (prompt {prompt}, step {step})"


def some_prompts(config: dict[str, Any]) -> list[np.ndarray]:
    """Three prompts from a fixed seed, for a bundle that has none."""
    stream = importlib.import_module("goldens.numerics").Stream("prompts of a bundle without any")
    return list(stream.integers(2, config["vocab_size"], (3, PROMPT_TOKENS)))


# -- bundle ----------------------------------------------------------------------------------------


@bundle_app.command("make")
def make(
    name: Annotated[
        str, typer.Argument(help="tiny-fp32, tiny-int4, tiny2-fp32, tiny2-int4 or tiny_k26.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the bundle goes.")],
    drafter: Annotated[
        bool, typer.Option("--drafter", help="With the drafter that was trained on its FP32 model.")
    ] = False,
) -> None:
    """Write one of the small models, its prompts and its golden tokens. Same bytes every time."""
    bundle = importlib.import_module("engine.bundle")
    bundles = importlib.import_module("goldens.bundles")
    if name not in bundles.NAMES:
        fail(f"no model {name!r}; there are {', '.join(bundles.NAMES)}")
    with told():
        whole = name
        if drafter:
            if name.startswith("k26"):
                fail(f"{name} is a public checkpoint and has no drafter")
            whole = name + bundles.DRAFTED
        weights, config = bundles.tensors(whole), bundles.config(whole)
        prompts = bundles.prompts(name)
        tokens, margins = bundles.golden(name)
        bundle.write(
            out,
            weights,
            config,
            name=whole,
            prompts=prompts,
            golden_tokens=tokens,
            golden_margins=margins,
        )
    packed = sum(tensor.endswith(".qw") for tensor in weights)
    also = f", a drafter of {config['drafter']['block_size'] - 1} guesses" if drafter else ""
    say(f"{whole} -> {out}: {size(out.stat().st_size)}, {packed} INT4 matrices{also}")
    say(f"{tokens.shape[1]} golden tokens after each of {len(prompts)} prompts")
    say(f"smallest top-2 margin {least_margin(margins)}")


@bundle_app.command("inspect")
def inspect(
    path: BundlePath,
    tensors: Annotated[bool, typer.Option("--tensors", help="A line for every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON.")] = False,
) -> None:
    """Say what a bundle holds, from its header alone: no weight is read."""
    opened = open_bundle(path)
    sizes = opened.sizes()
    if as_json:
        golden = opened.golden_tokens
        say(
            json.dumps(
                {
                    "path": str(path),
                    "name": opened.name,
                    "quantization": opened.quantization,
                    "bytes": path.stat().st_size,
                    "config": opened.config,
                    "prompts": [prompt.tolist() for prompt in opened.prompts],
                    "golden_tokens": None if golden is None else golden.tolist(),
                    "golden_margins": None if golden is None else opened.golden_margins.tolist(),
                    "tensors": {
                        name: {"dtype": dtype, "shape": shape, "bytes": count}
                        for name, (dtype, shape, count) in sizes.items()
                    },
                },
                indent=1,
            )
        )
        return
    config = opened.config
    packed = sum(name.endswith(".qw") for name in sizes)
    say(f"{path}: {opened.name or 'unnamed'}, {size(path.stat().st_size)}, {opened.quantization}")
    say(
        f"{config['num_hidden_layers']} layers ({config['first_k_dense_replace']} dense), "
        f"hidden {config['hidden_size']}, vocabulary {config['vocab_size']}, "
        f"{config['num_attention_heads']} heads of {config['qk_nope_head_dim']} + "
        f"{config['qk_rope_head_dim']} (value {config['v_head_dim']}), "
        f"latents {config['q_lora_rank']} and {config['kv_lora_rank']}, "
        f"{config['n_routed_experts']} experts of {config['moe_intermediate_size']}, "
        f"top {config['num_experts_per_tok']} + {config['n_shared_experts']} shared, "
        f"dense {config['intermediate_size']}"
    )
    if "drafter" in config:
        own = config["drafter"]
        say(
            f"drafter: block {own['block_size']}, {own['num_hidden_layers']} layers, "
            f"{own['num_attention_heads']} heads over {own['num_key_value_heads']} of "
            f"{own['head_dim']}, MLP {own['intermediate_size']}, taps "
            f"{' '.join(map(str, own['target_layer_ids']))}, mask token {own['mask_token_id']}"
        )
    table = columns("", "<tensor", "count", "<dtype", "<shape", "bytes")
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, (dtype, shape, count) in sorted(sizes.items()):
        shown = name if tensors else re.sub(r"\.(layers|experts)\.\d+\.", r".\1.*.", name)
        shown = shown if tensors else re.sub(r"\.experts\.\d+\.", ".experts.*.", shown)
        groups.setdefault((shown, dtype, " x ".join(map(str, shape))), []).append(count)
    for (name, dtype, shape), counts in groups.items():
        row(table, name, len(counts), dtype, shape, size(sum(counts)))
    total = sum(count for _, _, count in sizes.values())
    row(table, f"all, {packed} matrices INT4", len(sizes), "", "", size(total))
    show(table)
    if opened.golden_tokens is None:
        say("no golden tokens")
        return
    for at, prompt in enumerate(opened.prompts):
        say(f"prompt {at}: {listing(prompt)}")
        say(f"  golden {listing(opened.golden_tokens[at])}")
    say(f"smallest top-2 margin {least_margin(opened.golden_margins)}")


@bundle_app.command("verify")
def verify(
    path: BundlePath,
    golden: Annotated[
        bool, typer.Option("--golden", help="Compute the golden tokens again and compare.")
    ] = False,
) -> None:
    """Read all of a bundle: names, shapes, digests, finite values. Exit 1 at the first fault."""
    opened = open_bundle(path)
    with told():
        opened.verify()
    say(f"{path}: {len(opened)} weights, every digest right, every value finite")
    if not golden:
        return
    if opened.golden_tokens is None:
        fail(f"{path}: has no golden tokens", 1)
    steps = opened.golden_tokens.shape[1]
    greedy = importlib.import_module("goldens.forward").greedy
    for at, prompt in enumerate(opened.prompts):
        tokens, margins = greedy(opened, opened.config, prompt, steps, faithful=True)
        stored = opened.golden_tokens[at]
        different = np.flatnonzero(tokens != stored)
        if len(different):
            step = different[0]
            fail(
                f"{path}: prompt {at}, step {step}: golden token {stored[step]}, the reference "
                f"gives {tokens[step]} (margin {margins[step]:.4g})",
                1,
            )
    say(f"{path}: {opened.golden_tokens.size} golden tokens are the reference's")


@bundle_app.command("diff")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A bundle.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="A bundle of the same shape.")],
) -> None:
    """Where two models part: their golden tokens side by side, and the error after each layer.

    The error of a layer is the root mean square of the difference over that of A, both models run
    in float64 over A's prompts and golden tokens, so that it shows the weights alone.
    """
    first, second = open_bundle(a), open_bundle(b)
    same_shape(first, second)
    prompts = first.prompts or second.prompts or some_prompts(first.config)
    stored = [x.golden_tokens for x in (first, second) if x.golden_tokens is not None]
    steps = stored[0].shape[1] if stored else STEPS
    goldens = []
    for letter, path, opened in (("A", a, first), ("B", b, second)):
        tokens, margins = opened.golden_tokens, opened.golden_margins
        whence = ""
        same = [list(p) for p in opened.prompts] == [list(p) for p in prompts]
        if tokens is None or not same:
            whence = ", golden tokens computed now" + ("" if tokens is None else " for A's prompts")
            with told():
                tokens, margins = greedy_goldens(opened, opened.config, prompts, steps)
        goldens.append((tokens, margins))
        say(f"{letter}: {path} ({opened.name or 'unnamed'}, {opened.quantization}{whence})")
    (tokens_a, margins_a), (tokens_b, _) = goldens
    first_difference = importlib.import_module("goldens.quantise").first_difference
    for at, prompt in enumerate(prompts):
        say(f"\nprompt {at}: {listing(prompt)}")
        say(f"  A {listing(tokens_a[at])}")
        say(f"  B {listing(tokens_b[at])}")
        where = first_difference(tokens_a[at], tokens_b[at])
        say(f"  diverge at: {'none' if where is None else where}")
        if where is not None and where < min(len(tokens_a[at]), len(tokens_b[at])):
            say(
                f"  A's margin over its runner-up there: {margins_a[at][where]:.4g} "
                f"(median {np.median(margins_a[at]):.4g})"
            )
    say()
    with told():
        show_layer_errors(first, second, prompts, tokens_a)


def same_shape(first: Any, second: Any) -> None:
    """Leave with a message unless the layers of two bundles can be compared; say what differs."""
    layout = importlib.import_module("engine.bundle").layout
    mine, other = dict(layout(first.config)), dict(layout(second.config))
    for name in [*mine, *other]:
        shapes = [list(t[name].shape) if name in t else "not there" for t in (mine, other)]
        if shapes[0] != shapes[1]:
            fail(f"{name} is {shapes[0]} in {first.path}, {shapes[1]} in {second.path}", 1)
    for key in sorted(set(first.config) & set(second.config)):
        values = [opened.config[key] for opened in (first, second)]
        if values[0] != values[1]:
            if key == "num_experts_per_tok":
                fail(f"config key {key!r} is {values[0]} in A, {values[1]} in B: not comparable", 1)
            say(f"note: config key {key!r} is {values[0]} in A, {values[1]} in B")


def show_layer_errors(first: Any, second: Any, prompts: Sequence[Any], tokens: np.ndarray) -> None:
    """A row for each layer, and one for the logits: relative root mean square differences."""
    run = importlib.import_module("goldens.forward").forward
    reference = importlib.import_module("goldens.model").Weights
    models = [(reference(opened), opened.config) for opened in (first, second)]
    pairs = []
    for prompt, golden in zip(prompts, tokens, strict=True):
        path = np.concatenate([prompt, golden])
        pairs.append([run(weights, config, path) for weights, config in models])

    def stacked(key: str) -> list[np.ndarray]:
        return [np.concatenate([pair[i][key] for pair in pairs], axis=-2) for i in (0, 1)]

    def error(x: np.ndarray, y: np.ndarray) -> str:
        return f"{np.sqrt(np.square(x - y).mean() / np.square(x).mean()):.2e}"

    table = columns(
        "relative error of B against A",
        *("<layer", "<kind", "residual", "attention", "mlp", "latents", "same experts"),
    )
    keys = ("hidden", "attention", "mlp", "latents", "router_index")
    (hid, att, mlp, lat, idx) = (stacked(key) for key in keys)
    dense = first.config["first_k_dense_replace"]
    row(table, "embedding", "", error(hid[0][0], hid[1][0]), "", "", "", "")
    for layer in range(first.config["num_hidden_layers"]):
        parts = [error(x[layer], y[layer]) for x, y in (att, mlp, lat)]
        experts = ""
        if layer >= dense:
            same = (idx[0][layer - dense] == idx[1][layer - dense]).all(-1)
            experts = f"{same.sum()} of {same.size}"
        residual = error(hid[0][layer + 1], hid[1][layer + 1])
        row(table, layer, "MoE" if layer >= dense else "dense", residual, *parts, experts)
    logits = stacked("logits")
    kl = importlib.import_module("goldens.quantise").kl_divergence(*logits)
    same = logits[0].argmax(-1) == logits[1].argmax(-1)
    row(table, "logits", "", error(*logits), "", "", "", "")
    show(table)
    say(
        f"KL divergence of B from A: mean {kl.mean():.3g}, largest {kl.max():.3g} nats; "
        f"same argmax at {same.sum()} of {same.size} positions"
    )


# -- import ----------------------------------------------------------------------------------------


@app.command("import")
def import_(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="config.json and safetensors shards.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.kdtr", help="The bundle to write.")],
    drafter: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A drafter for it, in the public DFlash format."),
    ] = None,
) -> None:
    """Make a bundle of a checkpoint in the public Kimi K2 format. All or nothing."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    checkpoint_module = importlib.import_module("engine.checkpoint")
    started = time.perf_counter()
    console = Console(stderr=True)
    with (
        told(),
        Progress(
            "writing",
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as progress,
    ):
        folders = [directory, *([] if drafter is None else [drafter])]
        files = [path for folder in folders for path in folder.glob("*.safetensors")]
        total = sum(path.stat().st_size for path in files)
        task = progress.add_task("", total=total)

        def watch(_: str, array: np.ndarray) -> None:
            progress.advance(task, array.nbytes)

        checkpoint = checkpoint_module.convert(directory, out, drafter=drafter, watch=watch)
    seconds = time.perf_counter() - started
    packed = sum(name.endswith(".qw") for name in checkpoint.sources)
    read = f"{len(checkpoint.shards)} file{'s' if len(checkpoint.shards) > 1 else ''}"
    prefix = f"prefix {checkpoint.prefix!r}" if checkpoint.prefix else "no prefix"
    say(f"{directory} -> {out}: {size(out.stat().st_size)} in {seconds:.1f} s")
    say(f"{len(checkpoint.sources)} tensors from {read}, {prefix}, {packed} INT4 matrices")
    for group, (count, amount) in sorted(checkpoint.unused.items()):
        say(f"not used: {group}, {count} tensors, {size(amount)}")
    if not checkpoint.unused:
        say("not used: nothing")
    for note in checkpoint.notes:
        say(f"note: {note}")
