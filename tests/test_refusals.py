"""Every launcher refuses what it cannot take, by name and before anything is launched.

A table over all kernel specs: no launcher is listed here, so none can be forgotten. Nothing runs;
a launch is an error of its own.
"""

import importlib
import inspect
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from engine import device, simulator
from engine.kernels import embedding
from engine.kernels.add_rms_norm import add_rms_norm
from engine.kernels.moe_route import moe_route_share
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rope import rope
from engine.kernels.swiglu import swiglu
from engine.kernels.tap import tap
from harness import launch, memory, spec

pytestmark = pytest.mark.skipif(not memory.simulated(), reason="needs no GPU, and runs without one")

ROOT = Path(__file__).parents[1]
ALL = [s for s in map(spec.load, spec.discover(ROOT)) if s.stage == "kernel"]
KERNELS = [s for s in ALL if s.kernel.startswith("engine.")]  # not those that call one repeatedly
# gemm_bf16 takes a y that is wider than its n columns, and leaves the rest.
LEGAL = {("gemm_bf16_f32", "y", 1), ("gemm_bf16_f32", "w", -1)}
REFUSED = (ValueError, NotImplementedError)


class Launched(Exception):
    """A kernel was about to run."""


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    def launch(self, *args, **options):
        raise Launched(str(self))

    monkeypatch.setattr(device.Kernel, "launch", launch)


def call_of(each):
    """Launcher, its arrays by name, and its scalars, for the smallest case that runs."""
    cases = [c for c in each.cases.values() if not c.unsupported and c.gpus == 1]
    cases = [c for c in cases if all(np.prod(s) for s in each.shapes(c).values())]  # no empty ones
    case = min(cases, key=lambda c: sum(np.prod(s) for s in each.shapes(c).values()))
    launcher = launch.load_launcher(each)
    shapes, tensors = each.shapes(case), each.tensors()
    arrays = {n: device.empty(shapes[n], t.numpy_dtype) for n, t in tensors.items()}
    return launcher, arrays, dict(case.scalars)


def refusal(launcher, arrays, scalars):
    """What the launcher says of these arguments; fails if it would launch, or dies another way."""
    with pytest.raises(REFUSED) as caught:
        launcher(**arrays, **scalars)
    return str(caught.value)


def axes_of(tensor):
    """(position, label) of the axes of a tensor in its spec."""
    return list(enumerate(tensor.shape))


def by_stem(kernels):
    return [pytest.param(each, id=each.stem) for each in kernels]


@pytest.mark.parametrize("each", by_stem(KERNELS))
def test_right_arguments_are_launched(each):
    launcher, arrays, scalars = call_of(each)
    with pytest.raises(Launched):
        launcher(**arrays, **scalars)


@pytest.mark.parametrize("each", by_stem(KERNELS))
def test_another_dtype_is_refused(each):
    launcher, arrays, scalars = call_of(each)
    for name, array in arrays.items():
        other = np.dtype("int16" if array.dtype != np.dtype("int16") else "int64")
        wrong = {**arrays, name: device.empty(tuple(array.shape), other)}
        said = refusal(launcher, wrong, scalars)
        assert name in said, f"{name} of {other}: {said}"


@pytest.mark.parametrize("each", by_stem(KERNELS))
def test_an_axis_too_many_and_one_too_few_are_refused(each):
    launcher, arrays, scalars = call_of(each)
    for name, array in arrays.items():
        for shape in ((*array.shape, 1), tuple(array.shape)[1:]):
            wrong = {**arrays, name: device.empty(shape, array.dtype)}
            said = refusal(launcher, wrong, scalars)
            assert name in said, f"{name} of shape {shape}: {said}"


@pytest.mark.parametrize("each", by_stem(KERNELS))
def test_a_size_that_contradicts_another_argument_is_refused(each):
    """Axes that share a name in the spec, and those of a fixed size."""
    launcher, arrays, scalars = call_of(each)
    tensors = each.tensors()
    for name, tensor in tensors.items():
        for place, label in axes_of(tensor):
            others = [
                n for n, t in tensors.items() if n != name and label in t.shape
            ]  # fmt: skip
            if not others and not isinstance(label, int):
                continue
            for change in (1, -1):
                shape = list(arrays[name].shape)
                shape[place] += change
                if shape[place] < 0:
                    continue
                if (each.stem, name, change) in LEGAL:
                    continue
                wrong = {**arrays, name: device.empty(tuple(shape), arrays[name].dtype)}
                said = refusal(launcher, wrong, scalars)
                named = [n for n in (name, *others) if n in said]
                assert named, f"{name} of shape {shape} ({label}): {said}"


