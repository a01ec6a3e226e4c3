"""On one CUDA device: packed FSDP2 steps with fused kernels in bfloat16 against the padded reference and float32."""

import itertools
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from engines import EngineConfig, build_engine
from engines.launch import ensure_group
from engines.scoring.packed_model import adapt_for_packing, packed_logits
from engines.testing.executors import assert_same, state_of
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import GRPO, SFT
from seqpack.adapters.context import PackedContext
from seqpack.adapters.mixers import packed_hidden
from seqpack.ops import backends
from seqpack.testing import assert_packing_isolated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [700, 5, 333, 64, 1, 945]


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    made = ensure_group("cuda")
    yield
    if made:
        torch.distributed.destroy_process_group()


def model(kind: str = "dense") -> Any:
    return tiny_model(kind, scale=1.0, **FUSED_SIZES)


def engine(**options: Any) -> Any:
    return build_engine(EngineConfig(**{"device": "cuda", "lr": 1e-3, "max_tokens_per_rank": 2048, **options}), model())


def batch(seed: int = 0) -> TensorDict:
    return tiny_batch(LENGTHS, seed=seed, vocab=512)


def test_fused_kernels_are_there() -> None:
    """Otherwise the tests below say nothing about them."""
    tables = backends("cuda", torch.bfloat16)
    print({op: [name for name, there in table.items() if there.available] for op, table in tables.items()})
    for op, names in {
        "attention": ["varlen"],
        "causal_conv1d": ["causal_conv1d", "fla"],
        "gated_delta_rule": ["fla"],
    }.items():
        reasons = {name: tables[op][name].reason for name in names}
        assert any(tables[op][name].available for name in names), f"{op}: {reasons}"


def test_isolated_in_bfloat16() -> None:
    adapted = model().to("cuda", torch.bfloat16)
    adapt_for_packing(adapted)
    assert_packing_isolated(adapted, packed_forward=packed_logits, lengths=(300, 1, 70, 129))


def alone(adapted: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """One sequence through the packed path."""
    n = len(input_ids)
    cu_seqlens = torch.tensor([0, n], dtype=torch.int32, device=input_ids.device)
    positions = torch.arange(n, device=input_ids.device)
    hidden = packed_hidden(adapted, input_ids, positions, PackedContext(cu_seqlens, n))
    logits: torch.Tensor = adapted.get_output_embeddings()(hidden)
    return logits


def test_isolated_in_float32() -> None:
    """No fused kernel takes float32: the plain operations on the device.

    Alone means through the same operations: transformers hands float32 to kernels that multiply in TF32.
    """
    adapted = model().to("cuda")
    adapt_for_packing(adapted)
    assert_packing_isolated(adapted, packed_logits, alone, lengths=(300, 1, 70, 129))


def test_float32_equals_float64() -> None:
    """Packed logits and every gradient on the device, against the same model in float64 on the CPU."""
    lengths, generator = (300, 1, 70, 129), torch.Generator().manual_seed(0)
    ids = torch.randint(0, FUSED_SIZES["vocab_size"], (sum(lengths),), generator=generator)
    weights = torch.randn(sum(lengths), FUSED_SIZES["vocab_size"], generator=generator, dtype=torch.float64)
    positions = torch.cat([torch.arange(n) for n in lengths])
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    def run(adapted: Any, device: str) -> dict[str, torch.Tensor]:
        adapt_for_packing(adapted)
        context = PackedContext(cu_seqlens.to(device), max(lengths))
        hidden = packed_hidden(adapted, ids.to(device), positions.to(device), context)
        logits = adapted.get_output_embeddings()(hidden)
        (logits.log_softmax(-1) * weights.to(logits)).sum().backward()
        return {"logits": logits.detach(), **{name: p.grad for name, p in adapted.named_parameters()}}

    expected, got = run(model().double(), "cpu"), run(model().to("cuda"), "cuda")
    errors = {
        name: ((got[name].cpu().double() - value).norm() / value.norm()).item() for name, value in expected.items()
    }
    print(dict(sorted(errors.items(), key=lambda item: -item[1])[:4]))
    assert errors.pop("logits") < 1e-5
    assert max(errors.values()) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_equals_padded(dtype: str) -> None:
    """The padded path runs transformers' own layers, so in bfloat16 two sets of kernels meet."""
    bound = 2e-3 if dtype == "float32" else 0.05
    packed, padded = engine(dtype=dtype), engine(dtype=dtype, batching="padded")
    left, right = packed.train_batch(batch(), SFT()), padded.train_batch(batch(), SFT())
    assert left["loss"] == pytest.approx(right["loss"], rel=bound)
    assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=bound)


def test_float32_equals_the_cpu() -> None:
    left = engine(dtype="float32").train_batch(batch(), SFT())
    right = engine(dtype="float32", device="cpu").train_batch(batch(), SFT())
    assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
    assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-3)


