"""What the harness sees of a launcher that misbehaves. On a GPU or in the simulator."""

import sys
import time
import types
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
from broken.scale import inputs, reference, scale

from harness import golden, launch, memory, report, run, sources, spec
from harness.report import Fault, Status

simulator_only = pytest.mark.skipif(
    "not __import__('harness.memory', fromlist=['x']).simulated()",
    reason="reaches behind the arrays of the simulator",
)


# The first case answers for the spec's inputs; these tests are about another one.
FIRST = ("[cases]\nsmall", "[cases]\nfirst = { rows = 3 }\nsmall")


@pytest.fixture
def judge(load, tmp_path):
    """judge(kernel, (old, new), ...) runs case `small` of the scale spec, with text replaced."""

    def judge(kernel=None, *changes, case="small"):
        loaded = load(*changes)
        return run.run_case(loaded, loaded.cases[case], kernel=kernel, cache_dir=tmp_path / "c")

    return judge


def test_a_right_launcher_passes_and_is_timed(judge):
    verdict = judge()
    assert verdict.status is Status.PASSED, report.failure_text(verdict)
    assert (verdict.id, verdict.stage) == ("specs/scale.toml::small", "kernel")
    assert verdict.kernel == "broken.scale:scale"
    assert verdict.time_us > 0
    assert verdict.headroom == 0.0
    assert verdict.device == launch.device_name()
    assert len(verdict.digest) == 64


def test_a_verdict_has_the_digest_that_receipts_are_looked_up_by(load):
    """Else a run on a GPU would leave receipts that are stale from the start."""
    loaded = load()
    verdict = run.run_case(loaded, loaded.cases["small"])
    assert verdict.digest == sources.case_digests(loaded)["small"]


def test_a_launcher_may_be_given_by_name(judge):
    verdict = judge("broken.scale:scale")
    assert verdict.status is Status.PASSED
    assert verdict.replaced


@pytest.fixture
def oracle(monkeypatch):
    """oracle(reference) makes an oracle of that function and scale's inputs; returns its name."""

    def make(reference):
        module = types.ModuleType("oracle_of_this_test")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.inputs, module.reference = inputs, reference
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return ('reference = "broken.scale"', f'reference = "{module.__name__}"')

    return make


# -- written elsewhere, or not at all ------------------------------------------------------------


def test_a_launcher_that_does_nothing_leaves_the_poison(judge):
    def nothing(x, *, factor, y):
        pass

    verdict = judge(nothing)
    assert verdict.status is Status.UNWRITTEN
    assert (verdict.outputs[0].wrong, verdict.outputs[0].total) == (24, 24)


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "bool"])
def test_poison_that_is_the_answer_is_not_held_against_a_kernel(judge, oracle, dtype, second):
    """Any byte may be right for an integer: only two poisons can tell."""
    answer = memory.poison(dtype, 24, second).view(dtype).reshape(3, 8)

    def constant(x, *, factor, y):
        y.copy_to_device(answer)

    verdict = judge(
        constant,
        ('dtype = "float32", match = { ulp = 1 }', f'dtype = "{dtype}", match = "exact"'),
        ("sim = true", 'sim = true, constant = "the poison"'),
        oracle(lambda *, x, factor: {"y": answer}),
        FIRST,
    )
    assert verdict.status is Status.PASSED, report.failure_text(verdict)


@pytest.mark.parametrize("dtype", list(spec.DTYPES))
def test_the_two_poisons_differ_everywhere(dtype):
    first, second = (memory.poison(dtype, 6, second) for second in (False, True))
    assert (first != second).all()
    if dtype in spec.FLOATS:
        assert np.isnan(first.view(spec.DTYPES[dtype]).astype(float)).all()
        huge = second.view(spec.DTYPES[dtype]).astype(float)
        assert np.isfinite(huge).all()
        assert (huge[:3] > 5e4).all()
        assert (huge[3:] < -5e4).all()


@simulator_only
@pytest.mark.parametrize(
    ("at", "said"),
    [
        (-1, "before the start of y: 1 elements, last at start - 1"),
        (-5, "before the start of y: 1 elements, last at start - 2"),
        (96, "behind the end of y: 1 elements, first at end + 0"),
        (104, "behind the end of y: 1 elements, first at end + 2"),
    ],
)
def test_one_byte_outside_is_seen(judge, at, said):
    def outside(x, *, factor, y):
        scale(x, factor=factor, y=y)
        y._ary.base[memory.GUARD + at] ^= 1

    verdict = judge(outside)
    assert verdict.status is Status.OUT_OF_BOUNDS, report.failure_text(verdict)
    assert said in verdict.message


