"""What decays, and clipping against torch's own."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from engines.build import build_engine
from engines.config import EngineConfig
from engines.execution.bfloat16_adamw import BFloat16AdamW
from engines.execution.optimizer import (
    build_optimizer,
    clip_and_step,
    finite_on_all_ranks,
    gradient_norm,
    scale_gradients,
)
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from engines.weights.row_shards import own_part
from objectives import SFT

GROUP: Any = "the group"  # stands for a process group


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(2, 3, 4))
        self.matrix = nn.Parameter(torch.randn(3, 4))
        self.vector = nn.Parameter(torch.randn(5))
        self.scalar = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)


def test_matrices_decay_and_the_rest_does_not() -> None:
    module = Several()
    config = EngineConfig(lr=0.25, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.125)
    optimizer = build_optimizer(module, config)
    assert isinstance(optimizer, torch.optim.AdamW)
    matrices, rest = optimizer.param_groups
    assert [id(p) for p in matrices["params"]] == [id(module.cube), id(module.matrix)]
    assert [id(p) for p in rest["params"]] == [id(module.vector), id(module.scalar)]
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.125, 0.0)
    for one in (matrices, rest):
        assert (one["lr"], one["betas"], one["eps"], one["fused"]) == (0.25, (0.5, 0.75), 1e-3, True)


def test_groups_without_parameters_are_left_out() -> None:
    vectors, matrices = nn.LayerNorm(3), nn.Linear(2, 3, bias=False)
    config = EngineConfig(weight_decay=0.5)
    assert [one["weight_decay"] for one in build_optimizer(vectors, config).param_groups] == [0.0]
    assert [one["weight_decay"] for one in build_optimizer(matrices, config).param_groups] == [0.5]
    with pytest.raises(ValueError, match="build the engine with trainable=False instead"):
        build_optimizer(matrices.requires_grad_(False), config)


def grad_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def with_gradients(seed: int = 0, scale: float = 1.0) -> Several:
    module = Several()
    generator = torch.Generator().manual_seed(seed)
    for parameter in (module.cube, module.matrix, module.vector, module.scalar):
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return module


def clip_gradients(module: nn.Module, limit: float | None, group: Any = None) -> float:
    norm = float(gradient_norm(module, torch.zeros(()), group))
    scale_gradients(module, norm, limit)
    return norm


@pytest.mark.parametrize("share", [0.5, 0.999, 1.0, 1.001, 3.0, None])
def test_clipping_equals_torchs(share: float | None) -> None:
    whole = with_gradients()
    norm = torch.cat([p.grad.flatten().double() for p in whole.parameters() if p.grad is not None]).norm().item()
    limit = None if share is None else share * norm
    other = with_gradients()
    want = nn.utils.clip_grad_norm_(other.parameters(), math.inf if limit is None else limit)
    assert clip_gradients(whole, limit) == pytest.approx(norm, rel=1e-6) == pytest.approx(float(want), rel=1e-6)
    for one, two in zip(whole.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, atol=1e-6, rtol=1e-5)
    if share is None or share >= 1.001:  # bit for bit as it was
        assert torch.equal(grad_of(whole.cube), grad_of(with_gradients().cube))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_leaves_gradients_alone(bad: float) -> None:
    module = with_gradients()
    grad_of(module.vector)[2] = bad
    norm = clip_gradients(module, 0.5)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    assert torch.equal(grad_of(module.cube), grad_of(with_gradients().cube))
    assert torch.equal(grad_of(module.vector)[:2], grad_of(with_gradients().vector)[:2])


def test_no_gradients_and_empty_shards() -> None:
    assert clip_gradients(Several(), 1.0) == 0.0
    module = nn.ParameterList([nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(2))])
    module[0].grad = torch.zeros(0, 3)
    assert clip_gradients(module, 1.0) == 0.0
    module[1].grad = torch.tensor([3.0, 4.0])
    assert clip_gradients(module, 1.0) == 5.0
    torch.testing.assert_close(module[1].grad, torch.tensor([0.6, 0.8]))


def test_squares_are_added_up_in_double_precision() -> None:
    """Squares of 1 beside one of 2**26: in float32 they would be lost."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(2000)])
    for parameter in module:
        parameter.grad = torch.ones(1)
    module[0].grad = torch.full((1,), 2.0**13)
    assert clip_gradients(module, None) == math.sqrt(2.0**26 + 1999)


