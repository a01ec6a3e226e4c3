"""Experts: the load that a step reports, and tokens sent to the experts of a batch instead of the router's own."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F  # noqa: N812

from engines import EngineConfig, TrainEngine, build_engine
from engines.fsdp2.sharding import whole
from engines.launch import ensure_group
from engines.proofs.family_cases import CASES
from engines.proofs.forked_ranks import launch_forked
from engines.testing.executors import inside
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT
from seqpack.batches.batch import jagged
from seqpack.batches.schema import ROUTED_EXPERTS

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6]
LAYERS, EXPERTS, TOP_K = 2, 4, 2
VARIANTS = {
    "one": {"max_tokens_per_rank": 1000},
    "many": {"max_tokens_per_rank": 15},
    "recomputed": {"max_tokens_per_rank": 15, "gradient_checkpointing": True},
    "padded": {"max_tokens_per_rank": 31, "batching": "padded"},
}
RAW_TOP_K = next(case for case in CASES if case.model_type == "qwen3_next" and "raw top k" in case.switches)


def model(kind: str = "moe", coefficient: float = 0.0) -> Any:
    if kind == "raw":
        return RAW_TOP_K.model()
    return tiny_model(
        kind, scale=4.0, num_hidden_layers=LAYERS, output_router_logits=True, router_aux_loss_coef=coefficient
    )


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", "lr": 1e-2, "eps": 1e-2, "weight_decay": 0.0, "grad_clip": None, **options})


def weights(built: TrainEngine) -> dict[str, torch.Tensor]:
    return {part.name: part.flat.clone() for part in built.export_weights(2**40, live=True)}


def routers_of(stock: Any) -> list[Any]:
    return [module for module in stock.modules() if type(module).__name__.endswith("TopKRouter")]


def chosen_by(stock: Any, batch: TensorDict) -> list[torch.Tensor]:
    """i16[tokens, layers, k] a row: what the routers of the stock model choose, one sequence at a time."""
    rows, chosen = [], []
    handles = [router.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for router in routers_of(stock)]
    with torch.no_grad():
        for ids in batch["input_ids"].unbind():
            chosen.clear()
            stock(input_ids=ids[None], use_cache=False)
            rows.append(torch.stack(chosen, dim=1).to(torch.int16))
    for handle in handles:
        handle.remove()
    return rows


def with_experts(batch: TensorDict, rows: list[torch.Tensor]) -> TensorDict:
    batch = batch.clone()
    batch[ROUTED_EXPERTS] = jagged(rows, 0)
    return batch


def other_experts(count: int, layers: int = LAYERS, seed: int = 1) -> list[torch.Tensor]:
    """Random experts, different ones of each token, and a third of the tokens unknown."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for length in LENGTHS[:count]:
        some = torch.rand(length, layers, EXPERTS, generator=rng).topk(TOP_K).indices.to(torch.int16)
        some[torch.rand(length, generator=rng) < 0.3] = -1
        rows.append(some)
    return rows


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("kind", ["moe", "next"])
def test_replaying_its_own_choice_changes_nothing(kind: str, options: dict[str, Any]) -> None:
    batch = tiny_batch(LENGTHS)
    plain = build_engine(config(**options), model(kind, 0.5))
    routed = with_experts(batch, chosen_by(model(kind).eval(), batch))
    replayed = build_engine(config(routing_replay=True, **options), model(kind, 0.5))
    assert plain.train_batch(batch, SFT()) == replayed.train_batch(routed, SFT())
    other = weights(replayed)
    assert all(torch.equal(value, other[name]) for name, value in weights(plain).items())


