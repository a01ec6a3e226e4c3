"""Text parts of multi-modal types: trained inside of the whole, all else carried bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from engines import EngineConfig, build_engine
from engines.families.registry import family_of
from engines.prove import proof, text_part
from engines.prove.admission import admitted_family
from engines.prove.generic_family import TextPartFamily
from engines.prove.proof import prove, random_model, small_config
from engines.testing.one_rank import one_rank  # noqa: F401  a group for every test
from engines.tiny import tiny_batch
from engines.weights.model_weights import ModelWeights
from objectives import SFT


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path / "certificates"))
    monkeypatch.setattr("engines.families.registry._ADMITTED", {})
    monkeypatch.setattr(proof, "flips", lambda *args: ())


@pytest.mark.parametrize("kind", ["qwen3_vl", "idefics3", "gemma4", "glm4v", "lfm3_vl", "muse_glimmer"])
def test_a_text_part_is_equal_and_its_export_is_whole(kind: str) -> None:
    certificate = prove(AutoConfig.for_model(kind))
    assert certificate.holds, certificate
    assert certificate.model_type == kind


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("florence2", "florence2 is an encoder-decoder: it has no text part that can be trained alone"),
        ("blip-2", "could not run its config in small on text alone .*missing 1 required positional argument"),
        ("musicgen", "Multiple valid text configs"),
    ],
)
def test_a_text_part_that_cannot_be_separated_is_refused_with_the_reason(kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        admitted_family(AutoConfig.for_model(kind))


def test_text_is_trained_and_the_tower_is_carried_bit_for_bit(tmp_path: Path) -> None:
    config = small_config(AutoConfig.for_model("llava_next"))
    whole: Any = random_model(config).to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "model")
    settings = {"device": "cpu", "lr": 1e-2, "max_tokens_per_rank": 24}
    engine = build_engine(EngineConfig(model=str(tmp_path / "model"), **settings))  # type: ignore[arg-type]
    batch = tiny_batch([7, 3, 12, 5])
    losses = [engine.train_batch(batch, SFT())["loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    engine.save_hf(str(tmp_path / "export"), dtype=torch.float32)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "export"))
    text = {name for name in before if "language_model" in name or name.startswith("lm_head")}
    assert before.keys() == after.keys()
    assert {"model.image_newline", "image_newline"} & (before.keys() - text)
    assert all(
        torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before.keys() - text
    )
    assert not any(torch.equal(before[name].float(), after[name]) for name in text)
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    assert type(stock) is type(whole)
    for ids, ours in zip(batch["input_ids"].unbind(), engine.forward(batch)["log_probs"].unbind(), strict=True):
        table = torch.log_softmax(stock(input_ids=ids[None]).logits[0].float(), -1)
        assert torch.allclose(ours[1:], table[:-1].gather(1, ids[1:, None])[:, 0], atol=1e-5)


def test_a_whole_is_not_admitted_by_the_proof_of_its_text_config() -> None:
    config = AutoConfig.for_model("llava", text_config=AutoConfig.for_model("granite"))
    assert not isinstance(admitted_family(config.get_text_config()), TextPartFamily)
    with pytest.raises(ValueError, match="model family 'llava' is not supported"):
        family_of(config)
    assert isinstance(admitted_family(config), TextPartFamily)
    assert isinstance(family_of(config), TextPartFamily)
    assert not isinstance(family_of(config.get_text_config()), TextPartFamily)


def test_a_module_with_a_tower_is_refused() -> None:
    """Its tower would be part of no export."""
    module = random_model(small_config(AutoConfig.for_model("llava")))
    with pytest.raises(ValueError, match=r"llava: the text part of this type is trained.*give the model's directory"):
        build_engine(EngineConfig(device="cpu"), module)


def _lost(weights: Any, tensors: Any) -> Any:
    return ((name, one) for name, one in _EXPORT(weights, tensors) if "projector" not in name)


def _changed(weights: Any, tensors: Any) -> Any:
    return ((name, one + 1 if "projector" in name else one) for name, one in _EXPORT(weights, tensors))


def _stale(weights: Any, tensors: Any) -> Any:
    return _EXPORT(weights, ((name, one - text_part.STEP if "down_proj" in name else one) for name, one in tensors))


_EXPORT = ModelWeights.export


@pytest.mark.parametrize(
    ("kind", "export", "problem"),
    [
        ("llava", _lost, "its export lacks or adds .*projector"),
        ("llava", _changed, "its export has other values of .*projector"),
        ("llava", _stale, "its export, read by LlavaForConditionalGeneration, differs by"),
        ("granite", _stale, "its export, read by GraniteForCausalLM, differs by"),
    ],
)
def test_an_export_that_loses_or_changes_a_tensor_fails_the_proof(
    kind: str, export: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWeights, "export", export)
    with pytest.raises(ValueError, match=problem):
        admitted_family(AutoConfig.for_model(kind))
