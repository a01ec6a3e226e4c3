"""Adapters as the engine holds them: their number, and the bytes of what is trained and of what is frozen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from engines import EngineConfig, LoraConfig, build_engine
from engines.adapters.lora import is_adapter
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT
from runplan.estimates.states import fsdp_states
from runplan.model.adapters import adapter_parameters
from runplan.model.model_shape import shape_of

STACKS = (("experts.down_proj",), ("experts.down_proj", "mlp.experts.gate_up_proj"))
KINDS = [*((kind, ()) for kind in ("dense", "moe", "attention")), *(("moe", stacks) for stacks in STACKS)]


@pytest.mark.parametrize(("kind", "stacks"), KINDS)
@pytest.mark.parametrize("targets", [(), ("q_proj", "o_proj")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_what_an_engine_holds(
    tmp_path: Path, kind: str, stacks: tuple[str, ...], targets: tuple[str, ...], dtype: torch.dtype
) -> None:
    model: Any = tiny_model(kind).to(dtype)
    model.save_pretrained(tmp_path)
    lora = LoraConfig(rank=3, alpha=6.0, targets=targets, target_parameters=stacks)
    config = EngineConfig(model=str(tmp_path), device="cpu", lora=lora)
    engine = build_engine(config)
    shape = shape_of(model.config, kind)
    engine.train_batch(tiny_batch([9, 5]), SFT())
    named = dict(engine.executor.model.named_parameters())  # type: ignore[attr-defined]
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in named.items()}
    trained = [name for name in local if is_adapter(name)]
    assert adapter_parameters(shape, config.lora) == sum(local[name].numel() for name in trained)
    states = fsdp_states(shape, config, 1, dtype.itemsize)
    assert states.weights == sum(p.numel() * p.element_size() for p in local.values())
    assert states.gradients == sum(local[name].numel() * local[name].element_size() for name in trained)
    moments = [t for state in engine.executor.optimizer.state.values() for t in state.values() if t.ndim]  # type: ignore[attr-defined]
    bytes_of_moments = sum((t.to_local() if isinstance(t, DTensor) else t).numel() * t.element_size() for t in moments)
    assert states.optimizer == bytes_of_moments
