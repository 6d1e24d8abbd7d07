"""Reading specs: what a good one becomes, and what is said about a bad one."""

import json
import os
import sys

import pytest

from harness import spec

GOOD = """
stage     = "kernel"
kernel    = "broken.scale:scale"
reference = "broken.scale"

[axes]
columns = 96

[scalars]
factor = 3.0

[options]
pattern = "flat"

[inputs]
x = { shape = ["rows", "columns"], dtype = "bfloat16" }

[outputs]
y = { shape = ["rows", 2], dtype = "float32", match = { ulp = 1 } }

[cases]
small = { rows = 3, sim = true }
large = { rows = 64, columns = 7168, bench = true, factor = 2, pattern = "ties", timeout_s = 9 }
"""


@pytest.fixture
def load(tmp_path):
    def write_and_load(text, name="scale.toml"):
        path = tmp_path / "specs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return spec.load(path)

    return write_and_load


def test_a_case_is_complete(load):
    large = load(GOOD).cases["large"]
    assert large.axes == {"rows": 64, "columns": 7168}
    assert large.scalars == {"factor": 2.0}
    assert type(large.scalars["factor"]) is float
    assert large.options == {"pattern": "ties"}
    assert (large.bench, large.sim, large.gpus, large.timeout_s) == (True, False, 1, 9.0)


def test_shapes_take_names_and_literals(load):
    loaded = load(GOOD)
    assert loaded.shapes(loaded.cases["small"]) == {"x": (3, 96), "y": (3, 2)}


def test_the_file_name_is_the_identity(load):
    loaded = load(GOOD, "other.toml")
    assert loaded.stem == "other"
    assert loaded.case_id(loaded.cases["small"]) == "specs/other.toml::small"


def test_terms_may_be_an_axis(load):
    loaded = load(GOOD.replace("{ ulp = 1 }", '{ bound = "dot", terms = "columns", slack = 2 }'))
    output = loaded.outputs["y"]
    assert loaded.terms(output, loaded.cases["large"]) == 7168
    assert (output.match.accumulate, output.match.store) == ("float32", "float32")


def test_discovery_is_sorted(tmp_path):
    (tmp_path / "specs").mkdir()
    for name in ("b.toml", "a.toml", "README.md"):
        (tmp_path / "specs" / name).touch()
    assert [p.name for p in spec.discover(tmp_path)] == ["a.toml", "b.toml"]


Y = 'y = { shape = ["rows", 2], dtype = "float32", match = { ulp = 1 } }'
X = 'x = { shape = ["rows", "columns"], dtype = "bfloat16" }'
SMALL = "small = { rows = 3, sim = true }"
MUTANT = '[[mutants]]\nname = "m"\nfind = "x"\nreplace = "y"\n'


