"""A Qwen3.5 that sees, of 0.3 million parameters: the tiny hybrid after a vision tower of two blocks."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from apps.quickstart.model import MakeConfig, made_once, set_time_steps, tiny_config
from apps.quickstart.shapes import CELL, CELLS
from apps.quickstart.tokenizer import PAD, TURN_END, build_tokenizer

VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
MERGE = 2
PATCH = CELL // MERGE
"""A cell of the drawn pictures is one token."""
_TEXT_PART = "{{ part.text }}"
_IMAGE_PART = (
    f"{{%- if part.type == 'image' -%}}{VISION_START}{IMAGE}{VISION_END}{{%- else -%}}{_TEXT_PART}{{%- endif -%}}"
)


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """Return the quickstart's tokenizer with the tokens of images, and a template that writes them."""
    tokenizer = build_tokenizer()
    tokens = [AddedToken(t, special=True, normalized=False) for t in (VISION_START, VISION_END, IMAGE, VIDEO)]
    tokenizer.add_tokens(tokens, special_tokens=True)
    assert _TEXT_PART in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(_TEXT_PART, _IMAGE_PART)
    return tokenizer


def ensure_vision_model(directory: Path, seed: int, make_config: MakeConfig = tiny_config) -> Path:
    """Call `save_vision_model` unless the directory is there already; a kill leaves all of it or nothing."""
    return made_once(directory, lambda temporary: save_vision_model(temporary, seed, make_config))


def save_vision_model(directory: Path, seed: int, make_config: MakeConfig = tiny_config) -> Path:
    """Write an untrained model with its tokenizer and the settings of its images, as a Hugging Face directory.

    `make_config`: of its text part.
    """
    tokenizer = vision_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (PAD, TURN_END)}
    text = make_config(len(tokenizer), ids[PAD], ids[TURN_END])
    config = Qwen3_5Config(
        text_config=text.to_dict(), tie_word_embeddings=True, **vision_fields(tokenizer, text.hidden_size)
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3_5ForConditionalGeneration(config)
        set_time_steps(model)
    model.generation_config.eos_token_id = ids[TURN_END]
    model.generation_config.pad_token_id = ids[PAD]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_image_settings(directory)
    return directory


def vision_fields(tokenizer: PreTrainedTokenizerFast, hidden: int) -> dict[str, Any]:
    """Return the fields of a vision model's config beside its text part: a tower for the pictures, and their tokens."""
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE,
        "out_hidden_size": hidden,
        "num_position_embeddings": (CELLS * MERGE) ** 2,
        "initializer_range": 0.06,
    }
    names = {"image": IMAGE, "video": VIDEO, "vision_start": VISION_START, "vision_end": VISION_END}
    ids = {f"{name}_token_id": int(tokenizer.convert_tokens_to_ids(token)) for name, token in names.items()}
    return {"vision_config": tower, **ids}


def save_image_settings(directory: Path) -> None:
    """Write the settings of Qwen2-VL's image processor: pictures as they are, up to 4 times the drawn ones' area."""
    smallest = (PATCH * MERGE) ** 2
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": smallest, "longest_edge": 4 * smallest * CELLS**2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
