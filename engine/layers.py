"""The layers as launches in order. No maths, and no allocation: every array is a view of `Buffers`.

A function returns the launches of its block, in the order of the model's formulas:

  mla   qkv -> (query latent, cache row) -> q -> (absorbed, rotated) -> attention -> o -> delta
  mlp   gate and up -> swiglu -> delta
  moe   gate -> router -> routed experts -> delta[0]; shared expert -> delta[1:]

The residual stream x takes delta's parts in `add_rms_norm`, together with the norm that follows.
With a group (engine/parallel.py) a rank has some of the heads, of the experts and of the rows of
large matrices; what follows a split matrix or kernel is a gather:

  mla   .. -> its heads' o -> all heads' o -> its columns of delta -> delta
  mlp   its gate and up -> swiglu -> all columns -> its columns of delta -> delta
  moe   its experts' parts -> of its rows, the parts of all experts -> its rows of delta[0] -> all

`Launch.records` names arrays that are complete once a launch is done, for a pass to record.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.device import cdiv, empty
from engine.kernels import gemm_bf16, gemm_f32, moe_f32, moe_w4a16, w4a16_gemm
from engine.kernels.add_rms_norm import add_rms_norm
from engine.kernels.join_columns import join_columns
from engine.kernels.latent_append import latent_append
from engine.kernels.moe_combine import moe_combine_ranks
from engine.kernels.rope import rope
from engine.kernels.router import router
from engine.kernels.swiglu import swiglu
from engine.kernels.tree_verify_mla import tree_verify_mla_heads
from engine.splits import MAX_SPLITS

INT4_ROWS = 256  # that the INT4 GEMM and the MoE kernels take in one launch

Config = Mapping[str, Any]  # the public config.json's text_config, and lora_rms_norm_eps


@dataclass(frozen=True)
class Launch:
    name: str
    call: Callable[..., None]  # takes `stream`
    records: dict[str, Any] = field(default_factory=dict)


class Buffers:
    """Named device memory, allocated at the largest shape that is asked for before `freeze`."""

    def __init__(self, act: str):
        self.act = act  # dtype of activations
        self._flat: dict[str, Any] = {}
        self._frozen = False

    def view(self, name: str, *shape: int, dtype: str = "float32") -> Any:
        """The first elements of buffer `name`, in `shape`. ValueError if it is of another dtype,
        MemoryError if it has too few elements and start-up is over."""
        size = 1
        for extent in shape:
            size *= extent
        flat = self._flat.get(name)
        if flat is not None and str(flat.dtype) != dtype:
            raise ValueError(f"buffer {name} is {flat.dtype}, asked for as {dtype}")
        if flat is None or flat.size < size:
            if self._frozen:
                raise MemoryError(f"buffer {name}: {list(shape)} asked for after start-up")
            flat = self._flat[name] = empty((size,), dtype)
        return flat[:size].reshape(shape)

    def activations(self, name: str, *shape: int) -> Any:
        return self.view(name, *shape, dtype=self.act)

    def freeze(self) -> None:
        """From here on nothing is allocated."""
        self._frozen = True


@dataclass(frozen=True)
class Matrix:
    """Weights [n, k] of a projection: `w` bf16 or fp32, or INT4 as `qw` and `sc`. With `ranks`, its
    rows are this rank's share of so many equal ones."""

    n: int
    k: int
    w: Any = None
    qw: Any = None  # int32 [n, k/8]
    sc: Any = None  # bf16 [n, k/32]
    ranks: int | None = None

    @property
    def parts(self) -> int:
        """Sums over ranges of K that `project` leaves to the reader; those of the whole matrix."""
        if self.w is None:
            return 1
        gemm = gemm_f32 if self.w.dtype == "float32" else gemm_bf16
        return gemm.parts(self.n * (self.ranks or 1), self.k)

    @property
    def whole_n(self) -> int:
        return self.n * (self.ranks or 1)


@dataclass(frozen=True)
class Attention:
    """Weights of one MLA block, as the launches take them."""

    qkv: Matrix  # q_a_proj over kv_a_proj_with_mqa
    q_norm: Any  # [q_rank]
    kv_norm: Any  # [rank]
    q: Any  # q_b_proj [heads (nope + rope), q_rank]
    absorb: Any  # kv_b_proj's keys, transposed [heads, rank, nope]
    values: Any  # kv_b_proj's values [heads, v, rank]
    o: Matrix  # [hidden, heads v]


