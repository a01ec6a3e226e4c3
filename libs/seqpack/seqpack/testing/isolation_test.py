from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from seqpack.batches.packed import PackedBatch
from seqpack.testing.account import Tolerance
from seqpack.testing.isolation import LENGTHS, assert_packing_isolated, check_packing


class Mixer(nn.Module):
    """Adds the previous token of the same sequence; `leak` plants a fault in the packed form."""

    def __init__(self, leak: str | None = None) -> None:
        super().__init__()
        self.leak = leak
        self.weight = nn.Parameter(torch.tensor(0.7))
        self.out = nn.Linear(8, 8)  # gets what leaked as its input: not where it began

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        first = (positions == 0)[..., None]
        if self.leak == "late":  # only past the first chunk of 64 tokens of the row
            first = first & (torch.arange(x.shape[1]) < 64)[:, None]
        if self.leak != "shift":
            before = torch.where(first, before * 1e-9 if self.leak == "tiny" else 0.0, before)
        if self.leak == "mean":
            before = before / before.square().mean().sqrt()
        if self.leak == "future":
            before = before + torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1) * 1e-2
        out: torch.Tensor = self.out(x + before * self.weight)
        return Spread.of(out) if self.leak == "gradient" else out


class Spread(torch.autograd.Function):
    @classmethod
    def of(cls, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cls.apply(x)
        return out

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + grad.roll(1, 1) * 0.1


def parts(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    assert isinstance(layer, nn.ModuleDict)
    return layer["proj"], layer["mix"]


class Model(nn.Module):
    def __init__(self, leaks: Sequence[str | None] = (None, None), noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(31, 8)
        self.layers = nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(8, 8), "mix": Mixer(leak)}) for leak in leaks])
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 31)
        self.noise = noise

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids[None])
        for layer in self.layers:
            project, mix = parts(layer)
            x = self.drop(mix(torch.tanh(project(x)), positions[None]))
        logits: torch.Tensor = self.head(x)
        return logits + self.noise * torch.randn(1)


def packed(model: nn.Module, row: PackedBatch) -> torch.Tensor:
    logits: torch.Tensor = model(row.values["input_ids"], row.position_ids)
    return logits


def alone(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids, torch.arange(ids.numel()))
    return logits


def test_a_correct_model_passes_and_is_left_as_it_was() -> None:
    model = Model().train()
    _, mix = parts(model.layers[0])
    mix.eval()
    report = assert_packing_isolated(model, packed, alone)
    assert "packing is isolated" in str(report)
    assert max(report.logits) < 1e-6
    assert report.worst_grad is not None
    assert report.worst_grad[1] < 1e-5
    assert report.origin is None
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert not mix.training
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    "options", [{"align": 8}, {"bucket": 64}, {"lengths": (1, 1)}, {"lengths": (2, 30, 1, 4)}, {"grads": False}]
)
def test_other_rows_pass_too(options: dict[str, Any]) -> None:
    assert check_packing(Model(), packed, alone, **options).isolated


