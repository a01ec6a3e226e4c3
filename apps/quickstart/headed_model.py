"""The quickstart's model with a head for multi-token prediction, as published checkpoints of Qwen3.5 have one."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from apps.quickstart.model import save_tiny_model, served_config
from engines.mtp.head import LAYERS, NAME, add_head


def headed_config(vocab_size: int, pad_token_id: int, eos_token_id: int) -> Qwen3_5TextConfig:
    """Return the quickstart's model in sizes that vLLM takes, with a head of one layer."""
    config = served_config(vocab_size, pad_token_id, eos_token_id)
    setattr(config, LAYERS, 1)
    return config


def save_headed_model(directory: Path, seed: int = 0) -> Path:
    """Write the untrained model with an untrained head, as published checkpoints have them."""
    save_tiny_model(directory, seed, headed_config)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        add_head(model)
    own = {f"{NAME}.{name}": tensor.contiguous() for name, tensor in model.mtp.state_dict().items()}
    file = directory / "model.safetensors"
    save_file(load_file(file) | own, file, metadata={"format": "pt"})
    return directory
