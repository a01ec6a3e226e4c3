"""A vision tower beside experts that two ranks share: stock transformers, one sequence at a time, in one process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from engines import EngineConfig, TrainEngine, build_engine
from engines.proofs.forked_ranks import launch_forked
from engines.testing.expert_parallel import weights
from engines.testing.vision import (
    TOWER,
    as_stock,
    assert_close_gradients,
    gradients,
    samples,
    stock_loss,
    stock_scores,
    text_only,
    vision_model,
)
from objectives import SFT
from seqpack import make_batch

EXPERTS, TOP_K = 4, 2
MODES: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"vision": "frozen"},
    "padded": {"batching": "padded"},
    "shared sequences": {"context_parallel": "static:2"},
    "one micro-batch": {"max_tokens_per_rank": 1000},
}


Run = tuple[Tensor, dict[str, Tensor], list[float], dict[str, Tensor]]  # what `run` says
Found = tuple[dict[str, Run], dict[str, Tensor]]


def engine(ranks: int, **options: Any) -> TrainEngine:
    usual: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "eps": 1e-2, "max_tokens_per_rank": 40, "vision": "trained"}
    if dist.is_initialized() and dist.get_world_size() == 1:
        options = options | {"context_parallel": "off"}
    config = EngineConfig(expert_parallel=ranks, router_aux_loss_coef=0.5, **usual | options)
    return build_engine(config, vision_model("vision_moe"))


def run(mode: str, ranks: int) -> Run:
    """Scores, the first step's gradients, losses of text and images in turn, and weights."""
    built = engine(ranks, **MODES[mode])
    scores = built.forward(make_batch(samples()))["log_probs"].values().clone()
    seen = dict(gradients(built, make_batch(samples())))  # later steps would be written into it
    losses = [built.train_batch(make_batch(make(10)), SFT())["loss"] for make in (text_only, samples)]
    return scores, seen, losses, weights(built)


def run_all(ranks: int) -> dict[str, Run]:
    return {mode: run(mode, ranks) for mode in MODES}


def saved(folder: Path, ranks: int) -> dict[str, Tensor]:
    built = engine(ranks)
    built.train_batch(make_batch(samples()), SFT())
    built.save(folder / f"of_{ranks}")
    return weights(built)


def on_two(folder: Path) -> Found:
    return run_all(2), saved(folder, 2)


def read(folder: Path, ranks: int, by: int) -> dict[str, Tensor]:
    built = engine(by)
    built.load(folder / f"of_{ranks}")
    return weights(built)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    of_two: Found = launch_forked(on_two, (folder,), world_size=2)
    return of_two


@pytest.fixture(scope="module")
def one() -> dict[str, Run]:
    of_one: dict[str, Run] = launch_forked(run_all, (1,))
    return of_one


def stock_step() -> tuple[Tensor, dict[str, Tensor]]:
    """Scores, and the gradients of the supervised loss with Switch's loss from the stock routers' own logits."""
    rows, logits = samples(), []
    stock = as_stock(copy.deepcopy(vision_model("vision_moe")))
    with torch.no_grad():
        scores = torch.cat(stock_scores(stock, rows))
    for router in (module for module in stock.modules() if type(module).__name__.endswith("TopKRouter")):
        router.register_forward_hook(lambda _m, _i, out: logits.append(out[0]))
    loss = stock_loss(stock, rows)
    probabilities = torch.cat(logits).softmax(-1)
    chosen = functional.one_hot(probabilities.topk(TOP_K).indices, EXPERTS).sum(1).float()
    (loss + 0.5 * EXPERTS * (chosen.mean(0) * probabilities.mean(0)).sum()).backward()
    return scores, {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", list(MODES))
def test_two_ranks_that_share_experts_equal_stock_transformers_one_sequence_at_a_time(found: Found, mode: str) -> None:
    scores, want = stock_step()
    got = found[0][mode]
    assert float((got[0] - scores).abs().max()) < 1e-5
    if mode == "frozen":
        want = {name: grad for name, grad in want.items() if not name.startswith(TOWER)}
        assert not any(name.startswith(TOWER) for name in got[1])
    assert any(name.startswith(TOWER) and float(grad.abs().max()) > 0 for name, grad in want.items()) == (
        mode != "frozen"
    )
    assert_close_gradients(got[1], want)


@pytest.mark.parametrize("mode", list(MODES))
def test_their_steps_are_those_of_one_process(found: Found, one: dict[str, Run], mode: str) -> None:
    """Text alone in between: a rank without an image takes part in all collectives."""
    _, _, losses, trained = found[0][mode]
    assert losses == pytest.approx(one[mode][2], rel=2e-5)
    assert trained.keys() == one[mode][3].keys()
    for name, value in one[mode][3].items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-4, msg=name)
    began = {n: p.detach().flatten() for n, p in vision_model("vision_moe").named_parameters() if n.startswith(TOWER)}
    assert all(torch.equal(trained[name], value) for name, value in began.items()) == (mode == "frozen")


def test_checkpoints_fit_ranks_that_share_experts_and_one_that_has_all(found: Found, folder: Path) -> None:
    whole = launch_forked(saved, (folder, 1))
    for want, got in (
        (found[1], launch_forked(read, (folder, 2, 1))),
        (whole, launch_forked(read, (folder, 1, 2), world_size=2)),
    ):
        assert all(torch.equal(got[name], value) for name, value in want.items())
