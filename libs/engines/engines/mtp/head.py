"""The head for multi-token prediction of Qwen3.5: names, order and layers are those of vLLM's `qwen3_5_mtp`.

At token t it reads the last hidden state there (behind the final norm) and the embedding of token t + 1, each normed,
and predicts token t + 2 through one full-attention decoder layer and the model's own output layer:

    norm(layer(fc([norm(embedding of token t + 1), norm(hidden state of token t)])))

It is a module `mtp` of the causal LM, so that its tensors are live ones under the names on disk, `mtp.*`: trained,
saved, exported and synced as the others are. What it reads of the model is detached: it adds nothing to the model's
gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engines.config import EngineConfig
from engines.families.family import Family
from engines.families.registry import family_of
from engines.private_api import init_weights
from seqpack.adapters.attention import adapt_attention

NAME = "mtp"
"""The head's name in its model, and of its tensors on disk."""
LAYERS = "mtp_num_hidden_layers"
"""Config field: the number of its layers."""


class MTPHead(nn.Module):
    """See the module's text; `layer` and `norm` are the classes of the model's own."""

    def __init__(self, config: Any, layer: Any, norm: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = norm(size, eps=eps)
        self.pre_fc_norm_hidden = norm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers: Any = nn.ModuleList([layer(config, config.layer_types.index("full_attention"))])
        self.norm = norm(size, eps=eps)
        self.packs = False

    def forward(self, hidden: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor], **masks: Any) -> Tensor:
        """Return what the output layer reads [1, T, H] or [B, L, H], from hidden states and the embeddings of the
        tokens after them; `masks` says to the layer which tokens see one another."""
        x = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        x = self.fc(x)
        for layer in self.layers:
            x = layer(x, position_embeddings=angles, **masks)
        normed: Tensor = self.norm(x)
        return normed


def trains_head(config: EngineConfig) -> bool:
    """Return whether a configuration trains the head."""
    return config.mtp_loss_scaling_factor is not None


def refuse_head(family: Family, config: Any) -> None:
    """Raise ValueError where a model has no head, or one that is not the one here."""
    text = config.get_text_config()
    option = "leave mtp_loss_scaling_factor out"
    if not family.mtp:
        raise ValueError(
            f"mtp_loss_scaling_factor is for Qwen3.5, with or without experts, not {text.model_type}: {option}"
        )
    layers = getattr(text, LAYERS, None)
    if layers != 1:
        raise ValueError(
            f"mtp_loss_scaling_factor trains one layer that the config names, {LAYERS} is {layers}: {option}"
        )
    if getattr(text, "mtp_use_dedicated_embeddings", None):
        raise ValueError(
            f"mtp_use_dedicated_embeddings: a head with embeddings of its own is not trained here: {option}"
        )
    if getattr(text, "mtp_layer_types", None) not in (None, ["full_attention"]):
        raise ValueError(f"mtp_layer_types {text.mtp_layer_types}: a layer of full attention is trained here: {option}")
    if "full_attention" not in text.layer_types:
        raise ValueError(f"the model has no layer of full attention, which its head would be made as: {option}")


def add_head(model: Any, dtype: torch.dtype | None = None) -> None:
    """Give a causal LM without a head one, in its parameters' dtype or `dtype`: empty where the model is, else with
    first values as transformers gives those of a new model."""
    if head_of(model) is not None:
        return
    decoder, like = family_of(model.config).decoder(model), next(model.parameters())
    with torch.device(like.device):
        head = MTPHead(decoder.config, type(decoder.layers[0]), type(decoder.norm))
    head.to(dtype or like.dtype).eval()
    if not like.is_meta:
        head.apply(lambda module: init_weights(model, module))
    setattr(model, NAME, head)


def head_of(model: Any) -> MTPHead | None:
    """Return a model's head; None where it has none."""
    head = getattr(model, NAME, None)
    return head if isinstance(head, MTPHead) else None


def is_of_head(model: Any, name: str) -> bool:
    """Return whether a live tensor is the head's: a module of transformers' class has none."""
    return head_of(model) is not None and name.startswith(f"{NAME}.")


def pack_head(model: Any) -> None:
    """Make the head's attention take packed rows, as `adapt_for_packing` does that of the layers."""
    head = head_of(model)
    if head is not None and not head.packs:
        adapt_attention([layer.self_attn for layer in head.layers])
        head.packs = True


def units_of(model: Any) -> list[nn.Module]:
    """Return the modules of the head that are sharded on their own."""
    head = head_of(model)
    return [] if head is None else [head]
