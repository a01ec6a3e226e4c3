"""Reports of vLLM's worker on a vision-language model: the sizes and positions that the model computes itself.

What images need of vLLM is imported where it is used: releases that have other names for it sample from text.
"""

from typing import Any

import torch

from rollout.vllm.client.position_digest import digest_of


class VisionWorker:
    """Extension of vLLM's worker by its `worker_extension_cls`."""

    model_runner: Any

    def report_vision(self) -> dict[str, int]:
        """Return the vision settings of the model's modules."""
        model = self.model_runner.model
        return {
            "token": model.config.image_token_id,
            "numbers": model.visual.patch_embed.proj.weight[0].numel(),
            "merge_size": model.visual.spatial_merge_size,
        }

    def digest_positions(self, ids: list[int], grids: list[list[int]], places: list[int]) -> str:
        """Return the digest of the positions that the model gives a prompt's tokens."""
        # Not every release has these names; a worker that shows no images does without them.
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        # This module takes more of them.
        from rollout.vllm.server.images import ReceivedImage, item_of, place_of

        model = self.model_runner.model
        features = [
            MultiModalFeatureSpec(
                data=item_of(ReceivedImage("", grid, torch.empty(0, 0))),
                modality="image",
                identifier="",
                mm_position=place_of(grid, place, model.visual.spatial_merge_size),
            )
            for grid, place in zip(grids, places, strict=True)
        ]
        return digest_of(model.get_mrope_input_positions(ids, features)[0])