@dataclass(frozen=True)
class Mlp:
    gate_up: Matrix  # gate_proj over up_proj [2 inner, hidden]
    down: Matrix  # [hidden, inner]


@dataclass(frozen=True)
class Moe:
    gate: Matrix  # [experts, hidden]
    bias: Any  # fp32 [experts]
    routed: dict[str, Any]  # moe_w4a16's or moe_f32's weights by parameter name
    shared: Mlp | None
    inner: int  # moe_intermediate_size
    top_k: int
    scale: float  # routed_scaling_factor
    ranks: int | None = None  # that share the routed experts in equal ranges

    @property
    def count(self) -> int:
        """Routed experts that are here."""
        return self.gate.n // (self.ranks or 1)

    @property
    def int4(self) -> bool:
        return "down_qw" in self.routed

    def scratch_shapes(self, rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of what the routed experts' kernel needs besides its output."""
        return (moe_w4a16 if self.int4 else moe_f32).scratch_shapes(
            rows=rows,
            top_k=self.top_k,
            experts=self.count,
            hidden=self.gate.k,
            inner=self.inner,
        )


@dataclass(frozen=True)
class Layer:
    input_norm: Any
    attention: Attention
    post_norm: Any
    mlp: Mlp | None  # a dense layer's
    moe: Moe | None


@dataclass(frozen=True)
class DraftLayer:
    """Weights of a drafter's layer, all bf16."""

    input_norm: Any
    qkv: Matrix  # q_proj over k_proj over v_proj
    kv: Matrix  # the last two of these: the context has no queries
    q_norm: Any  # [size]
    k_norm: Any
    o: Matrix
    post_norm: Any
    mlp: Mlp


@dataclass(frozen=True)
class Drafter:
    """Weights of a drafter. Embedding and head are the target's."""

    fc: Any  # [hidden, taps hidden]
    hidden_norm: Any
    layers: list[DraftLayer]
    norm: Any  # [hidden], in the dtype of the target's activations: its head reads the result


@dataclass(frozen=True)
class Window:
    """The rows of one forward pass, on the device; rows of all requests are packed."""

    rows: int
    requests: int
    row_start: Any  # int32 [requests + 1]
    prefix_len: Any  # int32 [requests]
    depth: Any  # int32 [rows]
    ancestors: Any  # uint32 [rows, words]
    page_table: Any  # int32 [requests, max_pages]
    page_size: int
    position: Any  # int32 [rows]
    slot: Any  # int64 [rows]
    cos: Any  # fp32 [positions, rope / 2]
    sin: Any
    status: Callable[[str], Any]  # int32 [rows] for a launch's name


def gemm(name: str, x: Any, w: Any, y: Any, **records: Any) -> list[Launch]:
    """y = x w^T for weights that are not quantised, stored in y's dtype."""
    function = gemm_f32.gemm_f32 if w.dtype == "float32" else gemm_bf16.gemm_bf16
    return [Launch(name, partial(function, x, w, y=y), records)]


def project(
    name: str, x: Any, matrix: Matrix, y: Any, b: Buffers, **records: Any
) -> list[Launch]:  # fmt: skip
    """y [matrix.parts, rows, n] fp32: parts of x times the matrix."""
    if matrix.w is None:
        # One scratch for all: a projection's kernels wait for those of the one before.
        calls = [
            partial(
                w4a16_gemm.w4a16_gemm_many, x[rows], matrix.qw, matrix.sc, y=y[0][rows],
                **{
                    key: b.view(f"int4_{key}", *shape, dtype=dtype)
                    for key, (shape, dtype) in w4a16_gemm.scratch_shapes(
                        m=rows.stop - rows.start, n=matrix.n, k=matrix.k
                    ).items()
                },
            )
            for rows in _blocks(x.shape[0])
        ]  # fmt: skip
    elif matrix.w.dtype == "float32":
        calls = [partial(gemm_f32.gemm_f32_parts, x, matrix.w, parts=matrix.parts, y=y)]
    else:
        calls = [partial(gemm_bf16.gemm_bf16_parts, x, matrix.w, parts=matrix.parts, y=y)]
    launches = [Launch(name, call) for call in calls]
    launches[-1].records.update(records)
    return launches


def reserve_int4(every: Sequence[Layer], rows: int, b: Buffers) -> None:
    """Allocate the scratch of `project` for any number of rows up to `rows`: some of it is largest
    for fewer."""
    sizes: dict[tuple[str, str], int] = {}
    for n, k in {
        (matrix.n, matrix.k)
        for layer in every
        for block in (layer.mlp, layer.moe and layer.moe.shared)
        if block
        for matrix in (block.gate_up, block.down)
        if matrix.w is None
    }:
        for count in range(1, min(rows, INT4_ROWS) + 1):
            for key, (shape, dtype) in w4a16_gemm.scratch_shapes(m=count, n=n, k=k).items():
                sizes[key, dtype] = max(sizes.get((key, dtype), 0), math.prod(shape))
    for (key, dtype), size in sizes.items():
        b.view(f"int4_{key}", size, dtype=dtype)


def _blocks(rows: int) -> list[slice]:
    """Rows in blocks of what the INT4 kernels take at once; a row's bits do not depend on it."""
    return [slice(first, min(first + INT4_ROWS, rows)) for first in range(0, rows, INT4_ROWS)]


def gathered(name: str, part: Any, whole: Any, b: Buffers, group: Any) -> list[Launch]:
    """whole [.., ranks * width]: what every rank has in part [.., width], side by side."""
    *_, width = part.shape
    flat = part.reshape(part.size // width, width)
    every = b.view(
        f"gathered_{part.dtype}", group.world, *flat.shape, dtype=str(part.dtype)
    )  # fmt: skip
    whole = whole.reshape(flat.shape[0], group.world * width)
    return [
        Launch(f"{name}.gather", partial(group.all_gather, flat, every)),
        Launch(f"{name}.join", partial(join_columns, every, whole=whole)),
    ]


def project_whole(
    name: str, x: Any, matrix: Matrix, y: Any, b: Buffers, group: Any, **records: Any
) -> list[Launch]:
    """`project` into y [parts, rows, whole_n], wherever the matrix is."""
    if matrix.ranks is None:
        return project(name, x, matrix, y, b, **records)
    part = b.view("projected", matrix.parts, x.shape[0], matrix.n)
    launches = [*project(name, x, matrix, part, b), *gathered(name, part, y, b, group)]
    launches[-1].records.update(records)
    return launches


def attend(
    name: str, query: Any, cache: Any, latent_out: Any, window: Window, config: Config, b: Buffers
) -> list[Launch]:
    """query [rows, heads, rank + rope] over prefix and ancestors -> latent_out [.., rank]."""
    rows, heads, rank = latent_out.shape
    call = partial(
        tree_verify_mla_heads, query, cache, window.page_table, window.row_start, window.prefix_len,
        window.ancestors, scale=softmax_scale(config), page_size=window.page_size,
        of_heads=config["num_attention_heads"], o=latent_out,
        partial=b.view("attention_partial", rows, MAX_SPLITS, heads, rank),
        stats=b.view("attention_stats", rows, MAX_SPLITS, heads, 2),
    )  # fmt: skip
    return [Launch(name, call)]


def routed_experts(
    name: str, h: Any, experts: Any, shares: Any, weights: Moe, y: Any, b: Buffers,
    group: Any = None,
) -> list[Launch]:  # fmt: skip
    """y [rows, hidden] = the weighted sum of each row's experts, in ascending id."""
    if weights.ranks is not None:
        return [
            launch
            for rows in _blocks(h.shape[0])
            for launch in _experts_of_ranks(
                name, h[rows], experts[rows], shares[rows], weights, y[rows], b, group
            )
        ]
    function = moe_w4a16.moe_w4a16 if weights.int4 else moe_f32.moe_f32
    launches = []
    for rows in _blocks(h.shape[0]):
        scratch = {
            key: b.view(f"experts_{key}", *shape, dtype=dtype)
            for key, (shape, dtype) in weights.scratch_shapes(rows.stop - rows.start).items()
        }
        call = partial(
            function, h[rows], experts[rows], shares[rows], **weights.routed, **scratch, y=y[rows]
        )
        launches.append(Launch(name, call))
    return launches


def _experts_of_ranks(
    name: str, h: Any, experts: Any, shares: Any, weights: Moe, y: Any, b: Buffers, group: Any
) -> list[Launch]:
    """Each rank runs its experts over all rows and sums up its share of the rows, in the order of
    one GPU: what an expert made of a row goes to the rank that has the row."""
    function = moe_w4a16.moe_w4a16_share if weights.int4 else moe_f32.moe_f32_share
    (rows, top_k), hidden, world = experts.shape, h.shape[1], group.world
    each = cdiv(rows, world)  # rows of a rank; the last ones may have fewer, or none
    scratch = {
        key: b.view(f"experts_{key}", *shape, dtype=dtype)
        for key, (shape, dtype) in weights.scratch_shapes(rows).items()
        if key != "parts"
    }
    parts = b.view("experts_parts", world, each * top_k, hidden)
    others = b.view("experts_others", world, each * top_k, hidden)
    own = b.view("experts_own", each, hidden)
    used = parts.reshape(world * each * top_k, hidden)[: rows * top_k]
    mine = slice(min(rows, group.rank * each), min(rows, (group.rank + 1) * each))
    launches = [
        Launch(
            name,
            partial(
                function, h, experts, **weights.routed, first=group.rank * weights.count,
                **scratch, parts=used,
            ),
        ),
        Launch(
            f"{name}.exchange",
            partial(group.exchange, parts, others, experts=experts, share=weights.count),
        ),
    ]  # fmt: skip
    if mine.start < mine.stop:
        combine = partial(
            moe_combine_ranks, others, experts[mine], shares[mine], count=weights.gate.n,
            y=own[: mine.stop - mine.start],
        )  # fmt: skip
        launches.append(Launch(f"{name}.combine", combine))
    if rows == world * each:
        whole = y.reshape(world, each, hidden)
        return [*launches, Launch(f"{name}.gather", partial(group.all_gather, own, whole))]
    every = b.view("experts_rows", world, each, hidden)
    first = every.reshape(world * each, hidden)[:rows].reshape(1, rows, hidden)
    launches.append(
        Launch(f"{name}.gather", partial(group.all_gather, own, every, rows=mine.stop - mine.start))
    )
    launches.append(Launch(f"{name}.rows", partial(join_columns, first, whole=y)))
    return launches


def reserve_experts(weights: Moe, rows: int, b: Buffers) -> None:
    """Allocate the scratch of `routed_experts` for any number of rows up to `rows`: some of it is
    largest for fewer."""
    most = min(rows, INT4_ROWS)
    sizes: dict[tuple[str, str], int] = {}
    for count in range(1, most + 1):
        for key, (shape, dtype) in weights.scratch_shapes(count).items():
            sizes[key, dtype] = max(sizes.get((key, dtype), 0), math.prod(shape))
    for (key, dtype), size in sizes.items():
        b.view(f"experts_{key}", size, dtype=dtype)
    if weights.ranks is not None:
        each = cdiv(most, weights.ranks)
        for name in ("experts_parts", "experts_others"):
            b.view(name, weights.ranks * each * weights.top_k, weights.gate.k)
        b.view("experts_rows", weights.ranks * each, weights.gate.k)


def mla(
    name: str, h: Any, weights: Attention, cache: Any, window: Window, config: Config, b: Buffers,
    group: Any = None,
) -> tuple[list[Launch], Any]:  # fmt: skip
    """Launches from h [rows, hidden] to delta [parts, rows, hidden]; cache [slots, rank + rope]."""
    rows, heads = window.rows, weights.absorb.shape[0]
    nope, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    rank, v, q_rank = config["kv_lora_rank"], config["v_head_dim"], config["q_lora_rank"]
    qkv = b.view("qkv", weights.qkv.parts, rows, weights.qkv.n)
    q_a = b.activations("q_a", rows, q_rank)
    q = b.activations("q", rows, heads, nope + turned)
    query = b.activations("query", rows, heads, rank + turned)
    latent_out = b.activations("latent_out", rows, heads, rank)
    o = b.activations("o", rows, heads, v)
    delta = b.view("delta", weights.o.parts, rows, weights.o.whole_n)
    every, gathering = o.reshape(rows, heads * v), []
    if group is not None:
        every = b.activations("every_o", rows, weights.o.k)
        gathering = gathered(f"{name}.values", o.reshape(rows, heads * v), every, b, group)
    launches = [
        *project(f"{name}.qkv", h, weights.qkv, qkv, b),
        Launch(
            f"{name}.latent_append",
            partial(
                latent_append, qkv, weights.q_norm, weights.kv_norm, window.cos, window.sin,
                window.position, window.slot, eps=config["lora_rms_norm_eps"], q=q_a, cache=cache,
                status=window.status(f"{name}.latent_append"),
            ),
        ),
        *gemm(f"{name}.q", q_a, weights.q, q.reshape(rows, heads * (nope + turned))),
        *gemm(f"{name}.absorb", q, weights.absorb, query),
        Launch(
            f"{name}.rope",
            partial(
                rope, q, window.cos, window.sin, window.position, query=query,
                status=window.status(f"{name}.rope"),
            ),
        ),
        *attend(f"{name}.attention", query, cache, latent_out, window, config, b),
        *gemm(f"{name}.values", latent_out, weights.values, o),
        *gathering,
        *project_whole(f"{name}.o", every, weights.o, delta, b, group, attention=delta),
    ]  # fmt: skip
    return launches, delta


def mlp(name: str, h: Any, weights: Mlp, delta: Any, b: Buffers, group: Any = None) -> list[Launch]:
    """Launches from h [rows, hidden] to delta [down.parts, rows, hidden]."""
    rows, inner = h.shape[0], weights.gate_up.n // 2
    gate_up = b.view("gate_up", weights.gate_up.parts, rows, weights.gate_up.n)
    activated = b.activations("activated", rows, inner)
    every, gathering = activated, []
    if weights.gate_up.ranks is not None:
        every = b.activations("every_activated", rows, weights.down.k)
        gathering = gathered(f"{name}.swiglu", activated, every, b, group)
    return [
        *project(f"{name}.gate_up", h, weights.gate_up, gate_up, b),
        Launch(f"{name}.swiglu", partial(swiglu, gate_up, y=activated)),
        *gathering,
        *project_whole(f"{name}.down", every, weights.down, delta, b, group),
    ]


def moe(
    name: str, h: Any, weights: Moe, window: Window, b: Buffers, group: Any = None
) -> tuple[list[Launch], Any]:
    """Launches from h [rows, hidden] to delta [parts, rows, hidden]: routed experts, then the
    shared expert's parts."""
    rows, hidden = h.shape
    shared_parts = weights.shared.down.parts if weights.shared else 0
    logits = b.view("router_logits", weights.gate.parts, rows, weights.gate.n)
    experts = b.view("experts", rows, weights.top_k, dtype="int32")
    shares = b.view("expert_weights", rows, weights.top_k)
    delta = b.view("delta", 1 + shared_parts, rows, hidden)
    launches = [
        *project(f"{name}.gate", h, weights.gate, logits, b),
        Launch(
            f"{name}.router",
            partial(
                router, logits, weights.bias, top_k=weights.top_k, scale=weights.scale,
                experts=experts, expert_weights=shares, status=window.status(f"{name}.router"),
            ),
            {"router_index": experts, "router_weight": shares},
        ),
        *routed_experts(f"{name}.experts", h, experts, shares, weights, delta[0], b, group),
    ]  # fmt: skip
    if weights.shared:
        launches += mlp(f"{name}.shared", h, weights.shared, delta[1:], b, group)
    return launches, delta


def decoder_layer(
    name: str,
    x: Any,
    h: Any,
    weights: Layer,
    next_norm: Any,
    cache: Any,
    window: Window,
    config: Config,
    b: Buffers,
    group: Any = None,
) -> list[Launch]:
    """From h = norm of x by this layer's input norm to x after the layer and h by `next_norm`."""

    def add(what: str, delta: Any, norm: Any, **records: Any) -> Launch:
        call = partial(add_rms_norm, delta, norm, eps=config["rms_norm_eps"], x=x, y=h)
        return Launch(f"{name}.{what}", call, records)

    launches, delta = mla(f"{name}.mla", h, weights.attention, cache, window, config, b, group)
    launches.append(add("add_attention", delta, weights.post_norm))
    if weights.moe:
        block, delta = moe(f"{name}.moe", h, weights.moe, window, b, group)
    else:
        assert weights.mlp is not None  # a layer has the one or the other
        delta = b.view("delta", weights.mlp.down.parts, window.rows, weights.mlp.down.whole_n)
        block = mlp(f"{name}.mlp", h, weights.mlp, delta, b, group)
    block[-1].records["mlp"] = delta
    return [*launches, *block, add("add_mlp", delta, next_norm, hidden=x)]


def softmax_scale(config: Config) -> float:
    """(nope + rope)^-1/2, times YaRN's mscale_all_dim factor squared."""
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    scaling = config["rope_scaling"]
    if not scaling:
        return scale
    return scale * mscale(scaling["factor"], scaling.get("mscale_all_dim", 0)) ** 2


def mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
