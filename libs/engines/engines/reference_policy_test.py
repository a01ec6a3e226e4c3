"""The reference model is in the dtype of its layers and on the host while unused, and scores as float32 weights do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines import EngineConfig, LoraConfig, base_policy, build_engine, build_reference
from engines.devices.detect import devices_of
from engines.fake_npu.path import fake_npu_on_path
from engines.proofs.forked_ranks import launch_forked
from engines.reference_policy import reference_config
from engines.testing.one_rank import one_rank  # noqa: F401
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

LENGTHS = [17, 3, 9, 12]
NARROW = EngineConfig(device="cpu", dtype="bfloat16", max_tokens_per_rank=24)


def saved(folder: Path, kind: str = "dense") -> str:
    """Save a model whose float32 weights are no bfloat16 numbers; return its directory."""
    model: Any = tiny_model(kind, scale=2.0)
    model.save_pretrained(folder)
    return str(folder)


def log_probs(engine: Any) -> torch.Tensor:
    scored: Any = engine.forward(tiny_batch(LENGTHS))["log_probs"]
    values: torch.Tensor = scored.values()
    return values


def compared(config: EngineConfig) -> tuple[bool, list[str], int]:
    """Return whether the reference model scores as float32 weights do, its dtypes, and its bytes on this rank."""
    policy: Any = build_engine(config)
    policy.reference = build_reference(config)
    with base_policy(policy) as reference:
        mine = log_probs(reference)
    weights = list(policy.reference.executor.model.parameters())
    held = [getattr(weight, "_local_tensor", weight) for weight in weights]
    wide = log_probs(build_engine(config, trainable=False))
    return torch.equal(mine, wide), sorted({str(one.dtype) for one in held}), sum(one.nbytes for one in held)


@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        ("dense", 1, {}),
        ("moe", 1, {"weights": "sharded"}),
        ("dense", 1, {"weights": "replicated"}),
        ("dense", 2, {"weights": "replicated"}),
        ("moe", 2, {"expert_parallel": 2}),
        ("dense", 2, {"optimizer_on_host": True, "parameters_on_host": True}),
    ],
)
def test_it_scores_as_float32_weights_do_in_half_the_bytes(
    tmp_path: Path, kind: str, ranks: int, options: dict[str, Any]
) -> None:
    """Bit for bit, whole and sharded, with experts on ranks of their own, and kept on the host by FSDP2."""
    config = replace(NARROW, model=saved(tmp_path, kind), **options)
    equal, dtypes, size = launch_forked(compared, (config,), ranks)
    assert (equal, dtypes) == (True, ["torch.bfloat16"])
    assert size == pytest.approx(2 * sum(p.numel() for p in tiny_model(kind).parameters()) / ranks, rel=0.05)


def test_a_run_in_float32_keeps_float32(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", max_tokens_per_rank=24, model=saved(tmp_path))
    assert launch_forked(compared, (config,), 1)[:2] == (True, ["torch.float32"])


def test_what_bfloat16_costs_is_its_arithmetic(tmp_path: Path, one_rank: None) -> None:  # noqa: F811
    """Against stock transformers in float32, one sequence at a time: the policy at its start is as far from it."""
    path = saved(tmp_path)
    stock: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch, exact = tiny_batch(LENGTHS), []
    for row in batch["input_ids"].unbind():
        with torch.no_grad():
            scores = stock(row[None]).logits[0].log_softmax(-1)
        exact.append(torch.cat([torch.zeros(1), scores[:-1].gather(-1, row[1:, None])[:, 0]]))
    config = replace(NARROW, model=path)
    policy: Any = build_engine(config)
    policy.reference = build_reference(config)
    with base_policy(policy) as reference:
        found = log_probs(reference)
    assert torch.equal(found, log_probs(policy)), "the KL at the start is 0"
    difference = (found - torch.cat(exact)).abs()
    assert 0 < difference.mean() < 0.02
    assert difference.max() < 0.1


def test_settings_of_the_reference_model() -> None:
    assert reference_config(EngineConfig(device="cpu")).master_dtype == "float32"
    rounded = EngineConfig(device="cpu", master_dtype="bfloat16", lora=LoraConfig(rank=2))
    assert reference_config(rounded).master_dtype == "bfloat16", "as the policy begins"
    assert reference_config(rounded).lora.rank == 0
    assert reference_config(replace(NARROW, weights="replicated")).weights == "auto"
    assert reference_config(replace(NARROW, backend="megatron")).master_dtype == "float32"


def device_bytes(config: EngineConfig) -> tuple[int, int, bool]:
    """Return bytes on the device beside the trained engine's: at rest and while it scores, and whether a second block
    scores alike."""
    policy: Any = build_engine(config)
    policy.train_batch(tiny_batch(LENGTHS), SFT())
    memory: Any = devices_of(config.device).memory
    before = memory().allocated
    policy.reference = build_reference(config)
    scores, there = [], 0
    for _ in range(2):
        with base_policy(policy) as reference:
            there = memory().allocated - before
            scores.append(log_probs(reference))
    with pytest.raises(ValueError, match="onload"):
        policy.reference.forward(tiny_batch(LENGTHS))
    at_rest = memory().allocated - before
    return at_rest, there, torch.equal(*scores)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_it_is_on_the_host_while_unused(tmp_path: Path, backend: str) -> None:
    """A stand-in for an NPU counts the bytes on the device: two a parameter while it scores, none at rest."""
    config = EngineConfig(device="npu", backend=backend, model=saved(tmp_path), max_tokens_per_rank=64)
    parameters = sum(p.numel() for p in tiny_model("dense").parameters())
    with fake_npu_on_path():
        at_rest, there, alike = launch_forked(device_bytes, (config,), 2, device="npu")
    assert alike
    assert at_rest < 0.05 * there
    assert there == pytest.approx(2 * parameters / (2 if backend == "fsdp2" else 1), rel=0.1)
