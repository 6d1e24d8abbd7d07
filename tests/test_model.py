"""The host's part of a forward pass: trees, cache pages, memory, errors. On a GPU or simulated."""

import numpy as np
import pytest

from engine.cache import CacheFull, LatentCache
from engine.device import empty, to_host
from engine.kernels.w4a16_gemm import w4a16_gemm_many
from engine.layers import (
    Buffers,
    Layer,
    Matrix,
    Mlp,
    project,
    reserve_int4,
)
from engine.model import ForwardError, Model, Tree
from goldens import bundles
from goldens.model import ancestor_words, rope_tables, softmax_scale, tree


@pytest.fixture(scope="module")
def model():
    """One dense FP32 layer with two pages of four positions for each of two requests."""
    config = {**bundles.config("tiny-fp32"), "num_hidden_layers": 1}
    weights = bundles.tensors("tiny-fp32")
    return Model(weights, config, rows=6, requests=2, positions=8, page_size=4)


def cache(**changes):
    given = {"layers": 2, "width": 8, "dtype": "float32", "requests": 2, "pages": 5}
    return LatentCache(**{**given, "page_size": 4, "max_pages": 4, **changes})


@pytest.mark.parametrize("count", [1, 31, 32, 33, 70])
def test_a_tree_is_compiled_as_the_oracle_does(count):
    parents = [-1, *(i * 7 % (i + 1) for i in range(count - 1))]
    depth, ancestors = tree(parents)
    got = Tree([0] * count, parents).compiled(3)
    assert np.array_equal(got[0], depth)
    assert np.array_equal(got[1], ancestor_words(ancestors, 3))


@pytest.mark.parametrize("parents", [[0], [-1, -1], [-1, 1], [-1, 0, 3], [-1]])
def test_parents_that_are_no_tree_are_refused(parents):
    count = 2 if parents == [-1] else len(parents)
    with pytest.raises(ValueError, match="tree:"):
        Tree([0] * count, parents).compiled(1)


def test_a_window_wider_than_its_mask_is_refused():
    with pytest.raises(ValueError, match="33 tokens, 33 parents, 1 words"):
        Tree.chain([0] * 33).compiled(1)


def test_pages_go_to_requests_and_come_back():
    pages = cache()
    pages.reserve(0, 9)
    pages.reserve(1, 4)
    first = to_host(pages.page_table)
    used = first[first >= 0]
    assert len(used) == len(set(used)) == 4
    pages.reserve(0, 10)
    assert np.array_equal(to_host(pages.page_table), first)
    slots = pages.slots(0, 9)
    assert len(set(slots)) == 9
    assert slots[8] == 4 * first[0, 2]
    with pytest.raises(CacheFull, match="request 1: 12 tokens need 3 pages of 4"):
        pages.reserve(1, 12)
    assert np.array_equal(to_host(pages.page_table), first)
    pages.release(0)
    pages.reserve(1, 12)
    assert (to_host(pages.page_table)[0] == -1).all()
    with pytest.raises(CacheFull, match="17 tokens need 5 pages of 4; a request has at most 4"):
        pages.reserve(1, 17)


def test_a_page_has_one_owner():
    pages = cache()
    pages.map_pages(0, [4, 1])
    assert pages.slots(0, 5).tolist() == [16, 17, 18, 19, 4]
    with pytest.raises(CacheFull, match=r"pages \[1\] are not all free"):
        pages.map_pages(1, [1])
    pages.map_pages(0, [1, 2])
    assert to_host(pages.page_table)[0].tolist() == [1, 2, -1, -1]
    pages.map_pages(1, [4])


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ([1, 1], ValueError),  # twice
        ([2, 0], CacheFull),  # 0 is another request's
        ([2, 5], CacheFull),  # there is no page 5
        ([2, -1], CacheFull),
        ([1, 2, 3, 4], CacheFull),  # four pages, and three fit
    ],
)
def test_pages_that_cannot_be_had_change_nothing(wanted, error):
    pages = cache(max_pages=3)
    pages.map_pages(0, [4, 1])
    pages.map_pages(1, [0])
    before = to_host(pages.page_table)
    with pytest.raises(error, match="request 0: pages"):
        pages.map_pages(0, wanted)
    assert np.array_equal(to_host(pages.page_table), before)
    pages.reserve(0, 12)  # the page that it has not, of the two that are free
    pages.reserve(1, 8)
    used = to_host(pages.page_table)
    assert sorted(used[used >= 0].tolist()) == [0, 1, 2, 3, 4]


def test_an_unwritten_cache_is_nan():
    assert np.isnan(to_host(cache().latents)).all()


