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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from engines import EngineConfig, build_engine
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"


def qwen3(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES | changes))


def qwen3_moe() -> Any:
    torch.manual_seed(0)
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | more))


def gemma3(tied: bool = True) -> Any:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision |= {"image_size": 8, "patch_size": 4}
    text = SIZES | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=tied
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(tensors(path)), path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def to_bin(path: Path, shards: int = 1, **options: Any) -> None:
    """The weights as torch.save writes them, tied ones sharing their memory."""
    found = tensors(path)
    (path / "model.safetensors").unlink()
    if shards == 1:
        torch.save(
            found | {"lm_head.weight": found["model.embed_tokens.weight"]}, path / "pytorch_model.bin", **options
        )
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        names = list(found)[shard::shards]
        torch.save({name: found[name] for name in names}, path / f"pytorch_model-{shard}.bin")
        weight_map |= dict.fromkeys(names, f"pytorch_model-{shard}.bin")
    (path / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def whole(path: Path) -> None:
    qwen3().save_pretrained(path)


def untied(path: Path) -> None:
    qwen3(tie_word_embeddings=False).save_pretrained(path)


def sharded(path: Path) -> None:
    qwen3().save_pretrained(path, max_shard_size="20KB")


def sharded_then_whole(path: Path) -> None:
    sharded(path)
    qwen3(1).save_pretrained(path)
    assert (path / INDEX).is_file()


def whole_then_sharded(path: Path) -> None:
    whole(path)
    qwen3(1).save_pretrained(path, max_shard_size="20KB")
    assert (path / "model.safetensors").is_file()


def newer_file_beside_shards(path: Path) -> None:
    sharded(path)
    model = qwen3(1)
    found = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    assert len(list(path.glob("*.safetensors"))) > 2


def shards_in_a_subfolder(path: Path) -> None:
    sharded(path)
    (path / "weights").mkdir()
    for file in path.glob("*.safetensors"):
        file.rename(path / "weights" / file.name)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = {name: f"weights/{file}" for name, file in index["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(index))


def index_names_another_of_its_files(path: Path) -> None:
    sharded(path)
    index = json.loads((path / INDEX).read_text())
    found = index["weight_map"]
    found["model.norm.weight"] = next(file for file in found.values() if file != found["model.norm.weight"])
    (path / INDEX).write_text(json.dumps(index))


def bin_file(path: Path) -> None:
    whole(path)
    to_bin(path)


def bin_file_of_the_old_format(path: Path) -> None:
    whole(path)
    to_bin(path, _use_new_zipfile_serialization=False)


def bin_shards(path: Path) -> None:
    whole(path)
    to_bin(path, shards=3)


def bin_beside_safetensors(path: Path) -> None:
    whole(path)
    to_bin(path)
    qwen3(1).save_pretrained(path)


def bin_beside_shards(path: Path) -> None:
    whole(path)
    to_bin(path)
    qwen3(1).save_pretrained(path, max_shard_size="20KB")


def base_model(path: Path) -> None:
    qwen3().model.save_pretrained(path)
    assert "embed_tokens.weight" in tensors(path)


def base_model_with_experts(path: Path) -> None:
    qwen3_moe().model.save_pretrained(path)
    assert "layers.0.mlp.experts.0.gate_proj.weight" in tensors(path)


def half_without_prefix(path: Path) -> None:
    whole(path)
    rewrite(path, lambda t: {n.removeprefix("model.") if ".1." in n else n: value for n, value in t.items()})


def experts_apart(path: Path) -> None:
    qwen3_moe().save_pretrained(path)


def experts_together(path: Path) -> None:
    model = qwen3_moe()
    model.save_pretrained(path)
    found = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})


def head_twice(path: Path) -> None:
    whole(path)
    rewrite(path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})


def head_of_its_own(path: Path) -> None:
    whole(path)
    rewrite(path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].flip(0).contiguous()})


def head_alone(path: Path) -> None:
    whole(path)
    rewrite(path, lambda t: {n.replace("model.embed_tokens", "lm_head"): value for n, value in t.items()})


def vision_language(path: Path) -> None:
    model: Any = tiny_model("vision")
    model.save_pretrained(path)


def vision_language_base(path: Path) -> None:
    model: Any = tiny_model("vision")
    model.model.save_pretrained(path)
    assert "language_model.embed_tokens.weight" in tensors(path)


def vision_language_with_head(path: Path) -> None:
    vision_language(path)
    rewrite(path, lambda t: t | {"lm_head.weight": t["model.language_model.embed_tokens.weight"].clone()})


def text_part_saved_alone(path: Path) -> None:
    vision_language(path.with_name("vision"))
    AutoModelForCausalLM.from_pretrained(path.with_name("vision")).save_pretrained(path)


def gemma3_vision(path: Path) -> None:
    gemma3().save_pretrained(path)


def gemma3_untied(path: Path) -> None:
    gemma3(tied=False).save_pretrained(path)


def gemma3_as_published(path: Path) -> None:
    gemma3().save_pretrained(path)
    old = {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower."}
    old |= {"model.multi_modal_projector.": "multi_modal_projector."}

    def change(found: dict[str, Tensor]) -> dict[str, Tensor]:
        prefixes = {name: next(one for one in old if name.startswith(one)) for name in found}
        return {old[prefixes[n]] + n.removeprefix(prefixes[n]): value for n, value in found.items()}

    if any(name.startswith("model.") for name in tensors(path)):
        rewrite(path, change)
    assert "language_model.model.norm.weight" in tensors(path)


def classifier(path: Path) -> None:
    torch.manual_seed(0)
    transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**SIZES)).save_pretrained(path)
    assert "score.weight" in tensors(path)


