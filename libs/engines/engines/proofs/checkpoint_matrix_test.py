"""A part of each table that `python -m engines checkpoints` prints, and that it would show what is wrong."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engines.proofs import checkpoint_matrix
from engines.proofs.checkpoint_matrix import LOSS, MOVED, RESUMED, Case, move_all, resume_all


def test_every_way_to_train_meets_every_other_in_the_tables() -> None:
    """Full or LoRA, dense or experts, ranks that share sequences or not, and where weights and moments are held."""
    places: list[dict[str, Any]] = [{}, {"offloaded": True}, {"on_host": "optimizer"}, {"on_host": "parameters"}]
    for model, lora, where in itertools.product(("dense", "moe"), (0, 2), places):
        if lora and where == places[-1]:
            continue  # no test has run it: a proof admits it
        assert {Case(model, context_parallel=c, lora=lora, ranks=2, **where) for c in ("off", "dynamic")} <= {*RESUMED}
        assert Case(model, lora=lora, **where) in {*RESUMED} & {*MOVED}
    assert len(set(RESUMED)) == len(RESUMED)
    assert len(set(MOVED)) == len(MOVED)


def test_resumed_runs_have_the_bits_of_straight_ones() -> None:
    cases = [
        Case("moe", weights="replicated"),
        Case("dense", batching="padded", master_dtype="bfloat16"),
        Case("moe", context_parallel="dynamic", ranks=2),
        Case("dense", weights="replicated", ranks=2),
        Case("moe", copies=2, ranks=2),
        Case("moe", offloaded=True, lora=2, ranks=2),
        Case("moe", context_parallel="dynamic", on_host="parameters", ranks=2),
    ]
    assert set(cases) <= set(RESUMED)
    assert [equal for _, *equal in resume_all(cases)] == [[True, True]] * 7


def assert_moved(worlds: Sequence[int]) -> None:
    cases = [Case("moe"), Case(weights="replicated"), Case(copies=2)]
    assert set(cases) <= set(MOVED)
    results = list(move_all(cases, worlds))
    assert len(results) == 3 * len(worlds) ** 2
    for case, saved, loaded, state, difference in results:
        assert state, (case, saved, loaded)
        assert difference <= LOSS, (case, saved, loaded)


def test_a_checkpoint_of_some_ranks_fits_others() -> None:
    """Four ranks: checkpoint_matrix_long_test, and copies of shards in fsdp2's hybrid_test."""
    assert_moved((1, 2))


def test_a_cell_that_is_wrong_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checkpoint_matrix, "resume_all", lambda cases: [(case, True, False) for case in cases])
    monkeypatch.setattr(checkpoint_matrix, "move_all", lambda cases, worlds: [(Case(), 1, 2, True, 2 * LOSS)])
    assert checkpoint_matrix.main([Case()]) == 1
    assert "| 1 | equal | DIFFERENT |" in capsys.readouterr().out


def test_a_digest_sees_every_tensor() -> None:
    digests = []

    class Built:
        step = 1
        executor = None

    for value in (1.0, 2.0):
        state = {"model": {"a": torch.ones(2)}, "optimizer": {"state": {"a": {"exp_avg": torch.full((2,), value)}}}}
        built = Built()
        built.executor = type("Executor", (), {"state": lambda self, state=state: state})()
        digests.append(checkpoint_matrix._digest(built))
    assert digests[0] != digests[1]
