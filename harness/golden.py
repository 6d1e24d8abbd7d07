"""A case becomes its golden: the oracle's inputs and the values that must come out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.spec import Case, Spec


@dataclass(frozen=True)
class Golden:
    inputs: Mapping[str, np.ndarray]  # in the declared dtypes; initial values of inout outputs too
    expected: Mapping[str, np.ndarray]  # float64 or integers, not yet rounded
    magnitudes: Mapping[str, np.ndarray]  # float64 companions, by output
    weights: Mapping[str, np.ndarray] | None = None
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def make(spec: Spec, case: Case, *, cache_dir: Path | None = None) -> Golden:
    """The golden of a case. Raises Fault with GOLDEN_ERROR, VACUOUS or SPEC_ERROR."""
    raise NotImplementedError


def sensitivity(spec: Spec, case: Case) -> dict[str, bool]:
    """For each input: does the golden change when that input is perturbed?"""
    raise NotImplementedError


def manifest_entry(spec: Spec, case: Case) -> dict[str, Any]:
    """What goldens/manifest.toml keeps of a case."""
    raise NotImplementedError


def verify(specs: Iterable[Spec]) -> list[str]:
    """Differences between goldens/manifest.toml and what the oracles give here."""
    raise NotImplementedError


def generate(specs: Iterable[Spec], reason: str) -> list[str]:
    """Rewrite the manifest entries of `specs`; returns what changed."""
    raise NotImplementedError
