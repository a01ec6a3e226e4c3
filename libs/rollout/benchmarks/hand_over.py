"""Benchmark of weight sync to vLLM on one accelerator: 0.67B parameters, to each copy of the model.

    PYTHONPATH=libs/seqpack:libs/chat_tools:libs/rollout TESSERA_VLLM_PYTHON=PYTHON \
        python libs/rollout/benchmarks/hand_over.py [--copies 1 4] [--places host device] [--times 8]

Weights start on the trainer's side of the device and are synced while nothing is sampled. Prints a JSON line for each
number of copies and each place that weights pass through: medians without the first two weight syncs, in milliseconds.
`staged_ms` is writing them beside those in use, `paused_ms` the time in which vLLM makes no step.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from rollout.config import RolloutConfig
from rollout.engine import Sampling
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import BucketPiece, buckets
from rollout.sync.transfer import transfer_weights
from rollout.testing.model import HYBRID_067B as SHAPE
from rollout.vllm.engine import VllmEngine
from rollout.vllm.settings.config import VllmConfig

SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64}
BUCKET_BYTES = 1 << 28


def measure(
    model: Path, weights: list[BucketPiece], copies: int, place: str, times: int, cuda: bool
) -> dict[str, float]:
    """Return median milliseconds of a weight sync, and the number of bytes."""
    own = VllmConfig(data_parallel=copies, copies_per_device=copies, weights_on_device=place == "device")
    if cuda:
        arguments = {"additional_config": {"gdn_prefill_backend": "triton"}}
        own = VllmConfig(**(vars(own) | {"memory_share": 0.36 / copies, "arguments": arguments}))
    rows: list[tuple[float, float, float]] = []
    with VllmEngine(model, RolloutConfig(backend="vllm", max_length=512, vllm=own)) as engine:
        asyncio.run(engine.generate([5, 6, 7], Sampling(max_new_tokens=4)))
        for version in range(1, times + 1):
            start = time.perf_counter()
            stream = buckets(weights, BUCKET_BYTES)
            asyncio.run(transfer_weights([engine], Manifest(version), stream))
            seconds = time.perf_counter() - start
            assert engine.transfer is not None
            rows.append((engine.transfer.staged_s, engine.transfer.paused_s, seconds))
        assert engine.transfer is not None
        nbytes = engine.transfer.nbytes
    staged, paused, whole = (1e3 * statistics.median(column) for column in zip(*rows[2:], strict=True))
    return {"nbytes": nbytes, "staged_ms": staged, "paused_ms": paused, "whole_ms": whole}


def main() -> None:
    """Print the figures of each number of copies and each place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--places", nargs="+", choices=("host", "device"), default=["host", "device"])
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--device", default="cuda", help="cpu: a small model, to see that it runs")
    options = parser.parse_args()
    if options.times < 3:
        sys.exit("--times must be at least 3: the first two are not counted")
    cuda = options.device == "cuda"
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(SHAPE if cuda else SHAPE | SMALL))).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.to(options.device)
        named = {name: p.detach().reshape(-1) for name, p in model.named_parameters()}
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        weights = [BucketPiece(name, shapes[name], flat.dtype, 0, flat) for name, flat in named.items()]
        for copies, place in itertools.product(options.copies, options.places):
            figures = measure(Path(folder), weights, copies, place, options.times, cuda)
            facts = {"copies": copies, "place": place, **{k: round(v, 1) for k, v in figures.items()}}
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
