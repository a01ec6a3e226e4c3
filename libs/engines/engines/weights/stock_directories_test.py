"""A directory is read as stock `from_pretrained` reads it, or refused by both; an export of it keeps what was there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from engines import EngineConfig, build_engine
from engines.testing import model_directories as made
from engines.testing.model_directories import BIN_INDEX, INDEX, gemma3, qwen3, sharded, tensors, whole
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from objectives import SFT


def adapter_merged_by_peft(path: Path) -> None:
    model = get_peft_model(qwen3(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    merged: Any = model.merge_and_unload()
    merged.save_pretrained(path)


DIRECTORIES = [
    whole, made.untied, sharded, made.sharded_then_whole, made.whole_then_sharded, made.newer_file_beside_shards,
    made.shards_in_a_subfolder, made.index_names_another_of_its_files, made.bin_file, made.bin_file_of_the_old_format,
    made.bin_shards, made.bin_beside_safetensors, made.bin_beside_shards, made.base_model,
    made.base_model_with_experts, made.half_without_prefix, made.experts_apart, made.experts_together, made.head_twice,
    made.head_of_its_own, made.head_alone, made.vision_language, made.vision_language_with_head,
    made.text_part_saved_alone, made.gemma3_vision, made.gemma3_untied, made.gemma3_as_published, made.classifier,
    made.value_head, made.more_layers_than_the_config, made.old_buffers, made.further_token_head,
    made.fields_of_other_tools, made.half_precision, made.mixed_precision, adapter_merged_by_peft,
]  # fmt: skip
TOLD = [made.classifier, made.value_head, made.more_layers_than_the_config, made.fields_of_other_tools]


def named(make: Callable[[Path], None]) -> str:
    return make.__name__


def stock(path: Path, kind: Any = AutoModelForCausalLM) -> tuple[Any, dict[str, Any]]:
    model, info = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    return model.eval(), info


@torch.no_grad()
def log_probs(model: nn.Module, batch: Any) -> Tensor:
    rows = []
    for ids in batch["input_ids"].unbind():
        scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        rows.append(scores.gather(1, ids[1:, None]).squeeze(1))
    return torch.cat(rows)


def engine_log_probs(engine: Any, batch: Any) -> Tensor:
    return torch.cat([row[1:] for row in engine.forward(batch)["log_probs"].unbind()])


def names_and_values(path: Path) -> dict[str, Tensor]:
    """All tensors of the files that count: their precedence is this file's own reading of transformers."""
    if (path / "model.safetensors").is_file():
        return tensors(path)
    found: dict[str, Tensor] = {}
    for index, load in ((INDEX, load_file), (BIN_INDEX, torch.load)):
        if (path / index).is_file():
            for file in set(json.loads((path / index).read_text())["weight_map"].values()):
                found |= load(path / file)
            return found
    only: dict[str, Tensor] = torch.load(path / "pytorch_model.bin")
    return only


@pytest.mark.parametrize("make", DIRECTORIES, ids=named)
@pytest.mark.filterwarnings("ignore")
def test_a_directory_is_read_and_written_as_transformers_reads_it(make: Callable[[Path], None], tmp_path: Path) -> None:
    path, out = tmp_path / "source", tmp_path / "out"
    make(path)
    batch = tiny_batch([12, 7, 9], vocab=40)
    engine = build_engine(EngineConfig(model=str(path), device="cpu"))
    want = log_probs(stock(path)[0], batch)
    assert (engine_log_probs(engine, batch) - want).abs().max() < 1e-5
    engine.save_hf(out)
    source, written = names_and_values(path), names_and_values(out)
    assert set(written) == set(source)
    for name, tensor in source.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name], tensor), name
    assert torch.equal(log_probs(stock(out)[0], batch), want)
    kind = getattr(transformers, json.loads((out / "config.json").read_text())["architectures"][0])
    before, after = (stock(at, kind)[1] for at in (path, out))
    assert (after["missing_keys"], after["unexpected_keys"]) == (before["missing_keys"], before["unexpected_keys"])


@pytest.mark.parametrize("make", TOLD, ids=named)
def test_what_transformers_ignores_is_told(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "source")
    told = "ignored" if make is made.fields_of_other_tools else "part of every export as it is"
    with pytest.warns(UserWarning, match=told):
        build_engine(EngineConfig(model=str(tmp_path / "source"), device="cpu"))


