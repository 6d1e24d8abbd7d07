"""The mutants themselves: what is planted, what counts as a kill, and what a certificate says."""

import ast
import dataclasses
import json
import textwrap
from pathlib import Path

import pytest
from throwaway import Project

from harness import certificates, mutants, spec, stages

ROOT = Path(__file__).parents[1]

KERNEL = '''
    """A kernel with something for every operator."""

    from engine.device import check, cuda, function, kernel, ptr, static_range, u32


    @function
    def _half(a):
        return u32(a >> u32(1))


    @kernel(threads=32)
    def _kernel(x: ptr[u32], n: u32, y: ptr[u32]):
        pdl_wait()
        row = u32(cuda.blockIdx.y)
        i = u32(row * n + u32(cuda.threadIdx.x))
        total = u32(0)
        for j in static_range(4):
            total = max(total, x[j])
        cuda.syncthreads()
        if i < n and not total == n:
            y[i] = u32(total)
            store(y, i, total)


    def launch(x, *, y, stream=None):
        """Says nothing."""
        dims = check("launch", x=(x, "n", "uint32"))
        if len(x) > 1000 + 1:
            raise ValueError(f"{len(x) - 1} elements")
        _kernel.launch((dims["n"], 1), x, dims["n"], y)
'''
SPEC = """
    stage = "kernel"
    kernel = "mine.launch:launch"
    reference = "mine.oracle"
    [inputs]
    x = { shape = ["n"], dtype = "uint32" }
    [outputs]
    y = { shape = ["n"], dtype = "uint32", match = "exact" }
    [cases]
    five = { n = 5, sim = true }
"""


