"""The step in one process, over every executor: against a plain loop, any micro-batches, and its refusals."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.weak import TensorWeakRef

from engines import EngineConfig, LocalBatch, build_engine
from engines.testing.executors import BUILDERS, EPS, LENGTHS, assert_same_weights, engine, inside, weights
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_config, tiny_model
from objectives import GRPO, SFT
from seqpack import Totals, index_select, view_batch
from seqpack.batches.batch import jagged

OBJECTIVE = GRPO(kl_coef=0.1, entropy_coef=0.05, off_policy="truncate", aggregation="sequence")
EXECUTORS = pytest.mark.parametrize("executor", BUILDERS)


def plain_loss(model: Any, batch: TensorDict, temperature: float = 1.0) -> torch.Tensor:
    total = torch.zeros(())
    weights = batch.get("loss_weights", batch["loss_mask"])
    for ids, mask in zip(batch["input_ids"].unbind(), weights.unbind(), strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature
        chosen = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        total = total - (chosen * mask[1:]).sum() / Totals.of(batch).tokens
    return total


def plain_loop(
    model: Any, batches: list[TensorDict], temperature: float = 1.0, steps: int = 3
) -> tuple[list[float], list[float]]:
    """Rows one by one through the untouched model, torch's AdamW, no packing, no sharding: the oracle of a step."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), eps=EPS)
    losses, norms = [], []
    for batch in batches[:steps]:
        total = plain_loss(model, batch, temperature)
        total.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, norms


@pytest.mark.parametrize(
    ("executor", "batching", "weighted"),
    [("fsdp2", "packed", True), ("fsdp2", "padded", False), ("plain", "packed", False), ("plain", "packed", True)],
)
def test_steps_equal_a_plain_loop(executor: str, batching: str, weighted: bool) -> None:
    batches = [tiny_batch(LENGTHS, seed=seed) for seed in range(3)]
    for batch in batches if weighted else ():
        batch["loss_weights"] = -batch["old_log_probs"]  # some number a trained token, 0 elsewhere
    built = engine(executor=executor, batching=batching, max_tokens_per_rank=20, temperature=0.8)
    oracle = copy.deepcopy(tiny_model("dense", scale=2.0))
    losses, norms = plain_loop(oracle, batches, temperature=0.8)
    results = [built.train_batch(batch, SFT()) for batch in batches]
    assert [r["loss"] for r in results] == pytest.approx(losses, rel=1e-5)
    assert [r["grad_norm"] for r in results] == pytest.approx(norms, rel=1e-4)
    assert (results[0]["loss"] == pytest.approx(results[0]["nll"], rel=1e-6)) is not weighted
    assert results[-1]["step"] == 3.0
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(
            weights(built)[name].view_as(parameter), parameter.data, atol=2e-4, rtol=2e-4, msg=name
        )


@pytest.mark.parametrize(("executor", "options"), [("fsdp2", {}), ("fsdp2", {"weights": "replicated"}), ("plain", {})])
def test_gradients_add_up_until_an_update_with_settings_of_its_own(executor: str, options: dict[str, Any]) -> None:
    """The second step has the configuration's settings again, and the bits of `train_batch`."""
    built, oracle = engine(executor=executor, **options), copy.deepcopy(tiny_model("dense", scale=2.0))
    batches = [tiny_batch(LENGTHS[:3], seed=seed) for seed in range(3)]  # a single micro-batch
    total = torch.stack([plain_loss(oracle, batch) for batch in batches]).sum()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.3)
    kinds = [([p for p in oracle.parameters() if (p.ndim >= 2) == decays], 0.4 * decays) for decays in (True, False)]
    groups = [{"params": parameters, "weight_decay": decay} for parameters, decay in kinds]
    torch.optim.AdamW(groups, lr=5e-2, betas=(0.5, 0.8), eps=3e-3).step()
    for batch in batches:
        built.forward_backward(batch, SFT())
    found = built.optimizer_step(lr=5e-2, betas=(0.5, 0.8), eps=3e-3, weight_decay=0.4, grad_clip=0.3)
    assert (found["lr"], found["step"]) == (5e-2, 1)
    assert [found["loss"], found["grad_norm"]] == pytest.approx([total.item(), norm.item()], rel=1e-5)
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(weights(built)[name].view_as(parameter), parameter.data, atol=1e-4, rtol=1e-4)
    whole, halves = (engine(executor=executor, **options) for _ in "ab")
    for batch in batches:
        want = whole.train_batch(batch, SFT())
        assert halves.forward_backward(batch, SFT()) | halves.optimizer_step() == want
    assert all(torch.equal(value, weights(halves)[name]) for name, value in weights(whole).items())


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_packed_equals_padded_in_any_micro_batches(kind: str) -> None:
    batch = tiny_batch(LENGTHS)
    want = engine(kind=kind, max_tokens_per_rank=1000)
    first = want.train_batch(batch, OBJECTIVE)
    assert first["micro_batches"] == 1.0
    for options in (
        {"max_tokens_per_rank": 15},
        {"batching": "padded"},
        {"batching": "padded", "max_tokens_per_rank": 31},
        {"executor": "plain"},
        {"executor": "plain", "max_tokens_per_rank": 15},
    ):
        other = engine(kind=kind, **options)
        result = other.train_batch(batch, OBJECTIVE)
        for key in ("loss", "grad_norm", "kl", "entropy", "ratio", "mismatch/abs", "mismatch/abs/max", "policy_loss"):
            assert result[key] == pytest.approx(first[key], rel=1e-4, abs=1e-6), key
        assert result["tokens"] == sum(LENGTHS)


