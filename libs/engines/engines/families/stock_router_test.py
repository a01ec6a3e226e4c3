"""The balancing loss of types without a family: one step equals transformers' own loss, or the type is refused."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig

from engines import EngineConfig, build_engine
from engines.families.registry import admit
from engines.families.stock_router import stock_router_loss
from engines.prove.generic_family import generic_family
from engines.prove.proof import random_model, small_config
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from objectives import SFT

KINDS = ["mixtral", "gpt_oss", "olmoe", "granitemoe", "phimoe", "qwen3_vl_moe", "glm4v_moe"]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.families.registry._ADMITTED", {})


def stock_loss(stock: Any, batch: TensorDict) -> tuple[float, float]:
    """Return transformers' own loss on the padded batch, and its gradient's norm."""
    ids = batch["input_ids"].to_padded_tensor(0)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (row, trained) in enumerate(zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True)):
        mask[i, : len(row)] = 1
        labels[i, : len(row)] = torch.where(trained, row, -100)
    output = stock(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    output.loss.backward()
    return output.loss.item(), torch.nn.utils.clip_grad_norm_(stock.parameters(), float("inf")).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1000, 15], ids=["one micro-batch", "many"])
def test_a_step_has_the_loss_and_gradient_of_transformers(kind: str, tokens: int) -> None:
    config = small_config(AutoConfig.for_model(kind))
    text, family = config.get_text_config(), generic_family(config)
    text.output_router_logits, text.router_aux_loss_coef = True, 0.5
    admit(config, family)
    model, batch = random_model(config).float(), tiny_batch([7, 3, 12, 5, 9])
    loss, norm = stock_loss(model, batch)
    model.zero_grad()
    family.reduce(model)
    settings: dict[str, Any] = {"device": "cpu", "lr": 1e-3, "grad_clip": None, "max_tokens_per_rank": tokens}
    report = build_engine(EngineConfig(**settings), model).train_batch(batch, SFT())
    assert report["loss"] == pytest.approx(loss, rel=1e-4)
    assert report["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_the_text_part_of_a_type_with_another_loss_is_refused_by_name() -> None:
    config = AutoConfig.for_model("kimi_k25")
    config.get_text_config().output_router_logits = True
    assert generic_family(config).auxiliary_loss(config) is None  # its config has no coefficient
    with pytest.raises(ValueError, match=r"transformers' modelling code has no balancing loss of routers, or not that"):
        generic_family(config).auxiliary_loss(config, 0.1)


@pytest.mark.parametrize("kind", ["deepseek_v3", "doge", "jetmoe"])
def test_a_type_with_another_loss_or_none_is_refused_by_name(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    assert stock_router_loss(config, 0.0) is None
    with pytest.raises(ValueError, match=f"{kind}: transformers' modelling code has no balancing loss of routers, or"):
        stock_router_loss(config, 0.01)


def test_a_z_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="the z-loss is for described families"):
        stock_router_loss(AutoConfig.for_model("mixtral"), z_coefficient=0.1)