@pytest.fixture
def sample(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    for name, text in {"__init__": "", "oracle": "", "launch": KERNEL}.items():
        (tmp_path / "mine" / f"{name}.py").write_text(textwrap.dedent(text))
    (tmp_path / "launch.toml").write_text(SPEC)
    monkeypatch.syspath_prepend(tmp_path)
    return spec.load(tmp_path / "launch.toml"), textwrap.dedent(KERNEL)


# -- what is planted -------------------------------------------------------------------------------


def test_every_operator_makes_a_mutant(sample):
    made = mutants.generic(sample[0], "mine.launch", sample[1])
    assert {m.operator for m in made} == set(mutants.OPERATORS)


def test_a_mutant_is_one_edit_that_python_reads_and_no_other_makes(sample):
    made = mutants.generic(sample[0], "mine.launch", sample[1])
    trees = [ast.dump(ast.parse(m.source)) for m in made]
    assert len({*trees, ast.dump(ast.parse(sample[1]))}) == len(trees) + 1
    assert len({m.name for m in made}) == len(made)


def test_what_refuses_arguments_is_left_alone(sample):
    for mutant in mutants.generic(sample[0], "mine.launch", sample[1]):
        assert 'if len(x) > 1000 + 1:\n        raise ValueError(f"{len(x) - 1}' in mutant.source
        assert 'check("launch", x=(x, "n", "uint32"))' in mutant.source
        assert "@kernel(threads=32)" in mutant.source
        assert "pdl_wait()" in mutant.source


def test_the_first_ten_come_from_many_operators_and_do_not_move(sample):
    made = mutants.generic(sample[0], "mine.launch", sample[1])
    again = mutants.generic(sample[0], "mine.launch", "\n# A comment more.\n" + sample[1])
    assert [m.name for m in made] == [m.name for m in again]
    assert len({m.operator for m in made[:10]}) == 10


def test_those_that_are_asked_for_are_as_among_all(sample):
    made = mutants.generic(sample[0], "mine.launch", sample[1])
    for some in (made[::3], made[-1:], []):
        again = mutants.generic(sample[0], "mine.launch", sample[1], {m.name for m in some})
        assert {m.name: m for m in again} == {m.name: m for m in some}


def test_drawn_are_those_that_a_case_reaches(sample):
    made = mutants.generic(sample[0], "mine.launch", sample[1])
    line = next(m.line for m in made if m.operator == "barrier")
    assert {m.line for m in mutants.draw(made, 99, {line})} == {0, line}


def test_reached_lines_are_told_and_results_stay(sample):
    source = "def f(n):\n    if n > 3:\n        return n\n    return (\n        -n\n    )\n"
    scope, reached = {}, []
    scope[mutants.REACHED] = reached.append
    exec(mutants.instrumented(source), scope)
    assert scope["f"](1) == -1
    assert reached == [2, 4]
    assert mutants.statement_line(source, 5) == 4


@pytest.mark.parametrize(
    ("find", "replace", "flaw"),
    [
        ("total = u32(0)", "total = u32(1)", ""),
        ("total = u32(0)", "total = (u32(0))  # the same", "EQUAL: the code is what it was"),
        ("total = u32(0)", "total = u32(0", "INVALID: Python cannot read it"),
        ("totals = u32(0)", "total = u32(1)", "STALE: its text is no longer in mine.launch"),
        ("total", "sum", "STALE: its text is 6 times in mine.launch"),
    ],
)
def test_a_named_mutant_has_a_text_that_is_there_once(sample, find, replace, flaw):
    one = dataclasses.replace(sample[0], mutants=(spec.Mutant("m", find, replace),))
    (planted,) = mutants.named(one, {"mine.launch": sample[1]})
    assert planted.flaw == flaw


def test_a_generic_mutant_that_a_spec_names_is_not_made_twice(sample):
    own = spec.Mutant("off_by_one", "i < n", "i <= n", "why")
    without = mutants.generic(sample[0], "mine.launch", sample[1])
    one = dataclasses.replace(sample[0], mutants=(own,))
    made = mutants.generic(one, "mine.launch", sample[1])
    assert len(made) == len(without) - 1


# -- what counts -----------------------------------------------------------------------------------

KILL = {"name": "a", "operator": "named", "outcome": "killed", "case": "five", "verdict": "WRONG"}


def certificate(sample, *rows, honest="PASSED"):
    content = {
        "honest": [{"case": "five", "verdict": honest, "headroom": None}],
        "mutants": [{"module": "mine.launch", **row} for row in rows],
        "calibration": None,
    }
    return certificates.problems(sample[0], content)


def test_a_kill_is_enough(sample):
    assert not certificate(sample, KILL)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no mutant is killed"),
        ([{"outcome": "INVALID", "operator": "comparison", "why": "x"}], "no mutant is killed"),
        ([KILL, {"outcome": "survived", "why": "3 cases pass"}], "b survives (3 cases pass)"),
        ([KILL, {"outcome": "STALE", "why": "gone"}], "b is STALE: gone"),
        ([KILL, {"outcome": "EQUAL", "why": "same"}], "b is EQUAL: same"),
        ([KILL, {"outcome": "INVALID", "why": "typo"}], "b is INVALID: typo"),
        (
            [KILL, {**KILL, "name": "b", "why": "it is said to change nothing: ha"}],
            "but it is said",
        ),
        ([KILL, {"outcome": "equivalent", "why": "x", "revived": True}], "b lives again"),
    ],
)
def test_what_makes_a_spec_vacuous(sample, rows, said):
    rows = [{"name": "b", "operator": "named", **row} for row in rows]
    assert said in "; ".join(certificate(sample, *rows))


def test_survivors_count_against_the_score_and_misfits_do_not_count():
    outcomes = ["killed", "killed", "survived", "equivalent", "INVALID", "EQUAL", "STALE"]
    counts = certificates.score({"outcome": o} for o in outcomes)
    assert counts == {**dict.fromkeys(outcomes, 1), "killed": 2, "for a GPU": 0}


# -- the whole way ---------------------------------------------------------------------------------

