"""Oracles that lie, caches that rot, manifests that drift."""

import multiprocessing
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from broken.scale import SPEC, inputs, reference

from harness import golden, sources, spec, vacuity
from harness.report import Fault, Status


@pytest.fixture
def make(tmp_path, monkeypatch, load):
    """make(reference=..., inputs=...) makes the golden of an oracle of these functions."""

    def make(*changes, reference=reference, inputs=inputs, **attributes):
        module = types.ModuleType("oracle_of_this_test")
        module.__spec__ = ModuleSpec(module.__name__, None)
        vars(module).update(inputs=inputs, reference=reference, **attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        loaded = load(('reference = "broken.scale"', f'reference = "{module.__name__}"'), *changes)
        return golden._build(loaded, loaded.cases["small"], None, None)

    return make


def test_a_golden_has_inputs_and_float64_values(make):
    made = make()
    assert made.inputs["x"].dtype == np.float32
    assert made.expected["y"].dtype == np.float64
    assert np.array_equal(made.expected["y"], made.inputs["x"].astype(np.float64) * 3.0)


def test_cases_and_specs_draw_different_numbers_and_the_same_every_time(load):
    two = load(("[cases]", "[cases]\nother = { rows = 3 }"))
    a, b = (golden._build(two, case, None, None).inputs["x"] for case in two.cases.values())
    again = golden._build(two, two.cases["other"], None, None).inputs["x"]
    renamed = load(name="scale2")
    c = golden._build(renamed, renamed.cases["small"], None, None).inputs["x"]
    assert np.array_equal(a, again)
    assert not np.array_equal(a, b)
    assert not np.array_equal(b, c)


# -- double entry: spec and oracle must say the same ---------------------------------------------


def x_is(array):
    return lambda rng: {"x": array}


def y_is(array, **more):
    return lambda *, x, factor: {"y": array, **more}


SHAPE = (3, 8)
RAMP = np.arange(24.0).reshape(SHAPE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": x_is(np.ones((8, 3), np.float32))}, "x has shape (8, 3), the spec says (3, 8)"),
        ({"inputs": x_is(np.ones(SHAPE))}, "x is float64, expected float32"),
        ({"inputs": x_is([[1.0]])}, "x is a list, not an array"),
        ({"inputs": lambda rng: {}}, "inputs lacks x"),
        ({"inputs": lambda rng: {"x": RAMP, "w": 0}}, "returns w, not in the spec"),
        ({"inputs": lambda rng: None}, "returned NoneType, not a dict"),
        ({"inputs": lambda rng: 1 / 0}, "ZeroDivisionError: division by zero (test_golden.py:"),
        ({"reference": y_is(RAMP.astype(np.float32))}, "y is float32, expected float64"),
        ({"reference": y_is(RAMP[:2])}, "y has shape (2, 8)"),
        ({"reference": y_is(RAMP, z=RAMP)}, "returns z, not in the spec"),
        ({"reference": lambda *, x, factor: {}}, "reference lacks y"),
    ],
)
def test_an_oracle_that_contradicts_the_spec_is_a_golden_error(make, change, said):
    with pytest.raises(Fault) as caught:
        make(**change)
    assert caught.value.status is Status.GOLDEN_ERROR
    assert said in caught.value.message


def test_an_oracle_that_asks_for_what_the_spec_lacks_is_a_spec_error(make):
    with pytest.raises(Fault) as caught:
        make(reference=lambda *, x, factor, eps: {"y": RAMP})
    assert caught.value.status is Status.SPEC_ERROR
    assert "asks for eps; the spec gives x, factor" in caught.value.message


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("[inputs]", '[options]\npattern = "ties"\n[inputs]'), "pattern"),
        (("factor = 3.0", "factor = 3.0\neps = 1e-5"), "eps"),
    ],
)
def test_what_the_spec_sets_in_vain_is_a_spec_error(make, change, name):
    with pytest.raises(Fault, match=f"the spec sets {name}, but") as caught:
        make(change)
    assert caught.value.status is Status.SPEC_ERROR


def test_an_oracle_without_its_functions_is_a_spec_error(make):
    with pytest.raises(Fault, match="has no function reference"):
        make(reference=None)


def test_an_oracle_with_open_keywords_gets_all_of_them(make):
    seen = {}

    def everything(rng, **keywords):
        seen.update(keywords)
        return {"x": np.ones(SHAPE, np.float32) * rng.uniform(SHAPE).astype(np.float32)}

    make(inputs=everything)
    assert set(seen) == {"columns", "rows", "factor", "exact", "weights", "config"}


