"""Ten broken kernels and the three right ones that they come from, each judged."""

import importlib
from pathlib import Path

import pytest

from harness import memory, report, run, spec
from harness.report import Status

SPECS = Path(__file__).parent / "broken" / "specs"

# The simulator stops at the access and names the thread; on a GPU the guard band tells.
PAST = (
    "index 216 is out of bounds"
    if memory.simulated()
    else "behind the end of y: 1 elements, first at end + 0"
)

TEN = [
    ("rms_norm", "wrong_tail", Status.WRONG, "all of them within [0:3, 64:72]"),
    ("rms_norm", "unwritten_column", Status.UNWRITTEN, "all of them within [0:3, 71]"),
    ("rms_norm", "past_the_end", Status.OUT_OF_BOUNDS, PAST),
    ("rms_norm", "input_changed", Status.MUTATED_INPUT, "x was changed by the launcher"),
    ("rms_norm", "alias_returned", Status.ALIASED, "that is the memory of x"),
    ("rms_norm", "nan", Status.NONFINITE, "first at (0, 0): got nan"),
    ("gemm", "nibble_order", Status.WRONG, "times the allowance"),
    ("gemm", "neighbour_group", Status.WRONG, "times the allowance"),
    ("gemm", "dropped_last_tile", Status.WRONG, "times the allowance"),
    ("attention", "sibling_leak", Status.WRONG, "times the allowance"),
]


def cases(name):
    loaded = spec.load(SPECS / f"{name}.toml")
    return [(loaded, case) for case in loaded.cases.values()]


@pytest.mark.parametrize("name", ["rms_norm", "gemm", "attention"])
def test_without_its_fault_each_kernel_passes(name, tmp_path):
    for loaded, case in cases(name):
        verdict = run.run_case(loaded, case, cache_dir=tmp_path)
        assert verdict.status is Status.PASSED, report.failure_text(verdict)
        assert verdict.headroom is None or verdict.headroom < 0.5


@pytest.mark.parametrize(("name", "fault", "status", "said"), TEN, ids=[t[1] for t in TEN])
def test_a_broken_kernel_gets_the_right_verdict(name, fault, status, said, tmp_path):
    kernel = importlib.import_module(f"broken.{name}").launcher(fault)
    for loaded, case in cases(name):
        verdict = run.run_case(loaded, case, kernel=kernel, cache_dir=tmp_path)
        text = report.failure_text(verdict)
        assert verdict.status is status, text
        assert said in text or case.exact
        assert f"kdtr gate --spec {name} --kernel" in text


# Specs of the engine that the same launchers fit, and the cheapest case that has every hazard.
REAL = {"rms_norm": ("rms_norm_f32", "odd_tail"), "gemm": ("w4a16_gemm_f32", "exact")}


@pytest.mark.parametrize(
    ("name", "fault", "status"),
    [
        *((name, None, Status.PASSED) for name in REAL),
        *(pytest.param(*t[:3], id=t[1]) for t in TEN if t[0] in REAL),
    ],
)
def test_the_specs_of_the_engine_see_the_same(name, fault, status, tmp_path):
    stem, case = REAL[name]
    kernel = importlib.import_module(f"broken.{name}").launcher(fault)
    loaded = spec.load(SPECS.parents[2] / "specs" / f"{stem}.toml")
    verdict = run.run_case(loaded, loaded.cases[case], kernel=kernel, cache_dir=tmp_path)
    assert verdict.status is status, report.failure_text(verdict)


def test_the_tree_attention_of_the_engine_with_a_sibling_leak_is_seen(tmp_path, monkeypatch):
    loaded = spec.load(SPECS.parents[2] / "specs" / "tree_verify_mla.toml")
    (mutant,) = (m for m in loaded.mutants if m.name == "siblings_leak_by_slot_order")
    module, _, function = loaded.kernel.partition(":")
    source = Path(importlib.import_module(module).__file__).read_text()
    assert source.count(mutant.find) == 1
    (tmp_path / "leaking_kernel.py").write_text(source.replace(mutant.find, mutant.replace))
    monkeypatch.syspath_prepend(tmp_path)
    verdict = run.run_case(
        loaded,
        loaded.cases["siblings_loud"],
        kernel=f"leaking_kernel:{function}",
        cache_dir=tmp_path,
    )
    assert verdict.status is Status.WRONG, report.failure_text(verdict)
    assert verdict.headroom > 100


def test_all_ten_are_here():
    faults = {
        (n, f)
        for n in ("rms_norm", "gemm", "attention")
        for f in importlib.import_module(f"broken.{n}").FAULTS
    }
    assert faults == {(name, fault) for name, fault, *_ in TEN}
    assert len(faults) == 10
