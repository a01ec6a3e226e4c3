"""The trainer of a run over a real engine: what it scores, exports and shares, and the reference model of its step."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from apps.common.cluster import Cluster
from apps.grpo.step import NOTHING, GrpoTrainer, correction_line, train_on
from apps.grpo.step_test import CONFIG, batch_with_advantages, episode
from engines import EngineConfig, LoraConfig, SharedParameters, TrainEngine, build_engine
from engines.testing.one_rank import one_rank  # noqa: F401  a group for every test
from engines.tiny import tiny_model
from objectives import GRPO
from schedules.config import ScheduleConfig
from seqpack.batches.batch import jagged


def engine_of(seed: int = 0, trainable: bool = True, kind: str = "dense", **options: Any) -> TrainEngine:
    """A tiny model whose vocabulary holds the tokens of the step's batch."""
    config = EngineConfig(device="cpu", lr=1e-2, **options)
    return build_engine(config, tiny_model(kind, seed=seed, num_hidden_layers=1, vocab_size=64), trainable)


def trainer_of(**options: Any) -> GrpoTrainer:
    return GrpoTrainer(CONFIG, engine_of(**options))


def test_log_probs_are_the_engines() -> None:
    trainer, batch = trainer_of(), batch_with_advantages()
    rows = trainer.log_probs(batch)
    assert [len(row) for row in rows] == [len(row) for row in batch["input_ids"].unbind()]
    assert torch.equal(torch.cat(list(rows)), trainer.engine.forward(batch)["log_probs"].values())


def test_a_step_of_failed_episodes_trains_nothing() -> None:
    trainer = trainer_of()
    result = trainer.train(0, [episode(None, group) for group in range(3)])
    assert (result.metrics, result.advantages) == (NOTHING, [0.0, 0.0, 0.0])
    assert result.metrics is not NOTHING


def test_a_batch_without_a_trained_token_trains_nothing() -> None:
    batch, engine = batch_with_advantages(), engine_of()
    batch["loss_mask"] = jagged([torch.zeros_like(row) for row in batch["loss_mask"].unbind()])
    assert train_on(batch, CONFIG, engine) == NOTHING
    assert engine.state_summary()["step"] == 0


@pytest.mark.parametrize("module_names", [False, True])
def test_whole_weights_are_exported_under_either_names(module_names: bool) -> None:
    """Experts are one tensor a layer in the module, and one an expert on disk."""
    trainer = GrpoTrainer(CONFIG, engine_of(kind="moe"))
    export = trainer.export_weights(module_names)
    assert export.adapter is None
    pieces = {piece.name: piece.flat for piece in export.pieces}
    expected = {piece.name: piece.flat for piece in trainer.engine.export_weights(live=module_names)}
    assert pieces.keys() == expected.keys()
    assert all(torch.equal(pieces[name], flat) for name, flat in expected.items())


@pytest.mark.parametrize("module_names", [False, True])
def test_of_an_adapter_only_its_own_weights_are_exported(module_names: bool) -> None:
    trainer = trainer_of(lora=LoraConfig(rank=3, alpha=6.0, targets=("up_proj",)))
    export = trainer.export_weights(module_names)
    assert export.adapter is not None
    assert (export.adapter.rank, export.adapter.scale) == (3, 2.0)
    assert [name.endswith("up_proj") for name in export.adapter.layers] == [True]
    shapes = sorted(piece.shape for piece in export.pieces)
    assert len(shapes) == 2
    assert all(3 in shape for shape in shapes)


def test_a_sampler_shares_the_engines_tensors_until_they_move() -> None:
    trainer = trainer_of()
    shared = trainer.shared_weights()
    assert isinstance(shared, SharedParameters)
    places = {tensor.data_ptr() for tensor in shared.tensors.values()}
    assert places <= {p.data_ptr() for p in trainer.engine.executor.model.parameters()}  # type: ignore[attr-defined]


def test_the_penalty_is_to_the_reference_model() -> None:
    """The policy's own weights as reference: a penalty of zero; other weights: the k3 estimate of what both score."""
    objective = GRPO(kl_coef=0.5)
    config = replace(CONFIG, objective=objective)
    for seed in (0, 1):
        batch, engine = batch_with_advantages(), engine_of()
        engine.reference = engine_of(seed, trainable=False)
        ours, other = (one.forward(batch)["log_probs"] for one in (engine, engine.reference))
        log_ratio = (other.values() - ours.values())[batch["loss_mask"].values()].double()
        expected = float((log_ratio.exp() - 1 - log_ratio).mean())
        metrics = train_on(batch, config, engine)
        assert torch.equal(batch["ref_log_probs"].values(), other.values())
        assert metrics["train/kl"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert (expected > 0.01) == bool(seed)


def test_one_mini_batch_is_the_batch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is made of it."""
    engine, seen = engine_of(), []
    real = engine.train_batch

    def noted(batch: Any, objective: Any) -> Any:
        seen.append(batch)
        return real(batch, objective)

    monkeypatch.setattr(engine, "train_batch", noted)
    batch = batch_with_advantages()
    train_on(batch, CONFIG, engine)
    assert len(seen) == 1
    assert seen[0] is batch


def test_weights_that_nobody_named_are_told_where_responses_are_sampled_ahead() -> None:
    ahead = replace(CONFIG, cluster=Cluster(schedule=ScheduleConfig("fully_async")))
    assert correction_line(CONFIG) is None
    assert correction_line(replace(ahead, objective=GRPO(off_policy="truncate"))) is None
    assert str(correction_line(replace(ahead, objective=GRPO(off_policy=None)))).startswith(
        "off-policy weights: mask, as"
    )