@pytest.mark.parametrize(
    "make",
    [made.head_twice, made.head_alone, made.bin_file, made.vision_language_with_head, made.base_model],
    ids=named,
)
def test_what_was_trained_is_under_every_name_that_it_had(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "source")
    batch = tiny_batch([12, 7, 9], vocab=40)
    engine = build_engine(EngineConfig(model=str(tmp_path / "source"), device="cpu", lr=1e-2))
    before = engine_log_probs(engine, batch)
    engine.train_batch(batch, SFT())
    engine.save_hf(tmp_path / "out")
    trained = log_probs(stock(tmp_path / "out")[0], batch)
    assert (trained - engine_log_probs(engine, batch)).abs().max() < 1e-5
    assert (trained - before).abs().max() > 0.1
    heads = [t for name, t in tensors(tmp_path / "out").items() if "embed_tokens" in name or "lm_head" in name]
    assert all(torch.equal(head, heads[0]) for head in heads)


REFUSED: dict[Callable[[Path], None], str] = {
    made.without_a_shard: "is missing or damaged",
    made.cut_short: "is missing or damaged",
    made.bin_cut_short: r"pytorch_model\.bin is missing or damaged",
    made.bin_with_code: r"pytorch_model\.bin is damaged, or holds more than tensors",
    made.another_shape: r"has shape \(7,\)",
    made.head_of_another_shape: r"has shape \(50, 32\)",
    made.no_weights: "has neither model.safetensors",
}


@pytest.mark.parametrize("make", REFUSED, ids=named)
def test_what_transformers_cannot_read_is_refused_by_both(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "source")
    with pytest.raises((OSError, RuntimeError, ValueError, SafetensorError, UnpicklingError)):
        stock(tmp_path / "source")
    with pytest.raises(ValueError, match=REFUSED[make]):
        build_engine(EngineConfig(model=str(tmp_path / "source"), device="cpu"))


def an_adapter_beside_the_weights(path: Path) -> None:
    whole(path)
    get_peft_model(qwen3(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(path)


STRICTER: dict[Callable[[Path], None], str] = {
    made.vision_language_base: "lacks model",  # the text class does not find it
    made.no_head: r"lacks lm_head\.weight",
    an_adapter_beside_the_weights: "merge_and_unload",
    made.two_prefixes: r"norm\.weight and model\.norm\.weight are both read as model\.norm\.weight",
}


@pytest.mark.parametrize("make", STRICTER, ids=named)
def test_what_transformers_would_fill_at_random_or_choose_is_refused(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "source")
    stock(tmp_path / "source")
    with pytest.raises(ValueError, match=STRICTER[make]):
        build_engine(EngineConfig(model=str(tmp_path / "source"), device="cpu"))


@pytest.mark.parametrize("beside", [False, True])
def test_a_directory_with_an_adapter_names_the_base(beside: bool, tmp_path: Path) -> None:
    base, path = tmp_path / "base", tmp_path / "adapter"
    whole(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(path)
    if beside:
        whole(path)
    with pytest.raises(ValueError, match=f"holds an adapter .*give its base {base}, a directory"):
        build_engine(EngineConfig(model=str(path), device="cpu"))


def test_a_vision_language_model_is_read_from_its_base(tmp_path: Path) -> None:
    made.vision_language_base(tmp_path / "source")
    engine = build_engine(EngineConfig(model=str(tmp_path / "source"), device="cpu", vision="frozen"))
    batch = tiny_batch([12, 7, 9], vocab=40)
    model = stock(tmp_path / "source", transformers.AutoModelForImageTextToText)[0]
    assert (engine_log_probs(engine, batch) - log_probs(model, batch)).abs().max() < 1e-5
    engine.save_hf(tmp_path / "out")
    assert set(tensors(tmp_path / "out")) == set(tensors(tmp_path / "source"))


def test_an_export_over_another_one_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(tmp_path / "source")
    engine = build_engine(EngineConfig(model=str(tmp_path / "source"), device="cpu"))
    sharded(tmp_path / "out")
    engine.save_hf(tmp_path / "out")
    assert not [*tmp_path.glob("out/*-of-*"), *tmp_path.glob(f"out/{INDEX}")]
    shutil.copytree(tmp_path / "out", tmp_path / "again")
    build_engine(EngineConfig(model=str(tmp_path / "again"), device="cpu"))


def test_a_config_class_that_reads_text_alone_is_its_own() -> None:
    config: PretrainedConfig = gemma3(tied=False).config
    engine: Any = build_engine(EngineConfig(device="cpu"), config)
    assert type(engine.executor.model).__name__ == "Gemma3ForCausalLM"
    assert not engine.executor.model.config.tie_word_embeddings
