"""A device's dtype and kernels against stock transformers: what holds, and planted errors that fail. Here on a CPU in
bfloat16, `device_cuda_test.py` on a GPU at true width."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engines.build import build_engine
from engines.config import EngineConfig
from engines.families.registry import digest
from engines.launch import ensure_group
from engines.proofs import device, true_width
from engines.proofs.device import device_path, prove_device
from engines.proofs.true_width import fit_experts, layer_subset
from engines.prove.certificate import Certificate
from engines.prove.small_config import layer_kinds
from engines.prove.small_towers import shrink_whole
from engines.tiny import tiny_config
from seqpack.adapters.context import LocalOps

CONFIG = EngineConfig(device="cpu", dtype="bfloat16")


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    made = ensure_group("cpu")
    yield
    if made:
        torch.distributed.destroy_process_group()


SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 96}
WIDE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
"""Keys of a few numbers are normalised to one: their gradient in bfloat16 is mostly rounding."""


def of(kind: str, config: EngineConfig = CONFIG) -> Certificate:
    return prove_device(config, tiny_config(kind, **SIZES, **(WIDE if kind == "dense" else {})))


@pytest.mark.parametrize("kind", ["attention", "dense"])
def test_the_engine_is_as_near_as_stock_transformers(kind: str) -> None:
    certificate = of(kind)
    assert certificate.holds, certificate.problems
    assert certificate.subject == "device"
    assert certificate.width == "true"
    assert certificate.stock_error is not None
    assert certificate.stock_error > 1e-4, "float32 was compared, not the dtype of the run"


def test_float32_is_held_to_itself() -> None:
    certificate = of("dense", EngineConfig(device="cpu", dtype="float32"))
    assert certificate.holds, certificate.problems
    assert certificate.log_probs < 1e-3


def test_a_certificate_is_void_where_the_code_of_an_engine_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu = tiny_config("attention"), torch.device("cpu")
    before = device_path(CONFIG, config, cpu)
    assert before == device_path(CONFIG, config, cpu)
    monkeypatch.setattr("engines.proofs.device.engine_code", lambda: "other")
    assert device_path(CONFIG, config, cpu) != before


def text_part(kind: str) -> Any:
    """Return the config of a multi-modal type without a family, with a small tower and a narrow text part."""
    whole = shrink_whole(AutoConfig.for_model(kind))
    whole.get_text_config().num_hidden_layers = 3
    return whole


def test_the_text_part_of_a_multi_modal_type_is_proven() -> None:
    config = text_part("llava_onevision")
    certificate = prove_device(CONFIG, config)
    assert certificate.holds, certificate.problems
    assert certificate.model_type == "llava_onevision"
    assert certificate.config == digest(config)


def test_an_error_in_the_text_part_of_a_multi_modal_type_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalOps, "attention", scaled)
    assert not prove_device(CONFIG, text_part("llava_onevision")).holds


def test_a_leak_that_moves_nothing_fails_in_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.proofs.device._leak", lambda *args: 0.0)
    certificate = of("attention", EngineConfig(device="cpu", dtype="float32"))
    assert [problem for problem in certificate.problems if problem.startswith("a leak moves log-probs by 0")]


def test_values_are_drawn_again_where_errors_hide_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, seen = device._leak, list[float]()

    def hidden_at_first(engine: Any, rows: Any, plain: Any) -> float:
        seen.append(measured(engine, rows, plain))
        return seen[-1] if len(seen) > 1 else 0.0

    monkeypatch.setattr(device, "_leak", hidden_at_first)
    certificate = of("attention")
    assert certificate.holds, certificate.problems
    assert len(set(seen)) == 2, "other values"
    monkeypatch.setattr(device, "_leak", lambda *_: 0.0)
    assert not of("attention").holds


def test_a_threshold_that_memory_does_not_reach_is_told_and_a_model_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, cpu = AutoConfig.for_model("gemma3_text", sliding_window=512, hidden_size=64, num_hidden_layers=8), "cpu"
    assert layer_subset(config, torch.device(cpu)).not_crossed == ()
    assert max(layer_subset(config, torch.device(cpu)).lengths) == 1025
    weights = 36 * sum(one.numel() for one in AutoModelForCausalLM.from_config(layer_kinds(config)[0]).parameters())
    monkeypatch.setattr(true_width, "free_host_memory", lambda: weights + 16 * 400 * config.vocab_size)
    few = layer_subset(config, torch.device(cpu))
    assert few.not_crossed == ("sliding_window",)
    assert max(few.lengths) <= 400
    monkeypatch.setattr(true_width, "free_host_memory", lambda: weights // 2)
    with pytest.raises(ValueError, match="layers of gemma3_text at true width take about"):
        layer_subset(config, torch.device(cpu))


def test_an_activation_of_more_elements_than_the_proofs_is_told() -> None:
    """The proof's own activations have fewer than 2^31 elements, as its rows are few."""
    config = tiny_config("moe", **SIZES)
    cpu, each = torch.device("cpu"), true_width.widest(AutoModelForCausalLM.from_config(config))
    assert each >= config.num_experts_per_tok * 2 * config.moe_intermediate_size  # gates and values of two experts
    most = 2**31 // each
    assert layer_subset(config, cpu, tokens=most - 1).not_crossed == ()
    assert layer_subset(config, cpu, tokens=most + 1).not_crossed == (
        f"2^31 elements: {most + 1} tokens of {each} values",
    )


