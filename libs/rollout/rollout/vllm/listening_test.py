"""Real vLLM, two copies of two workers that share experts: nothing of it can be reached from another machine."""

import os
from pathlib import Path
from typing import Any

import pytest

from rollout.testing.listen_addresses import listen_addresses
from rollout.testing.model import SERVED, tiny_mixture
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import config

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SPREAD: dict[str, Any] = {"data_parallel": 2, "expert_parallel": True, "experts_over_copies": True}


def test_workers_and_copies_listen_on_loopback_alone(tmp_path: Path) -> None:
    tiny_mixture(300, layers=4, **{**SERVED, **HEADS, "num_experts": 4}).save_pretrained(tmp_path)
    with VllmEngine(tmp_path, config(**SPREAD, tensor_parallel=2)):
        found = listen_addresses()

    assert found, "workers that find each other listen somewhere"
    assert set().union(*found.values()) == {"127.0.0.1"}, found