def test_an_oracle_that_changes_its_inputs_is_a_golden_error(make):
    def in_place(*, x, factor):
        x *= 2
        return {"y": x.astype(np.float64)}

    with pytest.raises(Fault, match="read-only"):
        make(reference=in_place)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_an_undeclared_nan_or_infinity_is_a_golden_error(make, value):
    """1e39 is finite in float64 and infinite in float32."""
    want = RAMP.copy()
    want[2, 1] = value
    with pytest.raises(Fault, match="1 elements that are NaN or infinite in float32") as caught:
        make(reference=y_is(want))
    assert caught.value.status is Status.GOLDEN_ERROR
    make(("ulp = 1", "ulp = 1, nonfinite = true"), reference=y_is(want))


INTEGER = ('dtype = "float32", match = { ulp = 1 }', 'dtype = "int8", match = "exact"')


def test_an_integer_golden_must_fit_its_dtype(make):
    make(INTEGER, reference=y_is(RAMP.astype(np.int64)))
    with pytest.raises(Fault, match="does not fit into int8"):
        make(INTEGER, reference=y_is(RAMP.astype(np.int64) + 120))
    with pytest.raises(Fault, match="y is float64"):
        make(INTEGER, reference=y_is(RAMP))


def test_an_exact_copy_may_be_given_in_its_own_dtype(make):
    exact = ("match = { ulp = 1 }", 'match = "exact"')
    make(exact, reference=lambda *, x, factor: {"y": x.copy()})
    with pytest.raises(Fault, match="expected float64"):
        make(reference=lambda *, x, factor: {"y": x.copy()})


DOT = ("{ ulp = 1 }", '{ bound = "dot", terms = 8, slack = 2 }')


@pytest.mark.parametrize(
    ("magnitude", "said"),
    [
        (None, "lacks y.magnitude"),
        (RAMP[:1], "y.magnitude has shape"),
        (RAMP - 1, "y.magnitude is negative, infinite or NaN"),
        (RAMP * np.nan, "y.magnitude is negative, infinite or NaN"),
        (RAMP + np.inf, "y.magnitude is negative, infinite or NaN"),
        (RAMP * 0.99, "y.magnitude is smaller than |y|"),
    ],
)
def test_a_bound_needs_a_sensible_magnitude(make, magnitude, said):
    more = {} if magnitude is None else {"y.magnitude": magnitude}
    with pytest.raises(Fault) as caught:
        make(DOT, reference=y_is(RAMP, **more))
    assert said in caught.value.message


def test_an_exact_case_needs_no_magnitude(make):
    make(
        DOT,
        ("sim = true", "exact = true"),
        reference=y_is(RAMP),
        inputs=lambda rng, exact: {"x": RAMP.astype(np.float32)},
    )


# -- goldens that say nothing --------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_a_constant_golden_is_vacuous_unless_declared(make, value):
    with pytest.raises(Fault) as caught:
        make(reference=y_is(np.full(SHAPE, value)))
    assert caught.value.status is Status.VACUOUS
    assert f"is {value} everywhere" in caught.value.message
    make(("sim = true", 'constant = "padding"'), reference=y_is(np.full(SHAPE, value)))


def test_an_empty_golden_is_vacuous(make):
    with pytest.raises(Fault, match="is empty") as caught:
        make(("rows = 3", "rows = 0"), reference=y_is(np.empty((0, 8))),
             inputs=x_is(np.empty((0, 8), np.float32)))  # fmt: skip
    assert caught.value.status is Status.VACUOUS


def test_a_golden_equal_to_the_initial_value_is_vacuous(make):
    changes = (
        ('[inputs]\nx = { shape = ["rows", "columns"], dtype = "float32" }\n', ""),
        ("y = {", "x = { inout = true,"),
    )
    make(*changes, reference=lambda *, x, factor: {"x": x.astype(np.float64) + 1})
    with pytest.raises(Fault, match="equal to its initial value") as caught:
        make(*changes, reference=lambda *, x, factor: {"x": x.astype(np.float64)})
    assert caught.value.status is Status.VACUOUS


def test_one_constant_integer_output_beside_another_is_no_fault(make):
    counts = ("[cases]", 'n = { shape = ["rows"], dtype = "int32", match = "exact" }\n[cases]')
    make(counts, reference=y_is(RAMP, n=np.ones(3, np.int64)))


