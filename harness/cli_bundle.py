"""Commands on models: kdtr bundle make|inspect|verify|diff, import, forward, quant sweep.

The engine and the oracles are reached by name when a command runs, so that this module loads
neither: `engine.bundle`, `engine.checkpoint`, `goldens.bundles`, `goldens.forward`,
`goldens.quantise`, and `engine.passes:forward_tree` for a forward pass on a device.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.report import replacing

app = typer.Typer(no_args_is_help=True, add_completion=False)
bundle_app = typer.Typer(no_args_is_help=True, help="Make, look into and check .kdtr bundles.")
quant_app = typer.Typer(no_args_is_help=True, help="Choose a 4-bit scheme on evidence.")
app.add_typer(bundle_app, name="bundle")
app.add_typer(quant_app, name="quant")

STEPS = 32  # greedy tokens after a prompt where a bundle brings none
PROMPT_TOKENS = 8


class Device(StrEnum):
    reference = "reference"
    sim = "sim"
    cuda = "cuda"


BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A .kdtr file.")]


# -- shared ----------------------------------------------------------------------------------------


def fail(error: object, code: int = 1) -> NoReturn:
    """One message on stderr, no traceback; 2 for a call that makes no sense, 1 for a bad file."""
    print(f"kdtr: {error}", file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def told() -> Iterator[None]:
    """Turn the errors that a person can mend into one message."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(error)


def say(line: str = "") -> None:
    print(line, flush=True)


def show(table: Table) -> None:
    """Print a table: as wide as the terminal, or as it needs to be in a file."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


def columns(title: str, *names: str) -> Table:
    """An empty table; a name that begins with "<" is left aligned, the others right."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in names:
        left = name.startswith("<")
        table.add_column(name.removeprefix("<"), justify="left" if left else "right")
    return table


def row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))  # Text: names are no markup