@simulator_only
def test_scratch_and_inputs_are_guarded_too(judge):
    def outside(x, *, factor, y, partial):
        scale(x, factor=factor, y=y)
        partial._ary.base[memory.GUARD - 1] ^= 1

    verdict = judge(
        outside,
        ("[cases]", '[scratch]\npartial = { shape = [4], dtype = "float32" }\n[cases]'),
    )
    assert verdict.status is Status.OUT_OF_BOUNDS, report.failure_text(verdict)
    assert "partial" in verdict.message


def test_a_changed_input_is_seen(judge):
    def changes(x, *, factor, y):
        scale(x, factor=factor, y=y)
        host = x.copy_to_host()
        host[2, 7] += 1
        x.copy_to_device(host)

    verdict = judge(changes)
    assert verdict.status is Status.MUTATED_INPUT
    assert "x was changed by the launcher: 1 of 24 elements" in verdict.message
    assert "first at (2, 7): it was " in verdict.message


def test_a_returned_array_is_no_result(judge):
    def returns_input(x, *, factor, y):
        scale(x, factor=factor, y=y)
        return x

    def returns_new(x, *, factor, y):
        return x.copy_to_host() * factor

    assert "that is the memory of x" in judge(returns_input).message
    verdict = judge(returns_new)
    assert verdict.status is Status.ALIASED
    assert "returned a ndarray; it must write into the outputs" in verdict.message


def test_a_kernel_that_reads_its_poisoned_output_is_seen(judge):
    def accumulates(x, *, factor, y):
        y.copy_to_device(y.copy_to_host() + x.copy_to_host() * np.float32(factor))

    assert judge(accumulates).status in (Status.UNWRITTEN, Status.NONFINITE)


@pytest.mark.parametrize("keep", [np.fmax, np.fmin, lambda y, x: np.nan_to_num(y) + x])
def test_a_kernel_that_folds_into_what_was_there_and_drops_nan_is_seen(judge, keep):
    def folds(x, *, factor, y):
        y.copy_to_device(keep(y.copy_to_host(), x.copy_to_host() * np.float32(factor)))

    verdict = judge(folds)
    assert verdict.status is Status.NONDETERMINISTIC
    assert "on other values in outputs and scratch" in verdict.outputs[0].message


@pytest.mark.parametrize("keep", [np.maximum, np.minimum])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_an_integer_that_is_folded_into_what_was_there_is_seen(judge, oracle, keep, dtype):
    answer = np.arange(1000, 1024).reshape(3, 8).astype(dtype)

    def folds(x, *, factor, y):
        y.copy_to_device(keep(y.copy_to_host(), answer))

    verdict = judge(
        folds,
        ('dtype = "float32", match = { ulp = 1 }', f'dtype = "{dtype}", match = "exact"'),
        oracle(lambda *, x, factor: {"y": answer}),
        FIRST,
    )
    assert not verdict.status.ok


def test_an_inout_output_starts_from_its_initial_value_in_both_runs(judge, oracle):
    def adds(*, factor, x):
        x.copy_to_device(x.copy_to_host() + np.float32(factor))

    changes = (
        ('[inputs]\nx = { shape = ["rows", "columns"], dtype = "float32" }\n', ""),
        ("y = {", "x = { inout = true,"),
        oracle(lambda *, x, factor: {"x": x.astype(np.float64) + factor}),
    )
    assert judge(adds, *changes).status is Status.PASSED
    verdict = judge(lambda *, factor, x: None, *changes)
    assert verdict.status is Status.WRONG


def test_a_second_run_with_other_bits_is_seen(judge):
    calls = []

    def drifts(x, *, factor, y):
        calls.append(1)
        result = x.copy_to_host() * np.float32(factor)
        if len(calls) == 2:
            result[1, 3] = np.nextafter(result[1, 3], np.float32(9))
        y.copy_to_device(result)

    verdict = judge(drifts)
    assert verdict.status is Status.NONDETERMINISTIC
    assert verdict.outputs[0].first == (1, 3)


