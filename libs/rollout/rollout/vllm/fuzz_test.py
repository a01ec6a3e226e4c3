"""Settings drawn at random, on vLLM on a CPU: what is sampled is what a teacher-forced pass says.

One process a family plays all of its cases. Dense families run in float32; the delta nets, which vLLM has on a CPU in
bfloat16 alone, without filters, whose edges move by rounding.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout.testing.chat import tiny_tokenizer
from rollout.testing.fuzz import Case, build_model, draw, engine_problems
from rollout.testing.model import SERVED
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import MOST, config

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
CASES = 16
HEADS: Mapping[str, Any] = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 2048}
FAMILIES: Mapping[str, tuple[Mapping[str, Any], str, float]] = {
    "qwen3": (HEADS, "float32", 1e-3),
    "llama": (HEADS, "float32", 1e-3),
    "qwen3_5_text": (SERVED, "auto", MOST),
}
"""Sizes, dtype, and the bound of a token's log-prob."""


def case_of(family: str, seed: int) -> Case:
    case = replace(draw(seed), decoder="module", family=family)
    return replace(case, top_k=0, min_p=0.0) if FAMILIES[family][1] == "auto" else case


@pytest.mark.parametrize("family", FAMILIES)
def test_what_vllm_samples_is_exact(family: str, tmp_path: Path) -> None:
    sizes, dtype, bound = FAMILIES[family]
    build_model(case_of(family, 0), tiny_tokenizer(), 0, sizes).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    interrupted = 0
    with VllmEngine(tmp_path, replace(config(dtype=dtype), tokenizer=tmp_path)) as engine:
        for seed in range(CASES):
            case = case_of(family, seed)
            assert engine_problems(case, engine, sizes, bound) == [], case
            interrupted += case.swaps
    assert interrupted > 3