def test_sensitivity_finds_the_input_that_is_ignored(load, tmp_path, monkeypatch):
    from broken import scale

    monkeypatch.setattr(
        scale, "inputs", lambda rng: {"x": RAMP.astype(np.float32), "w": np.ones(2, np.int32)}
    )
    loaded = load(("[outputs]", 'w = { shape = [2], dtype = "int32" }\n[outputs]'))
    found = {"x": True, "w": False, "factor": True}
    assert vacuity.sensitivity(loaded, loaded.cases["small"]) == found
    assert vacuity.insensitive(loaded, cache_dir=tmp_path / "c") == ["w"]
    with monkeypatch.context() as known:
        known.setattr(vacuity, "sensitivity", None)  # known from now on
        assert vacuity.insensitive(loaded, cache_dir=tmp_path / "c") == ["w"]
    (kept,) = (tmp_path / "c").glob("*.inputs.*.json")
    for damaged in ("5", '"w"', "{}", '["nothing"]', "[[]]", ""):
        kept.write_text(damaged)
        assert vacuity.insensitive(loaded, cache_dir=tmp_path / "c") == ["w"]


def test_sensitivity_finds_the_initial_value_that_is_ignored(load, tmp_path, monkeypatch):
    """Such an output is no inout: its kernel may as well be given poison."""
    from broken import scale

    monkeypatch.setattr(
        scale, "inputs", lambda rng: {"x": RAMP.astype(np.float32), "y": RAMP.astype(np.float32)}
    )
    loaded = load(("y = {", "y = { inout = true,"))
    assert vacuity.insensitive(loaded, cache_dir=tmp_path / "c") == ["y"]
    monkeypatch.setattr(
        scale, "reference", lambda *, x, y, factor: {"y": x * np.float64(factor) + y * 2.0}
    )
    assert vacuity.insensitive(loaded, cache_dir=tmp_path / "d") == []


def test_an_oracle_that_objects_to_an_input_depends_on_it(load, monkeypatch):
    from broken import scale

    def particular(*, x, factor):
        if (x > 1).any():
            raise ValueError("x is out of range")
        return {"y": RAMP}

    monkeypatch.setattr(scale, "reference", particular)
    loaded = load()
    assert vacuity.sensitivity(loaded, loaded.cases["small"]) == {"x": True, "factor": False}


@pytest.mark.parametrize("value", ["3.0", "0.0", "3", "0", "true", "false"])
def test_sensitivity_finds_the_scalar_that_is_ignored(load, tmp_path, monkeypatch, value):
    from broken import scale

    loaded = load(("factor = 3.0", f"factor = {value}"))
    assert vacuity.insensitive(loaded, cache_dir=tmp_path / "a") == []
    monkeypatch.setattr(scale, "reference", lambda *, x, factor: {"y": x.astype(np.float64)})
    assert vacuity.insensitive(loaded, cache_dir=tmp_path / "b") == ["factor"]


def test_a_scalar_that_matters_beside_another_value_of_a_third_is_no_fault(
    load, tmp_path, monkeypatch
):
    """A seed changes nothing where the temperature is 0."""
    from broken import scale

    monkeypatch.setattr(
        scale,
        "reference",
        lambda *, x, factor, seed: {"y": x.astype(np.float64) + factor * seed},
    )
    seeded = ("factor = 3.0", "factor = 0.0\nseed = 1")
    assert vacuity.insensitive(load(seeded), cache_dir=tmp_path / "c") == ["seed"]
    hot = ("[cases]", "[cases]\nhot = { rows = 3, factor = 1.0 }")
    assert vacuity.insensitive(load(seeded, hot), cache_dir=tmp_path / "c") == []


# -- the cache -----------------------------------------------------------------------------------


def entries(folder):
    return sorted(folder.glob("*.safetensors"))


def made_with_calls(loaded, folder, monkeypatch):
    from broken import scale

    calls = []

    def counted(**keywords):
        calls.append(1)
        return reference(**keywords)

    counted.__signature__ = __import__("inspect").signature(reference)
    monkeypatch.setattr(scale, "reference", counted)
    made = golden.make(loaded, loaded.cases["small"], cache_dir=folder)
    return made, len(calls)


def test_a_golden_is_made_once(load, tmp_path, monkeypatch):
    first, calls = made_with_calls(load(), tmp_path / "c", monkeypatch)
    assert calls == 1
    second, calls = made_with_calls(load(), tmp_path / "c", monkeypatch)
    assert calls == 0
    assert np.array_equal(first.expected["y"], second.expected["y"])
    assert second.notes == ()