@pytest.mark.parametrize(
    ("old", "new", "key", "expected"),
    [
        ('stage     = "kernel"', "", "stage", "one of golden, kernel"),
        ('"kernel"', '"kernels"', "stage", "one of golden, kernel"),
        ('"broken.scale:scale"', '"broken.scale.scale"', "kernel", "module:function"),
        ('"broken.scale:scale"', '"broken.nothing:scale"', "kernel", "that Python can find"),
        ('"broken.scale"', '"broken.missing"', "reference", "that Python can find"),
        ('"broken.scale"', '"no_such.package"', "reference", "that Python can find"),
        ('"broken.scale"\n', "3\n", "reference", "dotted name"),
        ("[axes]", "[axis]", "axis", "one of stage, kernel"),
        ("columns = 96", "columns = 9.5", "axes.columns", "an integer"),
        ("columns = 96", "columns = true", "axes.columns", "an integer"),
        ("factor = 3.0", 'factor = "3"', "scalars.factor", "a float"),
        (X, X.replace("columns", "colums"), "cases.small.colums", "a value"),
        (X, X.replace("bfloat16", "bf16"), "inputs.x.dtype", "one of bfloat16"),
        (X, X.replace('"bfloat16"', "[]"), "inputs.x.dtype", "one of bfloat16"),
        (X, X.replace("dtype", "type"), "inputs.x.type", "one of shape, dtype"),
        (X, X.replace('["rows", "columns"]', "[]"), "inputs.x.shape", "axis names"),
        (X, X.replace('"columns"', "-1"), "inputs.x.shape", "0 or more"),
        (X, "x = 3", "inputs.x", "shape = "),
        (X, X.replace("x =", "rng ="), "inputs.rng", "does not use itself"),
        (X, X.replace("x =", "factor ="), "inputs.factor", "a name of its own"),
        (X, X.replace("x =", "lambda ="), "inputs.lambda", "a parameter's name"),
        (X, X.replace("columns", "None"), "inputs.x.shape", "axis names"),
        ("columns = 96", f"columns = {2**63}", "axes.columns", "an integer"),
        (SMALL, SMALL.replace("3", f"3, columns = {2**63}"), "cases.small.columns", "an integer"),
        (SMALL, SMALL.replace("3", f"3, factor = {10**400}"), "cases.small.factor", "a float"),
        ("[axes]", "invariant = [[]]\n[axes]", "file", "unhashable"),
        (Y, "", "outputs", "at least one output"),
        (Y, Y.replace("{ ulp = 1 }", "1e-3"), "outputs.y.match", '"exact"'),
        (Y, Y.replace("{ ulp = 1 }", "{ atol = 1e-3 }"), "outputs.y.match", '"exact"'),
        (Y, Y.replace("{ ulp = 1 }", "{ ulp = 0 }"), "outputs.y.match.ulp", "1 or more"),
        (Y, Y.replace("ulp = 1", "ulp = 1, slack = 2"), "outputs.y.match.slack", "one of ulp"),
        (Y, Y.replace("float32", "int32"), "outputs.y.match", "the only match for int32"),
        (Y, Y.replace("ulp = 1", 'bound = "dot", terms = 8'), "outputs.y.match.slack", "a number"),
        (Y, Y.replace("ulp = 1", 'bound = "dot", slack = 1'), "outputs.y.match.terms", "an axis"),
        (
            Y,
            Y.replace("ulp = 1", 'bound = "dot", slack = 1, terms = "k"'),
            "cases.small.k",
            "a value",
        ),
        (
            Y,
            Y.replace("ulp = 1", 'bound = "companion", terms = 8, slack = 1'),
            "outputs.y.match.terms",
            "one of bound",
        ),
        (SMALL, SMALL.replace("rows", "row"), "cases.small.row", "one of bench, columns"),
        (SMALL, "small = { sim = true }", "cases.small.rows", "a value"),
        (SMALL, SMALL.replace("true", "1"), "cases.small.sim", "true or false"),
        (SMALL, SMALL.replace("3", "-3"), "cases.small.rows", "0 or more"),
        (SMALL, SMALL.replace("3", "3, gpus = 0"), "cases.small.gpus", "1 or more"),
        (SMALL, SMALL.replace("3", "3, timeout_s = 0"), "cases.small.timeout_s", "more than 0"),
        (SMALL, SMALL.replace("3", "3, timeout_s = inf"), "cases.small.timeout_s", "at most"),
        (SMALL, SMALL.replace("3", '3, unsupported = ""'), "cases.small.unsupported", "reason"),
        (SMALL, SMALL.replace("3", "3, pattern = 3"), "cases.small.pattern", "a str"),
        (SMALL, SMALL.replace("3", "3, factor = true"), "cases.small.factor", "a float"),
        (SMALL, SMALL.replace("small", "spec"), "cases.spec", "another name"),
        (SMALL, SMALL.replace("small", '"a b"'), "cases.a b", "letters"),
        ("[cases]", "[fuzz]\nrow = [1, 2]\n[cases]", "fuzz.row", "the name of an axis"),
        ("[cases]", "[fuzz]\nrows = []\n[cases]", "fuzz.rows", "[lo, hi]"),
        ("[cases]", "[fuzz]\npattern = [1]\n[cases]", "fuzz.pattern", "a str"),
        ("[cases]", "[fuzz]\nrows = 3\n[cases]", "fuzz.rows", "[lo, hi]"),
        ("[cases]", "[fuzz]\nrows = [3, 2]\n[cases]", "fuzz.rows", "at least one value"),
        ("[cases]", "[fuzz]\nrows = { lo = 3 }\n[cases]", "fuzz.rows", "[lo, hi]"),
        (
            "[cases]",
            "[fuzz]\nrows = { lo = 3, hi = 9, sim = 2 }\n[cases]",
            "fuzz.rows",
            "simulator",
        ),
        ("[cases]", "[fuzz]\nrows = { lo = 3, hi = 9, step = 0 }\n[cases]", "fuzz.rows.step", "0"),
        ("[cases]", "[fuzz]\nrows = { lo = 3, hi = 9, by = 2 }\n[cases]", "fuzz.rows.by", "step"),
        ("[cases]", "[fuzz]\nrows = { lo = 3, hi = 9, most = 2 }\n[cases]", "fuzz.rows", "a int"),
        ("[cases]", "[fuzz]\nrows = { values = [] }\n[cases]", "fuzz.rows", "[lo, hi]"),
        ("[cases]", "[fuzz]\npattern = { lo = 1, hi = 2 }\n[cases]", "fuzz.pattern", "a str"),
        ("[cases]", "[fuzz]\nexact = [1]\n[cases]", "fuzz.exact", "a bool"),
        (SMALL, SMALL.replace("3", "3, draw = 0"), "cases.small.draw", "1 or more"),
        ("[axes]", 'invariant = ["rows"]\n[axes]', "invariant", "[scalars]"),
        ("[axes]", 'invariant = "factor"\n[axes]', "invariant", "[scalars]"),
        ("[cases]", '[[mutants]]\nname = "m"\n[cases]', "mutants[0].find", "a string"),
        ("[cases]", MUTANT + 'sim = ""\n[cases]', "mutants[0].sim", "a GPU need not show it"),
        ("[cases]", MUTANT + "gpu = 1\n[cases]", "mutants[0].gpu", "it needs a GPU"),
        (
            "[cases]",
            MUTANT + 'gpu = "large"\nsim = "luck"\n[cases]',
            "mutants[0]",
            "one of equivalent, gpu and sim",
        ),
        ("[cases]", "[mutants]\n[cases]", "mutants", "an array of tables"),
    ],
)
def test_a_bad_spec_is_told_file_key_and_expectation(load, tmp_path, old, new, key, expected):
    assert old in GOOD
    with pytest.raises(spec.SpecError) as caught:
        load(GOOD.replace(old, new, 1) if old != '"broken.scale"' else _second(old, new))
    assert caught.value.file == str(tmp_path / "specs" / "scale.toml")
    assert caught.value.key == key
    assert expected in caught.value.expected
    assert key in str(caught.value)


