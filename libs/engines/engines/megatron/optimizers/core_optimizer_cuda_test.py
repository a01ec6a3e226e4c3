"""On one CUDA device: megatron-core's own optimizer updates as torch's, resumes its files, and frees the device."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from engines import EngineConfig, TrainEngine, build_engine
from engines.megatron.optimizers.buffer_optimizer import MOMENTS, TorchUpdates
from engines.megatron.optimizers.core_optimizer import CoreUpdates
from engines.testing.executors import inside, weights
from engines.testing.megatron_curves import LENGTHS, MODELS
from engines.testing.one_megatron_rank import one_megatron_gpu  # noqa: F401  each test here has a group
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import SFT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
KINDS = ("torch", "core")
BOUNDS = {"float32": (1e-5, 1e-3), "bfloat16": (5e-3, 0.03)}
"""(loss, gradient norm), relative, of whole steps: their kernels add up in another order from run to run."""
SHARED = pytest.mark.parametrize("shared", [False, True], ids=["plain", "distributed optimizer"])
DTYPES = pytest.mark.parametrize("dtype", BOUNDS)


Held = dict[tuple[str, str], Tensor]


def engine(kind: Any, model: str = "dense", seed: int = 0, **options: Any) -> TrainEngine:
    sizes, changes = MODELS[model]
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    usual: dict[str, Any] = {
        "device": DEVICE,
        "lr": 1e-3,
        "eps": 1e-2,
        "weight_decay": 0.1,
        "max_tokens_per_rank": 2048,
    }
    settings = usual | options
    config = EngineConfig(backend="megatron", megatron_optimizer=kind, **settings)
    return build_engine(config, tiny_model(sizes, seed=seed, scale=1.0, **{**FUSED_SIZES, **changes}))


def batch(seed: int = 0) -> TensorDict:
    return tiny_batch(LENGTHS, seed=seed, vocab=FUSED_SIZES["vocab_size"])


def update(built: TrainEngine, seed: int, size: float = 1.0) -> float:
    """A step by random gradients, those of the seed in every engine of a model: the norm before clipping."""
    executor = inside(built)
    rng = torch.Generator(device=DEVICE).manual_seed(seed)
    for part in executor.updates.parts:
        gradient = part.one.parameter.main_grad
        gradient.copy_(size * torch.randn(gradient.shape, generator=rng, device=DEVICE))
    return float(executor.optimizer_step(1e-3 / (1 + seed), torch.zeros((), device=DEVICE), executor.config))


def held(built: TrainEngine) -> Held:
    """Masters, moments and numbers of steps, by the place of each part."""
    updates = inside(built).updates
    tensors: Held = {}
    for part, one in zip(updates.parts, updates.stepped, strict=True):
        state = one.ensure_state()
        tensors |= {(part.one.held.name, name): state[name].detach().flatten() for name in (*MOMENTS, "step")}
        tensors[part.one.held.name, "master"] = one.flat
    return {key: value.clone() for key, value in tensors.items()}


def assert_alike(own: TrainEngine, want: Held, got: Held) -> None:
    """The same bits where torch's Adam is inside of megatron-core's optimizer; rounding errors of one step beside
    Transformer Engine's or apex's."""
    torchs = all(isinstance(inner, torch.optim.Adam) for inner in inside(own).updates.inner)
    assert want.keys() == got.keys()
    for key, value in want.items():
        if torchs or key[1] == "step":
            assert torch.equal(got[key].cpu(), value.cpu()), key
        else:
            torch.testing.assert_close(got[key], value, atol=1e-6, rtol=1e-5, msg=str(key))


@SHARED
@pytest.mark.parametrize("model", MODELS)
@DTYPES
def test_the_same_gradients_give_the_update_of_torch(dtype: str, model: str, shared: bool) -> None:
    torchs, own = (engine(kind, model, dtype=dtype, distributed_optimizer=shared) for kind in KINDS)
    assert isinstance(inside(torchs).updates, TorchUpdates)
    assert isinstance(inside(own).updates, CoreUpdates)
    print(own.state_summary()["optimizer"])
    before = held(own)
    for seed, size in ((0, 1.0), (1, 1e-6), (2, 1.0)):  # clipped, not clipped, clipped
        norms = [update(built, seed, size) for built in (torchs, own)]
        assert norms[0] == norms[1]
        assert (norms[0] > inside(own).config.grad_clip) is (size == 1.0)
    assert_alike(own, held(torchs), held(own))
    assert all(not torch.equal(value, before[key]) for key, value in held(own).items())
    for part, master in inside(own).updates.updated():
        assert torch.equal(part.values, master.to(part.values.dtype))
    unchanged = held(own)
    assert math.isnan(update(own, 3, float("nan")))
    assert all(torch.equal(value, unchanged[key]) for key, value in held(own).items())


@pytest.mark.parametrize("model", MODELS)
@DTYPES
def test_same_curve_as_torchs(dtype: str, model: str) -> None:
    loss, norm = BOUNDS[dtype]
    torchs, own = (engine(kind, model, dtype=dtype) for kind in KINDS)
    for seed in range(3):
        want, got = (built.train_batch(batch(seed), SFT()) for built in (torchs, own))
        print(want["loss"], got["loss"], want["grad_norm"], got["grad_norm"])
        assert got["skipped"] == want["skipped"] == 0.0
        assert got["loss"] == pytest.approx(want["loss"], rel=loss, abs=loss)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=norm)


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]], ids=" to ".join)
@DTYPES
def test_a_checkpoint_of_one_resumes_under_the_other(tmp_path: Path, dtype: str, kinds: tuple[str, str]) -> None:
    """Every bit arrives, in an engine of other weights that shares them out; the next update is the same."""
    written = engine(kinds[0], "moe", dtype=dtype)
    for seed in range(2):
        update(written, seed)
    written.save(tmp_path / "saved")
    other = engine(kinds[1], "moe", seed=1, dtype=dtype, distributed_optimizer=True)
    for seed in range(3):
        update(other, 7 + seed)
    other.load(tmp_path / "saved")
    want, got = held(written), held(other)
    assert all(torch.equal(got[key].cpu(), value.cpu()) for key, value in want.items())
    for built in (written, other):
        update(built, 2)
    assert_alike((written, other)[kinds.index("core")], held(written), held(other))
    assert [built.train_batch(batch(), SFT())["skipped"] for built in (written, other)] == [0.0, 0.0]


@SHARED
@DTYPES
def test_offload_frees_the_device(dtype: str, shared: bool) -> None:
    """Weights and gradients (bfloat16 and float32), masters and two moments (float32): 18 bytes a parameter; in float32
    the master is the weight."""
    built = engine("core", dtype=dtype, distributed_optimizer=shared)
    built.train_batch(batch(), SFT())
    size = sum(p.numel() for stage in inside(built).stages for p in stage.parameters())
    before = {name: value.cpu() for name, value in weights(built).items()}
    memory = torch.cuda.memory_allocated()
    built.offload()
    freed = (memory - torch.cuda.memory_allocated()) / size
    print(f"{freed:.2f} bytes a parameter freed, {size} parameters")
    assert freed > 0.95 * (18 if dtype == "bfloat16" else 16)
    built.onload()
    assert all(torch.equal(value.cpu(), before[name]) for name, value in weights(built).items())
    assert built.train_batch(batch(), SFT())["skipped"] == 0.0


def test_what_is_left_to_itself() -> None:
    """megatron-core's on a GPU where it runs what is asked for, torch's elsewhere."""
    name = engine("auto").state_summary()["optimizer"]
    print(name)
    assert name.startswith("megatron-core's ")
    assert "on the host" in engine("auto", optimizer_on_host=True).state_summary()["optimizer"]
    with pytest.raises(ValueError, match="megatron_optimizer='core' cannot be used"):
        engine("core", optimizer_on_host=True)