def test_nothing_is_allocated_after_start_up():
    buffers = Buffers("float32")
    buffers.view("x", 4, 8)
    buffers.freeze()
    assert buffers.view("x", 2, 8).shape == (2, 8)
    with pytest.raises(MemoryError, match="buffer x"):
        buffers.view("x", 5, 8)
    with pytest.raises(MemoryError, match="buffer y"):
        buffers.view("y", 1)


def test_a_buffer_keeps_its_dtype():
    buffers = Buffers("bfloat16")
    buffers.view("x", 4, 8)
    buffers.activations("y", 4, 8)
    assert buffers.view("y", 2, dtype="bfloat16").dtype == "bfloat16"
    for shape in [(4, 8), (5, 8)]:
        with pytest.raises(ValueError, match="buffer x is float32, asked for as int32"):
            buffers.view("x", *shape, dtype="int32")
    with pytest.raises(ValueError, match="buffer y is bfloat16, asked for as float32"):
        buffers.view("y", 4, 8)


def test_the_scratch_of_int4_projections_is_there_for_any_number_of_rows():
    down = Matrix(7168, 18432, qw=empty((1,), "int32"), sc=empty((1,), "bfloat16"))
    gate_up = Matrix(36864, 7168, qw=down.qw, sc=down.sc)  # K2.6's dense layer, if it were INT4
    dense = Layer(None, None, None, Mlp(gate_up, down), None)
    buffers = Buffers("bfloat16")
    reserve_int4([dense], 300, buffers)
    buffers.freeze()
    for matrix in (gate_up, down):
        for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65, 255, 256, 257, 300):
            x, y = empty((rows, matrix.k), "bfloat16"), empty((1, rows, 32), "float32")
            launches = project("gate", x, matrix, y, buffers)
            assert len(launches) == 1 + (rows > 256)
            assert {launch.call.func for launch in launches} == {w4a16_gemm_many}


def test_the_tables_are_the_oracle_s():
    from engine import layers
    from engine.model import rope_tables as of_engine

    for name in ("tiny-fp32", "tiny2-fp32", "k26"):
        config = bundles.config(name)
        positions = np.arange(5000)
        for got, want in zip(of_engine(config, 5000), rope_tables(config, positions), strict=True):
            assert np.array_equal(got, want.astype(np.float32))
        assert layers.softmax_scale(config) == softmax_scale(config)


def test_what_only_the_device_sees_names_request_and_node(model):
    vocabulary = model.config["vocab_size"]
    plan = model.forward([Tree.chain([1, 2]), Tree([3, vocabulary, 4], [-1, 0, 0])])
    with pytest.raises(ForwardError, match="request 1, node 1: embedding gives status 1"):
        plan.check()
    model.forward([Tree.chain([1, 2]), Tree.chain([3])]).check()


def test_a_window_that_does_not_fit_is_refused(model):
    with pytest.raises(ValueError, match="7 nodes of 1 requests; the model has memory for 6 of 2"):
        model.forward([Tree.chain([0] * 7)])
    with pytest.raises(ValueError, match="0 nodes"):
        model.forward([None, None])
    model.advance(0, 8)
    with pytest.raises(CacheFull, match="request 0: 9 tokens need 3 pages of 4"):
        model.forward([Tree.chain([0])])
    model.release(0)


def test_a_request_may_sit_a_pass_out(model):
    together = model.forward([Tree.chain([5, 6]), Tree.chain([7])])
    together.check()
    want = to_host(together.logits)[2]
    alone = model.forward([None, Tree.chain([7])])
    alone.check()
    assert np.array_equal(to_host(alone.logits)[0], want)


def test_rows_behind_the_windows_leave_every_cache_alone():
    weights, config = bundles.tensors("micro-fp32"), bundles.config("micro-fp32")
    model = Model(weights, config, rows=6, requests=2, positions=8, page_size=4)

    def last(rows):
        for request in (0, 1):
            model.release(request)
        model.cache.reserve(1, 8)  # so that rows behind request 0's window would find a page
        model.forward([None, Tree.chain([5, 6, 7])]).check()
        model.forward([Tree.chain([3, 4]), None], rows=rows).check()
        model.advance(1, 3)
        plan = model.forward([None, Tree.chain([9])])
        plan.check()
        return to_host(plan.logits)[0]

    want = last(2)
    assert np.array_equal(last(6), want)


def test_launches_are_in_one_place(model):
    names = [launch.name for launch in model.plan(3, 1).launches]
    assert names[:3] == ["embedding", "slot_mapping", "norm"]
    assert names[-2:] == ["head", "argmax"]
    assert len(names) == 3 + 8 + 5 + 2
    assert model.plan(3, 1) is model.plan(3, 1)
