"""What ranks are told to do: functions of a group for `Ranks.call` and `in_turns`.

    with Ranks(["GPU-1..", "GPU-2.."]) as ranks:
        runs, times = decode_on(ranks, "model.kdtr", prompts, drafter, budget=16, max_new=64)

Every rank does the same work on the host, from the same arguments: nothing but activations passes
between ranks. drafter: of the host (engine.draft), or "dflash".
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine import layers
from engine.bundle import Bundle
from engine.decode import Decoded, decode, measured_costs
from engine.device import empty, to_device, to_host
from engine.dflash import DFlash
from engine.layers import Buffers, Config, Matrix, Moe
from engine.parallel import RankError, Ranks, in_turns
from engine.passes import layer_values
from engine.prepared import prepare


def layer_of_rank(
    group: Any,
    weights: Mapping[str, Any],
    config: Config,
    layer: int,
    x: np.ndarray,
    parents: np.ndarray,
    prefix: np.ndarray,
    page_size: int,
) -> dict[str, np.ndarray]:
    """engine.passes.layer_values of one layer of a bundle's tensors."""
    prepared = prepare(weights, config, only=[layer], group=group)
    return layer_values(prepared, config, x, parents, prefix, page_size, group)


def experts_of_rank(
    group: Any,
    x: np.ndarray,
    experts: np.ndarray,
    expert_weights: np.ndarray,
    routed: Mapping[str, np.ndarray],
) -> np.ndarray:
    """y fp32 [rows, hidden] of engine.kernels.moe_w4a16; routed: its weights, all experts."""
    (rows, hidden), (count, wide, _) = x.shape, routed["gate_up_qw"].shape
    share = count // group.world
    here = slice(group.rank * share, (group.rank + 1) * share)
    weights = Moe(
        gate=Matrix(count, hidden),
        bias=None,
        routed={name: to_device(array[here]) for name, array in routed.items()},
        shared=None,
        inner=wide // 2,
        top_k=experts.shape[1],
        scale=1.0,
        ranks=group.world,
    )
    y = empty((rows, hidden), "float32")
    launches = layers.routed_experts(
        "experts", to_device(x), to_device(experts), to_device(expert_weights), weights, y,
        Buffers("bfloat16"), group,
    )  # fmt: skip
    for launch in launches:
        launch.call(stream=None)
    return to_host(y)


def decode_of_rank(
    group: Any,
    model: str | tuple[Mapping[str, np.ndarray], Config],
    prompts: Sequence[Sequence[int]],
    drafter: Any,
    settings: Mapping[str, Any],
) -> tuple[list[Decoded] | None, str, dict[str, float]]:
    """engine.decode.decode of a bundle's path, or of tensors and a config: the runs (of rank 0),
    their digest, seconds by stage."""
    times: dict[str, float] = {}
    tell = None if group.rank else lambda *what: group.tell(what)
    weights, config = _opened(model)
    own = _drafter(drafter, weights, config)
    runs = decode(
        weights, config, prompts, own, group=group, times=times, on_token=tell, **settings
    )
    return (None if group.rank else runs), digest(runs), times


def costs_of_rank(
    group: Any,
    model: str | tuple[Mapping[str, np.ndarray], Config],
    prompts: Sequence[Sequence[int]],
    drafter: Any,
    settings: Mapping[str, Any],
) -> dict[int, float]:
    """engine.decode.measured_costs; the ranks' differ a little."""
    weights, config = _opened(model)
    drafter = _drafter(drafter, weights, config)
    return measured_costs(weights, config, prompts, drafter, group=group, **settings)


def _drafter(drafter: Any, weights: Mapping[str, Any], config: Config) -> Any:
    """A rank's own: "dflash" is the bundle's, whole on every rank; a host drafter is itself."""
    return DFlash(weights, config) if drafter == "dflash" else drafter


def _opened(
    model: str | tuple[Mapping[str, np.ndarray], Config],
) -> tuple[Mapping[str, np.ndarray], Config]:
    if not isinstance(model, str):
        return model
    bundle = Bundle(Path(model))
    return bundle, bundle.config


def decode_on(
    ranks: Ranks,
    model: str | tuple[Mapping[str, np.ndarray], Config],
    prompts: Sequence[Sequence[int]],
    drafter: Any,
    *,
    on_token: Callable[[int, int], None] | None = None,
    times: dict[str, float] | None = None,
    **settings: Any,
) -> list[Decoded]:
    """engine.decode.decode on these ranks; model as in `decode_of_rank`. RankError if the ranks do
    not agree to the bit."""
    tell = None if on_token is None else lambda _, what: on_token(*what)
    found = ranks.call(
        "engine.ranks:decode_of_rank", model, list(prompts), drafter, settings, on_word=tell
    )
    runs, _, seconds = found[0]
    assert runs is not None  # rank 0's
    _agree([said for _, said, _ in found])
    if times is not None:
        times.update(seconds)
    return runs


def costs_on(
    ranks: Ranks, model: str, prompts: Sequence[Sequence[int]], drafter: Any, **settings: Any
) -> dict[int, float]:
    """engine.decode.measured_costs on these ranks: rank 0's, for all of them to decode with."""
    return ranks.call("engine.ranks:costs_of_rank", model, list(prompts), drafter, settings)[0]


def decode_in_turns(
    world: int,
    weights: Mapping[str, Any],
    config: Config,
    prompts: Sequence[Sequence[int]],
    drafter: Any,
    *,
    on_token: Callable[[int, int], None] | None = None,
    times: dict[str, float] | None = None,
    **settings: Any,
) -> list[Decoded]:
    """`decode_on` for ranks that take turns in this process."""

    def of_rank(group: Any) -> list[Decoded]:
        first: dict[str, Any] = {"on_token": on_token, "times": times} if not group.rank else {}
        own = _drafter(drafter, weights, config)
        return decode(weights, config, prompts, own, group=group, **first, **settings)

    found = in_turns(world, of_rank)
    _agree([digest(runs) for runs in found])
    return found[0]


def costs_in_turns(
    world: int,
    weights: Mapping[str, Any],
    config: Config,
    prompts: Sequence[Sequence[int]],
    drafter: Any,
    **settings: Any,
) -> dict[int, float]:
    """`costs_on` for ranks that take turns in this process: what all of them take together."""

    def of_rank(group: Any) -> dict[int, float]:
        own = _drafter(drafter, weights, config)
        return measured_costs(weights, config, prompts, own, group=group, **settings)

    return in_turns(world, of_rank)[0]


def _agree(said: Sequence[str]) -> None:
    for rank, other in enumerate(said):
        if other != said[0]:
            raise RankError(f"rank {rank} decoded other bits than rank 0")


def digest(runs: Sequence[Decoded]) -> str:
    """Of tokens, logits and caches, to the bit."""
    whole = hashlib.sha256()
    for run in runs:
        whole.update(np.asarray(run.tokens, np.int64).tobytes())
        for row in run.logits:
            whole.update(row.tobytes())
        if run.cache is not None:
            whole.update(np.ascontiguousarray(run.cache).view(np.uint8).tobytes())
    return whole.hexdigest()
