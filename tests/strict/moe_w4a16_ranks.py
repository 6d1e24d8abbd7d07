"""Launcher of specs/moe_w4a16_ranks.toml: experts split over ranks, and on one GPU."""

import numpy as np

from engine.device import copy_to_device, empty, to_host
from engine.kernels.moe_w4a16 import moe_w4a16, scratch_shapes
from engine.ranks import experts_of_rank
from tests.strict.ranks import together, unlike


def moe_w4a16_ranks(
    x, experts, expert_weights, gate_up_qw, gate_up_sc, down_qw, down_sc, *, ranks: int, nccl: bool,
    y, differs, stream=None,
) -> None:  # fmt: skip
    """Inputs as engine.kernels.moe_w4a16. y: what rank 0 has; differs [rows] int32: elements of
    any rank's row whose bits are not those of one GPU."""
    (rows, hidden), (count, wide, _) = x.shape, gate_up_qw.shape
    routed = {
        "gate_up_qw": gate_up_qw, "gate_up_sc": gate_up_sc, "down_qw": down_qw, "down_sc": down_sc,
    }  # fmt: skip
    shapes = scratch_shapes(
        rows=rows, top_k=experts.shape[1], experts=count, hidden=hidden, inner=wide // 2
    )
    scratch = {name: empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
    moe_w4a16(x, experts, expert_weights, **routed, **scratch, y=y, stream=stream)
    one = to_host(y)
    given = [to_host(array) for array in (x, experts, expert_weights)]
    packed = {name: to_host(array) for name, array in routed.items()}
    made = together(ranks, nccl, experts_of_rank, *given, packed)
    copy_to_device(sum(unlike(each, one) for each in made).astype(np.int32), differs)
    copy_to_device(made[0], y)