def _second(old, new):
    """The text of the reference is also the start of the kernel's: replace the reference."""
    return GOOD.replace(f"reference = {old}", f"reference = {new}")


@pytest.mark.parametrize(
    "content",
    [b"stage = ", b"\xff\xfe\x00", b"[cases]\n[cases]\n", b"a=" + b"[" * 9999, b"a=" + b"1" * 9999],
)
def test_an_unreadable_file_is_a_spec_error(tmp_path, content):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(spec.SpecError, match=r"x\.toml: file: expected"):
        spec.load(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_a_spec_error_and_not_waited_for(tmp_path, make):
    make(tmp_path / "x.toml")
    with pytest.raises(spec.SpecError, match=r"x\.toml: file: expected a regular file"):
        spec.load(tmp_path / "x.toml")


def test_what_editors_put_before_and_after_a_line_is_no_fault(load, tmp_path):
    path = load(GOOD).path
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode().replace(b"\n", b"\r\n"))
    assert spec.load(path).cases == load(GOOD).cases


def test_reading_a_spec_runs_nothing_that_it_names(load, tmp_path, monkeypatch):
    (tmp_path / "leaves").mkdir()
    (tmp_path / "leaves" / "__init__.py").write_text("import os; os._exit(0)")
    (tmp_path / "leaves" / "oracle.py").write_text("import os; os._exit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load(_second('"broken.scale"', '"leaves.oracle"'))
    assert loaded.reference == "leaves.oracle"
    assert "leaves" not in sys.modules


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("json", True), ("json.decoder", True), ("os.path", False), ("json.nothing", False),
        ("numpy.linalg", True), ("broken", True), ("broken.scale", True), ("broken.scale.x", False),
        ("", False), (".x", False), ("json.", False), ("json..decoder", False),
    ],
)  # fmt: skip
def test_a_module_is_found_as_python_would(name, there):
    assert (spec.find_module(name) is not None) == there


def test_a_file_that_is_not_there_is_a_spec_error(tmp_path):
    with pytest.raises(spec.SpecError, match="a readable UTF-8 file"):
        spec.load(tmp_path / "gone.toml")


def test_stage_golden_has_no_kernel(load):
    with pytest.raises(spec.SpecError, match="no kernel"):
        load(GOOD.replace('"kernel"', '"golden"'))
    golden = load(
        GOOD.replace('"kernel"', '"golden"').replace('kernel    = "broken.scale:scale"', "")
    )
    assert golden.kernel is None


def test_exact_may_allow_nonfinite_values(load):
    loaded = load(GOOD.replace("ulp = 1", "exact = true, nonfinite = true"))
    assert loaded.outputs["y"].match == spec.Match("exact", nonfinite=True)


def test_weights_come_from_the_spec_or_the_case(load):
    loaded = load(
        'weights = "tiny-int4"\n' + GOOD.replace("rows = 3", 'rows = 3, weights = "tiny-fp32"')
    )
    assert [c.weights for c in loaded.cases.values()] == ["tiny-fp32", "tiny-int4"]


def test_a_broken_spec_is_one_failing_verdict(load):
    from harness import report

    with pytest.raises(spec.SpecError) as caught:
        load(GOOD.replace("[axes]", "[axis]"))
    verdict = report.broken(caught.value)
    assert verdict.id == "specs/scale.toml::spec"
    assert not verdict.ok
    json.dumps(report.as_report([verdict]))
