"""Conversations for the trainers of Transformers and TRL: a collator that renders them, and a loss by tokens' weights.

    class Weighted(WeightedLoss, SFTTrainer):  # or transformers.Trainer
        pass

    arguments = SFTConfig(remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True}, ...)
    Weighted(model, arguments, data_collator=ConversationCollator(tokenizer, train="last"), train_dataset=rows)

Where all weights are 1 the trainer's own class is enough. `remove_unused_columns=False` keeps the rows as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from chat_tools.rendering.render import render
from chat_tools.rendering.training import loss_weights, with_end

IGNORED = -100


@dataclass(frozen=True)
class ConversationCollator:
    """A collator of rows with `messages` (and `tools`, a list or JSON text) to one padded batch.

    `train`, `reasoning` and the column `weights_column` (by message a number, a list with one for each of its trained
    tokens, or None for 1) are those of `loss_weights`; `end_of_turn` is written after a last turn that the template
    does not end (`with_end`). The batch holds `input_ids`, `attention_mask` and `labels` (-100 where the weight is 0,
    and at first tokens), and `loss_weights` where some are neither 0 nor 1. Of more than `max_length` tokens the first
    are taken. ValueError for a row whose mask is not proven, or of which nothing is trained: filter such rows before.
    """

    tokenizer: Any
    train: Literal["all", "last"] = "all"
    reasoning: float = 1.0
    weights_column: str = "weights"
    end_of_turn: str | None = None
    max_length: int | None = None
    stop_tokens: tuple[str | int, ...] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        columns = [self._tokens(number, row) for number, row in enumerate(rows)]
        pad = self.tokenizer.pad_token_id or 0
        ids = pad_sequence([ids for ids, _ in columns], True, pad)
        weights = pad_sequence([weights for _, weights in columns], True)
        lengths = torch.tensor([len(ids) for ids, _ in columns])
        batch = {
            "input_ids": ids,
            "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
            "labels": ids.masked_fill(weights == 0, IGNORED),
        }
        return batch if bool(((weights == 0) | (weights == 1)).all()) else {**batch, "loss_weights": weights}

    def _tokens(self, number: int, row: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return ids i64[T] and weights f32[T] of a row."""
        tools, marks = row.get("tools"), row.get(self.weights_column) or ()
        tools = json.loads(tools) if isinstance(tools, str) else tools
        rendered = render(
            self.tokenizer, row["messages"], tools or None, stop_tokens=self.stop_tokens, **self.template_options
        )
        if rendered.problems:
            raise ValueError(f"row {number} of the batch: its mask is not proven: {rendered.problems[0]}")
        if self.end_of_turn is not None:
            rendered = with_end(rendered, self.end_of_turn)
        turns = [span.message for span in rendered.spans]
        given = {at: weight for at, weight in enumerate(marks) if weight is not None}
        kept = {at: weight for at, weight in given.items() if self.train == "all" or at == max(turns, default=0)}
        weights = torch.tensor(loss_weights(rendered, self.train, kept, self.reasoning)[: self.max_length])
        weights[:1] = 0
        if not weights.any():
            raise ValueError(f"row {number} of the batch: none of its first {len(weights)} tokens is trained")
        return torch.tensor(rendered.ids[: self.max_length]), weights


class WeightedLoss:
    """A mixin of trainers: the loss of each token times its weight, where a batch has `loss_weights`.

    The sum is divided as the trainer divides: by the number of labels of the whole accumulated batch.
    """

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss (and the outputs) of a batch, as `transformers.Trainer.compute_loss` does."""
        if "loss_weights" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        given = {key: value for key, value in inputs.items() if key not in ("loss_weights", "labels")}
        outputs = model(**given)
        loss = weighted_loss(outputs.logits, inputs["labels"], inputs["loss_weights"], num_items_in_batch)
        arguments, accelerator = (getattr(self, name) for name in ("args", "accelerator"))
        if arguments.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * accelerator.num_processes  # gradients are averaged over these
        return (loss, outputs) if return_outputs else loss


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return sum(weight * -log p(label)) / count over labels that are not -100; `count` is by default their number.

    `logits` f[B, T, V], `labels` i64[B, T] and `weights` f[B, T], aligned with the ids and not shifted.
    """
    targets = labels[:, 1:]
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return (losses * weights[:, 1:]).sum() / ((targets != IGNORED).sum() if count is None else count)
