"""Hold types that proofs admit to stock transformers once more, by public names alone: values as they are initialised,
float32, other lengths, all layers of a config that is small by its own sizes.

    python libs/engines/benchmarks/admitted_sample.py TYPE ...
"""

import sys
import tempfile
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from engines import EngineConfig, build_engine
from engines.proofs.every_type import MISSING_FIELDS
from engines.prove.generic_family import is_inside
from engines.prove.proof import small_config
from engines.tiny import tiny_batch

LENGTHS = [41, 3, 26, 2, 57, 18]
SEED = 1234


def largest_difference(kind: str) -> float:
    """Return the largest difference of a log-prob between an engine over packed rows and stock transformers."""
    config = small_config(AutoConfig.for_model(kind, **MISSING_FIELDS.get(kind, {})))
    auto: Any = AutoModelForImageTextToText if is_inside(config) else AutoModelForCausalLM
    torch.manual_seed(SEED)
    batch = tiny_batch(LENGTHS, vocab=60)
    with tempfile.TemporaryDirectory() as directory:
        auto.from_config(config).save_pretrained(directory)
        stock = auto.from_pretrained(directory).eval()
        engine = build_engine(EngineConfig(model=directory, device="cpu", max_tokens_per_rank=sum(LENGTHS)))
    worst = 0.0
    for ids, ours in zip(batch["input_ids"].unbind(), engine.forward(batch)["log_probs"].unbind(), strict=True):
        with torch.no_grad():
            table = torch.log_softmax(stock(input_ids=ids[None]).logits[0].float(), -1)
        worst = max(worst, float((ours[1:] - table[:-1].gather(1, ids[1:, None])[:, 0]).abs().max()))
    return worst


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {largest_difference(name):.1e}", flush=True)
