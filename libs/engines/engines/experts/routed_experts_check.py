"""The check of a batch's column of experts to replay, before a step."""

from itertools import combinations

import torch
from torch import Tensor

from seqpack.batches.jagged import flattened
from seqpack.batches.schema import ROUTED_EXPERTS
from seqpack.batches.view import BatchView


def check_routed_experts(view: BatchView, layers: int, top_k: int, experts: int) -> None:
    """Raise ValueError unless the column is i16[tokens, layers, k] of a model of these sizes.

    A token's k experts in a layer are all given, and distinct, or all are -1.
    """
    if ROUTED_EXPERTS not in view:
        raise ValueError(
            f"the batch lacks {ROUTED_EXPERTS}, which routing_replay takes experts from: let the sampler tell them, or "
            "set routing_replay=False"
        )
    routed = flattened(view.parts(ROUTED_EXPERTS))
    if routed.shape[1:] != (layers, top_k) or routed.dtype != torch.int16:
        raise ValueError(
            f"{ROUTED_EXPERTS} must be int16 (tokens, {layers}, {top_k}): so many routed layers and experts a token; "
            f"got {routed.dtype} {tuple(routed.shape)}: it was sampled from another model"
        )
    wrong = (routed < -1) | (routed >= experts)
    if wrong.any():
        _refuse(view, wrong, f"the model's experts are 0 to {experts - 1}, or -1 where that is not known")
    unknown = routed < 0
    if (unknown.any(-1) != unknown.all(-1)).any():
        _refuse(view, unknown.any(-1) != unknown.all(-1), "some of its experts are known and some are not")
    for one, other in combinations(range(top_k), 2):
        twice = (routed[..., one] == routed[..., other]) & ~unknown[..., one]
        if twice.any():
            _refuse(view, twice, "one expert comes twice")


def _refuse(view: BatchView, wrong: Tensor, what: str) -> None:
    token, layer = (int(place) for place in wrong.nonzero()[0][:2])
    row = int(torch.searchsorted(torch.tensor(view.lengths).cumsum(0), token, right=True))
    raise ValueError(
        f"{ROUTED_EXPERTS} of sample {row}, token {token - sum(view.lengths[:row])}, layer {layer}: {what}"
    )
