"""Ways to quantise a weight to 4 bits, and what each does to a model.

A scheme fixes how many inputs share a scale (16, 32, 64, 128), whether codes lie around zero or
around a stored zero point, and how the scale is found:

amax/7, amax/7.5   symmetric, scale = largest magnitude of the group / 7 or 7.5
range/15           asymmetric, scale = (max - min) / 15 with 0 in the range, 4-bit zero point
search             either kind; of a sweep of scales the one whose values lie nearest the weights
                   (least sum of squares)

Scales are bf16, and the value of a code is RN_bf16((q - zero) * scale), as everywhere here. A group
costs 16 bits for its scale and 4 for its zero point.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from goldens.forward import forward, greedy
from goldens.model import Weights
from goldens.numerics import BF16, round_to

Ids = Sequence[int] | np.ndarray
GROUPS = (16, 32, 64, 128)
# Names -> what a matrix must match to be quantised; each set contains the one before.
MATRICES = {
    "routed": re.compile(r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj"),
    "routed, shared": re.compile(r".*\.mlp\.(experts\.\d+|shared_experts)\.(gate|up|down)_proj"),
    "routed, shared, dense": re.compile(
        r"model\..*\.mlp\.((experts\.\d+|shared_experts)\.)?(gate|up|down)_proj"
    ),
}
# Scales that `search` tries, as parts of amax/7.5 or range/15: from clipping half of the range off
# to leaving the outermost code unused.
SEARCH = np.linspace(0.5, 1.15, 27)


@dataclass(frozen=True)
class Scheme:
    """One way to quantise; `bits` a weight, scales and zero points included."""

    group: int
    scale: str  # "amax/7", "amax/7.5", "range/15" or "search"
    symmetric: bool = True

    @property
    def bits(self) -> float:
        return 4 + (16 if self.symmetric else 20) / self.group

    @property
    def name(self) -> str:
        return f"{'symmetric' if self.symmetric else 'asymmetric'} {self.scale}"


KINDS = (
    ("amax/7", True),
    ("amax/7.5", True),
    ("search", True),
    ("range/15", False),
    ("search", False),
)


def approximate(weight: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The bf16 values (as float64) that `scheme` stores for a weight [out, in].

    ValueError if the group does not divide the inputs.
    """
    rows, columns = weight.shape
    if columns % scheme.group:
        raise ValueError(f"{columns} inputs are no multiple of group {scheme.group}")
    grouped = np.asarray(weight, np.float64).reshape(rows, -1, scheme.group)
    if scheme.symmetric:
        divisor = 7.0 if scheme.scale == "amax/7" else 7.5
        scale = np.abs(grouped).max(-1, keepdims=True) / divisor
    else:
        low = np.minimum(grouped.min(-1, keepdims=True), 0)
        scale = (np.maximum(grouped.max(-1, keepdims=True), 0) - low) / 15
    if scheme.scale != "search":
        return _values(grouped, scale, scheme.symmetric).reshape(rows, columns)
    best = _values(grouped, scale, scheme.symmetric)
    least = np.square(best - grouped).sum(-1, keepdims=True)
    for factor in SEARCH:
        tried = _values(grouped, scale * factor, scheme.symmetric)
        error = np.square(tried - grouped).sum(-1, keepdims=True)
        best = np.where(error < least, tried, best)
        least = np.minimum(error, least)
    return best.reshape(rows, columns)


def _values(grouped: np.ndarray, scale: np.ndarray, symmetric: bool) -> np.ndarray:
    """Round [out, groups, group] to codes under a scale [out, groups, 1] and back."""
    scale = round_to(scale, BF16).astype(np.float64)
    scale = np.where(scale == 0, 1.0, scale)
    codes = np.rint(grouped / scale)
    if symmetric:
        codes = np.clip(codes, -8, 7)
    else:
        zero = np.clip(np.rint(-np.minimum(grouped.min(-1, keepdims=True), 0) / scale), 0, 15)
        codes = np.clip(codes, -zero, 15 - zero)
    return round_to(codes * scale, BF16).astype(np.float64)