class Forced:
    """The stock model with its routers' choice overridden: logits and weights as in its own code, the experts given."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock
        for layer, router in enumerate(routers_of(stock)):
            router.forward = lambda hidden, layer=layer, router=router: self.route(layer, router, hidden)

    def route(self, layer: int, router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        probabilities = F.softmax(logits, dtype=torch.float, dim=-1)
        own = torch.topk(probabilities, TOP_K, dim=-1).indices
        forced = self.row[:, layer].long()
        taken = torch.stack([g if g[0] >= 0 else o for g, o in zip(forced, own, strict=True)])
        value = torch.stack([p[t] for p, t in zip(probabilities, taken, strict=True)])
        if getattr(router, "norm_topk_prob", True):
            value = value / value.sum(-1, keepdim=True)
        return logits, value, taken

    def loss(self, batch: TensorDict, rows: list[torch.Tensor]) -> Any:
        total: Any = 0.0
        tokens = int(batch["loss_mask"].values().sum())
        for ids, mask, self.row in zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), rows, strict=True):
            table = torch.log_softmax(self.stock(input_ids=ids[None], use_cache=False).logits[0], -1)
            total = total - table[:-1].gather(1, ids[1:, None]).squeeze(1)[mask[1:]].sum() / tokens
        return total


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("kind", ["moe", "next", "raw"])
def test_the_experts_of_another_are_those_of_stock_transformers(kind: str, options: dict[str, Any]) -> None:
    batch = tiny_batch(LENGTHS)
    made = model(kind).eval()
    rows = other_experts(len(LENGTHS), len(routers_of(made)))
    forced = Forced(copy.deepcopy(made))
    loss = forced.loss(batch, rows)
    loss.backward()
    built = build_engine(config(routing_replay=True, router_aux_loss_coef=0.0, **options), made)
    routed = with_experts(batch, rows)
    inside(built).optimizer_step = lambda rate, loss, settings: torch.ones(())  # gradients stay for a look
    assert built.train_batch(routed, SFT())["loss"] == pytest.approx(loss.item(), rel=1e-5)
    want = {name: parameter.grad for name, parameter in forced.stock.named_parameters()}
    for name, parameter in inside(built).model.named_parameters():
        grad = 0 * whole(parameter.data) if parameter.grad is None else whole(parameter.grad)
        expected = torch.zeros_like(grad) if want[name] is None else want[name]
        torch.testing.assert_close(grad, expected, atol=2e-5, rtol=1e-4, msg=name)
    free = build_engine(config(**options), model(kind)).forward(batch)["log_probs"].values()
    scores = built.forward(routed)["log_probs"].values()
    assert (scores - free).abs().max() > 5e-3  # other experts were taken, in scoring too


def on_ranks(
    context_parallel: str, replay: bool, coefficient: float
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    options = {"max_tokens_per_rank": 16, "context_parallel": context_parallel, "routing_replay": replay}
    built = build_engine(config(**options), model(coefficient=coefficient))
    batch = with_experts(tiny_batch(LENGTHS), other_experts(len(LENGTHS)))
    return [built.train_batch(batch, SFT()) for _ in range(2)], weights(built)


def on_all(*modes: str) -> dict[tuple[str, bool], tuple[list[dict[str, float]], dict[str, torch.Tensor]]]:
    return {(mode, replay): on_ranks(mode, replay, 0.5) for mode in modes for replay in (True, False)}


def test_two_ranks_equal_one_however_they_share_sequences() -> None:
    want = on_all("off")
    torch.distributed.destroy_process_group()
    got = launch_forked(on_all, ("off", "static:2", "dynamic"), world_size=2)
    ensure_group("cpu")
    for (mode, replay), (other_curve, two) in got.items():
        curve, one = want["off", replay]
        for left, right in zip(curve, other_curve, strict=True):
            for key in ("loss", "auxiliary_loss", "grad_norm"):
                assert right[key] == pytest.approx(left[key], rel=3e-5), (mode, replay, key)
            for key in ("expert_max_over_mean", "expert_max_over_mean_worst", "experts_unused"):
                assert right[key] == left[key], (mode, replay, key)
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, atol=2e-5, rtol=1e-4, msg=f"{mode} {replay} {name}")
    losses = [want["off", replay][0][0]["loss"] for replay in (True, False)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_load_of_a_step_is_what_the_batch_says(options: dict[str, Any]) -> None:
    """Counted by hand where the experts of all tokens are given."""
    rows = [row.clamp(min=0) for row in other_experts(len(LENGTHS))]
    rows = [torch.where(row[..., :1] == row[..., 1:], torch.tensor([0, 1], dtype=torch.int16), row) for row in rows]
    result = build_engine(config(routing_replay=True, **options), model()).train_batch(
        with_experts(tiny_batch(LENGTHS), rows), SFT()
    )
    flat = torch.cat(rows)
    counts = [Counter(flat[:, layer].flatten().tolist()) for layer in range(LAYERS)]
    uneven = [max(count.values()) / (sum(count.values()) / EXPERTS) for count in counts]
    assert result["expert_max_over_mean"] == pytest.approx(sum(uneven) / LAYERS)
    assert result["expert_max_over_mean_worst"] == pytest.approx(max(uneven))
    assert result["experts_unused"] == sum(EXPERTS - len(count) for count in counts) / (LAYERS * EXPERTS)


def test_an_expert_that_nothing_went_to_is_told() -> None:
    rows = [torch.tensor([0, 2], dtype=torch.int16).expand(length, LAYERS, TOP_K) for length in LENGTHS]
    built = build_engine(config(routing_replay=True, router_aux_loss_coef=0.0), model())
    result = built.train_batch(with_experts(tiny_batch(LENGTHS), rows), SFT())
    assert result["experts_unused"] == 0.5
    assert result["expert_max_over_mean"] == result["expert_max_over_mean_worst"] == EXPERTS / TOP_K
    assert "experts_unused" not in build_engine(config(), tiny_model()).train_batch(tiny_batch(LENGTHS), SFT())


def test_the_routers_loss_counts_the_experts_that_were_taken() -> None:
    """All tokens at experts 0 and 1: the loss is coefficient x E x sum of P_e / R over these two."""
    rows = [torch.tensor([0, 1], dtype=torch.int16).expand(length, LAYERS, TOP_K) for length in LENGTHS]
    batch = with_experts(tiny_batch(LENGTHS), rows)
    built = build_engine(config(routing_replay=True), model(coefficient=3.0))
    forced = Forced(model().eval())
    probabilities = []
    for router in routers_of(forced.stock):
        router.register_forward_hook(lambda _m, _i, out: probabilities.append(out[0].softmax(-1)))
    with torch.no_grad():
        forced.loss(batch, rows)
    share = torch.cat(probabilities).mean(0)[:2].sum()
    assert built.train_batch(batch, SFT())["auxiliary_loss"] == pytest.approx(3 * EXPERTS * share.item(), rel=1e-5)


def test_experts_are_computed_in_one_grouped_product() -> None:
    """Transformers' own path over sorted tokens, for every family with experts: no loop that asks the device."""
    for kind in ("moe", "next"):
        made = model(kind)
        assert made.config.get_text_config()._experts_implementation == "grouped_mm"
    with torch.profiler.profile() as profile:
        build_engine(config(), made).train_batch(tiny_batch(LENGTHS), SFT())
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::_grouped_mm") >= 2 * LAYERS