@pytest.mark.parametrize("each", by_stem(KERNELS))
def test_empty_axes_are_refused_or_legal(each, monkeypatch):
    """One or two axes of length 0: a launch or a refusal, not both, and no other error."""
    launched = []
    monkeypatch.setattr(device.Kernel, "launch", lambda self, *_, **__: launched.append(str(self)))
    launcher, arrays, scalars = call_of(each)
    axes = {n: axes_of(tensor) for n, tensor in each.tensors().items()}
    labels = sorted({label for of in axes.values() for _, label in of if isinstance(label, str)})
    for empty in (*combinations(labels, 1), *combinations(labels, 2)):
        changed = {}
        for name, array in arrays.items():
            shape = [0 if label in empty else array.shape[i] for i, label in axes[name]]
            changed[name] = device.empty(tuple(shape), array.dtype)
        launched.clear()
        try:
            launcher(**changed, **scalars)
        except REFUSED as error:
            if launched:
                pytest.fail(f"{empty} of length 0 is refused after {launched}: {error}")
        except Exception as error:
            pytest.fail(f"{empty} of length 0: {error!r}")


@pytest.mark.parametrize("each", by_stem(KERNELS))
def test_gaps_between_elements_are_refused(each):
    launcher, arrays, scalars = call_of(each)
    for name, array in arrays.items():
        shape = tuple(array.shape)
        wide = [i for i, size in enumerate(shape) if size > 1]
        if not wide:
            continue
        axis = wide[-1]
        spread = tuple(2 * size if i == axis else size for i, size in enumerate(shape))
        step = tuple(slice(None, None, 2 if i == axis else None) for i in range(len(shape)))
        gaps = device.empty(spread, array.dtype)[step]
        assert tuple(gaps.shape) == shape
        said = refusal(launcher, {**arrays, name: gaps}, scalars)
        assert name in said, f"{name} with gaps: {said}"
        assert "contiguous" in said


@pytest.mark.parametrize("each", by_stem(KERNELS))
def test_an_array_on_the_host_is_refused(each):
    launcher, arrays, scalars = call_of(each)
    for name, array in arrays.items():
        wrong = {**arrays, name: np.empty(tuple(array.shape), array.dtype)}
        said = refusal(launcher, wrong, scalars)
        assert name in said, f"{name} on the host: {said}"
        assert "device array" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"x": (3, 40)}, "x has 40 columns"),
        ({"x": (3, 96)}, None),  # as padded as 64
        ({"x": (2, 64)}, "x has shape"),
        ({"x_permuted": (3, 64)}, "x_permuted 64"),
        ({"block_slot": (6, 0), "width": 0}, "block_slot has 0 columns"),
        ({"block_slot": (6, 8), "width": -8}, "block_slot has 8 columns"),
    ],
)
def test_what_moe_route_share_refuses(changes, said):
    """No spec calls it; 3 rows x top 2, the 8 experts from 8 on."""
    shapes = {"experts": (3, 2), "block_expert": (6,), "block_slot": (6, 8)}
    shapes |= {"x": (3, 64), "x_permuted": (3, 128), "width": 8, **changes}
    width = shapes.pop("width")
    arrays = {
        name: device.empty(shape, ml_dtypes.bfloat16 if name.startswith("x") else np.int32)
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError if said else Launched, match=said):
        moe_route_share(**arrays, first=8, count=8, width=width)


