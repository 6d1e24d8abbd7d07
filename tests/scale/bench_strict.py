"""What STRICT costs: kernels built with other splits of K, each the best for one number of rows.

    python -m tests.scale.bench_strict [tree_verify_mla moe_w4a16 w4a16_gemm gemm_bf16]

STRICT has the order of every sum follow from the weights' shape or the length of the context alone.
A kernel that may look at the number of rows would choose among such variants: the price is the time
of what is built over that of the best of them, in one run, replays in turns. A variant is the
kernel file with a constant replaced; its bits are not those of the engine and nothing judges them.
Needs 12 GB of device memory.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from engine import splits as splits_of_keys
from engine.device import cdiv, empty, to_device
from engine.kernels import gemm_bf16, moe_w4a16, tree_verify_mla, w4a16_gemm
from goldens.numerics import Stream
from tests.scale.bench_layer import captured, graph_times_us
from tests.scale.k26_layer import expand

COLD_BYTES = 256 << 20


def variant(
    module: ModuleType, folder: Path, *, reads: ModuleType | None = None, **constants: str
) -> ModuleType:
    """The file with other values of its constants, imported beside it. reads: such a variant of a
    module that it imports."""
    text = Path(str(module.__file__)).read_text()
    if reads is not None:
        origin = reads.__name__.partition("_")[0]
        text = text.replace(f"from engine.{origin} import", f"from {reads.__name__} import")
    for name, value in constants.items():
        (line,) = [each for each in text.splitlines() if each.startswith(f"{name} = ")]
        text = text.replace(f"\n{line}\n", f"\n{name} = {value}\n")
    own = [*constants.values(), *([reads.__name__] if reads else [])]
    name = "_".join([module.__name__.rpartition(".")[2], *own])
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it is a file of Python
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def random(stream: Stream, *shape: int, dtype: str = "bfloat16") -> Any:
    words = stream.raw(-(-int(np.prod(shape)) * 2 // 8)).view(np.uint16)[: int(np.prod(shape))]
    # Half the exponents' range around 1: what a multiplier meets in a model.
    made = (words & np.uint16(0x80FF)) | np.uint16(0x3E00)
    return to_device(made.reshape(shape).view(empty((1,), dtype).dtype))


def attention(folder: Path, stream: Stream) -> Iterator[tuple[str, dict[str, list]]]:
    modules = {"16 splits (built)": tree_verify_mla}
    for splits, tiles in ((32, 8), (64, 4), (4, 8)):
        constants = {"MAX_SPLITS": str(splits), "SPLIT_TILES": str(tiles)}
        name = f"{splits} splits of {tiles} tiles or more"
        cut = variant(splits_of_keys, folder, **constants)
        modules[name] = variant(tree_verify_mla, folder, reads=cut)
    for nodes, prefix in ((1, 4096), (1, 32768), (16, 4096), (16, 32768), (64, 32768)):
        keys = prefix + nodes
        pages = cdiv(keys, 64)
        copies = max(1, min(16, -(-COLD_BYTES // (keys * 1152))))
        caches = [random(stream, pages * 64, 576) for _ in range(copies)]
        q, o = random(stream, nodes, 64, 576), empty((nodes, 64, 512), "bfloat16")
        table = to_device(np.arange(pages, dtype=np.int32)[None])
        rows = to_device(np.array([0, nodes], np.int32))
        prefixes = to_device(np.array([prefix], np.int32))
        seen = np.tril(np.ones((nodes, 32 * cdiv(nodes, 32)), np.uint8))  # a chain
        words = np.packbits(seen, axis=1, bitorder="little").view(np.uint32)
        ancestors = to_device(words)
        runs = {}
        for name, module in modules.items():
            parts = empty((nodes, module.MAX_SPLITS, 64, 512), "float32")
            stats = empty((nodes, module.MAX_SPLITS, 64, 2), "float32")
            runs[name] = [
                partial(
                    module.tree_verify_mla, q, cache, table, rows, prefixes, ancestors,
                    scale=0.1, page_size=64, o=o, partial=parts, stats=stats,
                )
                for cache in caches
            ]  # fmt: skip
        yield f"tree_verify_mla, T = {nodes}, P = {prefix}", runs


def experts(folder: Path, stream: Stream) -> Iterator[tuple[str, dict[str, list]]]:
    modules = {"4 and 2 slices (built)": moe_w4a16}
    for up, down in ((8, 8), (8, 4), (2, 2)):
        constants = {"GATE_UP_SLICES": str(up), "DOWN_SLICES": str(down)}
        modules[f"{up} and {down} slices"] = variant(moe_w4a16, folder, **constants)
    weights = {
        name: expand(random(stream, 4, *shape, dtype="bfloat16"), 384)
        for name, shape in (("gate_up_sc", (4096, 224)), ("down_sc", (7168, 64)))
    }
    for name, shape in (("gate_up_qw", (4096, 896)), ("down_qw", (7168, 256))):
        raw = stream.raw(-(-4 * int(np.prod(shape)) // 2)).view(np.int32)
        weights[name] = expand(to_device(raw[: 4 * int(np.prod(shape))].reshape(4, *shape)), 384)
    for rows in (1, 16, 64):
        x, y = random(stream, rows, 7168), empty((rows, 7168), "float32")
        shares = to_device(np.full((rows, 8), 0.125, np.float32))
        chosen = [
            np.stack([stream.permutation(384)[:8] for _ in range(rows)]).astype(np.int32)
            for _ in range(4 if rows == 1 else 1)
        ]
        routings = [to_device(np.sort(each, axis=1)) for each in chosen]
        shapes = moe_w4a16.scratch_shapes(rows=rows, top_k=8, experts=384, hidden=7168, inner=2048)
        scratch = {name: empty(*shape) for name, shape in shapes.items()}
        yield (
            f"moe_w4a16, M = {rows}",
            {
                name: [
                    partial(module.moe_w4a16, x, ids, shares, **weights, **scratch, y=y)
                    for ids in routings
                ]
                for name, module in modules.items()
            },
        )


def projections(folder: Path, stream: Stream) -> Iterator[tuple[str, dict[str, list]]]:
    modules = {"8 slices (built)": w4a16_gemm}
    for slices in (4, 16):
        modules[f"{slices} slices"] = variant(w4a16_gemm, folder, SLICES=str(slices))
    for n, k in ((4096, 7168), (36864, 7168)):
        copies = max(1, min(16, -(-COLD_BYTES // (n * k // 2))))
        words = [to_device(stream.raw(n * k // 16).view(np.int32).reshape(n, k // 8))]
        words = [*words, *(expand(words[0][None], 1)[0] for _ in range(copies - 1))]
        scales = random(stream, n, k // 32)
        for rows in (1, 16, 64):
            x, y = random(stream, rows, k), empty((rows, n), "bfloat16")
            ((shape, dtype),) = w4a16_gemm.scratch_shapes(m=rows, k=k).values()
            permuted = empty(shape, dtype)
            runs = {
                name: [
                    partial(module.w4a16_gemm_many, x, qw, scales, x_permuted=permuted, y=y)
                    for qw in words
                ]
                for name, module in modules.items()
            }
            yield f"w4a16_gemm {n} x {k}, M = {rows}", runs


def ranges(folder: Path, stream: Stream) -> Iterator[tuple[str, dict[str, list]]]:
    for what, n, k in (("q_a and kv_a", 2112, 7168), ("o", 7168, 8192), ("gate", 384, 7168)):
        copies = max(1, min(16, -(-COLD_BYTES // (2 * n * k))))
        weights = [random(stream, n, k) for _ in range(copies)]
        built = gemm_bf16.parts(n, k)
        for rows in (1, 16, 64):
            x = random(stream, rows, k)
            runs = {}
            for parts in sorted({built, 1, 2, 4, 7, 8, 14}):
                if parts > k // 128 // 2:
                    continue
                y = empty((parts, rows, n), "float32")
                name = f"{parts} ranges (built)" if parts == built else f"{parts} ranges"
                runs[name] = [
                    partial(gemm_bf16.gemm_bf16_parts, x, w, parts=parts, y=y) for w in weights
                ]
            yield f"gemm_bf16 {what}, M = {rows}", runs


KERNELS = {
    "tree_verify_mla": attention, "moe_w4a16": experts, "w4a16_gemm": projections,
    "gemm_bf16": ranges,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kernels", nargs="*", default=list(KERNELS), metavar="KERNEL")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kernel in asked.kernels:
            for title, runs in KERNELS[kernel](Path(folder), Stream("bench_strict", kernel)):
                graphs, sizes, absent = [], [], {}
                for name, calls in runs.items():
                    try:
                        calls[0]()  # compiles and loads
                        many = calls * -(-8 // len(calls))
                        graphs.append(captured(many))
                        sizes.append((name, len(many)))
                    except (NotImplementedError, ValueError, RuntimeError) as error:
                        absent[name] = str(error).splitlines()[0][:60]
                times = {
                    name: time / count
                    for (name, count), time in zip(sizes, graph_times_us(graphs), strict=True)
                }
                best = min(times.values())
                (built,) = [time for name, time in times.items() if "built" in name]
                print(f"{title}: {built:.1f} us, {built / best - 1:.1%} more than the best")
                told = [f"{name} {time:.1f}" for name, time in times.items()]
                told += [f"{name}: {why}" for name, why in absent.items()]
                print(f"    {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
