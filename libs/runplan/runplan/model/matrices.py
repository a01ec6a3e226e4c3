"""Parameters of the matrices that Muon updates (`engines.muon.matrices`), from a model's sizes alone."""

from collections.abc import Iterable

from runplan.model.adapters import LinearSizes, attention_linears, delta_net_linears, mlp_linears
from runplan.model.model_shape import ModelShape, count_parameters

MOST = 2**25
"""Elements that a rank orthogonalizes at once, or those of one matrix (`engines.muon.exchange_plan`)."""
COPIES = 6
"""Copies of them in bfloat16 at once, about: pieces that come, matrices, what is iterated on, results."""


def dense_matrices(shape: ModelShape) -> int:
    """Count the parameters of matrices beside the experts': token mixers, MLPs, routers."""
    mixers = shape.full_attention_layers * _count(attention_linears(shape))
    mixers += shape.linear_layers * _count(delta_net_linears(shape)) if shape.linear_layers else 0
    shared = 3 * shape.hidden * shape.shared_expert_intermediate
    mlp = shape.hidden * shape.experts + shared if shape.experts else _count(mlp_linears(shape))
    return mixers + shape.layers * mlp


def matrix_parameters(shape: ModelShape) -> int:
    """Count the parameters of all matrices, those of experts too."""
    return dense_matrices(shape) + count_parameters(shape).experts


def exchange_bytes(shape: ModelShape) -> float:
    """Return the bytes of matrices that a rank puts together at once."""
    largest = max((i * o for _, i, o in (*attention_linears(shape), *mlp_linears(shape))), default=0)
    return 2.0 * COPIES * min(max(MOST, largest), matrix_parameters(shape))


def _count(linears: Iterable[LinearSizes]) -> int:
    return sum(i * o for _, i, o in linears if min(i, o) > 1)
