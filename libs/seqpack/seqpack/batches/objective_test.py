from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from seqpack.batches.batch import make_batch, view_batch
from seqpack.batches.objective import Objective
from seqpack.batches.packed import PackedBatch, pack_sequences
from seqpack.batches.view import BatchView, Totals


@dataclass(frozen=True)
class MeanLogProb:
    required_keys: tuple[str, ...] = ()
    needs_entropy: bool = False

    def zero_gradient_rows(self, batch: TensorDict | BatchView) -> Tensor:
        view = view_batch(batch)
        return view.row_sums(view.trained) == 0

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, packed_batch: PackedBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -(log_probs * packed_batch.values["loss_mask"]).sum() / totals.tokens, {}


def test_shares_of_micro_batches_add_up_and_rows_of_zero_gradient_add_nothing() -> None:
    masks = [[False, True, True], [False], [False, False], [False, True]]
    batch = make_batch([{"input_ids": [1] * len(mask), "loss_mask": mask} for mask in masks])
    view, objective = view_batch(batch), MeanLogProb()
    assert isinstance(objective, Objective)
    quiet = objective.zero_gradient_rows(view)
    assert quiet.tolist() == objective.zero_gradient_rows(batch).tolist() == [False, True, True, False]

    def share(packed: PackedBatch) -> float:
        return float(objective(torch.arange(packed.num_tokens) + 1.0, None, packed, view.totals)[0])

    whole = [share(pack_sequences(view, [i])) for i in range(4)]
    kept = view.select((~quiet).nonzero().squeeze(1))
    assert sum(whole) == pytest.approx(-(2 + 3 + 2) / 3)
    assert sum(share(pack_sequences(kept, [i])) for i in range(2)) == sum(whole)


def test_what_lacks_a_method_is_no_objective() -> None:
    assert not isinstance(lambda log_probs, entropy, batch, totals: None, Objective)
