"""Vision-language models and their samples, and what stock transformers says of them one sequence at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from engines.adapters.lora import whole
from engines.families.torch_operations import choose_torch_operations
from engines.media.vision_settings import VisionSettings
from engines.testing.images import media_sample, model_arguments
from engines.tiny import FUSED_SIZES, tiny_config, tiny_model
from objectives import SFT

SETTINGS = VisionSettings.of(tiny_config("vision"))
TOWER = "model.visual."
Sample = dict[str, Any]


def samples(seed: int = 0) -> list[Sample]:
    """Return an image; text; a video and two images; two adjacent images; text of one token."""
    return [
        media_sample(SETTINGS, [3, 5], [(1, 4, 6)], seed=seed),
        media_sample(SETTINGS, [9], seed=seed + 1),
        media_sample(SETTINGS, [2, 1, 4, 2, 3], [(1, 2, 4), (1, 6, 2)], [(2, 4, 4)], seed=seed + 2),
        media_sample(SETTINGS, [4, 6], [(1, 2, 2)], seed=seed + 3),
        media_sample(SETTINGS, [1], seed=seed + 4),
    ]


def text_only(seed: int = 0) -> list[Sample]:
    """Return three samples without images."""
    return [media_sample(SETTINGS, [length], seed=seed + i) for i, length in enumerate((7, 3, 11))]


def vision_model(kind: str = "vision", **changes: Any) -> Any:
    """Return a tiny vision-language model, "vision" or "vision_moe", whose tower's biases are not zero."""
    made: Any = tiny_model(kind, scale=2.0, **changes)
    with torch.no_grad():
        for parameter in made.model.visual.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return made.eval()


def fused_vision_model(kind: str = "vision", **changes: Any) -> Any:
    """Return a model whose text part has the sizes of fused kernels (`FUSED_SIZES`); `changes` are of that part."""
    rope = {**FUSED_SIZES["rope_parameters"], "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = tiny_config(kind, **FUSED_SIZES | {"rope_parameters": rope} | changes)
    config.vision_config.out_hidden_size = FUSED_SIZES["hidden_size"]
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config)


def as_stock(module: Any) -> Any:
    """Return the module with the operations that the engine's packed ones are compared with."""
    choose_torch_operations(module)
    return module.eval()


def stock_scores(module: Any, rows: Sequence[Mapping[str, Any]], base: Any = None) -> list[Tensor]:
    """Return log-probs of each row alone, 0 for its first token; the image's features as transformers puts them in.

    `base`: the vision-language model where `module` wraps it.
    """
    out = []
    for sample in rows:
        ids = sample["input_ids"]
        (base or module).model.rope_deltas = None
        table = module(**model_arguments(sample), use_cache=False).logits[0].float().log_softmax(-1)
        out.append(torch.cat([torch.zeros(1), table[:-1].gather(1, ids[1:, None]).squeeze(1)]))
    return out


def stock_loss(module: Any, rows: Sequence[Mapping[str, Any]], base: Any = None) -> Tensor:
    """Return the supervised loss of all rows."""
    scores = torch.cat(stock_scores(module, rows, base))
    masks = torch.cat([row["loss_mask"] & (torch.arange(len(row["loss_mask"])) > 0) for row in rows])
    return -(scores * masks).sum() / masks.sum()


def stock_gradients(module: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the gradients of the supervised loss, by name."""
    stock_loss(module, rows).backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def gradients(built: Any, batch: Any) -> dict[str, Tensor]:
    """Return the gradients of all parameters of an engine in a supervised step, right before the update."""
    grads: dict[str, Tensor] = {}
    step = built.executor.optimizer_step

    def spied(*args: Any) -> Any:
        parameters = built.executor.model.named_parameters()
        grads.update({n: whole(p.grad).clone() for n, p in parameters if p.grad is not None})
        return step(*args)

    built.executor.optimizer_step = spied
    built.train_batch(batch, SFT())
    return grads


def assert_close_gradients(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Compare to 1e-4 of a tensor's largest entry, or of a thousandth of the largest of all."""
    floor = 1e-3 * max(float(grad.abs().max()) for grad in want.values())
    for name, grad in want.items():
        worst = float((got[name] - grad).abs().max()) / max(float(grad.abs().max()), floor)
        assert worst < 1e-4, (name, worst)
