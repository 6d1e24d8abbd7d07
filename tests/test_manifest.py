"""The manifest: what verifies, what differs, what is refused."""

import re
import tomllib

import numpy as np
import pytest
from broken.scale import reference

from harness import manifest
from harness.report import Fault
from harness.spec import SpecError

INTEGER = ('dtype = "float32", match = { ulp = 1 }', 'dtype = "int8", match = "exact"')


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As one process sees it, though these tests may run in a worker."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def read(tmp_path):
    return tomllib.loads((tmp_path / "goldens" / "manifest.toml").read_text())


def test_what_was_generated_verifies(load, tmp_path):
    loaded = load()
    assert manifest.verify([loaded]) == ["specs/scale.toml::small: not in manifest.toml"]
    assert manifest.generate([loaded], "first") == ["specs/scale.toml::small: new"]
    assert manifest.verify([loaded]) == []
    assert read(tmp_path)["scale"]["small"]["reason"] == "first"
    assert manifest.generate([loaded], "nothing new") == []
    assert read(tmp_path)["scale"]["small"]["reason"] == "first"


def test_other_inputs_and_moved_outputs_are_differences(load, monkeypatch):
    from broken import scale

    loaded = load()
    manifest.generate([loaded], "first")
    monkeypatch.setattr(scale, "reference", lambda *, x, factor: {"y": x * np.float64(3.0 + 3e-8)})
    (moved,) = manifest.verify([loaded])
    assert "output y moved by" in moved
    monkeypatch.setattr(scale, "reference", reference)
    monkeypatch.setattr(
        scale, "inputs", lambda rng, rows, columns: {"x": rng.signs((rows, columns)).astype("f4")}
    )
    assert "specs/scale.toml::small: input x has other bytes" in manifest.verify([loaded])


def test_rounding_in_another_order_is_no_difference(load, monkeypatch):
    from broken import scale

    loaded = load()
    manifest.generate([loaded], "first")
    monkeypatch.setattr(scale, "reference", lambda *, x, factor: {"y": x * np.float64(3.0 + 1e-14)})
    assert manifest.verify([loaded]) == []


def test_integer_outputs_are_exact(load, monkeypatch):
    from broken import scale

    answer = np.arange(24).reshape(3, 8)
    monkeypatch.setattr(scale, "reference", lambda *, x, factor: {"y": answer})
    loaded = load(INTEGER)
    manifest.generate([loaded], "first")
    answer[2, 7] += 1
    assert manifest.verify([loaded]) == ["specs/scale.toml::small: output y has other bytes"]


def test_entries_without_spec_or_case_are_differences_and_go(load, tmp_path):
    manifest.generate([load(), load(name="gone"), load(("small", "old"), name="kept")], "first")
    (tmp_path / "specs" / "gone.toml").unlink()
    kept = load(name="kept")
    assert manifest.verify([kept]) == [
        "gone: no such spec",
        "specs/kept.toml::old: no such case, or it is too large",
        "specs/kept.toml::small: not in manifest.toml",
    ]
    manifest.generate([kept], "renamed")
    assert {s: list(cases) for s, cases in read(tmp_path).items()} == {
        "kept": ["small"],
        "scale": ["small"],
    }


def test_a_broken_oracle_is_a_difference_and_generates_nothing(load, tmp_path, monkeypatch):
    from broken import scale

    loaded = load()
    manifest.generate([loaded], "first")
    before = (tmp_path / "goldens" / "manifest.toml").read_bytes()
    monkeypatch.setattr(scale, "reference", lambda *, x, factor: {"y": x * np.nan})
    assert "GOLDEN_ERROR" in manifest.verify([loaded])[0]
    with pytest.raises(Fault):
        manifest.generate([loaded], "the oracle's failure is no golden")
    assert (tmp_path / "goldens" / "manifest.toml").read_bytes() == before


def test_generation_needs_a_reason_and_one_process(load, monkeypatch):
    with pytest.raises(ValueError, match="reason"):
        manifest.generate([load()], "  ")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    with pytest.raises(PermissionError, match="parallel"):
        manifest.generate([load()], "a reason")


def test_verification_can_be_narrowed(load):
    loaded = load(("[cases]", "[cases]\nother = { rows = 2 }"))
    assert manifest.verify([loaded], select=lambda spec, case: case.sim) == [
        "specs/scale.toml::small: not in manifest.toml"
    ]


def test_large_cases_are_left_out(load, tmp_path):
    loaded = load(("[cases]", "[cases]\nlarge = { rows = 2_000_000 }"))
    manifest.generate([loaded], "first")
    assert list(read(tmp_path)["scale"]) == ["small"]
    assert manifest.verify([loaded]) == []


def test_a_fingerprint_sees_a_swap_and_one_wrong_element():
    rng = np.random.Generator(np.random.PCG64(1))
    values = rng.standard_normal((100, 100))
    rms, mean, projection = manifest.fingerprint(values)
    swapped = values.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert manifest.fingerprint(swapped)[0] == pytest.approx(rms)
    assert abs(manifest.fingerprint(swapped)[2] - projection) > 1e-6
    values[50, 50] += 1e-3
    assert abs(manifest.fingerprint(values)[1] - mean) > 1e-9


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"fingerprint = \[.*?\]", "fingerprint = [nan, nan, nan]", "output y moved by nan"),
        (r"fingerprint = \[.*?\]", "fingerprint = [inf, 0.0, 0.0]", "output y moved by"),
        (r"fingerprint = \[.*?\]", "fingerprint = [1.0]", "its entry is not one"),
        (r"fingerprint = \[.*?\]", 'fingerprint = ["a", "b", "c"]', "its entry is not one"),
        (r", drift = 1e-09", "", "its entry is not one"),
        (r"small = .*", "small = 3", "its entry is not one"),
        (r"\[scale\]\n.*", "scale = 3", "scale: expected a table of cases"),
        (r"\[scale\]", "[scale", "expected valid TOML"),
    ],
)
def test_an_edited_entry_never_agrees(load, tmp_path, old, new, said):
    loaded, path = load(), tmp_path / "goldens" / "manifest.toml"
    manifest.generate([loaded], "first")
    text, count = re.subn(old, new, path.read_text())
    assert count == 1
    path.write_text(text)
    try:
        (found,) = manifest.verify([loaded])
    except SpecError as error:
        found = str(error)
    assert said in found


def test_a_stem_with_dots_keeps_its_place(load):
    loaded = [load(name=name) for name in ("scale", "scale.v2", "scale..x")]
    manifest.generate(loaded, "first")
    assert manifest.verify(loaded) == []
