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
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from rollout.vllm.server.routes import NotedExperts
from rollout.vllm.server.text_models import register_text_models
from rollout.vllm.server.vision_probe import VisionWorker
from rollout.vllm.server.weight_digest import HEAD, corrupted_tensors, stale_draft, stale_experts, stale_heads
from rollout.vllm.server.weight_regions import WeightRegions
from rollout.vllm.weights.drafts import recorded
from rollout.vllm.weights.parts import Place, assembled

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
        self._make_stage_buffer()
        # All have it open by now; without its name it is freed with the last of them, however they end.
        for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
            path.unlink(missing_ok=True)

    def _make_stage_buffer(self) -> None:
        """Make the buffer for what the stage before sends, as vLLM's warm-up does, which it leaves out on a CPU that
        runs layer by layer with caches of a set size (0.32): its first step would fail without."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

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

    def load_file(
        self, path: str | int | Place, slots: list[list[Any]], tied: dict[str, str], digests: dict[str, int]
    ) -> str | None:
        """Replace the weights by those of a file, by its path or number, or of parts in several regions; return why
        that failed, or None.

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

    def _load_file(
        self, path: str | int | Place, slots: list[list[Any]], tied: dict[str, str], digests: dict[str, int]
    ) -> None:
        """Replace the weights. Raise RuntimeError where the file is damaged, or vLLM left a parameter as it was."""
        named: dict[str, Tensor] = {}
        if isinstance(path, str | int):
            named |= self._mapped(path, slots, tied, digests)
            self._reload(iter(named.items()))
        else:
            self._reload(self._own_parts(path, tied, named))
        if current_platform.is_cpu():
            from rollout.vllm.server.cpu_experts import pack_experts  # of a vLLM for CPUs alone

            _refuse(stale_experts(self._of_kind(RoutedExperts), named, get_tensor_model_parallel_rank()))
            pack_experts(self.model_runner.model)
        _refuse(stale_heads(self._of_kind(ParallelLMHead), named))
        if self._draft is not None:
            _refuse(stale_draft(self._draft, named))
        self.regions.forget_copies()

    def _mapped(
        self, path: str | int, slots: list[list[Any]], tied: dict[str, str], digests: dict[str, int]
    ) -> dict[str, Tensor]:
        """Return the tensors of a file under all their names. Raise RuntimeError where one is damaged."""
        end = max(start + prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape, start in slots)
        file = self.regions.read(path, end)
        named: dict[str, Tensor] = {}
        for name, kind, shape, start in slots:
            dtype = getattr(torch, kind)
            named[name] = file[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        _refuse(corrupted_tensors(named, digests))
        return named | {name: named[other] for name, other in tied.items()}

    def _own_parts(self, place: Place, tied: dict[str, str], kept: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under all their names, of each what this worker computes with; `kept` gets the head."""
        device = torch.device(current_platform.device_type)
        for name, tensor in assembled(place, get_tensor_model_parallel_rank(), self.regions.reader, device):
            for known in (name, *(further for further, other in tied.items() if other == name)):
                if known == HEAD:
                    kept[known] = tensor
                yield known, tensor

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        with _warnings() as warnings:
            if self._draft is None:
                self.model_runner.reload_weights(weights_iterator=tensors)
            else:
                self._reload_with(self._draft, tensors)
        stale = [text for text in warnings if not text.startswith(STATELESS)]
        if stale:
            raise RuntimeError(f"vLLM did not take all weights: {'; '.join(stale)}")

    @property
    def _draft(self) -> Any:
        """The head of the model (`mtp.*`) that drafts tokens, which vLLM has as a model of its own; None where none
        does."""
        settings = self.model_runner.vllm_config.speculative_config
        return None if settings is None or "mtp" not in settings.method else self.model_runner.get_draft_model()

    def _reload_with(self, draft: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights of the model and of the head that drafts for it, which vLLM itself leaves as it was. The
        head shares embedding and output layer with the model: it is given what the model was."""
        from vllm.model_executor.model_loader.reload.inplace import reload_weights  # not every release has it

        kept: dict[str, Tensor] = {}
        self.model_runner.reload_weights(weights_iterator=recorded(tensors, kept))
        reload_weights(self.model_runner.vllm_config, draft, iter(kept.items()), None, is_checkpoint_format=True)

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
