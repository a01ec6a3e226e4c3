"""Choice of a decoder for a module."""

from typing import Any

from torch import nn

from rollout.config import DecoderChoice
from rollout.native.decoders.decoder import Decoder
from rollout.native.decoders.module_decoder import ModuleDecoder
from rollout.native.decoders.routers import Routers
from rollout.native.lean.families import refusal
from rollout.native.lean.lean_decoder import LeanDecoder
from seqpack.memory import ledger


def decoder_of(model: nn.Module, pad_token_id: int, choice: DecoderChoice, experts: bool = False) -> Decoder[Any]:
    """Return the lean decoder where it can replace the module's own forward, else one that calls the module.

    With `experts` it records the experts of each token, which only the module's own forward returns.
    """
    if choice not in ("auto", "lean", "module"):
        raise ValueError(f'decoder is "auto", "lean" or "module", got {choice!r}')
    if experts and choice == "lean":
        raise ValueError("the lean decoder knows no experts: leave decoder at 'auto', or routed_experts off")
    ledger.register(ledger.SAMPLER_WEIGHTS, model, lambda it: [*it.parameters(), *it.buffers()])
    if choice == "lean" or (choice == "auto" and not experts and refusal(model) is None):
        return LeanDecoder(model)
    return ModuleDecoder(model, pad_token_id, Routers(model) if experts else None)
