"""An adapter as files that peft loads: adapter_config.json and adapter_model.safetensors."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from engines.adapters.lora import linear_layers
from engines.adapters.stacked import peft_tensors
from engines.lora_config import LoraConfig
from engines.nonfinite import finite_tensors
from engines.storage.directories import fresh_temporary, replace_directory
from engines.weights.disk_names import DiskNames

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def save_adapter(engine: Any, directory: str | Path) -> None:
    """Write the adapter of an engine for `peft.PeftModel.from_pretrained`; the directory appears whole. Collective.

    One of a vision-language checkpoint has the names of two classes, the checkpoint's own and that of its text part:
    peft reads those of the class that it is put over, and ignores the others.

    ValueError where the engine has none, `NonFiniteError` for values that are not finite, and after a step that
    ended a run.
    """
    config: LoraConfig = engine.config.lora
    if not config.rank:
        raise ValueError("the engine has no adapter to save: set EngineConfig.lora, or use save_hf")
    engine.guard.check_export()
    model, target = engine.executor.model, Path(directory)
    names: DiskNames = engine.weights.names
    live = {
        name: tensor.detach().to("cpu", torch.float32, copy=True)
        for name, tensor in finite_tensors(engine.executor.adapter_tensors())
    }
    tensors: dict[str, Tensor] = {}
    for own, whole in peft_tensors(live):
        for name in names.in_classes(own):
            tensors[f"base_model.model.{name}.weight"] = whole.clone().contiguous()
    if dist.get_rank() == 0:
        made = fresh_temporary(target)
        save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
        peft_config = _peft_config(config, model, names, engine.config.model)
        (made / CONFIG).write_text(json.dumps(peft_config, indent=2) + "\n")
        replace_directory(made, target)
    dist.barrier()


def _peft_config(config: LoraConfig, model: Any, names: DiskNames, base: str | None) -> dict[str, Any]:
    layers = [name for name, module in linear_layers(model).items() if hasattr(module, "lora_on")]
    targets = sorted({name.rpartition(".")[2] for name in layers})
    decoder = rf"model\.(language_model\.)?layers\..*\.({'|'.join(targets)})"  # a tower may have such layers too
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rank_stabilized,
        "target_modules": decoder if names.text_prefix else targets,
        "target_parameters": list(config.target_parameters) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
