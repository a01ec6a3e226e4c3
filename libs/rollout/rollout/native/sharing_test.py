"""A sampler over a trainer's own tensors: the tokens and log-probs of one that is handed copies, and no copy."""

import asyncio
import copy
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.engine import Completion, Sampling
from rollout.errors import NotFiniteError
from rollout.native.engine import NativeEngine
from rollout.native.sharing import SharingEngine, StaleWeightsError
from rollout.sync.manifest import Manifest
from rollout.sync.transfer import WeightVoteFailed, share_weights
from rollout.testing.model import tiny_dense_model, tiny_mixture, tiny_model
from rollout.testing.pieces import pieces_of

PROMPTS = [[3, 4, 5], [6, 7], [3, 4, 5, 8, 9, 10], [3, 4, 5]]
HOW = Sampling(max_new_tokens=8, seed=5)


class Weights(NamedTuple):
    tensors: Mapping[str, Tensor]
    updates: Callable[[], int]


class Trainer:
    """Holds a model's weights, and writes steps into them without torch's notice, as fused kernels do."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.steps = model, 0

    def lend(self) -> Weights:
        return Weights({name: p.detach() for name, p in self.model.named_parameters()}, lambda: self.steps)

    def step(self) -> None:
        self.steps += 1
        noise = torch.Generator().manual_seed(self.steps)
        for parameter in self.model.parameters():
            written = parameter.data.view(-1)[4:]  # nor in the few elements that a fingerprint looks at
            written.add_(0.05 * torch.randn(written.shape, generator=noise))


def empty(model: PreTrainedModel) -> PreTrainedModel:
    """The class without memory for parameters; buffers as they are."""
    buffers = dict(model.named_buffers())
    made: PreTrainedModel = copy.deepcopy(model).to("meta")
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(made.get_submodule(owner), attribute, buffer.clone())
    made.tie_weights()
    return made


def told(done: list[Completion]) -> list[tuple[Any, ...]]:
    return [(c.ids, c.log_probs, c.policy_versions) for c in done]


def share(
    engine: SharingEngine, version: int, weights: Weights, all_reduce_ok: Callable[[bool], bool] | None = None
) -> None:
    asyncio.run(share_weights(engine, version, weights, all_reduce_ok=all_reduce_ok))


@pytest.mark.parametrize("make", [tiny_model, tiny_dense_model, tiny_mixture])
@pytest.mark.parametrize("decoder", ["auto", "module"])
def test_a_trainers_steps_are_sampled_as_from_copies(make: Callable[[], PreTrainedModel], decoder: Any) -> None:
    """Step by step, bit for bit, though torch's own count of writes tells nothing of them."""
    trainer = Trainer(make())
    copies = NativeEngine(copy.deepcopy(trainer.model), decoder=decoder)
    shared = SharingEngine(empty(trainer.model), trainer.lend(), decoder=decoder)
    seen = []
    for version in range(1, 4):
        seen.append(told(shared.generate_batch(PROMPTS, HOW)))
        assert seen[-1] == told(copies.generate_batch(PROMPTS, HOW))
        trainer.step()
        copies.load_weights(version, pieces_of(trainer.lend().tensors.items()))
        share(shared, version, trainer.lend())
        assert shared.version == copies.version == version
    assert seen[0] != seen[1] != seen[2]


def test_the_module_has_the_trainers_memory_and_ties() -> None:
    trainer = Trainer(tiny_model())
    model = empty(trainer.model)
    SharingEngine(model, trainer.lend())
    theirs = {name: p.data_ptr() for name, p in trainer.model.named_parameters(remove_duplicate=False)}
    mine = {name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)}
    assert mine == theirs
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(p.grad is None for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())


def test_nothing_is_sampled_between_an_update_and_its_hand_over() -> None:
    trainer = Trainer(tiny_model())
    engine = SharingEngine(empty(trainer.model), trainer.lend())
    trainer.step()
    with pytest.raises(StaleWeightsError, match="since version 0 was handed over"):
        engine.generate_batch(PROMPTS, HOW)
    with pytest.raises(StaleWeightsError, match="since version 0 was handed over"):
        asyncio.run(engine.generate(PROMPTS[0], HOW))
    share(engine, 1, trainer.lend())
    assert {v for c in engine.generate_batch(PROMPTS, HOW) for v in c.policy_versions} == {1}
    asyncio.run(engine.generate(PROMPTS[0], HOW))


def test_a_hand_over_drops_what_was_kept_of_earlier_answers() -> None:
    trainer = Trainer(tiny_model())
    engine = SharingEngine(empty(trainer.model), trainer.lend())
    (first,) = engine.generate_batch([PROMPTS[0]], HOW)
    follows = [*PROMPTS[0], *first.ids, 7]
    engine.generate_batch([follows], HOW)
    assert engine.num_prefill_tokens < len(PROMPTS[0]) + len(follows)
    trainer.step()
    share(engine, 1, trainer.lend())
    before = engine.num_prefill_tokens
    engine.generate_batch([follows], HOW)
    assert engine.num_prefill_tokens - before == len(follows)