@pytest.mark.parametrize("leak", ["shift", "mean", "future"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_leak_is_found_where_it_is(leak: str, layer: int) -> None:
    leaks: list[str | None] = [None, None]
    leaks[layer] = leak
    with pytest.raises(AssertionError, match="packing LEAKS") as error:
        assert_packing_isolated(Model(leaks), packed, alone)
    assert f"first seen at layers.{layer}.mix (Mixer)" in str(error.value)


def test_the_first_of_two_leaks_is_named() -> None:
    origin = check_packing(Model(["shift", "shift"]), packed, alone).origin
    assert origin is not None
    assert origin.name == "layers.0.mix"


def test_what_moves_is_said_with_its_direction() -> None:
    report = check_packing(Model(["shift", None]), packed, alone)
    assert {(a, b) for a, b, _ in report.moved} <= {(i, i + 1) for i in range(5)} | {(0, 2)}  # sequence 1 has one token
    assert (0, 1) in {(a, b) for a, b, _ in report.moved}


def test_a_leak_that_appears_past_a_chunk_is_found() -> None:
    assert sum(LENGTHS) > 2 * 64
    report = check_packing(Model(["late", None]), packed, alone)
    assert report.moved
    assert {source for source, _, _ in report.reached} == {2, 3, 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_that_rounding_hides_is_found_by_its_gradient(dtype: torch.dtype) -> None:
    report = check_packing(Model(["tiny", None]).to(dtype), packed, alone)
    assert report.logits_equal
    assert report.grads_equal
    assert not report.moved
    assert not report.isolated
    assert {(source, other) for source, other, _ in report.reached} >= {(i, i + 1) for i in range(5)}
    assert "have a gradient at tokens of sequence" in str(report)


@pytest.mark.parametrize("seed", range(6))
def test_rounding_in_half_precision_raises_no_alarm(seed: int) -> None:
    class Coarse(Model):
        """Right, but rounds its state in another way where sequences lie at other places, as kernels do."""

        def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids[None])
            for number, layer in enumerate(self.layers):
                shift = torch.sin(torch.arange(x.shape[1]) + number)[None, :, None].to(x.dtype)
                project, mix = parts(layer)
                x = mix(torch.tanh(4 * project(x)), positions[None])
                x = (x + 4 * shift) - 4 * shift
            logits: torch.Tensor = self.head(x)
            return logits

    report = check_packing(Coarse().bfloat16(), packed, alone, seed=seed)
    assert max(report.logits) > 1e-3  # it does round in another way
    assert report.isolated


def test_a_leak_in_the_gradient_alone_is_found() -> None:
    report = check_packing(Model(["gradient", None]), packed, alone)
    assert report.logits_equal
    assert not report.moved
    assert not report.grads_equal
    assert not report.isolated


def test_positions_that_do_not_start_again_are_found_although_nothing_leaks() -> None:
    class Positions(Model):
        def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids[None]) + positions[None, :, None] * 0.01
            logits: torch.Tensor = self.head(x)
            return logits

    def running(model: nn.Module, row: PackedBatch) -> torch.Tensor:
        logits: torch.Tensor = model(row.values["input_ids"], torch.arange(row.num_tokens))
        return logits

    report = check_packing(Positions(), running, alone)
    assert not report.logits_equal
    assert report.moved == ()
    assert str(report).startswith("packed is NOT the same as alone, although no sequence moves another's logits")


def test_half_precision_has_its_own_bounds() -> None:
    assert check_packing(Model().bfloat16(), packed, alone).isolated
    assert not check_packing(Model(["shift", None]).bfloat16(), packed, alone).isolated
    assert Tolerance.of(torch.float16).logits > Tolerance.of(torch.float32).logits


def test_frozen_parameters_are_not_compared() -> None:
    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter requires a gradient; pass grads=False"):
        check_packing(model, packed, alone)
    assert check_packing(model, packed, alone, grads=False).worst_grad is None
    model.head.weight.requires_grad_(True)
    worst = check_packing(model, packed, alone).worst_grad
    assert worst is not None
    assert worst[0] == "head.weight"


def test_bad_calls_are_named() -> None:
    with pytest.raises(ValueError, match="at least two lengths"):
        check_packing(Model(), packed, alone, lengths=(5,))
    with pytest.raises(ValueError, match="make the model deterministic"):
        check_packing(Model(noise=0.1), packed, alone)
    with pytest.raises(ValueError, match=r"must return logits \[131, V\]"):
        check_packing(Model(), lambda m, row: packed(m, row)[:, 1:], alone)
    with pytest.raises(ValueError, match="pass vocab_size"):
        check_packing(nn.Linear(2, 2), packed, alone)


def test_the_default_row_has_a_prime_number_of_tokens() -> None:
    total = sum(LENGTHS)
    assert all(total % d for d in range(2, total))
