"""Launcher of specs/model_paths.toml: a tree in one pass, and each of its paths token by token."""

import numpy as np

from engine.device import copy_to_device, to_host
from engine.model import Model, Tree
from engine.passes import ready


def model_paths(
    tokens, parents, prefix, *, page_size: int, weights, config, logits, differs, stream=None
) -> None:
    """tokens, parents [rows] int32; prefix [layers, keys, rank + rope]; logits [rows, vocab] fp32;
    differs [rows] int32: elements of logits and cache rows whose bits another way changes."""
    tokens, parents, prefix = (to_host(array) for array in (tokens, parents, prefix))
    tree = Tree(tokens.tolist(), parents.tolist())
    rows, keys = len(tokens), prefix.shape[1]
    paths = [_path(tree.parents, node) for node in range(rows)]

    model = ready(weights, config, [tree], [prefix], page_size)
    whole = _pass(model, [tree], 0)
    copy_to_device(to_host(model.plan(rows, 1).logits), logits)
    unlike = np.zeros(rows, np.int64)

    # The same nodes in another order, as the second of three requests.
    order = _another_order(tree.parents)
    again = Tree([tree.tokens[i] for i in order], [_index(order, tree.parents[i]) for i in order])
    other = Tree.chain(tree.tokens[:2])
    three = ready(
        weights, config, [other, again, other], [prefix[:, :0], prefix, prefix], page_size
    )
    unlike[order] += (_pass(three, [other, again, other], 1) != whole[order]).sum(-1)

    # Every path alone, one token a pass.
    chain = [Tree([0] * max(map(len, paths)), range(-1, max(map(len, paths)) - 1))]
    model = ready(weights, config, chain, [prefix], page_size)
    for node, path in enumerate(paths):
        model.prefix_len[0] = keys
        for step in path:
            alone = _pass(model, [Tree([tree.tokens[step]], [-1])], 0)
            model.advance(0, 1)
        unlike[node] += (alone[0] != whole[node]).sum()
    copy_to_device(unlike.astype(np.int32), differs)


def _pass(model: Model, trees: list[Tree], request: int) -> np.ndarray:
    """uint16 [nodes, ..]: logits and cache rows of one request's window, as 16-bit pieces."""
    plan = model.forward(trees)
    plan.check()
    start, count = plan.starts[request], len(trees[request].tokens)
    logits = to_host(plan.logits)[start : start + count]
    slots = model.cache.slots(request, model.prefix_len[request] + count)[-count:]
    latents = to_host(model.cache.latents)[:, slots].swapaxes(0, 1).reshape(count, -1)
    both = (np.ascontiguousarray(array).view(np.uint16) for array in (logits, latents))
    return np.concatenate(list(both), axis=1)


def _path(parents, node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _another_order(parents) -> list[int]:
    """The nodes with every parent still before its children, later siblings first."""
    order, open_nodes = [], [0]
    while open_nodes:
        node = open_nodes.pop()
        order.append(node)
        open_nodes += [child for child, parent in enumerate(parents) if parent == node]
    return order


def _index(order: list[int], node: int) -> int:
    return order.index(node) if node >= 0 else -1
