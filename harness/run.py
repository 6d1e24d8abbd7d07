"""A case becomes what the kernel really did: poison, guards, launch, synchronise, look."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.golden import Golden
from harness.report import Verdict
from harness.spec import Case, Spec


@dataclass(frozen=True)
class Actual:
    outputs: Mapping[str, np.ndarray]
    device: str
    time_us: float


def execute(
    spec: Spec, case: Case, golden: Golden, *, kernel: str | Callable | None = None
) -> Actual:
    """Run the case twice. Raises Fault for what the launcher did wrong."""
    raise NotImplementedError


def run_case(
    spec: Spec,
    case: Case,
    *,
    kernel: str | Callable | None = None,
    cache_dir: Path | None = None,
) -> Verdict:
    """Golden, run, compare. Never raises for a fault of spec, oracle or kernel."""
    raise NotImplementedError