def test_bfloat16_bool_and_empty_arrays_survive_the_cache(tmp_path):
    arrays = {
        "a": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
        "b": np.array([True, False]),
        "c": np.empty((0, 4), np.uint32),
        "d": np.array([[np.nan, -0.0]]),
    }
    path = tmp_path / "x.safetensors"
    golden._write_cache(path, golden.Golden(arrays, {}, {}), "")
    read, note = golden._read_cache(path)
    assert note == ""
    for name, array in arrays.items():
        assert read.inputs[name].dtype == array.dtype
        assert read.inputs[name].shape == array.shape
        assert golden.digest(read.inputs[name]) == golden.digest(array)


def test_a_changed_spec_has_another_golden(load, tmp_path, monkeypatch):
    made_with_calls(load(), tmp_path / "c", monkeypatch)
    made, calls = made_with_calls(
        load(("factor = 3.0", "factor = 4.0")), tmp_path / "c", monkeypatch
    )
    assert calls == 1
    assert np.array_equal(made.expected["y"], made.inputs["x"].astype(np.float64) * 4.0)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "swap"])
def test_a_damaged_entry_is_noticed_and_made_again(load, tmp_path, monkeypatch, damage):
    made_with_calls(load(), tmp_path / "c", monkeypatch)
    (path,) = entries(tmp_path / "c")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    elif damage == "truncate":
        del content[-8:]
    elif damage == "empty":
        content.clear()
    else:
        content[:] = content.replace(b"expected.y", b"expected.z", 1)
    path.write_bytes(bytes(content))
    made, calls = made_with_calls(load(), tmp_path / "c", monkeypatch)
    assert calls == 1
    assert "was damaged" in made.notes[0]
    _, calls = made_with_calls(load(), tmp_path / "c", monkeypatch)
    assert calls == 0


