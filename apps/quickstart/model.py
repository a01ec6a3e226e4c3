"""A Qwen3.5 of 0.2 million parameters: gated delta net and full attention in alternating layers, like larger ones."""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from apps.quickstart.tokenizer import PAD, TURN_END, WORDS, build_tokenizer


def tiny_config(
    vocab_size: int, pad_token_id: int, eos_token_id: int, hidden: int = 64, layers: int = 4
) -> Qwen3_5TextConfig:
    """Return the tiny hybrid's configuration: every second layer is full attention, the others are gated delta nets."""
    heads = 4
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        full_attention_interval=2,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=hidden // heads,
        linear_value_head_dim=hidden // heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        initializer_range=0.06,  # narrow layers want a wider start than the 0.02 of large ones
    )


def served_config(vocab_size: int, pad_token_id: int, eos_token_id: int) -> Qwen3_5TextConfig:
    """Return the tiny hybrid with head sizes that vLLM can compute on a CPU: 32 in attention, 64 in a delta net."""
    config = tiny_config(vocab_size, pad_token_id, eos_token_id)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 32
    config.linear_num_key_heads = config.linear_num_value_heads = 1
    config.linear_key_head_dim = config.linear_value_head_dim = 64
    config.rope_parameters = {**config.rope_parameters, "mrope_section": [4, 2, 2]}
    return config


def set_time_steps(model: nn.Module) -> None:
    """Start every gated delta net with time steps spread over 0.001..0.1, so that its state lasts as long as a prompt.

    This is the initialisation of Mamba-2 (arXiv 2405.21060) that the gated delta net took over (arXiv 2412.06464);
    transformers leaves the parameters at 1, with which most heads forget everything within one token.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            low, high = math.log(0.001), math.log(0.1)
            steps = torch.exp(low + (high - low) * torch.rand_like(parameter))
            with torch.no_grad():
                parameter.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus


MakeConfig = Callable[[int, int, int], Qwen3_5TextConfig]
"""(vocab_size, pad_token_id, eos_token_id) -> a model's configuration."""


def ensure_tiny_model(
    directory: Path, seed: int, make_config: MakeConfig = tiny_config, words: Sequence[str] = WORDS
) -> Path:
    """Call `save_tiny_model` on one rank unless the directory is there; a kill leaves all of it or nothing."""
    return made_once(directory, lambda temporary: save_tiny_model(temporary, seed, make_config, words))


def made_once(directory: Path, make: Callable[[Path], object]) -> Path:
    """Let rank 0 make a directory beside its final path and move it there, unless it is there already."""
    if not directory.is_dir() and int(os.environ.get("RANK", "0")) == 0:
        temporary = directory.with_name(directory.name + ".writing")
        shutil.rmtree(temporary, ignore_errors=True)
        make(temporary)
        os.replace(temporary, directory)
    return directory


def save_tiny_model(
    directory: Path, seed: int, make_config: MakeConfig = tiny_config, words: Sequence[str] = WORDS
) -> Path:
    """Write an untrained tiny Qwen3.5 with its tokenizer and chat template as an ordinary Hugging Face directory."""
    tokenizer = build_tokenizer(words)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (PAD, TURN_END)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(make_config(len(tokenizer), ids[PAD], ids[TURN_END]))
        set_time_steps(model)
    model.generation_config.eos_token_id = ids[TURN_END]
    model.generation_config.pad_token_id = ids[PAD]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
