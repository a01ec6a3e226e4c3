"""Training engines behind one protocol: packed FSDP2 steps, checkpoints, weight export, and the start of ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from engines.adapters.adapter_files import save_adapter as save_adapter
    from engines.backends import TrainBackend as TrainBackend
    from engines.backends import register_train_backend as register_train_backend
    from engines.build import build_engine as build_engine
    from engines.build import build_reference as build_reference
    from engines.capability import Supported as Supported
    from engines.capability import Unsupported as Unsupported
    from engines.config import Adam as Adam
    from engines.config import EngineConfig as EngineConfig
    from engines.execution.executor import Executor as Executor
    from engines.execution.local_batch import LocalBatch as LocalBatch
    from engines.execution.local_batch import RowStats as RowStats
    from engines.lora_config import LoraConfig as LoraConfig
    from engines.parallel.layout import ParallelLayout as ParallelLayout
    from engines.parallel.planning import StepPlan as StepPlan
    from engines.protocol import TrainEngine as TrainEngine
    from engines.reference_policy import base_policy as base_policy
    from engines.scoring.packed_model import adapt_for_packing as adapt_for_packing
    from engines.step import Engine as Engine
    from engines.step_errors import FailedStepError as FailedStepError
    from engines.step_errors import LogProbDifferenceError as LogProbDifferenceError
    from engines.step_errors import NonFiniteError as NonFiniteError
    from engines.weight_sharing import SharedParameters as SharedParameters
    from engines.weight_sharing import shared_parameters as shared_parameters
    from engines.weights.shard_export import WeightShard as WeightShard
    from engines.weights.weight_pieces import WeightPiece as WeightPiece
    from seqpack.adapters.context import PackedContext as PackedContext
    from seqpack.adapters.mixers import Adaptation as Adaptation

_EXPORTS = {
    "LoraConfig": "engines.lora_config",
    "save_adapter": "engines.adapters.adapter_files",
    "base_policy": "engines.reference_policy",
    "Adaptation": "seqpack.adapters.mixers",
    "Adam": "engines.config",
    "EngineConfig": "engines.config",
    "Engine": "engines.step",
    "Executor": "engines.execution.executor",
    "LocalBatch": "engines.execution.local_batch",
    "RowStats": "engines.execution.local_batch",
    "FailedStepError": "engines.step_errors",
    "LogProbDifferenceError": "engines.step_errors",
    "NonFiniteError": "engines.step_errors",
    "ParallelLayout": "engines.parallel.layout",
    "SharedParameters": "engines.weight_sharing",
    "StepPlan": "engines.parallel.planning",
    "PackedContext": "seqpack.adapters.context",
    "TrainBackend": "engines.backends",
    "TrainEngine": "engines.protocol",
    "WeightPiece": "engines.weights.weight_pieces",
    "WeightShard": "engines.weights.shard_export",
    "Supported": "engines.capability",
    "Unsupported": "engines.capability",
    "adapt_for_packing": "engines.scoring.packed_model",
    "build_engine": "engines.build",
    "build_reference": "engines.build",
    "register_train_backend": "engines.backends",
    "shared_parameters": "engines.weight_sharing",
}
_ALIASES = {
    "No": "Unsupported",
    "SharedWeights": "SharedParameters",
    "Yes": "Supported",
    "shared_weights": "shared_parameters",
}
"""Earlier names."""
__all__ = [
    "Adam",
    "Adaptation",
    "Engine",
    "EngineConfig",
    "Executor",
    "FailedStepError",
    "LocalBatch",
    "LogProbDifferenceError",
    "LoraConfig",
    "No",
    "NonFiniteError",
    "PackedContext",
    "ParallelLayout",
    "RowStats",
    "SharedParameters",
    "SharedWeights",
    "StepPlan",
    "Supported",
    "TrainBackend",
    "TrainEngine",
    "Unsupported",
    "WeightPiece",
    "WeightShard",
    "Yes",
    "adapt_for_packing",
    "base_policy",
    "build_engine",
    "build_reference",
    "register_train_backend",
    "save_adapter",
    "shared_parameters",
    "shared_weights",
]


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` on first use."""
    name = _ALIASES.get(name, name)
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*_EXPORTS, *_ALIASES})
