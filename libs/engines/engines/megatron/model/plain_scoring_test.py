"""Megatron's stages, one sequence alone by plain operations, give what FSDP2's stock model gives, and find a fault."""

from typing import Any

import pytest

from engines import LogProbDifferenceError
from engines.proofs.megatron_layouts import LayoutCase, engine_of
from engines.testing.executors import assert_same, inside, state_of
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9]
CHECK = "proof/log_prob_difference"


@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3.5 MoE"])
def test_no_bit_of_a_step_changes_and_the_bound_holds(family: str) -> None:
    found = []
    for rows in (2, 0):
        built = engine_of(LayoutCase(family), recheck_rows=rows, recheck_every=1)
        found.append(([built.train_batch(tiny_batch(LENGTHS), SFT()) for _ in range(2)], state_of(built)))
    (checked, state), (plain, wanted) = found
    for one, other in zip(checked, plain, strict=True):
        proof = {name: one.pop(name) for name in list(one) if name.startswith("proof/")}
        assert one == other
        assert 0 <= proof[CHECK] < 1e-5
    assert_same(state, wanted)


def test_attention_over_a_lost_boundary_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine_of(LayoutCase("Qwen3.5"))
    real = inside(built)._packed

    def joined(*args: Any) -> Any:
        packed = real(*args)
        edges = packed.context.cu_seqlens[[0, -1]]
        packed.context.cu_seqlens, packed.context.max_seqlen = edges, int(edges[-1])
        return packed

    monkeypatch.setattr(inside(built), "_packed", joined)
    with pytest.raises(LogProbDifferenceError, match="step 1"):
        built.train_batch(tiny_batch(LENGTHS), SFT())
