"""On a CUDA device: drafts by the checkpoint's own head (`mtp.*`), before and after weight syncs. No GPU has run it."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.sync.manifest import Manifest
from rollout.sync.pieces import BucketPiece, buckets
from rollout.sync.transfer import transfer_weights
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.gpu_served import ARGUMENTS, CLOSE, FAR, REASON, SIZES
from rollout.vllm.testing.served import PROMPTS, VERSIONS, changed, config, distances, pieces, sample, served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or "TESSERA_VLLM_PYTHON" not in os.environ, reason=REASON),
]
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


def head(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Random tensors of a head beside the model: a layer of full attention as the model's, and what is around it."""
    draw = torch.Generator().manual_seed(seed)
    size = model.config.hidden_size
    number = model.config.layer_types.index("full_attention")
    layer = dict(model.model.layers[number].named_parameters())
    shapes = {f"mtp.layers.0.{name}": tuple(parameter.shape) for name, parameter in layer.items()}
    shapes |= {f"mtp.{name}.weight": (size,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes["mtp.fc.weight"] = (size, 2 * size)
    return {name: 0.05 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder: Path = tmp_path_factory.mktemp("headed")
    model = served(**SIZES, mtp_num_hidden_layers=1)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | head(model, 0), file, metadata={"format": "pt"})
    with VllmEngine(folder, config(memory_share=0.2, arguments=ARGUMENTS | DRAFTS)) as made:
        yield made


def test_log_probs_are_the_models_whatever_drafts_before_and_after_a_sync(engine: VllmEngine) -> None:
    old, new = served(**SIZES).to("cuda"), changed(served(**SIZES).to("cuda"))
    before = sample(engine, PROMPTS)
    assert distances(old, PROMPTS, before).mean() < CLOSE
    accepted = engine.take_accepted()
    assert accepted is not None
    assert 0 <= accepted <= 2
    own = [BucketPiece(n, tuple(t.shape), t.dtype, 0, t.reshape(-1)) for n, t in head(old, 1).items()]
    asyncio.run(transfer_weights([engine], Manifest(next(VERSIONS)), buckets([*pieces(new), *own], 1 << 20)))
    after = sample(engine, PROMPTS)
    assert distances(new, PROMPTS, after).mean() < CLOSE
    assert distances(old, PROMPTS, after).mean() > FAR
