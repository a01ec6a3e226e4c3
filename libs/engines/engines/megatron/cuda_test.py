"""On one CUDA device: Megatron's layers over the fused kernels give FSDP2's steps, files and memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from engines import EngineConfig, TrainEngine, build_engine
from engines.testing.executors import inside
from engines.testing.megatron_curves import LENGTHS, MODELS, curve
from engines.testing.one_megatron_rank import one_megatron_gpu  # noqa: F401  each test here has a group
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import GRPO, SFT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OBJECTIVE = GRPO(kl_coef=0.1, entropy_coef=0.01)
# (loss, gradient norm), relative: float32 is plain torch on the device, bfloat16 the fused kernels in other layers.
BOUNDS = {"float32": (1e-5, 1e-3), "bfloat16": (5e-3, 0.03)}


def engine(model: str = "dense", **options: Any) -> TrainEngine:
    kind, changes = MODELS[model]
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    settings = {
        "backend": "megatron",
        "device": "cuda",
        "lr": 1e-3,
        "eps": 1e-2,
        "max_tokens_per_rank": 2048,
        **options,
    }
    return build_engine(EngineConfig(**settings), tiny_model(kind, scale=1.0, **{**FUSED_SIZES, **changes}))


def batch(seed: int = 0) -> TensorDict:
    return tiny_batch(LENGTHS, seed=seed, vocab=FUSED_SIZES["vocab_size"])


def exported(built: TrainEngine) -> dict[str, Tensor]:
    return {piece.name: piece.flat.clone() for piece in built.export_weights(2**40)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_same_curve_as_fsdp2(dtype: str, model: str) -> None:
    loss, norm = BOUNDS[dtype]
    want, got = (curve("cuda", dtype, backend, model, OBJECTIVE) for backend in ("fsdp2", "megatron"))
    print(want, got)
    for one, other in zip(want, got, strict=True):
        assert one[2] == other[2] == 0.0
        assert other[0] == pytest.approx(one[0], rel=loss, abs=loss)
        assert other[1] == pytest.approx(one[1], rel=norm)


def test_bfloat16_keeps_its_weights_in_float32() -> None:
    built = engine()
    assert {p.dtype for stage in inside(built).stages for p in stage.parameters()} == {torch.bfloat16}
    assert {p.main_grad.dtype for stage in inside(built).stages for p in stage.parameters()} == {torch.float32}
    assert {master.dtype for master in inside(built).updates.masters} == {torch.float32}
    stock, weights = tiny_model(scale=1.0, **FUSED_SIZES), exported(built)
    for piece in build_engine(EngineConfig(device="cpu"), stock).export_weights(2**40):
        assert torch.equal(weights[piece.name].cpu(), piece.flat)


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "distributed optimizer"])
def test_resume_and_export(tmp_path: Path, shared: bool) -> None:
    built = engine(distributed_optimizer=shared)
    built.train_batch(batch(), SFT())
    built.save(tmp_path / "one", wait=False)
    before = exported(built)
    built.train_batch(batch(1), SFT())
    after = exported(built)
    built.wait_for_saves()
    other = engine(distributed_optimizer=not shared)
    other.load(tmp_path / "one")
    assert all(torch.equal(value, before[name]) for name, value in exported(other).items())
    other.train_batch(batch(1), SFT())
    for name, value in exported(other).items():  # kernels add up in another order from run to run
        torch.testing.assert_close(value, after[name], atol=1e-4, rtol=1e-2)
    built.load(tmp_path / "one")
    built.save_hf(tmp_path / "hf")
    again = build_engine(EngineConfig(model=str(tmp_path / "hf"), backend="megatron", device="cuda"))
    torch.testing.assert_close(
        again.forward(batch())["log_probs"].values(), built.forward(batch())["log_probs"].values()
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shared", [False, True], ids=["plain", "distributed optimizer"])
def test_offload_frees_the_device(shared: bool, model: str) -> None:
    """Weights and gradients (bfloat16 and float32), masters and two moments (float32): 18 bytes a parameter, of experts
    too, whose buffers are their own."""
    built = engine(model, distributed_optimizer=shared)
    built.train_batch(batch(), SFT())
    size = sum(p.numel() for stage in inside(built).stages for p in stage.parameters())
    allocated, before = torch.cuda.memory_allocated(), exported(built)
    before = {name: value.cpu() for name, value in before.items()}
    built.offload()
    freed = (allocated - torch.cuda.memory_allocated()) / size
    print(f"{model}: {freed:.2f} bytes a parameter freed, {size} parameters")
    assert freed > 0.95 * 18
    built.onload()
    assert all(torch.equal(value.cpu(), before[name]) for name, value in exported(built).items())
    assert built.train_batch(batch(), SFT())["skipped"] == 0.0


def test_a_reference_policy_offloads() -> None:
    built = build_engine(
        EngineConfig(backend="megatron", device="cuda"), tiny_model(scale=1.0, **FUSED_SIZES), trainable=False
    )
    before = built.forward(batch())["log_probs"].values()
    size = sum(p.nbytes for stage in inside(built).stages for p in stage.parameters())
    allocated = torch.cuda.memory_allocated()
    built.offload()
    freed = allocated - torch.cuda.memory_allocated()
    print(f"{freed} bytes freed of {size} of weights")
    assert freed > 0.95 * size
    built.onload()
    torch.testing.assert_close(built.forward(batch())["log_probs"].values(), before)


def test_an_optimizer_on_the_host_takes_the_same_steps() -> None:
    engines = [engine(optimizer_on_host=on) for on in (False, True)]
    for built in engines:
        built.train_batch(batch(), SFT())
    assert {master.device.type for master in inside(engines[1]).updates.masters} == {"cpu"}
    left, right = (exported(built) for built in engines)
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=1e-4, rtol=1e-2)


def test_recomputed_layers_give_the_same_loss() -> None:
    losses = [engine(gradient_checkpointing=on).train_batch(batch(), SFT()) for on in (False, True)]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-5)
    assert losses[0]["grad_norm"] == pytest.approx(losses[1]["grad_norm"], rel=1e-2)
