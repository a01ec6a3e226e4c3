"""The part of a vLLM engine on each further machine that its workers are spread over.

1. The first machine's process samples and calls all workers. A `VllmNode` has the workers of its own machine, and
   weights for them: it takes part in every weight sync, as each engine does, and is asked for nothing else.
2. `commit` and `abort` come to it before they come to the first machine, whose workers then all read new weights, each
   from its own machine; digests show that these are the same.
3. When workers of one machine end, those of the others fail at their next step, and so does the engine.
"""

import logging
from pathlib import Path
from typing import Any

from rollout.config import RolloutConfig
from rollout.engine import Completion
from rollout.node_place import node_place
from rollout.vllm.engine import VllmEngine

log = logging.getLogger(__name__)


class VllmNode(VllmEngine):
    """An engine's workers on a further machine, and the weights that they read."""

    async def generate(self, *args: Any, **options: Any) -> Completion:
        """Raise RuntimeError: the first machine's engine samples."""
        del args, options
        raise RuntimeError("a further machine of an engine samples nothing of its own")

    async def _read_weights(self, fall_back: bool, wake: bool = False) -> float:
        del fall_back, wake  # the first machine's process makes all workers read them
        return 0.0

    def _on_lost(self, copy: int, words: str) -> None:
        if not self._closed:
            log.error("the workers of machine %s of an engine are gone: %s", node_place(), words)
        super()._on_lost(copy, words)


def vllm_engine(model: Path, config: RolloutConfig, version: int = 0, wait: bool = True) -> VllmEngine:
    """Return an engine of the model in a directory, or its part on this machine where it spans several; see
    `VllmEngine`."""
    place = node_place()
    return (VllmNode if place is not None and place.node_rank else VllmEngine)(model, config, version, wait)
