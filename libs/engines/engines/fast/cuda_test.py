"""On one Hopper GPU: compiled layers, fused head and replicated weights against the plain path and float32."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.cuda import set_sync_debug_mode

from engines import EngineConfig, LoraConfig, build_engine
from engines.adapters.lora import is_adapter
from engines.execution.early_host_read import EarlyRead
from engines.execution.executor import Scoring
from engines.execution.loss import StepLoss
from engines.fast.adamw import AdamW, control, join, split, update, update_plain
from engines.fast.compiling import compilations
from engines.fast.convolution import conv_heads, conv_heads_grad
from engines.fast.log_prob_kernels import gradient, gradient_plain, statistics, statistics_plain
from engines.launch import ensure_group
from engines.testing.gradients import error
from engines.testing.gradients import gradients as gradients_of
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import SFT
from seqpack.batches.batch import jagged
from seqpack.batches.schema import ROUTED_EXPERTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [700, 5, 333, 64, 1, 945]
LAYERS, EXPERTS, TOP_K = 4, 16, 4


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    made = ensure_group("cuda")
    yield
    if made:
        torch.distributed.destroy_process_group()


def engine(kind: str = "dense", **options: Any) -> Any:
    config = {"device": "cuda", "lr": 1e-3, "max_tokens_per_rank": 2048, **options}
    hybrid = kind in ("dense", "moe")
    sizes = {name: size for name, size in FUSED_SIZES.items() if hybrid or not name.startswith(("linear", "rope"))}
    if kind.endswith("moe"):
        sizes |= {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 128}
        config |= {"routing_replay": True, "router_aux_loss_coef": 0.01, **options}
    return build_engine(EngineConfig(**config), tiny_model(kind, scale=1.0, **sizes))


def batch(seed: int = 0, lengths: list[int] = LENGTHS, kind: str = "dense") -> TensorDict:
    """`kind`: of the model; tokens of one with experts go to given ones, which no rounding of a router changes."""
    data = tiny_batch(lengths, seed=seed, vocab=512)
    if kind.endswith("moe"):
        rng = torch.Generator().manual_seed(seed)
        given = [torch.rand(n, LAYERS, EXPERTS, generator=rng).topk(TOP_K).indices.to(torch.int16) for n in lengths]
        data[ROUTED_EXPERTS] = jagged(given, 0)
    return data


def gradients(built: Any, data: TensorDict) -> tuple[float, dict[str, torch.Tensor]]:
    return gradients_of(built, data, SFT())


@pytest.mark.parametrize("weights", ["sharded", "replicated"])
@pytest.mark.parametrize("kind", ["dense", "attention", "moe", "attention_moe"])
def test_compiled_layers_equal_plain_ones(kind: str, weights: str) -> None:
    """Gradient errors against float32: no larger than the plain path's."""
    data = batch(kind=kind)
    exact_loss, exact = gradients(engine(kind, dtype="float32", weights="sharded"), data)
    plain_loss, plain = gradients(engine(kind, compile="off", weights="sharded"), data)
    fast_loss, fast = gradients(engine(kind, compile="on", weights=weights), data)
    print({"loss": (exact_loss, plain_loss, fast_loss), "plain": error(plain, exact), "fast": error(fast, exact)})
    assert fast_loss == pytest.approx(exact_loss, rel=2e-3)
    assert error(fast, exact) <= 1.05 * error(plain, exact)


def adapted(path: str, **options: Any) -> Any:
    """With adapters that do something, the same ones each time."""
    lora = LoraConfig(rank=8, alpha=16.0)
    config = EngineConfig(model=path, device="cuda", lr=1e-3, max_tokens_per_rank=2048, lora=lora, **options)
    built: Any = build_engine(config)
    torch.manual_seed(0)
    for name, parameter in built.executor.model.named_parameters():
        if name.endswith("lora_B"):
            parameter.detach().to_local().normal_(std=0.02)
    return built


