"""Conversations as training samples: ids, and a mask that is true on the assistant's tokens alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from chat_tools import render
from seqpack.batches.batch import make_batch

Sample = Mapping[str, Any]


class UnprovenMaskError(ValueError):
    """A conversation of which it can't be proven which tokens are the assistant's; the text says why."""


def sample_of(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
) -> Sample:
    """Render one conversation by the tokenizer's own chat template.

    Raises:
        UnprovenMaskError: the mask can't be trusted, or the ids are not those of `apply_chat_template`.
        ValueError, jinja2.TemplateError: the template refuses the messages.
    """
    rendered = render(tokenizer, list(messages), tools=list(tools) if tools else None)
    if rendered.problems:
        raise UnprovenMaskError(rendered.problems[0])
    return as_sample(rendered.ids, rendered.assistant_mask)


def as_sample(ids: Sequence[int], mask: Sequence[bool]) -> Sample:
    """Token ids and their mask as the batch's per-token entries."""
    return {
        "input_ids": torch.tensor(ids, dtype=torch.int64),
        "position_ids": torch.arange(len(ids)),
        "loss_mask": torch.tensor(mask, dtype=torch.bool),
    }


def batch_of(samples: Sequence[Sample]) -> TensorDict:
    """Samples as one batch."""
    return make_batch(samples)