def test_a_result_remembered_from_the_first_run_is_stale_not_right(judge):
    """A launcher that works once and then does nothing must not live on old memory."""
    calls = []

    def once(x, *, factor, y):
        if not calls:
            scale(x, factor=factor, y=y)
        calls.append(1)

    assert judge(once).status is Status.NONDETERMINISTIC


def test_a_launcher_that_knows_its_inputs_by_their_address_is_seen(judge):
    """As one that repacks weights once and looks them up by pointer afterwards."""
    packed = {}

    def remembers(x, *, factor, y):
        key = id(x)
        if key not in packed:
            packed[key] = x.copy_to_host() * np.float32(factor)
        y.copy_to_device(packed[key])

    verdict = judge(remembers)
    assert verdict.status is Status.WRONG
    assert "on other inputs in the same memory" in verdict.message
    assert "y: WRONG" in verdict.message


@pytest.mark.parametrize(
    "match",
    ["{ ulp = 10000000000 }", '{ bound = "companion", slack = 9.0 }'],
)
def test_a_match_that_zeros_would_pass_is_vacuous(judge, oracle, match):
    def magnitude(*, x, factor):
        y = x.astype(np.float64) * factor
        return {"y": y, "y.magnitude": np.abs(y)}

    changes = (("{ ulp = 1 }", match), oracle(magnitude if "bound" in match else reference))
    verdict = judge(None, *changes)
    assert verdict.status is Status.VACUOUS
    assert "zeros would pass for y" in verdict.message
    assert judge(None, *changes, ("sim = true", 'sim = true, constant = "why"')).ok


# -- exceptions ----------------------------------------------------------------------------------


def test_an_exception_is_a_crash_that_names_its_line(judge):
    def raises(x, *, factor, y):
        raise ValueError("x has dtype float32, expected bfloat16")

    verdict = judge(raises)
    assert verdict.status is Status.CRASHED
    assert "ValueError: x has dtype float32" in verdict.message
    assert "test_run.py:" in verdict.message
    assert not verdict.lost


def test_an_index_error_of_the_host_code_is_a_crash(judge):
    def raises(x, *, factor, y):
        return [][1]

    assert judge(raises).status is Status.CRASHED


def test_undeclared_refusal_is_a_crash_that_says_how_to_declare_it(judge):
    def refuses(x, *, factor, y):
        raise NotImplementedError("rows > 2")

    verdict = judge(refuses)
    assert verdict.status is Status.CRASHED
    assert 'unsupported = "why"' in verdict.message


def test_a_declared_refusal_is_unsupported(judge):
    def refuses(x, *, factor, y):
        raise NotImplementedError("rows > 2")

    declared = ("sim = true", 'sim = true, unsupported = "one warp a row"')
    verdict = judge(refuses, declared)
    assert verdict.status is Status.UNSUPPORTED
    assert verdict.ok
    assert "one warp a row (rows > 2)" in verdict.message


def test_a_stale_declaration_fails(judge):
    verdict = judge(None, ("sim = true", 'sim = true, unsupported = "one warp a row"'))
    assert verdict.status is Status.SPEC_ERROR


def test_a_refusal_must_say_not_implemented(judge):
    def crashes(x, *, factor, y):
        raise ZeroDivisionError

    verdict = judge(crashes, ("sim = true", 'sim = true, unsupported = "one warp a row"'))
    assert verdict.status is Status.CRASHED


def test_a_launcher_that_hangs_is_timed_out(judge):
    def hangs(x, *, factor, y):
        while True:
            time.sleep(0.01)

    start = time.monotonic()
    verdict = judge(hangs, ("sim = true", "sim = true, timeout_s = 0.2"))
    assert verdict.status is Status.TIMEOUT
    assert time.monotonic() - start < 2