class Cuda(torch.Tensor):
    """Says that it is on a GPU: the fused kernel of the CPU takes the scale and the flag as CUDA's does."""

    is_cuda = True


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(dtype, group) of each sum over the ranks of GROUP, two of them; others have one rank, and sum nothing."""
    calls = []

    def all_reduce(values: torch.Tensor, op: Any, group: Any = None) -> None:
        calls.append((values.dtype, group))
        values.add_(144.0)

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2 if group == GROUP else 1)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return calls


def test_shards_of_other_ranks_count(exchanged: list[Any]) -> None:
    """The squares of all ranks' shards are added over the group that is given, in float64."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    module[0].grad = torch.tensor([3.0, 4.0])
    norm = gradient_norm(module, torch.zeros(()), group=GROUP)
    assert float(norm) == 13.0
    assert exchanged == [(torch.float64, GROUP)]
    assert float(gradient_norm(module, torch.zeros(()))) == 5.0
    assert len(exchanged) == 1


def test_the_losses_of_other_ranks_count(exchanged: list[Any]) -> None:
    assert finite_on_all_ranks(torch.tensor(1.0))
    assert exchanged == []
    assert not finite_on_all_ranks(torch.tensor(1.0), group=GROUP)
    assert [group for _, group in exchanged] == [GROUP]


def test_a_shard_counts_by_its_local_part() -> None:
    """No exchange of DTensor's own: the norm is a plain tensor, and the local part is scaled."""
    mesh = init_device_mesh("cpu", (1,))
    module = nn.ParameterList([nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]))])
    module[0].grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
    norm = gradient_norm(module, torch.zeros(()))
    assert type(norm) is torch.Tensor
    assert float(norm) == 5.0
    scale_gradients(module, 5.0, 1.0)
    torch.testing.assert_close(module[0].grad.to_local(), torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("kind", [torch.Tensor, Cuda])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_makes_no_update(loss: float, kind: type[torch.Tensor]) -> None:
    module = with_gradients()
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = build_optimizer(module, EngineConfig(lr=0.1))
    norm = gradient_norm(module, torch.tensor(loss).as_subclass(kind))
    assert math.isnan(norm)
    clip_and_step(module, optimizer, norm, EngineConfig(grad_clip=1.0), 0.1)
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))
    assert not finite_on_all_ranks(torch.tensor(loss))
    assert finite_on_all_ranks(torch.tensor(-3.0))


@pytest.mark.parametrize("kind", [torch.Tensor, Cuda])
@pytest.mark.parametrize("limit", [0.5, 1e3, None])
def test_the_update_is_that_of_clipped_gradients_at_this_rate(limit: float | None, kind: type[torch.Tensor]) -> None:
    """`eps` is large: with the usual one the first update of AdamW is the same for gradients of any scale."""
    whole, other = with_gradients(), with_gradients()
    other.load_state_dict(whole.state_dict())
    config = EngineConfig(lr=7.0, eps=0.25, weight_decay=0.1, betas=(0.7, 0.9), grad_clip=limit)
    # The settings of an update are those it is given, not those that the optimizer was built with.
    optimizers = [build_optimizer(one, of) for one, of in ((whole, EngineConfig()), (other, config))]
    norm = gradient_norm(whole, torch.tensor(2.0)).as_subclass(kind)
    clip_and_step(whole, optimizers[0], norm, config, 0.125)
    nn.utils.clip_grad_norm_(other.parameters(), math.inf if limit is None else limit)
    for group in optimizers[1].param_groups:
        group["lr"] = 0.125
    optimizers[1].step()
    for one, two in zip(whole.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    for left in ("grad_scale", "found_inf"):  # the next update would take them for its own
        assert getattr(optimizers[0], left, None) is None


def test_the_norm_of_bfloat16_gradients_is_not_rounded() -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(257, dtype=torch.bfloat16))])
    module[0].grad = torch.ones(257, dtype=torch.bfloat16)
    assert clip_gradients(module, None) == pytest.approx(math.sqrt(257), rel=1e-5)


