"""Weights with which a proof shows most: no value as it was initialised, matrices that keep the size of what they get,
and states that last longer than the sequences that errors join."""

import torch
from torch import nn

GAIN = 1.0
"""Standard deviation of a matrix, times the root of its columns."""
SLOWEST, FASTEST = -3.0, 0.0
"""Logarithms of the rates at which recurrent layers forget. Stock code draws rates up to 16: nothing is then left of
one token at the next, and a leak of such a state would not be seen."""


@torch.no_grad()
def randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Fill the parameters of a model in place."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(SLOWEST, FASTEST, generator=generator)
        elif parameter.ndim >= 2:
            parameter.normal_(0.0, GAIN * parameter.shape[-1] ** -0.5, generator=generator)
        else:
            noise = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype, device=parameter.device)
            parameter.add_(0.1 * noise)
