"""Device proofs of a tiny delta net in bfloat16 on a CPU, for thirty draws of values: whether one is refused though
nothing is wrong, and whether planted errors are seen in each.

    python libs/engines/benchmarks/device_proof_seeds.py DATE [SEEDS]
"""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

from engines.config import EngineConfig
from engines.launch import ensure_group
from engines.proofs import device
from engines.proofs.device import GRADIENT, errors, prove_device
from engines.tiny import tiny_config
from seqpack.adapters.context import LocalOps, PackedContext

CONFIG = EngineConfig(device="cpu", dtype="bfloat16")
PAGE = Path(__file__).parents[3] / "docs" / "benchmarks" / "device_proof_seeds.json"
delta = LocalOps.gated_delta_rule


def halved(self: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, context: Any) -> Any:
    """Return the delta rule with half of the gradient of values."""
    return delta(self, q, k, 0.5 * v + 0.5 * v.detach(), g, beta, context)


def leaking(self: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, context: Any) -> Any:
    """Carry the state of the first sequence into the second."""
    first = context.cu_seqlens
    edges = first if len(first) == 2 else torch.cat([first[:1], first[2:]])
    return delta(self, q, k, v, g, beta, PackedContext(edges, int(edges.diff().max()), LocalOps(self.backend)))


PLANTED = {
    "gradient of values halved": ("gated_delta_rule", halved),
    "state of the sequence before": ("gated_delta_rule", leaking),
}


@contextmanager
def _seen(measured: list[Any]) -> Iterator[None]:
    """Note the errors that a proof computes: stock's first, the engine's then."""

    def noted(*arguments: Any) -> Any:
        measured.append(errors(*arguments))
        return measured[-1]

    with patch.object(device, "errors", noted):
        yield


def row(config: Any, seed: int) -> dict[str, Any]:
    """Return the figures of one draw."""
    measured: list[Any] = []
    with _seen(measured):
        certificate = prove_device(CONFIG, config, seed=seed)
    stock, ours = measured
    typical = sorted(stock.gradients.values())[len(stock.gradients) // 2]
    ratios = {name: ours.gradients[name] / max(value, typical) for name, value in stock.gradients.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    missed = []
    for name, (operation, planted) in PLANTED.items():
        with patch.object(LocalOps, operation, planted):
            if prove_device(CONFIG, config, seed=seed).holds:
                missed.append(name)
    return {
        "holds": certificate.holds, "log_probs_stock": round(stock.whole, 4), "log_probs_engine": round(ours.whole, 4),
        "log_probs_ratio": round(ours.whole / stock.whole, 2), "gradient_ratio_worst": round(ratios[worst], 2),
        "gradient_worst": worst, "scale_worst": round(max(ours.scales.values()), 2),
        "planted": len(PLANTED), "missed": ", ".join(missed) or "none",
    }  # fmt: skip


def main(date: str, seeds: int = 30) -> None:
    """Measure, and write the JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ensure_group("cpu")
    values: dict[str, Any] = {}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config = tiny_config("dense", num_hidden_layers=4, hidden_size=64, vocab_size=96, **sizes)
    for seed in range(seeds):
        values[f"seed {seed}"] = figures = row(config, seed)
        print(seed, json.dumps(figures), flush=True)
    made = {
        "date": date,
        "device": "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": f"python libs/engines/benchmarks/device_proof_seeds.py {date} {seeds}",
        "what": "Device proofs of a tiny Qwen3.5 (4 layers, 64 features, heads of 16) in bfloat16, a draw of values "
        "each: errors of log-probs against float32, the worst ratio of a parameter's gradient error to stock's (its "
        f"own, or its median where that is larger; the bound is {GRADIENT}), how far a part of one is from its size; "
        "planted errors, and which were missed.",
        "settings": {name: value for name, value in asdict(CONFIG).items() if name in device.OPTIONS},
    }
    PAGE.write_text(json.dumps({**made, "values": values}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