FLOAT = """
    stage = "kernel"
    kernel = "mine.half:half"
    reference = "mine.halves"
    [inputs]
    x = { shape = ["n"], dtype = "float32" }
    [outputs]
    y = { shape = ["n"], dtype = "float32", match = { bound = "companion", slack = 1e-6 } }
    [cases]
    five = { n = 5, sim = true }
    odd = { n = 33, sim = true }
"""
HALVES = """
    import numpy as np

    def inputs(rng, *, n):
        return {"x": (rng.integers(1, 1000, (n,)) / 7).astype("float32")}

    def reference(*, x):
        y = x.astype("float64") / 2
        return {"y": y, "y.magnitude": np.abs(y)}
"""
HALF = """
    from numba import cuda

    @cuda.jit
    def _half(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] * 0.5

    def half(x, *, y):
        _half[(x.size + 31) // 32, 32](x, y)
"""
MUTANTS = {
    "a_third": ('y[i] = x[i] * 0.5', 'y[i] = x[i] * 0.3333'),
    "one_in_a_thousand": ('y[i] = x[i] * 0.5', 'y[i] = x[i] * 0.5005'),
    "last_lost": ("if i < x.size:", "if i < x.size - 1:"),
    "never_ends": ("y[i] = x[i] * 0.5", "while x[i] > 0: y[i] = 1"),
    "does_not_parse": ("y[i] = x[i] * 0.5", "y[i] = x[i] *"),
    "cannot_be_imported": ("from numba import cuda", "from numba import kuda"),
    "no_such_name": ("y[i] = x[i] * 0.5", "y[i] = x[j] * 0.5"),
    "the_same": ("y[i] = x[i] * 0.5", "y[i] = (x[i]) * 0.5"),
    "no_anchor": ("y[i] = x[i] * 0.6", "y[i] = 0"),
    "survives": ("i = cuda.grid(1)", "i = 0 + cuda.grid(1)"),
    "explained": ("i = cuda.grid(1)", "i = cuda.grid(1) - 0"),
    "timing": ("x[i] * 0.5", "x[i] * 0.5 + 0"),
    "explained_and_wrong": ("y[i] = x[i] * 0.5", "y[i] = x[i] * 0.25"),
}  # fmt: skip


def with_mutants(project, *, only=tuple(MUTANTS), slack="1e-6"):
    text = textwrap.dedent(FLOAT).replace("1e-6", slack)
    for name in only:
        find, replace = MUTANTS[name]
        text += f'[[mutants]]\nname = "{name}"\nfind = """{find}"""\nreplace = """{replace}"""\n'
        text += 'equivalent = "nothing less is the same"\n' if name.startswith("explained") else ""
        text += 'gpu = "there is no time here"\n' if name == "timing" else ""
    project.write("specs/half.toml", text)


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path)
    made.write("mine/halves.py", HALVES)
    made.write("mine/half.py", HALF)
    return made


def rows(project):
    content = json.loads((project.folder / "ci/certificates/half.json").read_text())
    return {row["name"]: row for row in content["mutants"]}, content


def test_each_outcome_from_a_real_run(project):
    with_mutants(project)
    done = project.kdtr("mutate", "--spec", "half", "-n", "2")
    assert done.returncode == 1, done.stdout
    found, content = rows(project)
    assert {name: found[name]["outcome"] for name in MUTANTS} == {
        "a_third": "killed",
        "one_in_a_thousand": "killed",
        "last_lost": "killed",
        "never_ends": "killed",
        "does_not_parse": "INVALID",
        "cannot_be_imported": "INVALID",
        "no_such_name": "INVALID",
        "the_same": "EQUAL",
        "no_anchor": "STALE",
        "survives": "survived",
        "explained": "equivalent",
        "timing": "for a GPU",
        "explained_and_wrong": "killed",
    }
    assert found["last_lost"]["verdict"] == "UNWRITTEN"
    assert found["never_ends"]["verdict"] == "TIMEOUT"
    assert found["half: return None"]["verdict"] == "UNWRITTEN"
    assert 900 < found["one_in_a_thousand"]["excess"] < 1100
    assert content["calibration"]["mutant"] == "one_in_a_thousand"
    assert content["verdict"] == "VACUOUS"
    said = "\n".join(content["problems"])
    for name in ("does_not_parse is INVALID", "the_same is EQUAL", "no_anchor is STALE"):
        assert name in said
    assert "survives survives" in said
    assert "explained_and_wrong is killed by" in said
    assert not (project.folder / "mine" / "__pycache__" / "half.mutant").exists()
    assert project.folder.joinpath("mine/half.py").read_text() == textwrap.dedent(HALF)


