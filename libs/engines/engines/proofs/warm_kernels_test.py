"""Kernels are warmed by steps that leave the weights as they were, whatever the size of the gradient."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engines.build import build_engine
from engines.config import EngineConfig
from engines.launch import ensure_group
from engines.proofs import warm_kernels
from engines.tiny import tiny_config


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    made = ensure_group("cpu")
    yield
    if made:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["attention", "dense"])
def test_two_steps_at_the_size_of_a_micro_batch_leave_the_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = list[Any]()
    before = list[torch.Tensor]()

    def noted(*arguments: Any) -> Any:
        built.append(build_engine(*arguments))
        before.extend(one.detach().clone() for one in built[0].executor.model.parameters())
        return built[0]

    monkeypatch.setattr(warm_kernels, "build_engine", noted)
    config = EngineConfig(device="cpu", max_tokens_per_rank=2000)
    found = warm_kernels._warm(config, tiny_config(kind))
    assert 1200 < found["tokens"] <= 2000
    pairs = zip(built[0].executor.model.parameters(), before, strict=True)
    assert max(float((now.detach() - then).abs().max()) for now, then in pairs) < 1e-6