def plain_bfloat16_steps(
    weight: torch.Tensor, gradients: list[torch.Tensor], config: EngineConfig, decay: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 2 of Loshchilov and Hutter in float64; what is kept of the moments is rounded to bfloat16."""
    (beta1, beta2), first, second = config.betas, torch.zeros_like(weight), torch.zeros_like(weight)
    for count, grad in enumerate(gradients, start=1):
        first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2
        rate = config.lr * (first / (1 - beta1**count)) / ((second / (1 - beta2**count)).sqrt() + config.eps)
        weight = weight - config.lr * decay * weight - rate
        first, second = first.bfloat16().double(), second.bfloat16().double()
    return weight, first, second


@pytest.mark.parametrize("scale", [None, 4.0])
def test_moments_in_bfloat16_are_the_formula_with_rounded_ones(scale: float | None) -> None:
    config = EngineConfig(lr=1e-2, weight_decay=0.1, moments_dtype="bfloat16", betas=(0.9, 0.95))
    module = Several()
    optimizer = build_optimizer(module, config)
    assert type(optimizer) is BFloat16AdamW
    gradients = {name: [torch.randn_like(p) for _ in range(20)] for name, p in module.named_parameters()}
    want = {
        name: plain_bfloat16_steps(
            p.detach().double(), [g.double() for g in gradients[name]], config, 0.1 * (p.ndim > 1)
        )
        for name, p in module.named_parameters()
    }
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    for step in range(20):
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name][step] * (scale or 1.0) if parameter.requires_grad else None
        optimizer.found_inf = torch.tensor(1.0)  # this one changes nothing
        optimizer.step()
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            weight, first, second = want[name]
            state = optimizer.state[parameter]
            assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.bfloat16}
            assert float(state["step"]) == 20
            torch.testing.assert_close(parameter.detach().double(), weight, atol=1e-4, rtol=0)
            torch.testing.assert_close(state["exp_avg"].double(), first, atol=1e-3, rtol=2**-7)
            torch.testing.assert_close(state["exp_avg_sq"].double(), second, atol=1e-4, rtol=2**-7)


def test_bfloat16_moments_train_as_float32_ones(tmp_path: Path) -> None:
    """And half as large; a resumed run goes on bit for bit."""

    def engine(**options: Any) -> Any:
        config = EngineConfig(device="cpu", lr=3e-3, max_tokens_per_rank=40, weight_decay=0.1, **options)
        return build_engine(config, tiny_model(num_hidden_layers=2, scale=1.0))

    def run(built: Any, first: int, last: int) -> list[float]:
        return [
            built.train_batch(tiny_batch([7, 19, 4, 12], seed=step % 4), SFT())["loss"] for step in range(first, last)
        ]

    wide, narrow, resumed = engine(), *(engine(moments_dtype="bfloat16") for _ in range(2))
    want, got = run(wide, 0, 60), run(narrow, 0, 30)
    narrow.save(tmp_path / "one")
    resumed.load(tmp_path / "one")
    rest = run(narrow, 30, 60)
    assert run(resumed, 30, 60) == rest
    got += rest
    assert want[-1] < 0.5 * want[0]
    worst = max(abs(a - b) / a for a, b in zip(want, got, strict=True))
    assert worst < 0.02, worst
    sizes = [moment_bytes(built) for built in (wide, narrow)]
    assert sizes[1] == sizes[0] / 2 > 0


def moment_bytes(built: Any) -> int:
    states = built.executor.optimizer.state.values()
    moments = [own_part(state[name]).part for state in states for name in ("exp_avg", "exp_avg_sq")]
    return sum(moment.numel() * moment.element_size() for moment in moments)
