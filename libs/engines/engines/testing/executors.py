"""Engines of real models over every executor, for the tests of the step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.build import build_engine
from engines.config import EngineConfig
from engines.proofs.plain_executor import build_plain_engine
from engines.protocol import TrainEngine
from engines.step import Engine
from engines.tiny import tiny_model

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6]
EPS = 1e-3
"""Large: with the usual one, a gradient of nearly zero moves a weight by the sign of its rounding error."""
BUILDERS: dict[str, Callable[..., TrainEngine]] = {"fsdp2": build_engine, "plain": build_plain_engine}
"""Builders of engines by executor."""


def engine(
    seed: int = 0,
    kind: str = "dense",
    trainable: bool = True,
    executor: str = "fsdp2",
    model: Any = None,
    **options: Any,
) -> TrainEngine:
    """Build a tiny engine on the CPU, which checks nothing while it trains; `options` are those of `EngineConfig`."""
    usual = {"device": "cpu", "lr": 1e-2, "eps": EPS, "weight_decay": 0.1, "recheck_rows": 0}
    config = EngineConfig(**{**usual, **options})
    return BUILDERS[executor](config, model or tiny_model(kind, seed=seed, scale=2.0), trainable=trainable)


def inside(built: TrainEngine) -> Any:
    """Return the executor of a built engine, whose parts the tests look at."""
    assert isinstance(built, Engine)
    return built.executor


def weights(built: TrainEngine) -> dict[str, Tensor]:
    """Return copies of the exported tensors, flat."""
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def assert_same_weights(one: TrainEngine, other: TrainEngine, tolerance: float = 1e-5) -> None:
    """Raise AssertionError naming the first tensor in which two engines differ."""
    others = weights(other)
    for name, value in weights(one).items():
        torch.testing.assert_close(others[name], value, atol=tolerance, rtol=tolerance, msg=name)


def state_of(built: TrainEngine) -> dict[str, Any]:
    """Return a copy of all that a checkpoint holds of this rank, by path: tensors, and the engine's step."""
    assert isinstance(built, Engine)
    return dict(_leaves("", {**built.executor.state(), "step": built.step}))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise AssertionError naming the first value of `state_of` that is not the same to the bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}/{key}", inner)
    elif isinstance(value, Tensor):
        parts = getattr(value, "parts", None)  # of a Megatron rank's table of boxes
        if parts is not None:
            yield from ((f"{path}/{number}", part.detach().clone()) for number, (_, part, _) in enumerate(parts))
            return
        yield path, (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
    else:
        yield path, value