def kl_divergence(logits: np.ndarray, others: np.ndarray) -> np.ndarray:
    """KL(softmax(logits) || softmax(others)) over the last axis, in nats."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        shifted = x - x.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    p, q = log_softmax(logits), log_softmax(others)
    return (np.exp(p) * (p - q)).sum(-1)


def first_difference(a: Ids, b: Ids) -> int | None:
    """Where two token lists first differ; the shorter one's length if it is a prefix; or None."""
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True)
class Row:
    """What one scheme on one set of matrices does to a model."""

    matrices: str
    scheme: Scheme
    count: int  # quantised matrices
    model_bits: float  # a weight of the whole model, 16 for one that is not quantised
    weight_error: float  # root mean square of the change over that of the quantised weights
    kl: float  # nats, mean over all positions of all paths
    kl_error: float  # standard error of that mean
    differs: tuple[int | None, ...]  # for each prompt: the first greedy token that differs


class _Replaced(Weights):
    """Weights with some matrices replaced by float64 ones."""

    def __init__(self, base: Weights, matrices: Mapping[str, np.ndarray]):
        super().__init__(base.tensors)
        self._kept = {**base._kept, **matrices}


def sweep(
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    prompts: Sequence[Ids],
    *,
    steps: int = 32,
    groups: Sequence[int] = GROUPS,
) -> Iterator[Row]:
    """A Row for each group, kind and set of matrices, in float64 (no activation is rounded).

    The model's own greedy tokens (`steps` after each prompt) are the path; every scheme is run once
    over that path, which gives its logits at each position and, because its input agrees up to
    there, the first greedy token in which it differs. ValueError for a group that does not divide
    (`undivided` tells beforehand).
    """
    base = Weights.of(tensors)
    paths, logits = [], []
    for prompt in prompts:
        tokens, _ = greedy(base, config, prompt, steps)
        paths.append(np.concatenate([prompt, tokens]).astype(np.int64))
        logits.append(forward(base, config, paths[-1][:-1])["logits"])
    names = matrices_of(tensors)
    total = sum(
        tensors[name].size * (8 if name.endswith(".qw") else 1)
        for name in tensors
        if not name.endswith(".sc")
    )
    for group in groups:
        for scale, symmetric in KINDS:
            scheme = Scheme(group, scale, symmetric)
            replaced = {name: approximate(base(name), scheme) for name in names}
            for matrices, pattern in MATRICES.items():
                chosen = {name: replaced[name] for name in names if pattern.fullmatch(name)}
                changed = sum(np.square(new - base(name)).sum() for name, new in chosen.items())
                size = sum(np.square(base(name)).sum() for name in chosen)
                count = sum(new.size for new in chosen.values())
                model = _Replaced(base, chosen)
                divergence, differs = [], []
                for prompt, path, want in zip(prompts, paths, logits, strict=True):
                    got = forward(model, config, path[:-1])["logits"]
                    divergence.append(kl_divergence(want, got))
                    greedily = got[len(prompt) - 1 :].argmax(-1)
                    differs.append(first_difference(path[len(prompt) :], greedily))
                kl = np.concatenate(divergence)
                yield Row(
                    matrices=matrices,
                    scheme=scheme,
                    count=len(chosen),
                    model_bits=16 - (16 - scheme.bits) * count / total,
                    weight_error=float(np.sqrt(changed / size)),
                    kl=float(kl.mean()),
                    kl_error=float(kl.std() / np.sqrt(len(kl))),
                    differs=tuple(differs),
                )


def matrices_of(tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Names, without ".weight" or ".qw", of the matrices that a sweep may quantise."""
    widest = MATRICES["routed, shared, dense"]
    names = (name.rpartition(".")[0] for name in tensors if not name.endswith(".sc"))
    return [name for name in names if widest.fullmatch(name)]


def undivided(tensors: Mapping[str, np.ndarray], group: int) -> str | None:
    """Why a model cannot be quantised by this group: a matrix whose inputs it does not divide."""
    for name in matrices_of(tensors):
        plain = tensors.get(f"{name}.weight")
        inputs = plain.shape[1] if plain is not None else tensors[f"{name}.qw"].shape[1] * 8
        if inputs % group:
            return f"{name} has {inputs} inputs"
    return None
