"""CPU seconds of a layer's experts, forward and backward: FSDP2's, Megatron's, and megatron-core's own, in one process.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/experts_cpu.py
        [--rounds N] [--out FILE]

The block with router and experts of Qwen3 MoE, from the engines of both backends over the same weights, in float32, on
one thread: 128 experts, 8 a token. megatron-core's own has `SequentialMLP` and its dispatcher, as its local
specification has without other packages. Runs take turns; a row says the least of all rounds, and the median ratio to
FSDP2's of the same round. `step`: a whole step of both engines, with two such layers.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from engines import EngineConfig, build_engine
from engines.launch import launch
from engines.megatron.model.router import Router
from engines.megatron.runtime.cuda_calls import adapted
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

SIZES: dict[str, dict[str, int]] = {
    "hidden 64, width 32, 256 tokens": {"hidden_size": 64, "moe_intermediate_size": 32, "tokens": 256},
    "hidden 256, width 64, 1,024 tokens": {"hidden_size": 256, "moe_intermediate_size": 64, "tokens": 1024},
    "hidden 512, width 128, 2,048 tokens": {"hidden_size": 512, "moe_intermediate_size": 128, "tokens": 2048},
}
CPU = torch.device("cpu")
Calls = dict[str, Callable[[], Any]]


def engines_of(sizes: dict[str, int]) -> dict[str, Any]:
    shape = {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 2, **sizes}
    made = {}
    for backend in ("fsdp2", "megatron"):
        config = EngineConfig(backend=backend, device="cpu", lr=1e-3, max_tokens_per_rank=4096)
        made[backend] = build_engine(config, tiny_model("attention_moe", scale=1.0, **shape))
    return made


def core_layer(ours: Any) -> Any:
    """Return megatron-core's own layer of experts, with the weights of ours."""
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = ModuleSpec(module=SequentialMLP, submodules=parts)
    spec = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
    with adapted(CPU):
        layer = build_module(spec, config=ours.config, layer_number=1)
    layer.router.weight.data.copy_(ours.router.weight.data)
    for one, up, down in zip(layer.experts.local_experts, *ours.experts.matrices, strict=True):
        assert type(one) is MLP
        one.linear_fc1.weight.data.copy_(up)
        one.linear_fc2.weight.data.copy_(down)
    return layer


def blocks(made: dict[str, Any], tokens: int, hidden: int) -> tuple[Calls, dict[str, Any]]:
    """Return a forward and backward pass of each block of experts, and their results and gradients of the input."""
    stock = made["fsdp2"].executor.model.model.layers[0].mlp
    (stage,) = made["megatron"].executor.stages
    megatron = next(m for m in stage.modules() if type(m).__name__ == "PackedMoE")
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {}

    def of(name: str, call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.square().sum().backward()
            found[name] = y.detach().view_as(x), leaf.grad

        return run

    def layer_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(leaf: torch.Tensor) -> torch.Tensor:
            nothing: Any = SimpleNamespace(experts=None, counted=None)
            with layer.router.computing(nothing):
                result: torch.Tensor = layer(leaf[:, None])[0]
            return result

        return call

    calls = {
        "FSDP2": of("FSDP2", lambda leaf: stock(leaf[None])),
        "Megatron": of("Megatron", layer_of(megatron)),
        "megatron-core's own": of("megatron-core's own", layer_of(core_layer(megatron))),
    }
    return calls, found


def in_turn(calls: Calls, rounds: int) -> dict[str, dict[str, float]]:
    """Time the calls by turns, after two of each."""
    for call in [*calls.values()] * 2:
        call()
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.process_time()
            call()
            spent[name].append((time.process_time() - began) * 1e3)
    first = next(iter(spent.values()))
    ratios = {name: sorted(a / b for a, b in zip(times, first, strict=True)) for name, times in spent.items()}
    return {
        name: {"ms": round(min(times), 2), "ratio": round(ratios[name][rounds // 2], 2)}
        for name, times in spent.items()
    }


def main(rounds: int, out: str | None) -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for what, given in SIZES.items():
        sizes = {name: size for name, size in given.items() if name != "tokens"}
        made = engines_of(sizes)
        calls, found = blocks(made, given["tokens"], sizes["hidden_size"])
        with adapted(CPU):
            rows.append({"what": what, "experts": in_turn(calls, rounds)})
        for y, grad in found.values():
            torch.testing.assert_close(y, found["FSDP2"][0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(grad, found["FSDP2"][1], rtol=1e-3, atol=1e-3)
        batch = tiny_batch([given["tokens"] // 8] * 8)
        steps: Calls = {name: partial(engine.train_batch, batch, SFT()) for name, engine in made.items()}
        rows[-1]["step"] = in_turn(steps, max(3, rounds // 3))
        print(json.dumps(rows[-1]), flush=True)
        if out:
            Path(out).write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        release()


def release() -> None:
    from engines.megatron.runtime.process_groups import release as groups

    groups()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    given = parser.parse_args()
    launch(main, (given.rounds, given.out), device="cpu")
