"""A run that trains the head for multi-token prediction, sampled by vLLM: every weight sync has the head too."""

import os
from pathlib import Path

import pytest

from apps.grpo.main import run
from apps.grpo.testing.headed import assert_head_trained, small

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


def test_a_run_trains_the_head(tmp_path: Path) -> None:
    """Its log-probs are held to the trainer's on the first batch and after each weight sync, as ever."""
    run(small(tmp_path, "vllm"))
    assert_head_trained(tmp_path)
