"""A run that checks itself: planted faults end it at the next check, and the check changes no bit of what trains."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from engines import LogProbDifferenceError, LoraConfig, TrainEngine
from engines.families.registry import admitted
from engines.fast import layers
from engines.prove.generic_family import generic_family
from engines.prove.random_weights import randomize
from engines.scoring import rechecks
from engines.scoring.rechecks import MIN_TOKENS, Plain, choose_rows, differences
from engines.testing import executors
from engines.testing.executors import assert_same, inside, state_of
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT
from seqpack.adapters.context import LocalOps, PackedContext

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6]
CHECK = "proof/log_prob_difference"


def engine(**options: Any) -> TrainEngine:
    return executors.engine(**{"recheck_rows": 2, **options})


def curve(steps: int = 3, **options: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Train some steps; return metrics and the whole state after them."""
    built = engine(**options)
    torch.manual_seed(3)
    return [built.train_batch(tiny_batch(LENGTHS), SFT()) for _ in range(steps)], state_of(built)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "dense", "max_tokens_per_rank": 20},
        {"kind": "moe", "router_aux_loss_coef": 0.1, "gradient_checkpointing": True},
        {"kind": "dense", "weights": "replicated", "max_tokens_per_rank": 20},
        {"kind": "attention", "lora": LoraConfig(rank=2)},
        {"kind": "attention", "batching": "padded"},
    ],
)
def test_no_bit_of_a_run_changes(options: dict[str, Any]) -> None:
    (checked, state), (plain, wanted) = curve(recheck_every=1, **options), curve(recheck_rows=0, **options)
    noise = torch.get_rng_state()
    for one, other in zip(checked, plain, strict=True):
        found = {name: one.pop(name) for name in list(one) if name.startswith("proof/")}
        assert one == other
        assert 0 <= found[CHECK] <= found[CHECK + "_max"] < 1e-5
    assert_same(state, wanted)
    torch.manual_seed(3)
    assert torch.equal(noise, torch.get_rng_state())


def test_a_sequence_whose_angles_depend_on_its_length_is_not_cut() -> None:
    """Its first tokens alone have the short table of `longrope`, in the training pass all have the long one."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 4.0,
    }
    config = Phi3Config(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, original_max_position_embeddings=8, max_position_embeddings=32, rope_parameters=rope,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model: Any = Phi3ForCausalLM(config)
    randomize(model, torch.Generator().manual_seed(0))
    with admitted(config, generic_family(config)):
        built = engine(model=model, recheck_tokens=6)
        assert built.train_batch(tiny_batch([14, 3, 5]), SFT())[CHECK] < 1e-5


def test_the_first_batch_is_checked_then_one_every_so_many() -> None:
    metrics, _ = curve(6, recheck_every=2)
    assert [CHECK in one for one in metrics] == [True, False, True, False, True, False]
    metrics, _ = curve(3, recheck_every=0)
    assert [CHECK in one for one in metrics] == [True, False, False]


def test_a_resumed_run_has_the_metrics_of_a_straight_one_and_checks_its_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, resumed, faulty = (engine(recheck_every=3) for _ in range(3))
    built.train_batch(tiny_batch(LENGTHS), SFT())
    built.save(tmp_path / "one")
    straight = [built.train_batch(tiny_batch(LENGTHS), SFT()) for _ in range(3)]
    assert [CHECK in one for one in straight] == [False, False, True]
    resumed.load(tmp_path / "one")
    assert [resumed.train_batch(tiny_batch(LENGTHS), SFT()) for _ in range(3)] == straight
    faulty.load(tmp_path / "one")
    real = rechecks.differences
    monkeypatch.setattr(rechecks, "differences", lambda *both: tuple(one + 1 for one in real(*both)))
    with pytest.raises(LogProbDifferenceError):
        faulty.train_batch(tiny_batch(LENGTHS), SFT())


def test_a_step_without_gradient_leaves_the_check_to_the_next() -> None:
    built, batch = engine(recheck_every=0), tiny_batch(LENGTHS)
    idle = batch.clone()
    idle["advantages"].values().zero_()
    assert CHECK not in built.train_batch(idle, GRPO())
    assert CHECK in built.train_batch(batch, GRPO())


class _Faulty(LocalOps):
    """Operations with a fault that is switched on after the start."""

    on = False

    def attention(self, q: Tensor, k: Tensor, v: Tensor, context: PackedContext, *args: Any, **options: Any) -> Tensor:
        """Attend."""
        scale, window = args
        return super().attention(q, k, v, self.changed(context), scale, self.width(window, context), **options)

    def changed(self, context: PackedContext) -> PackedContext:
        return context

    def width(self, window: int | None, context: PackedContext) -> int | None:
        del context
        return window


class NoWindowFrom(_Faulty):
    """A window that is ignored where a sequence is longer than 10."""

    def width(self, window: int | None, context: PackedContext) -> int | None:
        return None if self.on and context.max_seqlen > 10 else window


class OneLayerLeaks(_Faulty):
    """Boundaries are dropped in the first layer alone."""

    def changed(self, context: PackedContext) -> PackedContext:
        edges = context.cu_seqlens[[0, -1]]
        return PackedContext(edges, int(edges[-1])) if self.on and len(context.mixed) == 1 else context


def windowed() -> Any:
    from transformers import AutoModelForCausalLM, MistralConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 48, "num_attention_heads": 4}
    config = MistralConfig(num_hidden_layers=2, num_key_value_heads=2, head_dim=8, sliding_window=4, **sizes)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("fault", [NoWindowFrom, OneLayerLeaks])
def test_a_fault_of_attention_ends_the_run_at_the_next_check(fault: type[_Faulty]) -> None:
    built = engine(model=windowed(), recheck_every=2, max_tokens_per_rank=30)
    executor, ops = inside(built), fault()
    object.__setattr__(executor.builder, "ops", ops)
    batch = tiny_batch(LENGTHS)
    assert built.train_batch(batch, SFT())[CHECK] < 1e-5
    _Faulty.on = True
    try:
        built.train_batch(batch, SFT())  # no check is due
        before = state_of(built)
        with pytest.raises(LogProbDifferenceError, match=r"step 3: a sequence of \d+ tokens .*compile off") as stop:
            built.train_batch(batch, SFT())
    finally:
        _Faulty.on = False
    assert stop.value.batch is batch
    assert_same(state_of(built), before)


def test_a_stale_weight_of_layer_functions_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions keep an MLP's values of their first call, while the optimizer moves the module's."""
    model = tiny_model("dense", scale=2.0)
    built = engine(model=model, recheck_every=1, lr=0.1)
    executor = inside(built)
    layers.use_layer_functions(executor.model, None)
    kept: dict[int, Any] = {}
    real = layers.mlp_weights

    def stale(norm: Any, mlp: Any) -> Any:
        weights: Any = real(norm, mlp)
        old = kept.setdefault(id(mlp), [weight.detach().clone() for weight in weights])
        return type(weights)(*(one + (other - one).detach() for one, other in zip(weights, old, strict=True)))

    assert built.train_batch(tiny_batch(LENGTHS), SFT())[CHECK] < 1e-5
    built.train_batch(tiny_batch(LENGTHS), SFT())  # functions and stock modules agree on weights that moved
    monkeypatch.setattr(layers, "mlp_weights", stale)
    built.train_batch(tiny_batch(LENGTHS), SFT())
    with pytest.raises(LogProbDifferenceError, match="step 4"):
        built.train_batch(tiny_batch(LENGTHS), SFT())


