"""Small model directories as transformers and other tools write them, by the function that writes each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines.tiny import tiny_model

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
    """Return a small Qwen3 with a tied head."""
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES | changes))


def qwen3_moe() -> Any:
    """Return a small Qwen3 with experts and a tied head."""
    torch.manual_seed(0)
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | more))


def gemma3(tied: bool = True) -> Any:
    """Return a small vision-language Gemma 3."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision |= {"image_size": 8, "patch_size": 4}
    text = SIZES | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=tied
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of the single safetensors file."""
    return load_file(path / "model.safetensors")


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the single safetensors file."""
    save_file(change(tensors(path)), path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path: Path, **fields: Any) -> None:
    """Set fields of config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def to_bin(path: Path, shards: int = 1, **options: Any) -> None:
    """Write the weights as torch.save does, tied ones sharing their memory."""
    weights = tensors(path)
    (path / "model.safetensors").unlink()
    if shards == 1:
        torch.save(
            weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, path / "pytorch_model.bin", **options
        )
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        names = list(weights)[shard::shards]
        torch.save({name: weights[name] for name in names}, path / f"pytorch_model-{shard}.bin")
        weight_map |= dict.fromkeys(names, f"pytorch_model-{shard}.bin")
    (path / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def whole(path: Path) -> None:
    """Write one file."""
    qwen3().save_pretrained(path)


def untied(path: Path) -> None:
    """Write a head of its own."""
    qwen3(tie_word_embeddings=False).save_pretrained(path)


def sharded(path: Path) -> None:
    """Write several files and their index."""
    qwen3().save_pretrained(path, max_shard_size="20KB")


def sharded_then_whole(path: Path) -> None:
    """Save twice: transformers leaves the old index."""
    sharded(path)
    qwen3(1).save_pretrained(path)
    assert (path / INDEX).is_file()


def whole_then_sharded(path: Path) -> None:
    """Save twice: transformers leaves the old file, which it reads first."""
    whole(path)
    qwen3(1).save_pretrained(path, max_shard_size="20KB")
    assert (path / "model.safetensors").is_file()


def newer_file_beside_shards(path: Path) -> None:
    """Write a file beside older shards and their index."""
    sharded(path)
    model = qwen3(1)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert len(list(path.glob("*.safetensors"))) > 2


def shards_in_a_subfolder(path: Path) -> None:
    """Write an index into a subfolder."""
    sharded(path)
    (path / "weights").mkdir()
    for file in path.glob("*.safetensors"):
        file.rename(path / "weights" / file.name)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = {name: f"weights/{file}" for name, file in index["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(index))


def index_names_another_of_its_files(path: Path) -> None:
    """Write an index that places a tensor in the wrong one of its files."""
    sharded(path)
    index = json.loads((path / INDEX).read_text())
    files = index["weight_map"]
    files["model.norm.weight"] = next(file for file in files.values() if file != files["model.norm.weight"])
    (path / INDEX).write_text(json.dumps(index))


def bin_file(path: Path) -> None:
    """Write pytorch_model.bin."""
    whole(path)
    to_bin(path)


def bin_file_of_the_old_format(path: Path) -> None:
    """Write pytorch_model.bin as before zip files."""
    whole(path)
    to_bin(path, _use_new_zipfile_serialization=False)


def bin_shards(path: Path) -> None:
    """Write several .bin files and their index."""
    whole(path)
    to_bin(path, shards=3)


def bin_beside_safetensors(path: Path) -> None:
    """Write a newer safetensors file beside pytorch_model.bin."""
    whole(path)
    to_bin(path)
    qwen3(1).save_pretrained(path)


def bin_beside_shards(path: Path) -> None:
    """Write newer shards beside pytorch_model.bin."""
    whole(path)
    to_bin(path)
    qwen3(1).save_pretrained(path, max_shard_size="20KB")


def base_model(path: Path) -> None:
    """Save the model without its head: names have no `model.`."""
    qwen3().model.save_pretrained(path)
    assert "embed_tokens.weight" in tensors(path)


def base_model_with_experts(path: Path) -> None:
    """Save a model with experts without its head."""
    qwen3_moe().model.save_pretrained(path)
    assert "layers.0.mlp.experts.0.gate_proj.weight" in tensors(path)


def half_without_prefix(path: Path) -> None:
    """Write some names with `model.` and some without."""
    whole(path)
    rewrite(path, lambda t: {n.removeprefix("model.") if ".1." in n else n: value for n, value in t.items()})


def experts_apart(path: Path) -> None:
    """Write one tensor an expert."""
    qwen3_moe().save_pretrained(path)


def experts_together(path: Path) -> None:
    """Write all experts of a layer as one tensor."""
    model = qwen3_moe()
    model.save_pretrained(path)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def head_twice(path: Path) -> None:
    """Write a tied head a second time."""
    whole(path)
    rewrite(path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})


def head_of_its_own(path: Path) -> None:
    """Write another head, though the config ties it."""
    whole(path)
    rewrite(path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].flip(0).contiguous()})


def head_alone(path: Path) -> None:
    """Write a tied weight as the head's alone."""
    whole(path)
    rewrite(path, lambda t: {n.replace("model.embed_tokens", "lm_head"): value for n, value in t.items()})


