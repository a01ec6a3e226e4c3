"""A tiny random model of a recipe's architecture, as the directory that its real checkpoint would be."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from apps.quickstart.model import set_time_steps
from apps.quickstart.tokenizer import PAD, TURN_END, build_tokenizer
from apps.quickstart.vision import save_image_settings, vision_fields, vision_tokenizer
from runplan.model.model_shape import ModelShape

WRAPPERS = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Model types of vision-language checkpoints, by that of their text part."""
POSITIONS = 2048


def tiny_shape(shape: ModelShape, stages: int, tp: int) -> ModelShape:
    """Return the same architecture in small: a whole pattern of layers a stage, two heads a tensor-parallel rank.

    Ratios stay: query heads to key heads, value heads to key heads of a delta net. Head sizes are those that vLLM has
    kernels for on a CPU, and its experts have rows for two of its workers.
    """
    kv_heads = min(shape.kv_heads, 2 * tp)
    linear_keys = min(shape.linear_key_heads, 2 * tp)
    values_each = shape.linear_value_heads // max(1, shape.linear_key_heads)
    return replace(
        shape,
        name=f"tiny {shape.name}",
        source="made here, of random numbers",
        layers=shape.full_attention_interval * max(2, stages + (stages > 2)),
        attention_layers=0 if shape.attention_layers == 0 else None,
        hidden=64,
        kv_heads=kv_heads,
        heads=kv_heads * (shape.heads // shape.kv_heads),
        head_dim=32,
        vocab=len(_tokenizer_of(shape)),
        intermediate=min(96, shape.intermediate),
        experts=min(8, shape.experts),
        experts_per_token=min(2, shape.experts_per_token),
        expert_intermediate=min(64, shape.expert_intermediate),
        shared_expert_intermediate=min(32, shape.shared_expert_intermediate),
        linear_key_heads=linear_keys,
        linear_value_heads=linear_keys * values_each,
        linear_head_dim=64,
    )


def make_model(directory: Path, shape: ModelShape, seed: int) -> Path:
    """Write the model with the quickstart's tokenizer unless it is there; with a vision tower, one for its pictures.

    A kill leaves all of it or nothing.
    """
    if directory.is_dir():
        return directory
    tokenizer = _tokenizer_of(shape)
    config = transformers_config(shape, *(int(tokenizer.convert_tokens_to_ids(token)) for token in (PAD, TURN_END)))
    maker: Any = AutoModelForImageTextToText if shape.vision else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = maker.from_config(config)
        set_time_steps(model)
        _calm_experts(model)
    text = config.get_text_config()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = text.eos_token_id, text.pad_token_id
    temporary = directory.with_name(directory.name + ".writing")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    if shape.vision:
        save_image_settings(temporary)
    os.replace(temporary, directory)
    return directory


def _calm_experts(model: nn.Module) -> None:
    """Scale the outputs of experts to a quarter: the choices of a random router are close, and bfloat16 turns some of
    them. Unscaled, these move log-probs by 0.06 on average, in stock transformers as in vLLM; scaled by 0.02, as
    without experts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name and "down_proj" in name and "shared_expert" not in name:
                parameter.mul_(0.25)


def transformers_config(shape: ModelShape, pad_token_id: int, eos_token_id: int) -> PretrainedConfig:
    """Return the transformers config of a shape; with a vision tower the config of text and vision."""
    text = _text_fields(shape) | {"pad_token_id": pad_token_id, "eos_token_id": eos_token_id, "bos_token_id": None}
    if not shape.vision:
        return AutoConfig.for_model(shape.model_type, **text)
    return AutoConfig.for_model(
        WRAPPERS[shape.model_type],
        text_config={"model_type": shape.model_type, **text},
        tie_word_embeddings=shape.tied_embeddings,
        **vision_fields(vision_tokenizer(), shape.hidden),
    )


def _tokenizer_of(shape: ModelShape) -> PreTrainedTokenizerFast:
    return vision_tokenizer() if shape.vision else build_tokenizer()


def _text_fields(shape: ModelShape) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": shape.tied_embeddings,
        "initializer_range": 0.06,
    }
    if shape.intermediate:
        fields["intermediate_size"] = shape.intermediate
    if shape.experts:
        fields |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.expert_intermediate,
        }
    if shape.shared_expert_intermediate:
        fields["shared_expert_intermediate_size"] = shape.shared_expert_intermediate
    if shape.linear_key_heads:
        fields |= {
            "full_attention_interval": shape.full_attention_interval if shape.full_attention_layers else POSITIONS,
            "linear_num_key_heads": shape.linear_key_heads,
            "linear_num_value_heads": shape.linear_value_heads,
            "linear_key_head_dim": shape.linear_head_dim,
            "linear_value_head_dim": shape.linear_head_dim,
            "linear_conv_kernel_dim": shape.linear_conv_width,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        }
    return fields
