"""Launcher of specs/decoder_layer_ranks.toml: a layer split over ranks, and on one GPU."""

import numpy as np

from engine.device import copy_to_device, to_host
from engine.passes import layer_values
from engine.prepared import prepare
from engine.ranks import layer_of_rank
from tests.strict.ranks import together, unlike


def decoder_layer_ranks(
    x, parents, prefix, *, layer: int, page_size: int, ranks: int, nccl: bool, weights, config,
    y, latent, attention, mlp, differs, stream=None,
) -> None:  # fmt: skip
    """engine.passes.layer_output by rank 0; differs [rows] int32: elements of any rank's four
    outputs whose bits are not those of one GPU."""
    given = [to_host(array) for array in (x, parents, prefix)]
    one = layer_values(prepare(weights, config, only=[layer]), config, *given, page_size)
    tensors = {name: to_host(array) for name, array in weights.items()}
    made = together(ranks, nccl, layer_of_rank, tensors, config, layer, *given, page_size)
    other = sum(unlike(each[name], one[name]) for each in made for name in one)
    copy_to_device(np.asarray(other, np.int32), differs)
    for name, array in (("y", y), ("latent", latent), ("attention", attention), ("mlp", mlp)):
        copy_to_device(made[0][name], array)
