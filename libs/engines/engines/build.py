"""The one way to an engine."""

from typing import Any

from engines.capability import refuse_unsupported
from engines.config import EngineConfig
from engines.protocol import TrainEngine


def build_engine(config: EngineConfig, model: Any = None, trainable: bool = True) -> TrainEngine:
    """An engine over all ranks of the current process group; a group of one is made where there is none.

    `model`: a transformers causal LM (it becomes the engine's), or a transformers config for random weights; None loads
    `config.model`. `trainable=False` is a reference policy: no optimizer, no gradients. What is not supported is
    refused here, before a device is touched.
    """
    refuse_unsupported(config)
    from engines.fsdp2 import FSDP2Engine

    return FSDP2Engine(config, model, trainable)
