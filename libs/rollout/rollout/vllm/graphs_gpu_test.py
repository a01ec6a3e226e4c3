"""Settings that only an accelerator has: the share of its memory, and steps that are replayed as CUDA graphs."""

import asyncio
import os
from pathlib import Path

import pytest
import torch

from rollout.engine import Sampling
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.gpu_served import ARGUMENTS, CLOSE, FAR, REASON, SIZES
from rollout.vllm.testing.served import PROMPTS, VERSIONS, changed, config, distances, pieces, sample, served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "TESSERA_VLLM_PYTHON" not in os.environ,
        reason=REASON,
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    served(**SIZES).save_pretrained(folder)
    return folder


def used() -> float:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / total


def test_the_share_of_memory_is_what_it_takes(directory: Path) -> None:
    before = used()
    for share in (0.2, 0.4):
        with VllmEngine(directory, config(memory_share=share, arguments=ARGUMENTS)) as engine:
            sample(engine, PROMPTS)
            taken = used() - before
        assert share - 0.1 < taken < share + 0.1


def test_replayed_steps_sample_from_the_weights_in_use(directory: Path) -> None:
    """Graphs read the weights where they lie, so a hand-over reaches them; sizes between the captured are padded."""
    model = served(**SIZES)
    graphs = config(memory_share=0.2, graph_sizes=(1, 4, 16), arguments=ARGUMENTS)
    with VllmEngine(directory, graphs) as engine:
        for prompts in (PROMPTS[:1], PROMPTS[:3], PROMPTS):
            answers = sample(engine, prompts, Sampling(max_new_tokens=8))
            assert distances(model.cuda(), prompts, answers).mean() < CLOSE
        new = changed(served(**SIZES))
        asyncio.run(engine.update_weights(next(VERSIONS), pieces(new)))
        answers = sample(engine, PROMPTS, Sampling(max_new_tokens=8))
        assert distances(new.cuda(), PROMPTS, answers).mean() < CLOSE
        assert distances(model.cuda(), PROMPTS, answers).mean() > FAR
