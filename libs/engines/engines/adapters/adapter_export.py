"""The export of an adapter alone, to a sampler that has the base: two small matrices a layer, not all weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engines.adapters.lora import linear_layers
from engines.nonfinite import finite_tensors
from engines.weights.weight_pieces import WeightPiece, pieces

PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class AdapterExport:
    """The layout that a receiver needs before the pieces: `LAYER.lora_A` (rank, in) and `LAYER.lora_B` (out, rank), for
    the weight W + scale * B A of every layer."""

    rank: int
    scale: float
    layers: tuple[str, ...]


def adapter_layout(engine: Any, live: bool = False) -> AdapterExport | None:
    """Return the layout of what `adapter_pieces` yields; None for an engine without an adapter, and for one with
    adapters on experts, whose merged weights are exported. `live`: see `Engine.export_weights`."""
    config = engine.config.lora
    if not config.rank or config.target_parameters:
        return None
    adapted = [name for name, module in linear_layers(engine.executor.model).items() if hasattr(module, "lora_on")]
    return AdapterExport(config.rank, config.scale, tuple(_export_name(engine, name, live) for name in adapted))


def adapter_pieces(engine: Any, live: bool = False, max_bytes: int = PIECE_BYTES) -> Iterator[WeightPiece]:
    """Yield the adapter's matrices in the dtype that they are trained in; all ranks iterate to the end together.

    ValueError where the engine has none, `NonFiniteError` for values that are not finite.
    """
    if not engine.config.lora.rank:
        raise ValueError("the engine has no adapter to export: set EngineConfig.lora, or use export_weights")

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in finite_tensors(engine.executor.adapter_tensors()):
            layer, _, part = name.rpartition(".")
            yield f"{_export_name(engine, layer, live)}.{part}", tensor

    return pieces(named(), max_bytes)


def _export_name(engine: Any, layer: str, live: bool) -> str:
    """Return the layer's name: in the trained module where `live`, else on disk."""
    if live:
        return layer
    (part,) = engine.weights.names.parts(f"{layer}.weight", ())
    return str(part.name.removesuffix(".weight"))
