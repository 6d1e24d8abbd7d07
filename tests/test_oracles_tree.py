"""The oracles of the tree kernels against brute force, on hundreds of random trees."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from goldens import cache_commit, draft_top_k, greedy_accept, tree_build
from goldens.numerics import Stream

UNIT = 2.0**-24


# -- draft_top_k ---------------------------------------------------------------------------------


def test_fma_rounds_once():
    rng = Stream("fma")
    a, b = (rng.bell(4000).astype(np.float32) for _ in range(2))
    exponents = rng.integers(-40, 3, 4000)
    c = np.ldexp(rng.bell(4000), exponents).astype(np.float32)
    c[::2] = -(a * b)[::2]  # what is left is the rounding of the product
    for x, y, z, got in zip(a, b, c, draft_top_k.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [got, np.nextafter(got, np.float32(np.inf)), np.nextafter(got, np.float32(-np.inf))]
        distances = [abs(Fraction(float(n)) - exact) for n in near]
        assert distances[0] == min(distances)


@pytest.mark.parametrize(
    "pattern", ["normal", "ties", "plateau", "sorted", "minus_infinity", "zeros", "huge", "far"]
)
@pytest.mark.parametrize(("vocabulary", "dtype"), [(7, "float32"), (9001, "bfloat16")])
def test_top_k_is_the_sorted_log_softmax(pattern, vocabulary, dtype):
    rng = Stream("top_k", pattern, vocabulary)
    x = draft_top_k.inputs(
        rng, requests=2, length=3, vocabulary=vocabulary, pattern=pattern, dtype=dtype
    )["logits"]
    k = min(vocabulary, 50)
    got = draft_top_k.reference(logits=x, top_k=k)
    for at in np.ndindex(2, 3):
        row = [float(v) for v in x[at]]
        order = sorted(range(vocabulary), key=lambda token: (-row[token], token))[:k]
        assert got["tokens"][at].tolist() == order
        top = max(row)
        total = math.log(math.fsum(math.exp(v - top) for v in row))
        for token, log_prob in zip(order, got["log_probs"][at], strict=True):
            if row[token] == -math.inf:
                assert log_prob == -np.inf
                continue
            exact = row[token] - top - total
            allowed = (4 + 2 * (top - row[token]) + 2 * total) * UNIT + 2 * UNIT
            assert abs(float(log_prob) - exact) <= allowed or exact < -3e38
        assert (got["log_probs"][at] <= 0).all()
        assert (np.diff(got["log_probs"][at][np.isfinite(got["log_probs"][at])]) <= 0).all()


@pytest.mark.parametrize(("pattern", "code"), [("nan", 1), ("infinity", 1), ("all_masked", 2)])
def test_rows_without_a_distribution_say_so(pattern, code):
    x = draft_top_k.inputs(
        Stream(pattern), requests=2, length=3, vocabulary=40, pattern=pattern, dtype="float32"
    )["logits"]
    got = draft_top_k.reference(logits=x, top_k=4)
    bad = got["status"] != 0
    assert bad.any()
    assert not bad.all()
    assert (got["status"][bad] == code).all()
    assert (got["tokens"][bad] == -1).all()
    assert np.isneginf(got["log_probs"][bad]).all()
    assert (got["tokens"][~bad] >= 0).all()


# -- tree_build ----------------------------------------------------------------------------------


def every_prefix(log_probs, budget):
    """All prefixes of the draft by score and rank tuple, the first `budget` of them."""
    length, k = log_probs.shape
    found = []
    with np.errstate(over="ignore"):
        for depth in range(1, length + 1):
            for ranks in itertools.product(range(k), repeat=depth):
                score = np.float32(0)
                for position, rank in enumerate(ranks):
                    score = np.float32(score + log_probs[position, rank])
                if score > -np.inf:
                    found.append((-float(score), ranks))
    return [ranks for _, ranks in sorted(found)[:budget]]


@pytest.mark.parametrize(
    "pattern",
    ["random", "ties", "equal", "certain", "absorbed", "minus_infinity", "nothing", "steep"],
)
def test_best_first_trees_hold_the_best_prefixes_in_order(pattern):
    for trial in range(40):
        rng = Stream("trees", pattern, trial)
        length, k = [(1, 9), (2, 7), (3, 5), (4, 4), (5, 3), (6, 2), (4, 1), (1, 1)][trial % 8]
        k = max(k, 2) if pattern == "minus_infinity" else k
        nodes = int(rng.integers(1, 40))
        x = tree_build.inputs(
            rng, requests=1, length=length, k=k, nodes=nodes, pattern=pattern, budget="full"
        )
        x["floors"][:] = -np.inf
        got = tree_build.reference(**x)
        assert got["status"][0] == 0
        want = every_prefix(x["log_probs"][0], nodes - 1)
        count = int(got["counts"][0])
        assert count == len(want) + 1
        ranks = [()]
        for n in range(1, count):
            parent, depth = int(got["parents"][0, n]), int(got["depths"][0, n])
            assert parent < n
            assert depth == len(ranks[parent]) + 1
            row = x["tokens"][0, depth - 1]
            ranks.append((*ranks[parent], row.tolist().index(got["tree_tokens"][0, n])))
        assert ranks[1:] == want
        for n, m in itertools.product(range(count), repeat=2):
            bit = int(got["ancestors"][0, n, m // 32]) >> m % 32 & 1
            assert bit == (ranks[n][: len(ranks[m])] == ranks[m])
        assert (got["tree_tokens"][0, count:] == -1).all()
        assert (got["parents"][0, count:] == -1).all()


def test_a_floor_stops_the_tree_at_the_first_node_below_it():
    for trial in range(30):
        rng = Stream("floors", trial)
        x = tree_build.inputs(
            rng, requests=1, length=3, k=4, nodes=30, pattern="random", budget="full"
        )
        whole = every_prefix(x["log_probs"][0], 29)
        scores = [
            sum((x["log_probs"][0, i, r] for i, r in enumerate(ranks)), np.float32(0))
            for ranks in whole
        ]
        below = [score < floor for score, floor in zip(scores, x["floors"][1:], strict=True)]
        kept = below.index(True) if any(below) else 29
        assert tree_build.reference(**x)["counts"][0] == kept + 1


# -- greedy_accept -------------------------------------------------------------------------------


def longest_agreement(target, tokens, parents, count):
    """Of all paths from the root that the target agrees with and that take first children, the
    longest: found from the leaves up."""
    best = [0]
    for leaf in range(count):
        path = [leaf]
        while path[0]:
            path.insert(0, int(parents[path[0]]))
        steps = list(itertools.pairwise(path))
        agreed = all(tokens[b] == target[a] for a, b in steps)
        first = all(
            not any(parents[c] == a and tokens[c] == target[a] for c in range(1, b))
            for a, b in steps
        )
        if agreed and first and len(path) > len(best):
            best = path
    return best


def test_accepted_paths_are_the_longest_agreement():
    for trial in range(300):
        rng = Stream("accept", trial)
        nodes = int(rng.choice([1, 2, 5, 12, 31, 32, 33]))
        pattern = ["random", "chain", "star", "twins"][trial % 4]
        x = greedy_accept.inputs(rng, requests=2, nodes=nodes, pattern=pattern, vocabulary=4)
        got = greedy_accept.reference(**x, max_accepted=nodes)
        for r in range(2):
            want = longest_agreement(
                x["target_tokens"][r], x["tree_tokens"][r], x["parents"][r], nodes
            )
            assert got["status"][r] == 0
            assert got["accepted"][r, : len(want)].tolist() == want
            assert got["accepted_counts"][r] == len(want)
            assert (got["accepted"][r, len(want) :] == -1).all()
            assert got["next_tokens"][r] == x["target_tokens"][r, want[-1]]


@pytest.mark.parametrize(
    ("pattern", "code", "node"),
    [
        ("orphan", 2, 16), ("root_has_parent", 2, 0), ("cycle", 3, 15), ("itself", 3, 16),
        ("outside", 2, 16), ("far_outside", 2, 16), ("bad_count", 1, 0), ("no_choice", 4, 1),
        ("negative_choice", 4, 1),
    ],
)  # fmt: skip
def test_a_tree_at_fault_accepts_nothing_and_names_the_node(pattern, code, node):
    x = greedy_accept.inputs(Stream(pattern), requests=3, nodes=17, pattern=pattern, vocabulary=5)
    got = greedy_accept.reference(**x, max_accepted=17)
    assert got["status"][0] == code + 16 * node
    assert got["accepted_counts"][0] == 0
    assert got["next_tokens"][0] == -1
    assert (got["accepted"][0] == -1).all()
    assert got["accepted_counts"][1] > 0


# -- cache_commit --------------------------------------------------------------------------------


def test_commits_leave_what_a_decoded_path_would_have_left():
    """The cache as a table from (request, position) to rows, before and after."""
    for trial in range(60):
        rng = Stream("commit", trial)
        page_size = int(rng.choice([1, 4, 16]))
        max_pages, room = 64 // page_size, int(rng.integers(1, 17))
        x = cache_commit.inputs(
            rng, requests=3, layers=2, slots=256, width=2, max_pages=max_pages, room=room,
            page_size=page_size, pattern=["random", "overlap", "padding"][trial % 3],
            dtype="float32",
        )  # fmt: skip
        got = cache_commit.reference(**x, page_size=page_size)
        logical = {}
        for r, place in itertools.product(range(3), range(max_pages * page_size)):
            page = x["page_table"][r, place // page_size]
            logical[r, place] = page * page_size + place % page_size
        untouched = set(range(256))
        for r in range(3):
            prefix, count = int(x["prefix_len"][r]), int(x["accepted_counts"][r])
            for j in range(count):
                target, source = logical[r, prefix + j], logical[r, prefix + x["accepted"][r, j]]
                assert (got["cache"][:, target] == x["cache"][:, source]).all()
                untouched.discard(target)
            assert got["new_prefix_len"][r] == prefix + count
        kept = sorted(untouched)
        assert (got["cache"][:, kept] == x["cache"][:, kept]).all()
        assert not got["status"].any()