def test_compiled_layers_with_adapters_equal_plain_ones(tmp_path: Path) -> None:
    """Gradient errors of adapters against float32: no larger than the plain path's; the rest has no gradient."""
    model: Any = tiny_model("dense", scale=1.0, **FUSED_SIZES).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    exact_loss, exact = gradients(adapted(str(tmp_path), dtype="float32"), batch())
    plain_loss, plain = gradients(adapted(str(tmp_path), compile="off"), batch())
    fast_loss, fast = gradients(adapted(str(tmp_path), compile="on"), batch())
    print({"loss": (exact_loss, plain_loss, fast_loss), "plain": error(plain, exact), "fast": error(fast, exact)})
    assert exact.keys() == fast.keys()
    assert all(is_adapter(name) for name in fast)
    assert fast_loss == pytest.approx(exact_loss, rel=2e-3)
    assert error(fast, exact) <= 1.05 * error(plain, exact)


SHORT = ([2048], [5, 3], [64] * 9, [1, 1, 700], [999, 1, 1, 1, 1], [2], [512, 512])
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {"weights": "replicated"},
    "sharded": {"weights": "sharded"},
    "recomputed": {"gradient_checkpointing": True},
    "attention": {"kind": "attention"},
    "experts": {"kind": "moe"},
    "adapters": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_compiled_once_whatever_the_batch(way: str, tmp_path: Path) -> None:
    if way == "adapters":
        model: Any = tiny_model("dense", scale=1.0, **FUSED_SIZES).to(torch.bfloat16)
        model.save_pretrained(tmp_path)
        built = adapted(str(tmp_path), compile="on")
    else:
        built = engine(compile="on", **WAYS[way])
    kind = WAYS[way].get("kind", "dense")
    built.train_batch(batch(kind=kind), SFT())
    before = compilations()
    for seed, lengths in enumerate(SHORT):
        built.train_batch(batch(seed, lengths, kind), SFT())
        built.forward(batch(seed, lengths, kind))
    assert compilations() == before


def test_compiled_once_for_33000_tokens_too() -> None:
    """Tensors of more elements than those by which a compiler would choose other kernels."""
    built = engine(compile="on", max_tokens_per_rank=34_000)
    built.train_batch(batch(), SFT())
    before = compilations()
    long = [4096] * 8 + [232]
    for seed, lengths in enumerate([long, [4096] * 2, *SHORT, long, [4096] * 4 + [3], [4096, 3000], [4096] * 6]):
        built.train_batch(batch(seed, lengths), SFT())
    assert compilations() == before


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_the_host_never_waits_in_forward_backward_and_update(weights: str) -> None:
    """From a prefetched batch to the norm of its gradient."""
    built = engine(compile="on", weights=weights)
    built.train_batch(batch(), SFT())
    work = built._agree_on(batch(1), SFT())
    micro_batches = built.executor.ahead(built._micro_batches(work.batch, work.plan))
    micro_batches.begin()
    loss = StepLoss(SFT(), work.stats.totals)
    set_sync_debug_mode("error")
    try:
        built.executor.train(micro_batches, loss, Scoring())
        norm = built.executor.optimizer_step(1e-3, loss.share(built.device), built.config)
    finally:
        set_sync_debug_mode("default")
    assert math.isfinite(norm)


def test_a_number_is_read_before_what_the_device_does_after_it() -> None:
    """The host has it while work enqueued after it goes on, and the value is that of its place in the stream."""
    value = torch.full((2,), 3.0, device="cuda")
    early = EarlyRead(value)
    value.fill_(7.0)
    torch.cuda._sleep(2_000_000_000)  # a second of the device's clock, about
    after = torch.cuda.Event()
    after.record()
    assert early.read().tolist() == [3.0, 3.0]
    assert not after.query()
    torch.cuda.synchronize()


