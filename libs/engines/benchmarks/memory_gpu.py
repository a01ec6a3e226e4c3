"""What each way to save memory saves and costs: of a vocabulary of 248,320, of activations, of optimizer and weights.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/memory_gpu.py
        [--device cuda|cpu] [--cases vocabulary ...] [--out FILE]

One CUDA device, the hybrid of `step_gpu.py` (0.67 B parameters with a vocabulary of 65,536, 1.04 B with 248,320),
bfloat16 over float32 weights. A row is one way to train: the median of its steps and of a scoring pass with entropy,
and the peak of the device's memory in each over what was there before the engine. `kept_gib` is what lies there between
steps. The inputs of layers grow with layers and tokens: those rows have 32 narrow layers (0.63 B) and 65,536 tokens.
Stock transformers make the logits of the same rows. On a CPU tiny sizes, to see that it runs.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step_gpu import SHAPE, batch_of, lengths_of
from torch.nn.functional import cross_entropy

from engines import EngineConfig, build_engine
from engines.launch import launch
from engines.tiny import tiny_batch, tiny_config
from objectives import SFT

VOCABULARY = 248_320
"""Vocabulary size of Qwen3.5."""
WIDE: dict[str, Any] = {"vocab_size": VOCABULARY}
DEEP: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}
AS_IT_IS: dict[str, Any] = {}
STEPS = 5
PLAIN: dict[str, Any] = {"compile": "off", "weights": "sharded"}
OUT: list[dict[str, Any]] = []


def say(**facts: Any) -> None:
    OUT.append(facts)
    print(json.dumps(facts), flush=True)


class Gauge:
    """Times calls and reads the device's memory over what it held at first, in GiB."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        self.before = self._held()

    def _held(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def held(self) -> float:
        return round((self._held() - self.before) / 2**30, 2)

    def of(self, call: Callable[[], Any], times: int = STEPS) -> tuple[float, float]:
        """Return (median milliseconds, peak in GiB) of `times` calls, after two warm-up calls."""
        for _ in range(2):
            call()
        times_ms = []
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(times):
            began = time.perf_counter()
            call()
            if self.cuda:
                torch.cuda.synchronize()
            times_ms.append((time.perf_counter() - began) * 1e3)
        peak = torch.cuda.max_memory_allocated() - self.before if self.cuda else 0
        return round(sorted(times_ms)[times // 2], 1), round(peak / 2**30, 2)


def config_of(device: str, changes: dict[str, Any]) -> Any:
    """Return the config of the model that is trained; a tiny one on a CPU."""
    from transformers import Qwen3_5TextConfig

    if device == "cpu":
        return tiny_config("dense")
    return Qwen3_5TextConfig(**{**SHAPE, **changes})


def rows_of(device: str, tokens: int) -> Any:
    """Return the batch of every step."""
    return batch_of(lengths_of(tokens, 8192)) if device == "cuda" else tiny_batch([60, 5, 33, 20])


def ours(what: str, device: Any, tokens: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    """Measure steps and a scoring pass, then a move of everything to the host and back."""
    from transformers import Qwen3_5ForCausalLM

    gauge, batch, objective = Gauge(device), rows_of(device, tokens), SFT()
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3_5ForCausalLM(config_of(device, changes))
    count = sum(p.numel() for p in model.parameters())
    engine: Any = build_engine(EngineConfig(device=device, lr=1e-5, max_tokens_per_rank=tokens, **options), model)
    del model
    seen: dict[str, float] = {}
    step_ms, step_gib = gauge.of(lambda: seen.update(engine.train_batch(batch, objective)))
    idle = gauge.held()
    score_ms, score_gib = gauge.of(lambda: engine.forward(batch, entropy=True))
    facts = {
        "parameters": count,
        "tokens": tokens,
        "loss": round(seen["loss"], 5),
        "compiled": engine.state_summary()["compiled"],
    }
    say(what=what, ms=step_ms, peak_gib=step_gib, kept_gib=idle, score_ms=score_ms, score_peak_gib=score_gib, **facts)
    if not options.get("parameters_on_host"):
        rest(what, engine, gauge)


def rest(what: str, engine: Any, gauge: Gauge) -> None:
    """Print what `offload` leaves on the device, and the seconds of a second `offload` and `onload`."""
    engine.offload()
    engine.onload()
    began = time.perf_counter()
    engine.offload()
    left, gone = gauge.held(), time.perf_counter()
    engine.onload()
    if gauge.cuda:
        torch.cuda.synchronize()
    say(
        what=f"{what}: at rest",
        left_gib=left,
        offload_s=round(gone - began, 2),
        onload_s=round(time.perf_counter() - gone, 2),
    )


def stock(what: str, device: str, tokens: int, changes: dict[str, Any]) -> None:
    """Measure stock transformers, which computes log-probs and entropy in float32 from all logits."""
    from transformers import Qwen3_5ForCausalLM

    gauge = Gauge(device)
    torch.manual_seed(0)
    with torch.device(device):
        net = Qwen3_5ForCausalLM(config_of(device, changes)).bfloat16()
    idle = gauge.held()
    ids = torch.cat(list(rows_of(device, tokens)["input_ids"].unbind())).to(device)[None]

    def score() -> None:
        with torch.no_grad():
            logits = net(input_ids=ids, use_cache=False).logits[0, :-1].float()
            log_probs = logits.log_softmax(-1)
            log_probs.gather(1, ids[0, 1:, None])
            -(log_probs.exp() * log_probs).sum(-1)

    def loss() -> None:
        net.zero_grad(set_to_none=True)
        logits = net(input_ids=ids, use_cache=False).logits[0, :-1].float()
        cross_entropy(logits, ids[0, 1:]).backward()

    score_ms, score_gib = gauge.of(score)
    ms, gib = gauge.of(loss)
    say(what=what, ms=ms, peak_gib=gib, kept_gib=idle, score_ms=score_ms, score_peak_gib=score_gib, tokens=tokens)


SHARDED: dict[str, Any] = {"weights": "sharded"}
HOST: dict[str, Any] = {"optimizer_on_host": True}
LESS: dict[str, Any] = {"gradient_checkpointing": True}
WAYS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "vocabulary": ("248k vocabulary", 8192, WIDE, {}),
    "vocabulary_plain": ("248k vocabulary, not compiled", 8192, WIDE, PLAIN),
    "kept": ("activations kept", 32768, AS_IT_IS, PLAIN),
    "recomputed": ("recomputed", 32768, AS_IT_IS, LESS | PLAIN),
    "deep": ("32 layers, recomputed", 65536, DEEP, LESS | PLAIN),
    "waiting": (
        "32 layers, recomputed, their inputs on the host",
        65536,
        DEEP,
        LESS | PLAIN | {"activation_offload": True},
    ),
    "plain": ("all on the device", 8192, AS_IT_IS, SHARDED),
    "moments": ("moments in bfloat16", 8192, AS_IT_IS, SHARDED | {"moments_dtype": "bfloat16"}),
    "bfloat16": ("weights and moments in bfloat16", 8192, AS_IT_IS, SHARDED | {"master_dtype": "bfloat16"}),
    "optimizer": ("moments on the host", 8192, AS_IT_IS, SHARDED | HOST),
    "parameters": (
        "weights, gradients, moments on the host",
        8192,
        AS_IT_IS,
        PLAIN | HOST | {"parameters_on_host": True},
    ),
}
STOCK = "stock"


def main(device: str, cases: list[str], out: str | None) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    say(what="machine", device=name, torch=torch.__version__, steps=STEPS)
    for case in cases:
        if case == STOCK:
            stock("248k vocabulary, all logits, no optimizer", device, 8192, WIDE)
        else:
            what, tokens, changes, options = WAYS[case]
            ours(what, device, tokens, changes, options)
        if out:
            Path(out).write_text("\n".join(json.dumps(row) for row in OUT) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=[*WAYS, STOCK], choices=[*WAYS, STOCK])
    parser.add_argument("--out")
    given = parser.parse_args()
    launch(main, (given.device, given.cases, given.out), device=given.device)