def test_bfloat16_training_learns_and_scores_agree() -> None:
    built = engine(lr=3e-3)
    data = batch()
    data["old_log_probs"] = built.forward(data)["log_probs"]
    first = built.train_batch(data, GRPO())
    assert first["ratio"] == pytest.approx(1.0, abs=2e-2)
    losses = [built.train_batch(data, SFT())["loss"] for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


def test_resume_and_export(tmp_path: Path) -> None:
    built = engine()
    built.train_batch(batch(), SFT())
    built.save(tmp_path / "one")
    other = engine()
    other.load(tmp_path / "one")
    left, right = ({p.name: p.flat for p in one.export_weights(2**40)} for one in (built, other))
    assert all(torch.equal(left[name], right[name]) for name in left)
    built.save_hf(tmp_path / "hf")
    again = build_engine(EngineConfig(model=str(tmp_path / "hf"), device="cuda"))
    torch.testing.assert_close(
        again.forward(batch())["log_probs"].values(), built.forward(batch())["log_probs"].values()
    )


def given_gradients(built: Any, given: list[dict[str, torch.Tensor]]) -> Any:
    """Lets its steps take these gradients, noting its own where there are none: two backward passes differ in bits."""
    step, parameters = built.executor.optimizer_step, dict(built.executor.scorer.named_parameters())
    numbers = itertools.count()

    def spied(*args: Any) -> Any:
        if (at := next(numbers)) == len(given):
            given.append({name: p.grad.to_local().clone() for name, p in parameters.items()})
        for name, grad in given[at].items():
            parameters[name].grad.to_local().copy_(grad)
        return step(*args)

    built.executor.optimizer_step = spied
    return built


def test_moments_on_the_host_change_no_bit(tmp_path: Path) -> None:
    """Nor a checkpoint's; and the device is free of them."""
    runs: list[Any] = []
    grads: list[dict[str, torch.Tensor]] = []
    for host in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        options = {"optimizer_on_host": host, "weights": "sharded", "grad_clip": 0.1}
        built = given_gradients(engine(**options), grads)
        steps = [built.train_batch(batch(seed), SFT())["grad_norm"] for seed in range(2)]
        torch.cuda.synchronize()
        noted = sum(grad.nbytes for step in grads for grad in step.values())
        used = torch.cuda.memory_allocated() - before - (0 if host else noted)
        built.save(tmp_path / str(host))
        other = engine(**options)
        other.load(tmp_path / str(host))
        steps.append(built.train_batch(batch(2), SFT())["grad_norm"])
        steps.append(given_gradients(other, grads[2:]).train_batch(batch(2), SFT())["grad_norm"])
        weights = [{p.name: p.flat.cpu() for p in one.export_weights(max_bytes=2**40)} for one in (built, other)]
        moments = [
            s[name].to_local() for s in built.executor.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
        ]
        runs.append((steps, weights, used, sum(moment.nbytes for moment in moments), {m.is_pinned() for m in moments}))
        del built, other, moments
    (plain, want, full, size, _), (lean, got, less, _, pinned) = runs
    assert pinned == {True}
    assert plain == lean
    assert lean[2] == lean[3]
    for name, value in want[0].items():
        assert all(torch.equal(one[name], value) for one in (want[1], *got)), name
    print(f"{full - less} bytes less on the device, {size} of moments")
    assert full - less >= 0.99 * size > 0


def test_parameters_on_the_host_change_no_bit() -> None:
    """Of weights after three steps; and the device is free of them, of their gradients and moments."""
    runs: list[Any] = []
    grads: list[dict[str, torch.Tensor]] = []
    for host in (True, False):  # in this order, gradients are noted on the host
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        options = {"optimizer_on_host": host, "parameters_on_host": host, "weights": "sharded", "grad_clip": 0.1}
        built = given_gradients(engine(**options), grads)
        used = torch.cuda.memory_allocated() - before
        steps = [built.train_batch(batch(seed), SFT())["grad_norm"] for seed in range(3)]
        peak = torch.cuda.max_memory_allocated() - before
        weights = {p.name: p.flat.cpu() for p in built.export_weights(max_bytes=2**40)}
        parameters = list(built.executor.model.parameters())
        places = {(p.device.type, p.to_local().is_pinned()) for p in parameters}
        runs.append((steps, weights, peak, used, sum(p.to_local().nbytes for p in parameters), places))
        del built, parameters
    (lean, got, less, left, size, places), (plain, want, full, there, _, _) = runs
    print(f"peak {full} bytes on the device, {less} with parameters on the host; {size} of parameters")
    assert places == {("cpu", True)}
    assert lean == plain
    assert [name for name, value in want.items() if not torch.equal(got[name], value)] == []
    assert there - left >= 0.95 * size > 0
    assert full - less >= 0.95 * 2 * size  # moments, and of weights and gradients what is not gathered


@pytest.mark.parametrize("weights", ["sharded", "replicated"])
def test_offload_goes_to_pinned_memory_that_is_kept(weights: str) -> None:
    built, places = engine(weights=weights), []
    built.train_batch(batch(), SFT())
    before = state_of(built)
    for _ in range(2):
        built.offload()
        parameters = [getattr(p, "_local_tensor", p.data) for p in built.executor.model.parameters()]
        assert all(p.is_pinned() for p in parameters)
        places.append([p.data_ptr() for p in parameters])
        built.onload()
    assert places[0] == places[1]
    assert_same(state_of(built), before)


def test_offload_frees_the_device() -> None:
    built = engine()
    built.train_batch(batch(), SFT())
    before = torch.cuda.memory_allocated()
    size = sum(p.numel() for p in built.executor.model.parameters()) * 12
    built.offload()
    assert before - torch.cuda.memory_allocated() > 0.9 * size
    built.onload()
    assert built.train_batch(batch(), SFT())["skipped"] == 0.0
