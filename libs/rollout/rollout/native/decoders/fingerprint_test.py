"""A module's fingerprint changes with its weights, however they were written."""

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from rollout.native.decoders.fingerprint import fingerprint
from rollout.testing.model import tiny_model

MODEL = tiny_model(16, layers=2)


def in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)


def through_data(model: PreTrainedModel) -> None:
    """As an optimizer that torch does not see: no write is counted."""
    for parameter in model.parameters():
        parameter.data.mul_(1.001)


def replaced(model: PreTrainedModel) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())


def optimizer_step(model: PreTrainedModel) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
    optimizer.step()


def not_a_number(model: PreTrainedModel) -> object:
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    return fingerprint(model)


@pytest.mark.parametrize("change", [in_place, through_data, replaced, optimizer_step, not_a_number])
def test_a_change_is_noticed(change: Callable[[PreTrainedModel], object]) -> None:
    model = copy.deepcopy(MODEL)
    before = fingerprint(model)
    assert before is not None
    assert fingerprint(model) == before
    change(model)
    assert fingerprint(model) != before


def test_a_forward_pass_is_no_change() -> None:
    before = fingerprint(MODEL)
    MODEL(input_ids=torch.tensor([[3, 4]]))
    assert fingerprint(MODEL) == before


def test_what_torch_does_not_count_is_not_told() -> None:
    with torch.inference_mode():
        model = tiny_model(16, layers=2)
    assert fingerprint(model) is None