def size(count: float) -> str:
    """Bytes for a person: 4.7 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def open_bundle(path: Path) -> Any:
    with told():
        return importlib.import_module("engine.bundle").Bundle(path)


def ids(text: str, what: str) -> list[int]:
    """ "1,2,3" -> [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        fail(f"{what}: expected numbers with commas between, like 1,2,3, got {text!r}", 2)


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
        fail(f"no model {name!r}; there are {', '.join(bundles.NAMES)}", 2)
    with told():
        whole = name
        if drafter:
            if name.startswith("k26"):
                fail(f"{name} is a public checkpoint and has no drafter", 2)
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
        fail(f"{path}: has no golden tokens")
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
                f"gives {tokens[step]} (margin {margins[step]:.4g})"
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
            fail(f"{name} is {shapes[0]} in {first.path}, {shapes[1]} in {second.path}")
    for key in sorted(set(first.config) & set(second.config)):
        values = [opened.config[key] for opened in (first, second)]
        if values[0] != values[1]:
            if key == "num_experts_per_tok":
                fail(f"config key {key!r} is {values[0]} in A, {values[1]} in B: not comparable")
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


# -- forward ---------------------------------------------------------------------------------------


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
        fail("--tree-tokens and --tree-parents go together", 2)
    tree = None
    if tree_tokens is not None and tree_parents is not None:
        tree = (ids(tree_tokens, "--tree-tokens"), ids(tree_parents, "--tree-parents"))
        if len(tree[0]) != len(tree[1]):
            fail(f"{len(tree[0])} tree tokens but {len(tree[1])} parents", 2)
    if save is not None and save.suffix != ".npz":
        fail(f"--save: expected a name that ends in .npz, got {save}", 2)
    if exact and device is not Device.reference:
        fail("--exact: only the reference can leave its values unrounded", 2)
    depth = depths(tree[1]) if tree else []
    opened = open_bundle(path)
    vocabulary, limit = opened.config["vocab_size"], opened.config["max_position_embeddings"]
    for token in prompt + (tree[0] if tree else []):
        if not 0 <= token < vocabulary:
            fail(f"token {token} is not one of the {vocabulary} of {path}", 2)
    if len(prompt) + max(depth, default=-1) >= limit:
        fail(f"the last token is past max_position_embeddings, {limit}", 2)
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
            fail(f"--tree-parents: node {node} has parent {parent}, expected {expected}", 2)
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
            fail(f"--device {device.value}: {error}")
        fail(
            f"--device {device.value}: this version of the engine has no engine.passes:forward_tree"
            " (its kernels are judged one by one); --device reference runs the model in numpy"
        )


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """np.savez, all or nothing."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


# -- quant -----------------------------------------------------------------------------------------


@quant_app.command("sweep")
def sweep(
    path: BundlePath,
    plot: Annotated[
        Path, typer.Option(metavar="FILE", help="The plot: .png, .svg or .pdf.")
    ] = Path("report", "quant_sweep.svg"),
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="The table as CSV.")
    ] = None,
    group: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Only this group size. Repeatable.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Greedy tokens after a prompt.")] = STEPS,
) -> None:
    """Quantise a model in every way and measure what each costs.

    Group size, symmetric or asymmetric codes, how the scale is found and which matrices are
    quantised, against bits a weight, weight error, KL divergence of the logits from the unquantised
    model's and the first greedy token that differs. All in float64: the activations are not
    rounded, so what differs is due to the weights. A star marks the rows that no other beats in
    both bits of the model and KL divergence.
    """
    quantise = importlib.import_module("goldens.quantise")
    if plot.suffix not in (".png", ".svg", ".pdf"):
        fail(f"--plot: expected .png, .svg or .pdf, got {plot}", 2)
    opened = open_bundle(path)
    prompts = opened.prompts or some_prompts(opened.config)
    packed = sum(name.endswith(".qw") for name in opened)
    if packed:
        say(
            f"note: {packed} matrices of {path} are INT4 already; the sweep quantises their INT4 "
            "values again and takes these for the truth"
        )
    if not opened.prompts:
        say(f"note: {path} has no prompts; {len(prompts)} from a fixed seed stand in")
    groups = []
    for each in group or quantise.GROUPS:
        if each < 1:
            fail(f"--group: expected a size >= 1, got {each}", 2)
        why = quantise.undivided(opened, each)
        if why:
            say(f"group {each} left out: {why}")
        else:
            groups.append(each)
    if not groups:
        fail("no group size divides the matrices of this model")
    console = Console(stderr=True)
    rows = []
    with told(), console.status("quantising") as status:
        for each in quantise.sweep(opened, opened.config, prompts, steps=steps, groups=groups):
            rows.append(each)
            status.update(f"quantised {each.matrices}, group {each.scheme.group}")
    show_sweep(path, rows, steps)
    if table is not None:
        with told():
            write_csv(table, rows)
        say(f"table: {table}")
    with told():
        sweep_plot(plot, opened.name or path.stem, rows)
    say(f"plot: {plot}")


@quant_app.command("drafter")
def drafter_on_int4(
    path: BundlePath,
    budgets: Annotated[
        str, typer.Option(metavar="B,..", help="Most nodes of a tree below its root.")
    ] = "0,1,7,16,64,256",
    texts: Annotated[int, typer.Option(metavar="N", help="Prompts, from a fixed seed.")] = 32,
    new: Annotated[int, typer.Option(metavar="N", help="Greedy tokens after a prompt.")] = 64,
) -> None:
    """What a drafter loses when its target is quantised: accepted tokens a round, FP32 and INT4.

    The bundle is a float32 model with a drafter that was calibrated on it; its INT4 model is made
    here. Each target drafts from its own hidden states and verifies its own greedy text. Rounds are
    played along these texts, in float64 and without a GPU; only the weights differ.
    """
    acceptance = importlib.import_module("goldens.acceptance")
    numerics = importlib.import_module("goldens.numerics")
    wanted = ids(budgets, "--budgets")
    opened = open_bundle(path)
    if "drafter" not in opened.config:
        fail(f"{path} has no drafter: kdtr bundle make NAME --drafter adds one")
    if opened["model.embed_tokens.weight"].dtype != np.float32:
        fail(f"{path} is no float32 model: its INT4 model would be no other")
    slots = opened.config["drafter"]["block_size"]
    if texts < 2 or new <= slots or min(wanted) < 0:
        fail(f"--texts at least 2, --new more than {slots}, --budgets not below 0", 2)
    stream = numerics.Stream("quant drafter")
    prompts = stream.integers(2, opened.config["vocab_size"], (texts, PROMPT_TOKENS))
    with told(), Console(stderr=True).status("decoding with both targets"):
        plain, packed, rows = acceptance.compare(opened, opened.config, prompts, new, wanted)
        parting = acceptance.agreement(plain, packed)
    names = ("budget", "FP32 target", "", "INT4 target", "", "change", "")
    table = columns(f"accepted tokens a round, drafter of {path}", *names)
    for one, other in rows:
        change, error = one.change(other)
        row(
            table,
            one.budget,
            f"{one.mean:.2f}",
            f"± {one.error:.2f}",
            f"{other.mean:.2f}",
            f"± {other.error:.2f}",
            f"{change:+.1%}",
            f"± {error:.1%}",
        )
    show(table)
    rounds = [sum(map(len, one.lengths)) for one, _ in rows]
    say(
        f"{texts} prompts of {PROMPT_TOKENS} tokens that no training saw, {new} greedy tokens after"
    )
    say(f"each, {min(rounds)} to {max(rounds)} rounds a row. The root counts; ± standard error.")
    first = f"FP32 {plain.first_slot():.1%}, INT4 {packed.first_slot():.1%}"
    say(f"Best guess at the first slot is right: {first}. Both targets' texts")
    say(
        f"agree for {np.median(parting):.0f} tokens in the median, for all {new} in "
        f"{(parting == new).sum()} of {texts}."
    )


def unbeaten(rows: Sequence[Any]) -> set[int]:
    """Indices of the rows that no other beats in both bits of the model and KL divergence."""
    return {
        i
        for i, one in enumerate(rows)
        if not any(
            other.model_bits <= one.model_bits
            and other.kl <= one.kl
            and (other.model_bits, other.kl) != (one.model_bits, one.kl)
            for other in rows
        )
    }


def show_sweep(path: Path, rows: Sequence[Any], steps: int) -> None:
    names = ("<matrices", "count", "group", "<scheme", "bits", "model bits", "weight error")
    table = columns(f"4-bit schemes for {path}", *names, "KL, nats", "", "<first difference", "")
    stars, last = unbeaten(rows), None
    for at, each in sorted(enumerate(rows), key=lambda pair: (pair[1].count, pair[0])):
        if last not in (None, each.matrices):
            table.add_section()
        last = each.matrices
        row(
            table,
            each.matrices,
            each.count,
            each.scheme.group,
            each.scheme.name,
            f"{each.scheme.bits:.3f}",
            f"{each.model_bits:.2f}",
            f"{each.weight_error:.2%}",
            f"{each.kl:.4f}",
            f"± {each.kl_error:.4f}",
            " ".join("none" if where is None else str(where) for where in each.differs),
            "*" if at in stars else "",
        )
    show(table)
    say("bits: of a quantised weight with its scale; model bits: mean over all weights, 16 for")
    say("one that is not quantised. KL: mean over all positions, ± its standard error. First")
    say(f"difference: of {steps} greedy tokens, a number for each prompt. *: no other row has")
    say("both fewer model bits and less KL.")


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            "matrices count group symmetric scale bits model_bits weight_error kl kl_error "
            "first_difference".split()
        )
        for each in rows:
            scheme = each.scheme
            differs = " ".join("none" if where is None else str(where) for where in each.differs)
            writer.writerow(
                [
                    *(each.matrices, each.count, scheme.group, scheme.symmetric, scheme.scale),
                    *(scheme.bits, each.model_bits, each.weight_error, each.kl, each.kl_error),
                    differs,
                ]
            )


def sweep_plot(path: Path, name: str, rows: Sequence[Any]) -> None:
    """KL divergence against bits a quantised weight, a panel a set; weight error in the last."""
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(each.matrices for each in rows))
    kinds = list(dict.fromkeys(each.scheme.name for each in rows))
    colours = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7")
    styles = {
        kind: {"color": colour, "marker": marker, "ms": 5, "lw": 1.2, "label": kind}
        for kind, colour, marker in zip(kinds, colours, "os^Dv", strict=False)
    }
    figure = Figure(figsize=(3.5 * (len(sets) + 1), 4.2), layout="constrained")
    axes = figure.subplots(1, len(sets) + 1, sharex=True)
    for axis, matrices in zip(axes, [*sets, sets[-1]], strict=True):
        for kind in kinds:
            line = [r for r in rows if (r.matrices, r.scheme.name) == (matrices, kind)]
            bits = [r.scheme.bits for r in line]
            if axis is axes[-1]:
                axis.plot(bits, [100 * r.weight_error for r in line], **styles[kind])
            else:
                kl, error = [r.kl for r in line], [r.kl_error for r in line]
                axis.errorbar(bits, kl, error, elinewidth=0.7, capsize=2, **styles[kind])
            if kind == kinds[0] and axis is axes[0]:
                for each in line:
                    axis.annotate(
                        f"group {each.scheme.group}",
                        (each.scheme.bits, each.kl),
                        xytext=(6, 5),
                        textcoords="offset points",
                        fontsize=8,
                        color=styles[kind]["color"],
                    )
        count = next(r.count for r in rows if r.matrices == matrices)
        axis.set_title(f"{matrices} ({count} matrices)", fontsize=10)
        axis.set_xlabel("bits a quantised weight")
        axis.grid(alpha=0.3, lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    top = 1.08 * max(r.kl + r.kl_error for r in rows)
    for axis in axes[:-1]:
        axis.set_ylim(0, top)
    axes[-1].set_ylim(bottom=0)
    axes[0].set_ylabel("KL divergence of the logits, nats")
    axes[-1].set_ylabel("weight error, % of RMS")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(kinds), frameon=False)
    figure.suptitle(f"{name}: what a 4-bit scheme costs")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