def scaled(self: LocalOps, q: Any, k: Any, v: Any, context: Any, scale: float, window: Any, **more: Any) -> Tensor:
    """Attend with another scale."""
    return attention(self, q, k, v, context, 1.3 * scale, window, **more)


def halved(self: LocalOps, q: Any, k: Any, v: Any, context: Any, scale: float, window: Any, **more: Any) -> Tensor:
    """Attend with half of the gradient of values."""
    return attention(self, q, k, 0.5 * v + 0.5 * v.detach(), context, scale, window, **more)


def far_only(self: LocalOps, q: Any, k: Any, v: Any, context: Any, scale: float, window: Any, **more: Any) -> Tensor:
    """Attend to at most 512 tokens: only sequences that are longer notice."""
    return attention(self, q, k, v, context, scale, 128 if context.max_seqlen > 512 else window, **more)


attention: Callable[..., Tensor] = LocalOps.attention


@pytest.mark.parametrize("planted", [scaled, halved, far_only])
def test_planted_errors_fail(planted: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalOps, "attention", planted)
    assert not of("attention").holds


def test_weights_that_moved_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets another model than stock transformers: one row of one matrix is twice as large."""

    def build(config: Any, model: Any) -> Any:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3].mul_(-2)
        return build_engine(config, model)

    monkeypatch.setattr("engines.proofs.device.build_engine", build)
    assert any("gradient" in problem or "log-probs" in problem for problem in of("attention").problems)


def test_few_layers_are_one_of_each_kind_at_their_width() -> None:
    config = tiny_config("dense", num_hidden_layers=12, full_attention_interval=4)
    text, kept = layer_kinds(config)
    assert [config.layer_types[layer] for layer in kept] == text.layer_types
    assert set(text.layer_types) == set(config.layer_types)
    assert kept[-1] == 11
    assert (text.hidden_size, text.vocab_size) == (config.hidden_size, config.vocab_size)


def test_experts_are_fewer_where_memory_is_short() -> None:
    config = tiny_config("moe", num_experts=64)
    assert fit_experts(config, 2**40) == {}
    changed = fit_experts(config, 40_000)
    assert changed["num_experts"] == config.num_experts < 64
    assert config.num_experts >= 2 * config.num_experts_per_tok


def test_scores_of_plain_attention_on_an_accelerator_fit_its_memory() -> None:
    """64 GiB of them were asked for at 32,768 tokens and 16 heads."""
    few = layer_subset(tiny_config("attention", num_attention_heads=16, head_dim=16), torch.device("meta"), 32_768)
    assert 16 * max(few.lengths) ** 2 <= true_width.PLAIN_SCORES < 16 * 32_768**2
    assert few.not_crossed == ("the run's longest row",)