class Large:
    """A device array of this shape without its memory."""

    def __init__(self, *shape, dtype="float32"):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape, dtype=object))
        sizes = [int(np.prod(shape[i + 1 :], dtype=object)) for i in range(len(shape))]
        self.strides = tuple(size * self.dtype.itemsize for size in sizes)
        self._ary = None


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda n: rms_norm(Large(n, 4096), Large(4096), eps=1e-5, y=Large(n, 4096)), "x"),
        (lambda n: rope_of(rows=n, heads=64, q_width=64, width=4), "rope: q "),
        (lambda n: rope_of(rows=n, heads=64, q_width=4, width=64), "rope: query"),
        (lambda n: rope_of(rows=1, positions=2 * n, pairs=2048, q_width=4096, width=4096), "cos"),
        (lambda n: swiglu(Large(1, n, 4096), y=Large(n, 2048)), "gate_up"),
        (
            lambda n: tap(Large(n, 4096), tap=0, taps=Large(n, 4096, dtype=ml_dtypes.bfloat16)),
            "taps",
        ),
        (
            lambda n: add_rms_norm(
                Large(1, n, 4096), Large(4096), eps=1e-5, x=Large(n, 4096), y=Large(n, 4096)
            ),
            f"{2**20} rows",
        ),
        (lambda n: resized("cache_commit", requests=4096, max_pages=n), "page_table"),
        (lambda n: resized("cache_commit", layers=4096, width=8 * n), "cache"),
        (lambda n: resized("close_round", sites=2048, requests=1, rows=n), "status"),
        (lambda n: resized("draft_append", positions=512 * n), "cos"),
        (lambda n: resized("draft_attention", requests=4096, rows=4096, max_pages=n), "page_table"),
        (lambda n: resized("draft_block", requests=512 * n), "tokens"),
        (lambda n: resized("draft_gather", requests=4096, rows=4096, max_pages=n), "page_table"),
        (lambda n: resized("slot_mapping", requests=4096, bounds=4097, max_pages=n), "page_table"),
        (
            lambda n: resized("tree_verify_mla", requests=4096, bounds=4097, max_pages=n),
            "page_table",
        ),
        (lambda n: resized("tree_verify_mla", rows=4096, words=n), "ancestors"),
        (lambda n: resized("draft_limit", requests=4096, length=n), "tokens"),
        (lambda n: resized("greedy_accept", requests=4 * n, nodes=1024), "tree_tokens"),
        (lambda n: resized("greedy_accept", requests=4096, room=n, max_accepted=n), "accepted"),
        (lambda n: resized("latent_append", rows=128 * n, width=32, rank=8, entry=16), "qkv"),
        (lambda n: resized("latent_append", positions=1024 * n), "cos"),
        (lambda n: resized("moe_combine", rows=4096, top_k=n, slots=4096 * n), "experts"),
        (
            lambda n: resized("moe_route", top_k=1, blocks=1, width=2048 * n, slots=2048 * n),
            "block_slot",
        ),
        (lambda n: resized("router", rows=4 * n, count=1024), "logits"),
        (lambda n: resized("tree_build", requests=4 * n, nodes=1024, words=32), "tree_tokens"),
        (
            lambda n: resized(
                "w4a16_gemm",
                m=128,
                k=32 * n,
                words=4 * n,
                groups=n,
                tokens=128,
                width=1024 * -(-n // 32),
            ),
            "w4a16_gemm_many: x ",
        ),
    ],
)
def test_more_elements_than_32_bits_count_are_refused(call, named):
    with pytest.raises(NotImplementedError, match=named):
        call(2**20)
    with pytest.raises(Launched):
        call(2**20 - 1)


@pytest.mark.parametrize("stem", ["draft_append", "latent_append", "rope"])
def test_tables_without_a_position_are_refused(stem):
    with pytest.raises(ValueError, match="cos has no position"):
        resized(stem, positions=0)


class Sparse:
    """A pointer to `size` elements that keeps what is written, by its place."""

    def __init__(self, size, start=0, written=None):
        self.size, self.start = size, start
        self.written = {} if written is None else written

    def __len__(self):
        return self.size - self.start

    def __getitem__(self, behind):
        return Sparse(self.size, self.start + behind.start, self.written)

    def __setitem__(self, i, value):
        assert int(i) < len(self)
        self.written[self.start + int(i)] = value