def bad(change: Callable[[list[torch.Tensor]], Any]) -> TensorDict:
    rows = other_experts(len(LENGTHS))
    change(rows)
    return with_experts(tiny_batch(LENGTHS), rows)


def put(row: int, token: int, layer: int, experts: list[int]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    return lambda rows: rows[row][token, layer].copy_(torch.tensor(experts))


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (tiny_batch(LENGTHS), "the batch lacks routed_experts"),
        (bad(put(2, 4, 1, [0, EXPERTS])), "sample 2, token 4, layer 1: the model's experts are 0 to 3"),
        (bad(put(0, 0, 0, [-2, 1])), "sample 0, token 0, layer 0: the model's experts"),
        (bad(put(7, 5, 0, [-1, 1])), "sample 7, token 5, layer 0: some of its experts are known"),
        (bad(put(1, 2, 1, [3, 3])), "sample 1, token 2, layer 1: one expert comes twice"),
        (with_experts(tiny_batch(LENGTHS), other_experts(8, LAYERS + 1)), "sampled from another model"),
    ],
    ids=["none", "beyond", "below", "half", "twice", "layers"],
)
def test_what_cannot_be_replayed_is_refused(batch: TensorDict, problem: str) -> None:
    built = build_engine(config(routing_replay=True), model())
    for call in (lambda: built.train_batch(batch, SFT()), lambda: built.forward(batch)):
        with pytest.raises(ValueError, match=problem):
            call()


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="routing_replay is for models with experts, qwen3_5_text has none"):
        build_engine(config(routing_replay=True), tiny_model())