def vision_language(path: Path) -> None:
    """Write a vision-language Qwen3.5."""
    model: Any = tiny_model("vision")
    model.save_pretrained(path)


def vision_language_base(path: Path) -> None:
    """Save a vision-language Qwen3.5 without its head."""
    model: Any = tiny_model("vision")
    model.model.save_pretrained(path)
    assert "language_model.embed_tokens.weight" in tensors(path)


def vision_language_with_head(path: Path) -> None:
    """Write the tied head of a vision-language Qwen3.5 a second time."""
    vision_language(path)
    rewrite(path, lambda t: t | {"lm_head.weight": t["model.language_model.embed_tokens.weight"].clone()})


def text_part_saved_alone(path: Path) -> None:
    """Save the text part that transformers read from a vision-language checkpoint."""
    vision_language(path.with_name("vision"))
    AutoModelForCausalLM.from_pretrained(path.with_name("vision")).save_pretrained(path)


def gemma3_vision(path: Path) -> None:
    """Write a vision-language Gemma 3."""
    gemma3().save_pretrained(path)


def gemma3_untied(path: Path) -> None:
    """Write a vision-language Gemma 3 with a head of its own."""
    gemma3(tied=False).save_pretrained(path)


def gemma3_as_published(path: Path) -> None:
    """Write a vision-language Gemma 3 under its older names."""
    gemma3().save_pretrained(path)
    old = {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower."}
    old |= {"model.multi_modal_projector.": "multi_modal_projector."}

    def change(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        prefixes = {name: next(one for one in old if name.startswith(one)) for name in weights}
        return {old[prefixes[n]] + n.removeprefix(prefixes[n]): value for n, value in weights.items()}

    if any(name.startswith("model.") for name in tensors(path)):
        rewrite(path, change)
    assert "language_model.model.norm.weight" in tensors(path)


def classifier(path: Path) -> None:
    """Write a classifier of sequences: its head is no language model's."""
    torch.manual_seed(0)
    transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**SIZES)).save_pretrained(path)
    assert "score.weight" in tensors(path)


def value_head(path: Path) -> None:
    """Write a value head beside the model."""
    whole(path)
    rewrite(path, lambda t: t | {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.ones(1)})


def more_layers_than_the_config(path: Path) -> None:
    """Write a layer more than the config has."""
    qwen3(num_hidden_layers=3).save_pretrained(path)
    edit_config(path, num_hidden_layers=2, layer_types=["full_attention"] * 2)


def old_buffers(path: Path) -> None:
    """Write rotary frequencies, as transformers once did."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(path)
    rewrite(path, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


def further_token_head(path: Path) -> None:
    """Write a head that predicts further tokens beside a vision-language model."""
    vision_language(path)
    rewrite(path, lambda t: t | {"mtp.fc.weight": torch.randn(32, 64)})


def fields_of_other_tools(path: Path) -> None:
    """Write config fields that say nothing of the model."""
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
    """Write float16."""
    qwen3().to(torch.float16).save_pretrained(path)


def mixed_precision(path: Path) -> None:
    """Write bfloat16 with float32 norms."""
    whole(path)
    rewrite(path, lambda t: {n: v if "norm" in n else v.bfloat16() for n, v in t.items()})


def without_a_shard(path: Path) -> None:
    """Leave out a file that the index names."""
    sharded(path)
    next(iter(path.glob("*.safetensors"))).unlink()


def cut_short(path: Path) -> None:
    """Cut the file short."""
    whole(path)
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-8])


def bin_cut_short(path: Path) -> None:
    """Cut the .bin file short."""
    bin_file(path)
    (path / "pytorch_model.bin").write_bytes((path / "pytorch_model.bin").read_bytes()[:-400])


def bin_with_code(path: Path) -> None:
    """Write a .bin file with more than tensors."""
    whole(path)
    (path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Path("x")}, path / "pytorch_model.bin")


def another_shape(path: Path) -> None:
    """Write a tensor of another shape."""
    whole(path)
    rewrite(path, lambda t: t | {"model.norm.weight": torch.ones(7)})


def head_of_another_shape(path: Path) -> None:
    """Write a tied head of another vocabulary."""
    whole(path)
    rewrite(path, lambda t: t | {"lm_head.weight": torch.ones(50, 32)})


def no_weights(path: Path) -> None:
    """Leave out the weights."""
    whole(path)
    (path / "model.safetensors").unlink()


def no_head(path: Path) -> None:
    """Leave out a head that is not tied."""
    untied(path)
    rewrite(path, lambda t: {name: value for name, value in t.items() if name != "lm_head.weight"})


def two_prefixes(path: Path) -> None:
    """Write one tensor under two names."""
    whole(path)
    rewrite(path, lambda t: t | {"norm.weight": t["model.norm.weight"].clone()})
