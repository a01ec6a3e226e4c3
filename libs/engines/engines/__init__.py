"""Training engines behind one protocol: packed FSDP2 steps, checkpoints, weight export, and the start of ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from engines.adapters.config import LoraConfig as LoraConfig
    from engines.adapters.files import save_adapter as save_adapter
    from engines.adapters.reference import base_policy as base_policy
    from engines.build import build_engine as build_engine
    from engines.capability import No as No
    from engines.capability import Yes as Yes
    from engines.config import EngineConfig as EngineConfig
    from engines.execution.executor import Executor as Executor
    from engines.execution.local_batch import LocalBatch as LocalBatch
    from engines.execution.nonfinite import NonFiniteError as NonFiniteError
    from engines.packing.model import adapt_for_packing as adapt_for_packing
    from engines.parallel.layout import ParallelLayout as ParallelLayout
    from engines.parallel.planning import StepPlan as StepPlan
    from engines.protocol import TrainEngine as TrainEngine
    from engines.step import Engine as Engine
    from engines.weights.pieces import WeightPiece as WeightPiece
    from engines.weights.shared import SharedWeights as SharedWeights
    from engines.weights.shared import shared_weights as shared_weights
    from seqpack.adapters.context import PackedContext as PackedContext
    from seqpack.adapters.model import Adaptation as Adaptation

_EXPORTS = {
    "LoraConfig": "engines.adapters.config",
    "save_adapter": "engines.adapters.files",
    "base_policy": "engines.adapters.reference",
    "Adaptation": "seqpack.adapters.model",
    "EngineConfig": "engines.config",
    "No": "engines.capability",
    "Engine": "engines.step",
    "Executor": "engines.execution.executor",
    "LocalBatch": "engines.execution.local_batch",
    "NonFiniteError": "engines.execution.nonfinite",
    "ParallelLayout": "engines.parallel.layout",
    "SharedWeights": "engines.weights.shared",
    "StepPlan": "engines.parallel.planning",
    "PackedContext": "seqpack.adapters.context",
    "TrainEngine": "engines.protocol",
    "WeightPiece": "engines.weights.pieces",
    "Yes": "engines.capability",
    "adapt_for_packing": "engines.packing.model",
    "build_engine": "engines.build",
    "shared_weights": "engines.weights.shared",
}
__all__ = [
    "Adaptation",
    "Engine",
    "EngineConfig",
    "Executor",
    "LocalBatch",
    "LoraConfig",
    "No",
    "NonFiniteError",
    "PackedContext",
    "ParallelLayout",
    "SharedWeights",
    "StepPlan",
    "TrainEngine",
    "WeightPiece",
    "Yes",
    "adapt_for_packing",
    "base_policy",
    "build_engine",
    "save_adapter",
    "shared_weights",
]


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_EXPORTS)