def test_of_a_long_sequence_the_beginning_is_checked() -> None:
    built, seen = engine(recheck_tokens=6, recheck_every=1), []
    score = inside(built).score_plain

    def watched(micro_batches: Any, *args: Any) -> None:
        seen.append([one.packed.num_tokens for one in micro_batches])
        score(micro_batches, *args)

    inside(built).score_plain = watched
    assert built.train_batch(tiny_batch([14, 9, 20]), SFT())[CHECK] < 1e-5
    assert seen == [[6, 6]]
    padded = engine(recheck_tokens=6, recheck_every=1, batching="padded")
    assert CHECK not in padded.train_batch(tiny_batch([14, 9, 20]), SFT())  # rows are scored whole or not at all


def test_rows_are_a_long_one_a_short_one_behind_others_and_some_between() -> None:
    lengths = dict(enumerate([5, 2, 9, 2, 7, 30, 1]))
    assert choose_rows(lengths, [0, 3], 2) == (5, 3)
    assert choose_rows(lengths, [], 2) == (5, 6)
    assert choose_rows(lengths, [0, 3], 1) == (5,)
    assert len({*choose_rows(lengths, [3], 5)}) == 5
    assert set(choose_rows(lengths, [3], 9)) == set(lengths)
    assert choose_rows({}, [], 2) == ()


def test_differences_are_of_trained_tokens_and_few_count_as_more() -> None:
    draw = random.Random(0)
    plain = torch.tensor([draw.uniform(-3, 0) for _ in range(40)])
    trained = torch.arange(40) % 2 == 1
    passed = torch.where(trained, plain + 0.5, 7.0)
    rms, largest, tokens = differences(passed, Plain(plain, trained))
    assert [float(rms), float(largest), float(tokens)] == pytest.approx([0.5, 0.5, 20.0])
    few = trained & (torch.arange(40) < 8)
    assert float(differences(passed, Plain(plain, few))[0]) == pytest.approx(0.5 * (4 / MIN_TOKENS) ** 0.5)
    passed[1] = torch.nan
    assert float(differences(passed, Plain(plain, trained))[0]) == torch.inf