def value_head(path: Path) -> None:
    whole(path)
    rewrite(path, lambda t: t | {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.ones(1)})


def more_layers_than_the_config(path: Path) -> None:
    qwen3(num_hidden_layers=3).save_pretrained(path)
    edit_config(path, num_hidden_layers=2, layer_types=["full_attention"] * 2)


def old_buffers(path: Path) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(path)
    rewrite(path, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


def further_token_head(path: Path) -> None:
    vision_language(path)
    rewrite(path, lambda t: t | {"mtp.fc.weight": torch.randn(32, 64)})


def fields_of_other_tools(path: Path) -> None:
    whole(path)
    edit_config(
        path,
        is_llama_config=True,
        rope_interleaved=False,
        unsloth_version="2025.3.19",
        _attn_implementation_autoset=True,
        gradient_checkpointing=True,
        finetuning_task="x",
        auto_map={"AutoModelForCausalLM": "modeling_other.Other"},
        temperature=0.7,
        max_length=20,
        torchscript=False,
        pruned_heads={},
    )


def half_precision(path: Path) -> None:
    qwen3().to(torch.float16).save_pretrained(path)


def mixed_precision(path: Path) -> None:
    whole(path)
    rewrite(path, lambda t: {n: v if "norm" in n else v.bfloat16() for n, v in t.items()})


def adapter_merged_by_peft(path: Path) -> None:
    model = get_peft_model(qwen3(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    merged: Any = model.merge_and_unload()
    merged.save_pretrained(path)


DIRECTORIES = [
    whole, untied, sharded, sharded_then_whole, whole_then_sharded, newer_file_beside_shards, shards_in_a_subfolder,
    index_names_another_of_its_files, bin_file, bin_file_of_the_old_format, bin_shards, bin_beside_safetensors,
    bin_beside_shards, base_model, base_model_with_experts, half_without_prefix, experts_apart, experts_together,
    head_twice, head_of_its_own, head_alone, vision_language, vision_language_with_head,
    text_part_saved_alone, gemma3_vision, gemma3_untied, gemma3_as_published, classifier, value_head,
    more_layers_than_the_config, old_buffers, further_token_head, fields_of_other_tools, half_precision,
    mixed_precision, adapter_merged_by_peft,
]  # fmt: skip
TOLD = [classifier, value_head, more_layers_than_the_config, fields_of_other_tools]


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
    told = "ignored" if make is fields_of_other_tools else "part of every export as it is"
    with pytest.warns(UserWarning, match=told):
        build_engine(EngineConfig(model=str(tmp_path / "source"), device="cpu"))


@pytest.mark.parametrize("make", [head_twice, head_alone, bin_file, vision_language_with_head, base_model], ids=named)
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


def without_a_shard(path: Path) -> None:
    sharded(path)
    next(iter(path.glob("*.safetensors"))).unlink()


def cut_short(path: Path) -> None:
    whole(path)
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-8])


def bin_cut_short(path: Path) -> None:
    bin_file(path)
    (path / "pytorch_model.bin").write_bytes((path / "pytorch_model.bin").read_bytes()[:-400])


def bin_with_code(path: Path) -> None:
    whole(path)
    (path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Path("x")}, path / "pytorch_model.bin")


def another_shape(path: Path) -> None:
    whole(path)
    rewrite(path, lambda t: t | {"model.norm.weight": torch.ones(7)})


def head_of_another_shape(path: Path) -> None:
    whole(path)
    rewrite(path, lambda t: t | {"lm_head.weight": torch.ones(50, 32)})


def no_weights(path: Path) -> None:
    whole(path)
    (path / "model.safetensors").unlink()


REFUSED: dict[Callable[[Path], None], str] = {
    without_a_shard: "is missing or damaged",
    cut_short: "is missing or damaged",
    bin_cut_short: r"pytorch_model\.bin is missing or damaged",
    bin_with_code: r"pytorch_model\.bin is damaged, or holds more than tensors",
    another_shape: r"has shape \(7,\)",
    head_of_another_shape: r"has shape \(50, 32\)",
    no_weights: "has neither model.safetensors",
}


@pytest.mark.parametrize("make", REFUSED, ids=named)
def test_what_transformers_cannot_read_is_refused_by_both(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "source")
    with pytest.raises((OSError, RuntimeError, ValueError, SafetensorError, UnpicklingError)):
        stock(tmp_path / "source")
    with pytest.raises(ValueError, match=REFUSED[make]):
        build_engine(EngineConfig(model=str(tmp_path / "source"), device="cpu"))


def no_head(path: Path) -> None:
    untied(path)
    rewrite(path, lambda t: {name: value for name, value in t.items() if name != "lm_head.weight"})


def an_adapter_beside_the_weights(path: Path) -> None:
    whole(path)
    get_peft_model(qwen3(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(path)


def two_prefixes(path: Path) -> None:
    whole(path)
    rewrite(path, lambda t: t | {"norm.weight": t["model.norm.weight"].clone()})


STRICTER: dict[Callable[[Path], None], str] = {
    vision_language_base: "lacks model",  # the text class does not find it
    no_head: r"lacks lm_head\.weight",
    an_adapter_beside_the_weights: "merge_and_unload",
    two_prefixes: r"norm\.weight and model\.norm\.weight are both read as model\.norm\.weight",
}


@pytest.mark.parametrize("make", STRICTER, ids=named)
def test_what_transformers_would_fill_at_random_or_choose_is_refused(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "source")
    stock(tmp_path / "source")
    with pytest.raises(ValueError, match=STRICTER[make]):
        build_engine(EngineConfig(model=str(tmp_path / "source"), device="cpu"))


def test_a_vision_language_model_is_read_from_its_base(tmp_path: Path) -> None:
    vision_language_base(tmp_path / "source")
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
