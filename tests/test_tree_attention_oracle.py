"""The oracle of tree attention against a walk from node to parent, one key at a time."""

import math
from itertools import pairwise

import numpy as np
import pytest

from goldens import tree_verify_mla
from goldens.numerics import Stream

SHAPE = {
    "rows": 9, "requests": 2, "heads": 2, "width": 12, "slots": 96, "max_pages": 12, "words": 2,
    "dtype": "float32", "prefixes": "5,0", "nodes": "5,3",
}  # fmt: skip


def walked(made: dict, row: int, head: int, page_size: int, scale: float, rank: int) -> list[float]:
    """The definition, with nothing but Python numbers."""
    starts = made["row_start"].tolist()
    request = next((r for r in range(2) if starts[r] <= row < starts[r + 1]), None)
    if request is None:
        return [0.0] * rank
    prefix = int(made["prefix_len"][request])

    def key(place: int) -> list[float]:
        page = int(made["page_table"][request][place // page_size])
        return made["cache"][page * page_size + place % page_size].tolist()

    node, path = row - starts[request], []
    while node >= 0:
        path.append(node)
        bits = [int(w) for w in made["ancestors"][starts[request] + node]]
        above = [j for j in range(node) if bits[j // 32] >> (j % 32) & 1]
        node = max(above, default=-1)  # the parent is the nearest ancestor
    keys = [key(p) for p in range(prefix)] + [key(prefix + n) for n in reversed(path)]
    query = made["q"][row][head].tolist()
    weights = [
        math.exp(scale * math.fsum(a * b for a, b in zip(query, k, strict=True))) for k in keys
    ]
    total = math.fsum(weights)
    return [
        math.fsum(w * k[c] for w, k in zip(weights, keys, strict=True)) / total for c in range(rank)
    ]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("tree", ["chain", "star", "random", "wide"])
def test_a_node_attends_to_its_prefix_and_to_its_path(tree, page_size):
    rng = Stream("walk", tree, page_size)
    made = tree_verify_mla.inputs(rng, page_size=page_size, tree=tree, values="plain", **SHAPE)
    names = [n for n in made if n != "o"]
    got = tree_verify_mla.reference(**{n: made[n] for n in names}, scale=0.3, page_size=page_size)
    for row in range(SHAPE["rows"]):
        for head in range(SHAPE["heads"]):
            want = walked(made, row, head, page_size, 0.3, 8)
            np.testing.assert_allclose(got["o"][row, head], want, rtol=1e-12, atol=1e-15)


def test_exact_values_say_so():
    with pytest.raises(ValueError, match="do not go together"):
        tree_verify_mla.inputs(
            Stream("x"), page_size=4, tree="star", values="uniform", exact=False, **SHAPE
        )


def nodes_without_a_bit(made: dict) -> np.ndarray:
    """[rows], of the definition: NaN is theirs and nobody else's."""
    room = min(tree_verify_mla.MAX_WINDOW, 32 * made["ancestors"].shape[1])
    node = np.full(len(made["q"]), -1)
    for first, last in pairwise(made["row_start"].tolist()):
        node[first:last] = np.arange(last - first)
    return node >= room


def check_nan(made: dict, scale: float, page_size: int) -> None:
    got = tree_verify_mla.reference(**made, scale=scale, page_size=page_size)["o"]
    beyond = nodes_without_a_bit(made)
    assert np.isnan(got[beyond]).all()
    assert np.isfinite(got[~beyond]).all()


@pytest.mark.parametrize("values", ["plain", "climbing", "loud", "faint"])
@pytest.mark.parametrize("tree", ["chain", "star", "random", "wide"])
def test_nan_in_the_golden_is_a_node_beyond_the_mask_and_no_poisoned_slot(tree, values):
    """The specs allow NaN where the golden has it, and slots that no row may read hold NaN."""
    shape = {**SHAPE, "words": 1, "rows": 50, "slots": 160, "max_pages": 40, "nodes": "40,3"}
    for prefixes in ("0,0", "5,0", "1,90"):
        rng = Stream("nan", tree, values, prefixes)
        given = {**shape, "prefixes": prefixes}
        made = tree_verify_mla.inputs(rng, page_size=4, tree=tree, values=values, **given)
        check_nan(made, 0.3, 4)


def test_an_oracle_that_reads_a_poisoned_slot_is_seen(monkeypatch):
    made = tree_verify_mla.inputs(Stream("x"), page_size=4, tree="star", values="plain", **SHAPE)
    poisoned = np.flatnonzero(np.isnan(made["cache"]).all(-1))[:1]
    honest = tree_verify_mla.keys_of_rows
    monkeypatch.setattr(
        tree_verify_mla,
        "keys_of_rows",
        lambda *given: [np.concatenate([seen, poisoned]) for seen in honest(*given)],
    )
    with pytest.raises(AssertionError):
        check_nan(made, 0.3, 4)