def test_a_disk_that_cannot_be_written_costs_time_only(load, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(golden, "replace_file", full)
    made, calls = made_with_calls(load(), tmp_path / "c", monkeypatch)
    assert calls == 1
    assert "No space left" in made.notes[0]
    assert entries(tmp_path / "c") == []


def _worker(path, folder, queue):
    loaded = spec.load(path)
    made = golden.make(loaded, loaded.cases["small"], cache_dir=folder)
    queue.put((golden.digest(made.expected["y"]), made.notes))


def test_two_processes_may_make_the_same_golden(load, tmp_path):
    loaded = load()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=_worker, args=(loaded.path, tmp_path / "c", queue)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    answers = {queue.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert len(answers) == 1
    assert len(entries(tmp_path / "c")) == 1


# -- what a verdict depends on -------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A package `mine` with an oracle and a kernel, and a spec that names them."""
    for name, text in {
        "mine/__init__.py": "",
        "mine/oracle.py": "from mine import maths\nimport common, numpy\nFILE = 'capture.npz'\n",
        "mine/capture.npz": "",
        "mine/other.npz": "",
        "common.py": "import namespace.deep.end\n",
        "namespace/deep/end.py": "",  # neither folder has an __init__.py
        "mine/maths.py": "import numpy\n",
        "mine/kernel.py": "from .parts import helper\n",
        "mine/parts/__init__.py": "from .deep import helper\n",
        "mine/parts/deep.py": "def helper(): pass\n",
        "mine/unrelated.py": "",
        "specs/op.toml": SPEC.replace("broken.scale:scale", "mine.kernel:k").replace(
            "broken.scale", "mine.oracle"
        ),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_the_digest_covers_what_oracle_and_kernel_import(project):
    loaded = spec.load(project / "specs" / "op.toml")
    names = [str(p.relative_to(project)) for p in sources.files(loaded)]
    assert names == [
        "common.py",
        "mine/__init__.py",
        "mine/capture.npz",
        "mine/kernel.py",
        "mine/maths.py",
        "mine/oracle.py",
        "mine/parts/__init__.py",
        "mine/parts/deep.py",
        "namespace/deep/end.py",
    ]


@pytest.mark.parametrize(
    ("file", "kernel_only"),
    [
        ("specs/op.toml", False),
        ("mine/maths.py", False),
        ("mine/capture.npz", False),
        ("common.py", False),
        ("namespace/deep/end.py", False),
        ("mine/parts/deep.py", True),
    ],
)
def test_any_change_behind_a_verdict_changes_its_digest(project, file, kernel_only):
    loaded = spec.load(project / "specs" / "op.toml")
    before, oracle_before = sources.digest(loaded), sources.oracle_digest(loaded)
    path = project / file
    path.write_text(path.read_text() + "\n# changed\n")
    os.utime(path, ns=(1, 1))
    assert sources.digest(loaded) != before
    assert (sources.oracle_digest(loaded) == oracle_before) == kernel_only


def test_what_appears_changes_or_vanishes_in_the_life_of_a_process_counts(project):
    """Whatever the time stamps say."""
    loaded = spec.load(project / "specs" / "op.toml")
    maths, late, data = (project / "mine" / name for name in ("maths.py", "late.py", "late.npz"))
    digests = [sources.digest(loaded)]
    text, before = maths.read_text(), maths.stat()

    def write(content):
        maths.write_text(content)
        os.utime(maths, ns=(before.st_atime_ns, before.st_mtime_ns))
        digests.append(sources.digest(loaded))

    write(f"{text}\nfrom mine import late\nFILE = 'late.npz'\n")
    assert not {late, data} & {*sources.files(loaded)}
    late.write_text("")
    data.write_text("")
    assert {late, data} <= {*sources.files(loaded)}
    digests.append(sources.digest(loaded))
    late.unlink()
    data.unlink()
    assert sources.digest(loaded) == digests[1]
    write(f"{text}\nfrom mine import none\nFILE = 'none.npz'\n")
    assert len({*digests}) == 4
    write(text)
    assert digests[-1] == digests[0]


def test_digests_that_share_a_snapshot_are_those_of_each_alone(project):
    root, seen = Path(__file__).resolve().parents[1], sources.Snapshot()
    files = [project / "specs" / "op.toml"]
    files += [
        root / "specs" / f"{stem}.toml" for stem in ("rms_norm", "model_paths", "model_greedy")
    ]
    for one in map(spec.load, files):
        assert sources.digest(one, seen=seen) == sources.digest(one), one.id
        assert sources.case_digests(one, seen=seen) == sources.case_digests(one), one.id


def test_a_kernel_in_a_folder_without_init_counts_with_all_that_it_imports():
    root = Path(__file__).resolve().parents[1]
    loaded = spec.load(root / "specs" / "model_paths.toml")
    assert loaded.kernel.startswith("tests.strict.")
    names = {str(p.relative_to(root)) for p in sources.files(loaded)}
    assert {"tests/strict/model_paths.py", "engine/model.py", "engine/ptx/mma.py"} <= names


def test_what_is_not_imported_does_not_count(project):
    loaded = spec.load(project / "specs" / "op.toml")
    before = sources.digest(loaded)
    (project / "mine/unrelated.py").write_text("changed = 1\n")
    assert sources.digest(loaded) == before


@pytest.mark.parametrize(
    ("find", "replace", "counts"),
    [
        ("factor = 3.0", "factor = 4.0", True),  # of all cases
        ("ulp = 1", "ulp = 2", True),
        ('], dtype = "float32", match', '], dtype = "float64", match', True),
        ('kernel    = "mine.kernel:k"', 'kernel    = "mine.kernel:j"', True),
        ("small = {", "small = { draw = 2,", True),
        ("small = {", "small = { exact = true,", True),
        ("small = {", "small = { gpus = 2,", True),
        ("sim = true", "bench = true, timeout_s = 9.0", False),
        ("[cases]", "# a comment\n[cases]\nother = { rows = 3 }", False),
        ("[cases]", "[fuzz]\nrows = [1, 9]\n[cases]", False),
        ("[cases]", "[[mutants]]\nname = 'm'\nfind = 'a'\nreplace = 'b'\n[cases]", False),
    ],
)
def test_what_a_spec_says_of_a_case_counts_for_its_receipt_and_no_more(
    project, find, replace, counts
):
    path = project / "specs" / "op.toml"
    before = sources.case_digests(spec.load(path))["small"]
    text = path.read_text()
    assert find in text
    path.write_text(text.replace(find, replace))
    changed = spec.load(path)
    assert (sources.case_digests(changed)["small"] != before) == counts
    alone = sources.case_digest(changed, changed.cases["small"], kernel=changed.kernel)
    assert alone == sources.case_digests(changed)["small"]


def test_code_counts_for_a_case_and_another_kernel_is_another_digest(project):
    loaded = spec.load(project / "specs" / "op.toml")
    case = loaded.cases["small"]
    before = sources.case_digest(loaded, case)
    (project / "mine/other.py").write_text("def k(): pass\n")
    assert sources.case_digest(loaded, case, kernel="mine.other:k") != before
    (project / "mine/parts/deep.py").write_text("def helper(): return 1\n")
    assert sources.case_digest(loaded, case) != before