def test_a_module_that_cannot_be_imported_is_a_crash(judge, tmp_path, monkeypatch):
    (tmp_path / "bad_kernel.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    verdict = judge("bad_kernel:scale")
    assert verdict.status is Status.CRASHED
    assert "no_such_library" in verdict.message


@pytest.mark.parametrize(
    "text",
    [
        "def scale(:\n",
        "raise SystemExit(0)\n",
        "\0",
        "import pytest\npytest.importorskip('no_such_module')\n",
    ],
)
def test_a_module_that_python_cannot_read_or_that_leaves_is_a_crash(
    judge, tmp_path, monkeypatch, text
):
    (tmp_path / "worse_kernel.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert judge("worse_kernel:scale").status is Status.CRASHED


def test_a_launcher_that_ends_the_program_is_a_crash(judge):
    def leaves(x, *, factor, y):
        sys.exit(0)

    assert judge(leaves).status is Status.CRASHED


def test_a_launcher_that_skips_is_a_crash_and_no_skip(judge):
    def skips(x, *, factor, y):
        pytest.skip("no tensor cores")

    verdict = judge(skips)
    assert verdict.status is Status.CRASHED
    assert "no tensor cores" in verdict.message


@pytest.mark.parametrize("leave", [sys.exit, pytest.skip])
def test_an_oracle_that_leaves_is_a_golden_error(judge, oracle, leave):
    def reference(*, x, factor):
        leave("not today")

    verdict = judge(None, oracle(reference))
    assert verdict.status is Status.GOLDEN_ERROR
    assert "not today" in verdict.message


def test_a_launcher_cannot_say_that_it_passed(judge):
    def says(x, *, factor, y):
        raise Fault(Status.PASSED, "all is well")

    assert judge(says).status is Status.CRASHED


@pytest.mark.parametrize(
    "broken",
    [dict, lambda *, x, factor: {"y": x.astype(float) * factor, 3: x}],
    ids=["no_signature", "no_name"],
)
def test_what_the_judge_itself_trips_over_is_a_verdict(judge, oracle, broken):
    verdict = judge(None, oracle(broken))
    assert verdict.status is Status.CRASHED
    assert "the judge could not go on: " in verdict.message
    assert "golden.py" in verdict.message


def test_an_error_that_cannot_be_told_is_a_crash_all_the_same(judge):
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    def raises(x, *, factor, y):
        raise Mute

    verdict = judge(raises)
    assert verdict.status is Status.CRASHED
    assert "Mute: its text cannot be had, ValueError" in verdict.message


def test_what_a_terminal_or_utf8_cannot_take_is_escaped(judge):
    def raises(x, *, factor, y):
        raise ValueError("\udcff \x1b[31m \x00 \N{GREEK SMALL LETTER ALPHA}")

    verdict = judge(raises)
    assert r"\udcff \x1b[31m \x00 " + "\N{GREEK SMALL LETTER ALPHA}" in verdict.message
    report.failure_text(verdict).encode()


def test_what_is_returned_may_be_anything(judge):
    class Hostile:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError

    def returns(x, *, factor, y):
        scale(x, factor=factor, y=y)
        return Hostile()

    verdict = judge(returns)
    assert verdict.status is Status.ALIASED
    assert "returned a Hostile" in verdict.message


def test_a_missing_function_is_a_spec_error(judge):
    verdict = judge("broken.scale:scales")
    assert verdict.status is Status.SPEC_ERROR
    assert "has no function 'scales'" in verdict.message


# -- the signature -------------------------------------------------------------------------------


def test_every_difference_of_the_signature_is_named(judge):
    def other(x, y, weight):
        pass

    verdict = judge(other)
    assert verdict.status is Status.SPEC_ERROR
    for said in (
        "lacks factor",
        "does not have weight",
        "y is written to and must be keyword-only",
    ):
        assert said in verdict.message


def test_keywords_of_any_name_do_not_stand_for_the_names(judge):
    def catches_all(*args, **kwargs):
        pass

    assert judge(catches_all).status is Status.SPEC_ERROR


# -- weights -------------------------------------------------------------------------------------


@pytest.fixture
def bundle(monkeypatch):
    """A bundle "toy" of one matrix, and the change that makes the scale spec use it."""
    bundles = types.ModuleType("goldens.bundles")
    bundles.tensors = lambda name: {"layer.weight": np.full(2, 7, np.float32)}
    bundles.config = lambda name: {"hidden_size": 8}
    monkeypatch.setitem(sys.modules, "goldens.bundles", bundles)
    return ("[axes]", 'weights = "toy"\n[axes]')


def weighted(*, x, factor, weights, config):
    assert config == {"hidden_size": 8}
    return {"y": x.astype(np.float64) * factor * weights["layer.weight"][0]}


def test_launcher_and_oracle_get_the_weights_and_who_asks_gets_the_config(judge, oracle, bundle):
    def scales(x, *, factor, y, weights):
        factor = np.float32(factor) * weights["layer.weight"].copy_to_host()[0]
        y.copy_to_device(x.copy_to_host() * factor)

    def scales_by_config(x, *, factor, y, weights, config):
        assert config == {"hidden_size": 8}
        scales(x, factor=factor, y=y, weights=weights)

    for launcher in (scales, scales_by_config):
        verdict = judge(launcher, oracle(weighted), bundle)
        assert verdict.status is Status.PASSED, report.failure_text(verdict)


def test_a_launcher_that_changes_a_weight_is_seen(judge, oracle, bundle):
    def changes(x, *, factor, y, weights):
        y.copy_to_device(x.copy_to_host() * np.float32(factor * 7))
        weights["layer.weight"].copy_to_device(np.zeros(2, np.float32))

    verdict = judge(changes, oracle(weighted), bundle)
    assert verdict.status is Status.MUTATED_INPUT
    assert "weights['layer.weight']" in verdict.message


def test_a_launcher_without_weights_does_not_fit_a_spec_with_them(judge, oracle, bundle):
    verdict = judge(scale, oracle(weighted), bundle)
    assert verdict.status is Status.SPEC_ERROR
    assert "lacks weights" in verdict.message


def test_a_bundle_that_cannot_be_made_is_a_golden_error(judge, oracle, bundle, monkeypatch):
    def missing(name):
        raise KeyError(name)

    monkeypatch.setattr(sys.modules["goldens.bundles"], "tensors", missing)
    verdict = judge(None, oracle(weighted), bundle)
    assert verdict.status is Status.GOLDEN_ERROR
    assert "weights 'toy': KeyError" in verdict.message


# -- stage golden --------------------------------------------------------------------------------


def test_stage_golden_compares_the_reference_with_a_witness(judge, monkeypatch):
    from broken import scale as oracle

    changes = [('stage     = "kernel"\nkernel    = "broken.scale:scale"', 'stage = "golden"')]
    verdict = judge(None, *changes)
    assert verdict.status is Status.SPEC_ERROR
    assert "has no function witness" in verdict.message

    def witness(*, x, factor):
        return {"y": x.astype(np.float64) * factor}

    monkeypatch.setattr(oracle, "witness", witness, raising=False)
    verdict = judge(None, *changes)
    assert (verdict.status, verdict.device) == (Status.PASSED, "host")

    monkeypatch.setattr(oracle, "witness", lambda *, x, factor: {"y": x.astype(np.float64) * 2})
    assert judge(None, *changes).status is Status.WRONG

    monkeypatch.setattr(oracle, "witness", oracle.reference)
    assert judge(None, *changes).status is Status.VACUOUS


def test_an_input_that_no_golden_depends_on_is_vacuous_in_the_first_case(judge, oracle):
    ignored = oracle(lambda *, x, factor: {"y": np.arange(24.0).reshape(3, 8)})

    def ramp(x, *, factor, y):
        y.copy_to_device(np.arange(24, dtype=np.float32).reshape(3, 8))

    verdict = judge(ramp, ignored, FIRST, case="first")
    assert verdict.status is Status.VACUOUS
    assert "no golden of specs/scale.toml changes when factor, x is perturbed" in verdict.message
    assert judge(ramp, ignored, FIRST).status is Status.PASSED


def test_a_scalar_is_invariant_where_the_spec_says_so_and_nothing_changes_with_it(judge, oracle):
    ignored = oracle(lambda *, x, factor: {"y": x.astype(np.float64)})
    declared = ("[axes]", 'invariant = ["factor"]\n[axes]')

    def copy(x, *, factor, y):
        y.copy_to_device(x.copy_to_host())

    verdict = judge(copy, ignored)
    assert (verdict.status, "factor is perturbed" in verdict.message) == (Status.VACUOUS, True)
    assert judge(copy, ignored, declared).status is Status.PASSED
    wrongly = judge(None, declared)
    assert wrongly.status is Status.SPEC_ERROR
    assert "factor: declared invariant, and a golden changes with it" in wrongly.message


def test_execute_works_without_a_verdict(judge, tmp_path):
    """From a REPL: the golden, what came out, no pytest and no report."""
    judge()
    loaded = spec.load(tmp_path / "specs" / "scale.toml")
    case = loaded.cases["small"]
    made = golden.make(loaded, case, cache_dir=tmp_path / "c")
    actual = run.execute(loaded, case, made)
    assert np.array_equal(actual.outputs["y"], made.inputs["x"] * np.float32(3))
    with pytest.raises(Fault):
        run.execute(loaded, case, made, kernel=lambda x: None)