def test_weights_that_lie_elsewhere_by_now_are_taken_from_there() -> None:
    """As after a trainer went to host memory and came back."""
    trainer = Trainer(tiny_model())
    model = empty(trainer.model)
    engine = SharingEngine(model, trainer.lend())
    old, kept = [p.data_ptr() for p in model.parameters()], [weakref.ref(p) for p in model.parameters()]
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.clone()
    trainer.step()
    share(engine, 1, trainer.lend())
    now = [p.data_ptr() for p in model.parameters()]
    assert now == [p.data_ptr() for p in trainer.model.parameters()]
    assert not set(now) & set(old)
    gc.collect()
    assert [one for one in kept if one() is not None] == [], "nothing holds on to what was lent before"
    expected = NativeEngine(copy.deepcopy(trainer.model), version=1).generate_batch(PROMPTS, HOW)
    assert told(engine.generate_batch(PROMPTS, HOW)) == told(expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), r"weights never arrived: model\.norm\.weight"),
        (lambda t: t.update(other=torch.zeros(2)), "unknown weight 'other'"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"model\.norm\.weight: shape \(5,\) does not fit"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32).bfloat16()}), "bfloat16 can't be shared by"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, device="meta")}), r"norm\.weight is on meta"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(48, 32)}), "two tensors are lent for them"),
        (lambda t: t.update({"model.norm.weight": torch.full((32,), torch.nan)}), "not finite"),
    ],
)
def test_what_is_not_the_modules_is_refused_by_name(change: Callable[[dict[str, Tensor]], Any], says: str) -> None:
    trainer = Trainer(tiny_model())
    good = trainer.lend()
    tensors = dict(good.tensors)
    change(tensors)
    with pytest.raises(ValueError, match=says):
        SharingEngine(empty(trainer.model), Weights(tensors, good.updates))
    engine = SharingEngine(empty(trainer.model), good)
    expected = told(engine.generate_batch(PROMPTS, HOW))
    with pytest.raises(ValueError, match=says):
        share(engine, 1, Weights(tensors, good.updates))
    assert engine.version == 0
    assert told(engine.generate_batch(PROMPTS, HOW)) == expected, "no update was made: the old version goes on"


def test_values_that_are_not_finite_keep_everybody_from_sampling() -> None:
    trainer = Trainer(tiny_model())
    engine = SharingEngine(empty(trainer.model), trainer.lend())
    trainer.step()
    trainer.model.model.norm.weight.data[3] = torch.inf
    with pytest.raises(NotFiniteError, match=r"model\.norm\.weight"):
        share(engine, 1, trainer.lend())
    with pytest.raises(StaleWeightsError):
        engine.generate_batch(PROMPTS, HOW)


@pytest.mark.parametrize("fails", ["propose", "commit"])
def test_where_another_process_can_not_none_goes_on(fails: str) -> None:
    """Its vote on the first phase or the second; a later hand-over, which all can take, ends it."""
    trainer = Trainer(tiny_model())
    engine = SharingEngine(empty(trainer.model), trainer.lend())
    trainer.step()
    votes = iter([fails != "propose", fails != "commit"])
    with pytest.raises(WeightVoteFailed, match="are of no version"):
        share(engine, 1, trainer.lend(), all_reduce_ok=lambda mine: mine and next(votes))
    assert engine.version == 0
    with pytest.raises(StaleWeightsError):
        engine.generate_batch(PROMPTS, HOW)
    version = 1 if fails == "propose" else 2
    share(engine, version, trainer.lend())
    assert {v for c in engine.generate_batch(PROMPTS, HOW) for v in c.policy_versions} == {version}


def test_a_number_counts_upwards_and_is_offered_first() -> None:
    trainer = Trainer(tiny_model())
    engine = SharingEngine(empty(trainer.model), trainer.lend(), version=3)
    with pytest.raises(ValueError, match="weights 3 are not newer than 3"):
        share(engine, 3, trainer.lend())
    with pytest.raises(ValueError, match="cannot commit weights 4: propose them first"):
        asyncio.run(engine.commit(4))


def test_copies_are_refused_and_the_trainers_weights_untouched() -> None:
    trainer = Trainer(tiny_model())
    engine = SharingEngine(empty(trainer.model), trainer.lend())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    pieces = pieces_of((name, torch.zeros_like(p)) for name, p in trainer.model.named_parameters())
    with pytest.raises(ValueError, match="nothing is copied"):
        engine.load_weights(1, pieces)
    with pytest.raises(ValueError, match="nothing is copied"):
        asyncio.run(engine.prepare(Manifest(1)))
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    assert engine.supports("shared_weights")
    assert not engine.supports("two_phase_weights")