def test_a_prefetched_batch_gives_the_same_step() -> None:
    objective, batches = SFT(), [batch(seed) for seed in range(3)]
    plain, ahead = engine(compile="on", max_tokens_per_rank=1024), engine(compile="on", max_tokens_per_rank=1024)
    for data, following in zip(batches, [*batches[1:], batches[0]], strict=True):
        ahead.prefetch(following, objective)
        expected, got = plain.train_batch(data, objective), ahead.train_batch(data, objective)
        assert got["micro_batches"] > 1
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_scores_are_those_that_are_trained_on() -> None:
    built = engine(compile="on")
    data = batch()
    data["old_log_probs"] = built.forward(data)["log_probs"]
    from objectives import GRPO

    assert built.train_batch(data, GRPO())["ratio"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("weights", ["sharded", "replicated"])
def test_training_learns_and_checkpointing_changes_little(weights: str) -> None:
    """Later steps at this rate take what backward passes differ in, from run to run, apart by percents."""
    steps = {}
    for checkpointing in (False, True):
        built = engine(lr=3e-3, compile="on", weights=weights, gradient_checkpointing=checkpointing)
        steps[checkpointing] = [built.train_batch(batch(), SFT()) for _ in range(10)]
    losses = {checkpointing: [step["loss"] for step in made] for checkpointing, made in steps.items()}
    for made in losses.values():
        assert made[-1] < 0.8 * made[0]
    assert losses[True][0] == pytest.approx(losses[False][0], rel=1e-3)
    assert steps[True][0]["grad_norm"] == pytest.approx(steps[False][0]["grad_norm"], rel=1e-2)
    assert losses[True][:4] == pytest.approx(losses[False][:4], rel=1e-2)


@pytest.mark.parametrize("vocabulary", [512, 65536, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_prob_kernels_equal_plain_ones(vocabulary: int, temperature: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(300, vocabulary, generator=generator, device="cuda")
    targets = torch.randint(0, vocabulary, (300,), generator=generator, device="cuda")
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        low = logits.to(dtype)
        got = statistics(low, targets, temperature, True)
        expected = statistics_plain(low, targets, temperature, True)
        for mine, other, slack in zip(got, expected, (1, 1, 20), strict=True):  # entropies are differences
            torch.testing.assert_close(mine, other, rtol=bound, atol=slack * bound)
        grads = [torch.randn(300, generator=generator, device="cuda") for _ in range(2)]
        operands = (targets, expected[1], grads[0], temperature, expected[2], grads[1])
        other = gradient_plain(low, *operands)
        torch.testing.assert_close(gradient(low.clone(), *operands), other)


@pytest.mark.parametrize("lengths", [[700, 5, 333, 1, 1, 64, 2, 3], [1], [40], [4096]])
def test_convolution_kernels_equal_plain_ones(lengths: list[int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    tokens, keys, values = sum(lengths), 2, 4
    position = torch.cat([torch.arange(n) for n in lengths]).to("cuda", torch.int32)
    x, weight = randn(tokens, (2 * keys + values) * 128), randn((2 * keys + values) * 128, 4)
    grads = randn(tokens, keys, 128), randn(tokens, keys, 128), randn(tokens, values, 128)
    expected = conv_heads(x.cpu(), weight.cpu(), position.cpu(), keys, 128)
    expected += conv_heads_grad(x.cpu(), weight.cpu(), position.cpu(), *(g.cpu() for g in grads))
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        operands = x.to(dtype), weight.to(dtype), position
        got = conv_heads(*operands, keys, 128) + conv_heads_grad(*operands, *(g.to(dtype) for g in grads))
        for mine, other in zip(got, expected, strict=True):
            assert mine.dtype == dtype
            assert float((mine.cpu().float() - other).norm() / other.norm()) < bound


@pytest.mark.parametrize("limit", [None, 0.5])
def test_update_kernel_equals_the_plain_one(limit: float | None) -> None:
    start = torch.randn(1000, 33, device="cuda")
    whole, (high, rest) = [start.clone() for _ in range(2)], split(start)
    moments = [(torch.zeros_like(start), torch.zeros_like(start)) for _ in range(3)]
    settings = AdamW(1e-2, (0.9, 0.98), 1e-8)
    for step in range(1, 6):
        grad = torch.randn(1000, 33, device="cuda")
        controls = control(grad.norm(), limit, torch.tensor(float(step), device="cuda").double(), settings.betas)
        update_plain(whole[0], None, moments[0], grad, controls, settings, 0.1)
        update(whole[1], None, moments[1], grad, controls, settings, 0.1)
        update(high, rest, moments[2], grad, controls, settings, 0.1)
    torch.testing.assert_close(whole[1], whole[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(join(high, rest), whole[0], rtol=0, atol=1e-6)
    before = high.clone(), rest.clone(), moments[2][0].clone()
    nothing = control(
        torch.tensor(torch.nan, device="cuda"), 1.0, torch.tensor(1.0, device="cuda").double(), settings.betas
    )
    update(high, rest, moments[2], grad, nothing, settings, 0.1)
    assert all(torch.equal(one, other) for one, other in zip(before, (high, rest, moments[2][0]), strict=True))
