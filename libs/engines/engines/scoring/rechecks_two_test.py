"""Ranks that share sequences check themselves: each scores its rows alone and whole, by the stock model."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from engines import LogProbDifferenceError, TrainEngine
from engines.inputs.context_parallel import ShardedOps
from engines.proofs.forked_ranks import launch_forked
from engines.testing import executors
from engines.tiny import tiny_batch
from objectives import SFT

CHECK = "proof/log_prob_difference"


def engine(**options: Any) -> TrainEngine:
    return executors.engine(**{"recheck_rows": 2, **options})


def on_two_ranks() -> dict[str, Any]:
    """Train with context parallelism over both ranks, then with a fault of one of them."""
    out: dict[str, Any] = {}
    for mode in ("static:2", "dynamic"):
        built = engine(max_tokens_per_rank=16, context_parallel=mode, recheck_every=1)
        batch = tiny_batch([29, 3, 12, 5, 17, 2, 1, 6, 4])
        out[mode] = [built.train_batch(batch, SFT()) for _ in range(2)]
    real = ShardedOps.attention

    def shifted(self: ShardedOps, q: Tensor, *args: Any, **options: Any) -> Tensor:
        return real(self, q * (1.5 if dist.get_rank() else 1.0), *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedOps, "attention", shifted)
        try:
            built.train_batch(batch, SFT())
        except LogProbDifferenceError as error:
            out["fault"] = str(error)
    return out


def test_ranks_that_share_a_sequence_are_held_to_one_that_has_it_whole() -> None:
    ranks = launch_forked(on_two_ranks, (), world_size=2)
    for mode in ("static:2", "dynamic"):
        assert all(0 < one[CHECK] < 1e-5 for one in ranks[mode])
    assert "step 3: a sequence of 29 tokens" in ranks["fault"]