def test_gradient_checkpointing_and_resharding_change_nothing() -> None:
    batch = tiny_batch(LENGTHS)
    want = engine(lr=1e-3)
    want.train_batch(batch, SFT())
    for options in ({"gradient_checkpointing": True}, {"reshard_after_forward": False}, {"logit_chunk": 3}):
        other = engine(lr=1e-3, **options)
        other.train_batch(batch, SFT())
        assert_same_weights(want, other, tolerance=1e-5)


@EXECUTORS
def test_rows_without_a_signal_are_not_computed_and_change_nothing(executor: str) -> None:
    batch = tiny_batch(LENGTHS)
    rows = list(batch["advantages"].unbind())
    keep = [True, False, False, True, False, True, True, False]
    batch["advantages"] = jagged([row * weight for row, weight in zip(rows, keep, strict=True)])
    results = [
        engine(executor=executor, max_tokens_per_rank=20, skip_zero_gradient_rows=skip).train_batch(batch, GRPO())
        for skip in (True, False)
    ]
    assert [r["computed_sequences"] for r in results] == [4.0, 8.0]
    assert [r["sequences"] for r in results] == [8.0, 8.0]
    for key in ("loss", "grad_norm", "policy_loss", "trained_tokens", "tokens"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-5), key


@EXECUTORS
def test_a_batch_without_any_signal_still_makes_a_step(executor: str) -> None:
    batch = tiny_batch(LENGTHS)
    batch["advantages"] = jagged([0 * row for row in batch["advantages"].unbind()])
    result = engine(executor=executor).train_batch(batch, GRPO())
    assert (result["loss"], result["grad_norm"], result["step"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(("executor", "batching"), [("fsdp2", "packed"), ("fsdp2", "padded"), ("plain", "packed")])
def test_forward_scores_every_token(executor: str, batching: str) -> None:
    batch = tiny_batch(LENGTHS)
    built = engine(executor=executor, batching=batching, max_tokens_per_rank=16, temperature=0.7)
    scored = built.forward(batch, entropy=True)
    for i, ids in enumerate(batch["input_ids"].unbind()):
        assert scored["log_probs"][i].shape == ids.shape
        assert scored["log_probs"][i][0] == 0
    model = tiny_model("dense", scale=2.0)
    for i, ids in enumerate(batch["input_ids"].unbind()):
        table = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float() / 0.7, -1)[:-1]
        torch.testing.assert_close(
            scored["log_probs"][i][1:], table.gather(1, ids[1:, None])[:, 0], atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(scored["entropy"][i][1:], -(table.exp() * table).sum(-1), atol=1e-4, rtol=1e-4)
    warmer = built.forward(batch, temperature=1.0)
    assert set(warmer.keys()) == {"log_probs"}
    assert not torch.allclose(warmer["log_probs"].values(), scored["log_probs"].values())


@EXECUTORS
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_scores_of_the_engine_are_those_it_trains_on(executor: str, dropout: float) -> None:
    """old_log_probs from forward() give a ratio of one in the first step, whatever dropout the model asks for."""
    batch = tiny_batch(LENGTHS)
    model = tiny_model("dense", scale=2.0, attention_dropout=dropout)
    built = engine(executor=executor, model=model, max_tokens_per_rank=20)
    batch["old_log_probs"] = built.forward(batch)["log_probs"]
    result = built.train_batch(batch, GRPO())
    assert result["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert result["approx_kl"] == pytest.approx(0.0, abs=1e-7)


@EXECUTORS
def test_learning_rate_zero_and_schedule(executor: str) -> None:
    built = engine(executor=executor, lr=1e-2, warmup_steps=2, lr_schedule="linear", total_steps=4)
    batch = tiny_batch(LENGTHS)
    assert [round(built.train_batch(batch, SFT())["lr"], 6) for _ in range(5)] == [0.005, 0.01, 0.01, 0.005, 0.0]
    before = weights(built)
    built.train_batch(batch, SFT())
    for name, value in weights(built).items():
        assert torch.equal(value, before[name])


def test_bfloat16_compute_with_float32_weights() -> None:
    batch = tiny_batch(LENGTHS)
    want = engine(max_tokens_per_rank=20).train_batch(batch, SFT())
    built = engine(max_tokens_per_rank=20, dtype="bfloat16")
    got = built.train_batch(batch, SFT())
    assert got["loss"] == pytest.approx(want["loss"], rel=0.03)
    assert all(value.dtype == torch.float32 for value in weights(built).values())
    losses = [built.train_batch(batch, SFT())["loss"] for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]


def test_dropout_adds_no_noise() -> None:
    """Scores with dropout in the model's config are those without it, and the gradient is too."""
    batch = tiny_batch(LENGTHS)
    want = engine(max_tokens_per_rank=20)
    for options in ({}, {"batching": "padded"}, {"gradient_checkpointing": True}):
        noisy = engine(model=tiny_model("dense", scale=2.0, attention_dropout=0.5), max_tokens_per_rank=20, **options)
        scores = [noisy.forward(batch)["log_probs"].values() for _ in range(2)]
        assert torch.equal(scores[0], scores[1])
        torch.testing.assert_close(scores[0], want.forward(batch)["log_probs"].values(), atol=1e-5, rtol=1e-5)
        norm = noisy.train_batch(batch, SFT())["grad_norm"]
        assert norm == pytest.approx(engine(max_tokens_per_rank=20).train_batch(batch, SFT())["grad_norm"], rel=1e-4)


def test_gradient_checkpointing_recomputes_the_layers() -> None:
    calls = []
    for checkpointing in (False, True):
        built = engine(gradient_checkpointing=checkpointing)
        norm = inside(built).model.model.layers[0].input_layernorm
        handle = norm.register_forward_hook(lambda *_: calls.append(1))
        built.train_batch(tiny_batch(LENGTHS), SFT())
        handle.remove()
        calls.append(0)
    assert calls == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("options", [{}, {"batching": "padded"}, {"weights": "replicated"}], ids=str)
def test_inputs_of_layers_on_the_host_change_no_bit(kind: str, options: dict[str, Any]) -> None:
    curves, built = [], []
    moved: list[dict[str, Any]] = [{}, {"gradient_checkpointing": True, "activation_offload": True}]
    for changes in moved:
        built.append(engine(kind=kind, max_tokens_per_rank=31, **options, **changes))
        curves.append([built[-1].train_batch(tiny_batch(LENGTHS, seed=seed), SFT()) for seed in range(2)])
    assert curves[0] == curves[1]
    assert_same_weights(built[0], built[1], tolerance=0.0)


@pytest.mark.parametrize("moved", [False, True])
def test_the_inputs_of_a_layer_are_freed_once_they_are_on_the_host(moved: bool) -> None:
    """Without offload they live until the backward pass."""
    built, alive, inputs = engine(gradient_checkpointing=True, activation_offload=moved), [], []
    layers = inside(built).model.model.layers
    # First of all hooks, as FSDP2's gives the layer a tensor that is none of the checkpoint's.
    layers[2].register_forward_pre_hook(lambda _, args: inputs.append(TensorWeakRef(args[0])), prepend=True)
    objective = SFT()

    class Looking(SFT):
        def __call__(self, *args: Any) -> Any:
            gc.collect()
            alive.append([reference() is not None for reference in inputs])
            return objective(*args)

    built.train_batch(tiny_batch(LENGTHS), Looking())
    assert alive == [[not moved]]


@EXECUTORS
def test_parts_of_a_batch_in_one_process(executor: str) -> None:
    """All rows are this rank's: in any order they give the whole batch's step."""
    batch = tiny_batch(LENGTHS)
    rows = [5, 2, 7, 0, 1, 3, 6, 4]
    batch["advantages"] = jagged([r * (i % 3 > 0) for i, r in enumerate(batch["advantages"].unbind())])
    part = LocalBatch(index_select(batch, rows), tuple(rows), tuple(LENGTHS))
    whole, parts = (engine(executor=executor, max_tokens_per_rank=20) for _ in range(2))
    want, got = whole.train_batch(batch, GRPO()), parts.train_batch(part, GRPO())
    for key in ("loss", "grad_norm", "ratio", "tokens", "sequences", "computed_tokens", "computed_sequences"):
        # The loss is a difference of larger terms, so that its last digits are rounding.
        assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-7), key
    scores = parts.forward(part, entropy=True)
    for key in ("log_probs", "entropy"):
        expected = parts.forward(batch, entropy=True)[key]
        for place, row in enumerate(rows):
            torch.testing.assert_close(scores[key][place], expected[row], atol=1e-5, rtol=1e-5)


@EXECUTORS
def test_a_view_trains_like_its_batch(executor: str) -> None:
    batch = tiny_batch(LENGTHS)
    built = [engine(executor=executor) for _ in range(2)]
    assert built[0].train_batch(view_batch(batch), SFT()) == built[1].train_batch(batch, SFT())


@EXECUTORS
def test_parts_that_do_not_fit_are_refused(executor: str) -> None:
    batch = tiny_batch([5, 3])
    for rows, lengths, message in [
        ((0,), (5, 3), "names 1 rows"),
        ((1, 1), (5, 3), "twice"),
        ((0, 2), (5, 3), "row 2 is not in"),
        ((0, 1), (5, 4), "row 1 has 3 tokens here, lengths says 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            LocalBatch(batch, rows, lengths)
    part = LocalBatch(index_select(batch, [1]), (1,), (5, 3))
    with pytest.raises(ValueError, match="rank 0 of the plan lacks a row"):
        engine(executor=executor).train_batch(part, SFT())


@EXECUTORS
def test_reference_policy_only_scores(executor: str) -> None:
    built = engine(executor=executor, trainable=False)
    batch = tiny_batch(LENGTHS)
    assert not built.forward(batch)["log_probs"].requires_grad
    with pytest.raises(ValueError, match="trainable=False"):
        built.train_batch(batch, SFT())


@EXECUTORS
def test_offload_and_onload(executor: str) -> None:
    built, stayed = (engine(executor=executor) for _ in range(2))
    batch = tiny_batch(LENGTHS)
    for one in (built, stayed):
        one.train_batch(batch, SFT())
    built.offload()
    with pytest.raises(ValueError, match="onload"):
        built.train_batch(batch, SFT())
    built.onload()
    for one in (built, stayed):
        one.train_batch(batch, SFT())
    assert_same_weights(stayed, built, tolerance=0.0)


@EXECUTORS
def test_export_equals_the_state_dict(executor: str) -> None:
    built = engine(executor=executor)
    state = tiny_model("dense", scale=2.0).state_dict()
    exported = weights(built)
    assert set(state) - set(exported) == {"lm_head.weight"}  # tied to the embedding: exported once
    for name, value in exported.items():
        assert torch.equal(value, state[name].flatten())
    small = list(built.export_weights(max_bytes=64))
    assert max(part.flat.numel() * part.flat.element_size() for part in small) <= 64


@EXECUTORS
def test_plain_facts(executor: str) -> None:
    built = engine(executor=executor)
    metadata = built.state_summary()
    assert metadata["world_size"] == 1
    assert metadata["dtype"] == "float32"
    assert metadata["parameters"] == sum(p.numel() for p in tiny_model("dense").parameters())
    reason = (
        "on a CPU the plain layers are as fast"
        if executor == "fsdp2"
        else "the plain executor calls stock transformers"
    )
    assert metadata["compiled"] == f"no: {reason}"
    assert built.supports("packed")
    assert not built.supports("tensor_parallel")


def test_facts_say_why_layers_are_not_compiled() -> None:
    assert engine(compile="off").state_summary()["compiled"] == "no: compile='off'"
    padded = engine(batching="padded").state_summary()["compiled"]
    assert padded == "no: layers are compiled for packed batches alone: set batching='packed'"


def test_a_model_that_cannot_be_had_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model directory"):
        build_engine(EngineConfig(model=str(tmp_path / "absent"), device="cpu"))
    with pytest.raises(ValueError, match=r"config\.json"):
        build_engine(EngineConfig(model=str(tmp_path), device="cpu"))
    with pytest.raises(ValueError, match="no model"):
        build_engine(EngineConfig(device="cpu"))
    with pytest.raises(ValueError, match="not both"):
        build_engine(EngineConfig(model="here", device="cpu"), tiny_config())


@EXECUTORS
def test_batches_that_cannot_be_trained_are_refused_with_the_fix(executor: str) -> None:
    batch = tiny_batch(LENGTHS)
    with pytest.raises(ValueError, match="lacks advantages"):
        engine(executor=executor).train_batch(batch.exclude("advantages"), GRPO())
    with pytest.raises(ValueError, match="14"):
        engine(executor=executor, max_tokens_per_rank=13).train_batch(batch, SFT())
    with pytest.raises(ValueError, match="no token"):
        engine(executor=executor).train_batch(tiny_batch([1, 1]), SFT())
    with pytest.raises(ValueError, match="function is no objective, it lacks required_keys"):
        engine(executor=executor).train_batch(batch, lambda *args: args)  # type: ignore[arg-type]
    batch["pixel_values"] = jagged([torch.zeros(2, 4)] * len(LENGTHS), 0)
    for call in (
        lambda: engine(executor=executor).train_batch(batch, SFT()),
        lambda: engine(executor=executor).forward(batch),
    ):
        with pytest.raises(ValueError, match="has pixel_values: leave them out"):
            call()
