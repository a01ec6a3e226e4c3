"""Recording of the experts that a module's routers choose: hooks on them during one forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ROUTERS = ("Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter")
"""Router classes of transformers whose third output is the experts' numbers, [tokens, k]."""


class Routers:
    """The routers of a module, in order. Raises ValueError where it has none of a known kind."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = [module for module in model.modules() if type(module).__name__ in ROUTERS]
        others = [n for n, m in model.named_modules() if type(m).__name__ not in ROUTERS and _looks_like_one(m)]
        if others or not self._routers:
            reason = "it has no router"
            if others:
                reason = f"{others[0]} is a {type(model.get_submodule(others[0])).__name__}"
            raise ValueError(
                f"the experts that {type(model).__name__} sends its tokens to can't be told: {reason}; known are "
                f"{', '.join(ROUTERS)} (native/decoders/routers.py): leave routed_experts off"
            )

    @contextmanager
    def noted(self) -> Iterator[list[Tensor]]:
        """Append what each router chooses, [tokens, k], to the list that it yields, layer by layer."""
        chosen: list[Tensor] = []
        handles = [router.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for router in self._routers]
        try:
            yield chosen
        finally:
            for handle in handles:
                handle.remove()

    def table(self, chosen: list[Tensor], rows: int) -> Tensor:
        """Return the choices of one forward pass over padded rows: i16[rows, columns, layers, k]."""
        assert len(chosen) == len(self._routers)
        return torch.stack([one.view(rows, -1, one.shape[-1]) for one in chosen], dim=2).to(torch.int16)


def _looks_like_one(module: nn.Module) -> bool:
    return "router" in type(module).__name__.lower()
