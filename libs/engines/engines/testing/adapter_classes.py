"""What peft computes with a saved adapter over the classes that can read the checkpoint under it."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from engines.adapters.adapter_files import save_adapter
from engines.families.torch_operations import choose_torch_operations
from engines.protocol import TrainEngine
from engines.tiny import tiny_batch
from objectives import SFT


def stock_classes(base: Path) -> list[Any]:
    """Load a vision-language checkpoint as its own class and as its text part's."""
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    models = [kind.from_pretrained(base, dtype=torch.float32).eval() for kind in kinds]
    for model in models:
        if type(model).__name__.startswith("Qwen"):
            choose_torch_operations(model)
    assert len({type(model) for model in models}) == len(models)
    return models


@torch.no_grad()
def log_probs(model: Any, batch: Any) -> Tensor:
    """Score one sequence at a time."""
    rows = []
    for ids in batch["input_ids"].unbind():
        scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        rows.append(scores.gather(1, ids[1:, None]).squeeze(1))
    return torch.cat(rows)


def assert_peft_agrees(engine: TrainEngine, models: Sequence[Any], folder: Path) -> None:
    """Train an adapter, save it, and hold peft over each of these models to the engine: all layers found and used."""
    batch = tiny_batch([12, 7, 9], vocab=40)
    for _ in range(2):
        engine.train_batch(batch, SFT())
    save_adapter(engine, folder)
    want = torch.cat([row[1:] for row in engine.forward(batch)["log_probs"].unbind()])
    for model in models:
        before, name = log_probs(model, batch), type(model).__name__
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            adapted = PeftModel.from_pretrained(model, folder).eval()
        assert not [str(one.message) for one in told if "adapter keys" in str(one.message)], name
        after = log_probs(adapted, batch)
        assert float((after - want).abs().max()) < 2e-5, name
        assert float((after - before).abs().max()) > 0.1, name
