"""Extension of vLLM's worker: it reads weights that another process wrote, and records experts.

Each worker imports this before it makes its model: a process of its own, where several share a model, whose registry
lacks what the server's was given.
"""

import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from rollout.vllm.server.routes import NotedExperts
from rollout.vllm.server.text_models import register_text_models
from rollout.vllm.server.vision_probe import VisionWorker
from rollout.vllm.server.weight_digest import corrupted_tensors, stale_experts, stale_heads
from rollout.vllm.server.weight_regions import WeightRegions

register_text_models()

RELOADING = "vllm.model_executor.model_loader.reload"
STATELESS = ("RotaryEmbedding", "MRotaryEmbedding")
"""Layers whose contents follow from their sizes alone."""


class FileWeights(NotedExperts, VisionWorker):
    """Extension of vLLM's worker by its `worker_extension_cls`."""

    model_runner: Any
    places: WeightRegions
    take_back: Callable[[], None]
    """Function that undoes the patches of vLLM where copies share experts."""

    def settle_in(self) -> None:
        """Finish the start of vLLM: call it once. Most of it concerns workers that share a model on a CPU."""
        self.regions = WeightRegions()
        if not current_platform.is_cpu():
            return
        from rollout.vllm.server.cpu_experts import map_experts  # of a vLLM for CPUs alone

        map_experts(self.model_runner.model)
        # All have it open by now; without its name it is freed with the last of them, however they end.
        for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
            path.unlink(missing_ok=True)

    def join_copies(self) -> list[int] | None:
        """Patch vLLM until it ends, where copies of the model on a CPU share its experts: call it once. Return the
        numbers of this worker's own experts, the same in each layer."""
        from vllm.distributed import get_dp_group, get_ep_group  # this and what follows: of a vLLM for CPUs alone
        from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase  # likewise

        from rollout.vllm.server.cpu_replicas import patch_collectives  # likewise

        groups = (get_dp_group(), get_ep_group())
        self.take_back = patch_collectives([group.device_communicator for group in groups], DeviceCommunicatorBase)
        for _, layer in self._of_kind(RoutedExperts):
            if layer.expert_map is not None:
                return [number for number, own in enumerate(layer.expert_map.tolist()) if own >= 0]
        return None

    def load_file(self, path: str, slots: list[list[Any]], tied: dict[str, str], digests: dict[str, int]) -> str | None:
        """Replace the weights by those of a file; return why that failed, or None.

        It returns an error and does not raise it: vLLM reads no other worker's answer after an error, and would take
        those for answers to the next call.

        `slots`: (name, dtype, shape, first byte) of each tensor. `tied`: further names and the tensors they stand for;
        vLLM's packed copy of a tied head would otherwise silently stay as it was. `digests`: of each tensor.
        """
        try:
            self._load_file(path, slots, tied, digests)
        except (ValueError, RuntimeError, AssertionError, KeyError) as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return None

    def _load_file(self, path: str, slots: list[list[Any]], tied: dict[str, str], digests: dict[str, int]) -> None:
        """Replace the weights. Raise RuntimeError where the file is damaged, or vLLM left a parameter as it was."""
        end = max(start + prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape, start in slots)
        file = self.regions.read(path, end)
        named: dict[str, Tensor] = {}
        for name, kind, shape, start in slots:
            dtype = getattr(torch, kind)
            named[name] = file[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        _refuse(corrupted_tensors(named, digests))
        named |= {name: named[other] for name, other in tied.items()}
        with _warnings() as warnings:
            self.model_runner.reload_weights(weights_iterator=iter(named.items()))
        stale = [text for text in warnings if not text.startswith(STATELESS)]
        if stale:
            raise RuntimeError(f"vLLM did not take all weights: {'; '.join(stale)}")
        if current_platform.is_cpu():
            from rollout.vllm.server.cpu_experts import pack_experts  # of a vLLM for CPUs alone

            _refuse(stale_experts(self._of_kind(RoutedExperts), named, get_tensor_model_parallel_rank()))
            pack_experts(self.model_runner.model)
        _refuse(stale_heads(self._of_kind(ParallelLMHead), named))
        self.regions.forget_copies()

    def _of_kind(self, kind: type) -> Iterator[tuple[str, Any]]:
        return (pair for pair in self.model_runner.model.named_modules() if isinstance(pair[1], kind))


def _refuse(problems: Sequence[str]) -> None:
    """Raise RuntimeError with the first problems, if any."""
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise RuntimeError(f"{'; '.join(problems[:3])}{more}")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of vLLM's reloading: its only sign that it left a parameter as it was."""
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if "Failed to load weights" in text or "were not loaded" in text:
                texts.append(text)

    loggers = [logging.getLogger(f"{RELOADING}.{name}") for name in ("inplace", "layerwise")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    keep = Keep()
    for logger in loggers:
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        logger.addHandler(keep)
    try:
        yield texts
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(keep)
            logger.setLevel(level)
            logger.propagate = propagate