def test_embedding_writes_rows_past_2_32_elements():
    row, hidden = 2**20, 4096
    x, status = Sparse(2**32 + hidden), Sparse(row + 1)
    tokens, table = np.ones(row + 1, np.int32), np.arange(2 * hidden, dtype=np.float32)
    made = embedding._embedding(bf16=False)
    with np.errstate(over="ignore"):
        simulator.Block(made.python, (made.threads, 1, 1), (row, 0, 0)).run(
            tokens, table, np.uint32(2), np.uint32(hidden), x, status
        )
    assert x.written == {2**32 + i: hidden + i for i in range(hidden)}


def test_the_driver_is_asked_once_for_an_array_and_a_device(monkeypatch):
    asked, current = [], SimpleNamespace(device_id=0)
    monkeypatch.setattr(device, "SIMULATED", False)
    monkeypatch.setattr(device, "_cuda_core", lambda: SimpleNamespace(Device=lambda: current))
    monkeypatch.setattr(
        device, "_require_device_array", lambda where, array, here: asked.append((where, here))
    )
    x, foreign = Large(3, 4), Large(3, 4)
    x.device_ctypes_pointer = None  # Numba's arrays have one, and stay as they are

    def check(columns="columns"):
        return device.check("f", x=(x, f"3 {columns}", "float32"), y=(foreign, "3 4", "float32"))

    for _ in range(2):
        assert check() == {"columns": 4}
    current.device_id = 1
    check()
    assert asked == [("f: x", 0), ("f: y", 0), ("f: y", 0), ("f: x", 1), ("f: y", 1)]
    with pytest.raises(ValueError, match="f: x has shape"):
        check("5")
    foreign.strides = (4, 12)
    with pytest.raises(ValueError, match="f: y is not C-contiguous"):
        check()


class Foreign:
    """A torch tensor on a GPU, as far as `check` looks: torch is not installed everywhere."""

    def __init__(self, dtype):
        self.shape, self.dtype = (3, 4), dtype

    @property
    def __cuda_array_interface__(self):
        raise TypeError("not of this dtype")

    def data_ptr(self):
        return 256

    def is_contiguous(self):
        return True


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_foreign_dtype_is_refused(monkeypatch, name):
    """A launcher would take torch.float32 for what is not numpy's float32: bfloat16."""
    current = SimpleNamespace(device_id=0)
    monkeypatch.setattr(device, "SIMULATED", False)
    monkeypatch.setattr(device, "_cuda_core", lambda: SimpleNamespace(Device=lambda: current))
    x = Foreign(f"torch.{name}")
    with pytest.raises(ValueError, match=f"f: x has dtype torch.{name}, expected float32 or"):
        device.check("f", x=(x, "3 4", ("float32", "bfloat16")))


def resized(stem, **sizes):
    """The spec's launcher and its smallest case, with other axes and scalars."""
    each = next(each for each in KERNELS if each.stem == stem)
    launcher, arrays, scalars = call_of(each)
    for name, tensor in each.tensors().items():
        shape = [sizes.get(label, arrays[name].shape[i]) for i, label in axes_of(tensor)]
        arrays[name] = Large(*shape, dtype=tensor.numpy_dtype)
    launcher(**arrays, **{name: sizes.get(name, value) for name, value in scalars.items()})


def rope_of(*, rows, heads=1, q_width, width, positions=1, pairs=2):
    tables = [Large(positions, pairs) for _ in range(2)]
    rope(
        Large(rows, heads, q_width), *tables, Large(rows, dtype="int32"),
        query=Large(rows, heads, width), status=Large(rows, dtype="int32"),
    )  # fmt: skip


def test_the_table_has_every_launcher_of_the_engine():
    """A public function of a kernel file that takes a stream launches: a spec must reach it."""
    reached = {each.kernel for each in KERNELS}
    for each in ALL:
        reached |= {f"{f.__module__}:{n}" for n, f in _functions(each.kernel.partition(":")[0])}
    for file in sorted((ROOT / "engine" / "kernels").glob("[!_]*.py")):
        module = importlib.import_module(f"engine.kernels.{file.stem}")
        for name, function in _functions(module.__name__):
            own = function.__module__ == module.__name__ and not name.startswith("_")
            if own and "stream" in inspect.signature(function).parameters:
                assert f"{module.__name__}:{name}" in reached


def _functions(module):
    return inspect.getmembers(importlib.import_module(module), inspect.isfunction)
