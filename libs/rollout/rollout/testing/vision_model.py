"""For tests of vLLM with images: a vision-language model that it serves on a CPU, prompts, and stock log-probs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.engine import Completion
from rollout.native.decoders.media import followed, seen_inputs, seen_prompt
from rollout.testing.model import SERVED, tiny_vision_model, tiny_vision_moe

IMAGE, START, END = 44, 46, 47
NUMBERS = 3 * 2 * 2 * 2
Prompt = tuple[list[int], dict[str, Any]]
"""Tokens, and what they show."""


def served_vision_model(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a tiny hybrid with a tower that matters, whose delta nets remember for a while; `changes` of its text."""
    return _tuned(tiny_vision_model(300, seed=seed, **{**SERVED, **changes}))


def served_vision_moe(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build `served_vision_model` with experts that matter: in a wrong order they move log-probs by units."""
    model = tiny_vision_moe(300, seed=seed, **{**SERVED, "moe_intermediate_size": 64, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(0.4)
    return _tuned(model)


def _tuned(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-2)
            if "visual.merger.linear_fc2.weight" in name:
                parameter.normal_(0, 0.5)
    return model


def shown(seed: int, *grids: tuple[int, int, int], before: Prompt = ([], {})) -> Prompt:
    """Return a prompt with images of these grids between stretches of text, after the prompt `before`."""
    rng = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(50, 290, (length,), generator=rng).tolist()

    ids, media = list(before[0]), before[1]
    types = [*media.get("mm_token_type_ids", ()), *[0] * (len(ids) - len(media.get("mm_token_type_ids", ())))]
    first = text(3)
    ids, types = [*ids, *first], [*types, *[0] * len(first)]
    for t, h, w in grids:
        count = t * h * w // 4
        rest = text(2)
        ids += [START, *[IMAGE] * count, END, *rest]
        types += [0, *[1] * count, 0, 0, 0]
    patches = torch.randn(sum(t * h * w for t, h, w in grids), NUMBERS, generator=rng)
    old = ([media["pixel_values"]], [media["image_grid_thw"]]) if media else ([], [])
    return ids, {
        "pixel_values": torch.cat([*old[0], patches]),
        "image_grid_thw": torch.cat([*old[1], torch.tensor(grids, dtype=torch.int64).view(-1, 3)]),
        "mm_token_type_ids": types,
    }


def before_image_token(ids: Sequence[int]) -> Sequence[int]:
    """Return the sampled tokens up to and with the first image token, which stock transformers takes for an image."""
    return ids[: ids.index(IMAGE) + 1] if IMAGE in ids else ids


@torch.no_grad()
def forced_vision(model: Any, prompt: Prompt, ids: Sequence[int]) -> Tensor:
    """Return the log-probs of `ids` after the prompt, by the stock module's forward pass on one sequence."""
    tokens, media = prompt
    row = torch.tensor([[*tokens, *ids[:-1]]], device=model.device)
    model.model.rope_deltas = None
    inputs: Mapping[str, Any] = {}
    if media:
        types = torch.zeros_like(row)
        types[0, : len(media["mm_token_type_ids"])] = torch.tensor(media["mm_token_type_ids"])
        inputs = {k: v.to(model.device) for k, v in media.items() if k != "mm_token_type_ids"}
        inputs |= {"mm_token_type_ids": types}
    logits = model(input_ids=row, **inputs, use_cache=False).logits[0, len(tokens) - 1 :].cpu()
    result: Tensor = logits.float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return result


@torch.no_grad()
def forced_by_types(model: Any, prompt: Prompt, ids: Sequence[int]) -> Tensor:
    """Return log-probs as `forced_vision` does, by the native engine's embeddings: image tokens of type 0 are text."""
    tokens, media = prompt
    inputs = seen_inputs(model, [followed(seen_prompt(model, tokens, media), ids[:-1])])
    states, places = inputs.embeddings[None], inputs.positions[:, None]
    logits = model(inputs_embeds=states, position_ids=places, use_cache=False).logits
    logits = logits[0, len(tokens) - 1 :].float()
    result: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return result


def vision_distances(model: Any, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Tensor:
    """Return the distance of each sampled token's log-prob from the stock module's."""
    distances = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = before_image_token(completion.ids)
        log_probs = torch.tensor(completion.log_probs[: len(ids)])
        distances.append((log_probs - forced_vision(model, prompt, ids)).abs())
    return torch.cat(distances)