def test_a_loosened_bound_lets_the_dead_live_and_fails(project):
    kept = ("a_third", "one_in_a_thousand", "explained")
    with_mutants(project, only=kept)
    done = project.kdtr("mutate", "--spec", "half", "-n", "2")
    assert done.returncode == 0, done.stdout
    done = project.kdtr("mutate", "--spec", "half", "--check", "-n", "1")
    assert done.returncode == 0, done.stdout

    with_mutants(project, only=kept, slack="1e-2")
    done = project.kdtr("mutate", "--spec", "half", "--check", "-n", "1")
    assert done.returncode == 1
    assert "STALE: made from other sources" in done.stdout
    for _ in range(2):  # making it again does not wash it off
        done = project.kdtr("mutate", "--spec", "half", "-n", "2")
        assert done.returncode == 1
        assert "one_in_a_thousand lives again" in done.stdout


def test_a_certificate_is_checked_by_what_happens(project):
    with_mutants(project, only=("a_third",))
    assert project.kdtr("mutate", "--spec", "half", "-n", "2").returncode == 0
    file = project.folder / "ci/certificates/half.json"
    text = file.read_text()

    file.write_text(text.replace('"killed"', '"equivalent"', 1))
    done = project.kdtr("mutate", "--spec", "half", "--check", "-n", "1")
    assert done.returncode == 1
    assert "its seal is not that of its content" in done.stdout

    forged = json.loads(text)
    forged["mutants"][0] = {**forged["mutants"][0], "outcome": "equivalent", "why": "trust me"}
    file.write_text(json.dumps(certificates.sealed(forged)))
    done = project.kdtr("mutate", "--spec", "half", "--check", "-n", "1")
    assert done.returncode == 1
    assert "a_third was equivalent and is killed now" in done.stdout

    forged["mutants"][0] |= {"outcome": "survived"}  # and no word of it in "problems"
    file.write_text(json.dumps(certificates.sealed(forged)))
    done = project.kdtr("mutate", "--spec", "half", "--check", "-n", "1")
    assert done.returncode == 1
    assert "VACUOUS: a_third survives" in done.stdout

    file.unlink()
    done = project.kdtr("mutate", "--spec", "half", "--check", "-n", "1")
    assert done.returncode == 1
    assert "MISSING: no certificate" in done.stdout


def test_the_report_says_what_each_spec_can_catch(project):
    with_mutants(project, only=("a_third", "survives"))
    project.kdtr("mutate", "--spec", "half", "-n", "2")
    done = project.gate("--spec", "half", "--device", "sim")
    assert done.returncode == 0, done.stdout  # certificates are `kdtr mutate --check`'s to judge
    half, twice = project.report()["context"]["mutation"]["specs"]
    assert (half["verdict"], twice["verdict"]) == ("VACUOUS", "MISSING")
    page = (project.folder / "report" / "report.html").read_text()
    assert "survives survives (2 cases pass)" in page
    assert "no certificate" in page


def test_what_one_spec_cannot_show_another_of_the_same_file_may(project):
    """A spec of whole warps does not see the bound; one of a single element does."""
    for stem, n in (("half", 32), ("half_of_5", 5)):
        text = textwrap.dedent(FLOAT).partition("[cases]")[0] + "[cases]\n"
        project.write(f"specs/{stem}.toml", f"{text}one = {{ n = {n}, sim = true }}\n")
    project.kdtr("mutate", "--spec", "half", "-n", "2")
    killers = {name: row.get("case") for name, row in rows(project)[0].items()}
    assert killers["_half: i < x.size with <="] == "half_of_5::one"
    assert killers["half: return None"] == "one"


# -- the tree --------------------------------------------------------------------------------------


def test_every_named_mutant_of_the_tree_is_one_edit_of_the_source_that_it_names():
    for one in stages.readable(stages.load_specs(ROOT)):
        names = {mutants.default_module(one), *(m.module for m in one.mutants if m.module)}
        texts = {name: (ROOT / f"{name.replace('.', '/')}.py").read_text() for name in names}
        flaws = [f"{m.name}: {m.flaw}" for m in mutants.named(one, texts) if m.flaw]
        assert not flaws, one.id


def test_every_spec_of_the_tree_names_faults_of_its_own():
    bare = [s.id for s in stages.readable(stages.load_specs(ROOT)) if not s.mutants]
    assert not bare
