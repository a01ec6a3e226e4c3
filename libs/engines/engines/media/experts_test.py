"""A vision-language model with experts: the router's loss, replayed experts, two ranks, against stock transformers."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from engines import EngineConfig, TrainEngine, build_engine
from engines.launch import ensure_group
from engines.proofs.forked_ranks import launch_forked
from engines.testing.images import model_arguments
from engines.testing.one_rank import one_rank
from engines.testing.vision import (
    Sample,
    as_stock,
    assert_close_gradients,
    gradients,
    samples,
    stock_loss,
    stock_scores,
    text_only,
    vision_model,
)
from objectives import GRPO
from seqpack import make_batch
from seqpack.batches.batch import jagged
from seqpack.batches.schema import ROUTED_EXPERTS

__all__ = ["one_rank"]
LAYERS, EXPERTS, TOP_K = 4, 4, 2


Curve = tuple[list[list[float]], Tensor]  # metrics of each step, scores


def engine(module: Any = None, **options: Any) -> TrainEngine:
    usual: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 40, "vision": "trained"}
    return build_engine(EngineConfig(**usual | options), module or vision_model("vision_moe"))


def given_experts(rows: list[Sample], seed: int = 1) -> list[Tensor]:
    """i16[tokens, layers, k] a row: random ones, different for each token; those of a third of the tokens unknown."""
    rng, out = torch.Generator().manual_seed(seed), []
    for row in rows:
        length = len(row["input_ids"])
        some = torch.rand(length, LAYERS, EXPERTS, generator=rng).topk(TOP_K).indices.to(torch.int16)
        some[torch.rand(length, generator=rng) < 0.3] = -1
        out.append(some)
    return out


def with_experts(rows: list[Sample], experts: list[Tensor]) -> TensorDict:
    batch = make_batch(rows)
    batch[ROUTED_EXPERTS] = jagged(experts, 0)
    return batch


def routers_of(stock: Any) -> list[Any]:
    return [module for module in stock.modules() if type(module).__name__.endswith("TopKRouter")]


class Forced:
    """The stock model that sends the tokens of `row` to its experts; logits and weights as in its own code."""

    row: Tensor

    def __init__(self, stock: Any) -> None:
        self.stock = stock
        for layer, router in enumerate(routers_of(stock)):
            router.forward = lambda hidden, layer=layer, router=router: self.route(layer, router, hidden)

    def route(self, layer: int, router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        probabilities = F.softmax(logits, dtype=torch.float, dim=-1)
        own, forced = torch.topk(probabilities, TOP_K, dim=-1).indices, self.row[:, layer].long()
        taken = torch.stack([g if g[0] >= 0 else o for g, o in zip(forced, own, strict=True)])
        value = torch.stack([p[t] for p, t in zip(probabilities, taken, strict=True)])
        return logits, value / value.sum(-1, keepdim=True), taken

    def scores(self, rows: list[Sample], experts: list[Tensor]) -> list[Tensor]:
        out = []
        for row, self.row in zip(rows, experts, strict=True):
            out += stock_scores(self.stock, [row])
        return out


def test_replayed_experts_are_those_of_stock_transformers() -> None:
    rows, module = samples(), vision_model("vision_moe")
    experts = given_experts(rows)
    forced = Forced(as_stock(copy.deepcopy(module)))
    built = engine(copy.deepcopy(module), routing_replay=True, router_aux_loss_coef=0.0)
    scores = torch.cat(forced.scores(rows, experts))
    got = built.forward(with_experts(rows, experts))["log_probs"].values()
    assert float((got - scores).detach().abs().max()) < 1e-5
    free = torch.cat(stock_scores(as_stock(module), rows))
    assert float((free - scores).detach().abs().max()) > 5e-3  # they are others than the router's
    masks = torch.cat([row["loss_mask"] & (torch.arange(len(row["loss_mask"])) > 0) for row in rows])
    (-(scores * masks).sum() / masks.sum()).backward()
    want = {name: p.grad for name, p in forced.stock.named_parameters() if p.grad is not None}
    assert_close_gradients(gradients(built, with_experts(rows, experts)), want)


def test_the_routers_loss_counts_tokens_of_images_as_any_other() -> None:
    """Switch's loss of the whole batch, from the stock routers' own logits."""
    rows, module = samples(), vision_model("vision_moe")
    stock, logits = as_stock(copy.deepcopy(module)), []
    for router in routers_of(stock):
        router.register_forward_hook(lambda _m, _i, out: logits.append(out[0]))
    loss = stock_loss(stock, rows)
    probabilities = torch.cat(logits).softmax(-1)
    chosen = F.one_hot(probabilities.topk(TOP_K).indices, EXPERTS).sum(1).float()
    assert len(probabilities) == LAYERS * sum(len(row["input_ids"]) for row in rows)
    (loss + 0.5 * EXPERTS * (chosen.mean(0) * probabilities.mean(0)).sum()).backward()
    want = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    assert_close_gradients(gradients(engine(module, router_aux_loss_coef=0.5), make_batch(rows)), want)


STEPS = (text_only, samples)
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"context_parallel": "static:2"},
    {"context_parallel": "dynamic"},
    {"vision": "frozen"},
)


def curve(**options: Any) -> Curve:
    built = engine(routing_replay=True, router_aux_loss_coef=0.5, **options)
    out = []
    for step, make in enumerate(STEPS):
        rows = make(10 * step)
        metrics = built.train_batch(with_experts(rows, given_experts(rows)), GRPO(off_policy="mask"))
        out.append([metrics[key] for key in ("loss", "auxiliary_loss", "grad_norm")])
    return out, built.forward(with_experts(samples(), given_experts(samples())))["log_probs"].values().clone()


def on_two() -> list[Curve]:
    return [curve(**mode) for mode in MODES]


def test_two_ranks_equal_one() -> None:
    trained, frozen = curve(), curve(vision="frozen")
    dist.destroy_process_group()
    results = launch_forked(on_two, world_size=2)
    ensure_group("cpu")
    for got, want in zip(results, [trained] * 3 + [frozen], strict=True):
        for mine, theirs in zip(got[0], want[0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert float((got[1] - want[1]).abs().max()) < 1e-3


def test_the_stock_model_sees_its_images() -> None:
    """What the tests above compare with sees its images: without them it says something else."""
    (row, *_), module = samples(), as_stock(vision_model("vision_moe"))
    arguments = model_arguments(row)
    with torch.no_grad():
        seen = stock_scores(module, [row])[0]
        other = stock_scores(module, [row | {"pixel_values": -row["pixel_values"]}])[0]
    assert arguments["pixel_values"].shape == row["pixel_values"].shape
    assert float((seen - other).abs().max()) > 1e-3
