"""On one CUDA device: adapters, replayed experts and a router's losses under Megatron give FSDP2's steps."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from engines import EngineConfig, LoraConfig, TrainEngine, build_engine
from engines.testing.executors import inside
from engines.testing.megatron_curves import LENGTHS, MODELS, Curve
from engines.testing.one_megatron_rank import one_megatron_gpu  # noqa: F401  each test here has a group
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import GRPO
from seqpack.batches.batch import jagged
from seqpack.batches.schema import ROUTED_EXPERTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
LAYERS = 4
BOUNDS = {"float32": (1e-5, 1e-3), "bfloat16": (5e-3, 0.03)}
"""(loss, gradient norm), relative."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory that adapters stand on."""
    folder = tmp_path_factory.mktemp("base")
    made("dense").save_pretrained(folder)
    return str(folder)


def made(model: str) -> Any:
    kind, changes = MODELS[model]
    return tiny_model(kind, scale=1.0, **{**FUSED_SIZES, **changes})


def engine(kind: str, backend: Any, dtype: Any, **options: Any) -> TrainEngine:
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    usual: dict[str, Any] = {"device": DEVICE, "lr": 1e-3, "eps": 1e-2, "max_tokens_per_rank": 1024}
    config = EngineConfig(backend=backend, dtype=dtype, **usual | options)
    return build_engine(config, None if "model" in options else made(kind))


def rows(seed: int, replayed: bool = False) -> TensorDict:
    """With experts of every token drawn anew: none of them is likely to be the router's own pair everywhere."""
    batch, rng = tiny_batch(LENGTHS, seed=seed, vocab=FUSED_SIZES["vocab_size"]), torch.Generator().manual_seed(seed)
    if replayed:
        chosen = [torch.rand(n, LAYERS, 4, generator=rng).topk(2).indices.to(torch.int16) for n in LENGTHS]
        batch[ROUTED_EXPERTS] = jagged(chosen, 0)
    return batch


def steps(kind: str, backend: str, dtype: str, replayed: bool = False, **options: Any) -> Curve:
    built = engine(kind, backend, dtype, **options)
    metrics = [built.train_batch(rows(seed, replayed), GRPO()) for seed in range(2)]
    return [(step["loss"], step["grad_norm"], step["skipped"]) for step in metrics]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adapters": ("dense", {"lora": LoraConfig(rank=8)}),
    "replayed": ("moe", {"replayed": True, "routing_replay": True, "router_aux_loss_coef": 0.0}),
    "router's losses": ("moe", {"router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.01}),
    "adapters, recomputed": ("dense", {"lora": LoraConfig(rank=8), "gradient_checkpointing": True}),
}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_same_steps_as_fsdp2(case: str, dtype: str, base: str) -> None:
    model, options = CASES[case]
    if "lora" in options:
        options = options | {"model": base}
    loss, norm = BOUNDS[dtype]
    want, got = (steps(model, backend, dtype, **options) for backend in ("fsdp2", "megatron"))
    print(case, dtype, want, got)
    for one, other in zip(want, got, strict=True):
        assert one[2] == other[2] == 0.0
        assert one[1] > 0
        assert other[0] == pytest.approx(one[0], rel=loss, abs=loss)
        assert other[1] == pytest.approx(one[1], rel=norm)


def test_the_base_under_adapters_stays_bit_for_bit(base: str) -> None:
    # A large lr: what moves by less than a rounding of bfloat16 moves in its master alone.
    built = engine("dense", "megatron", "bfloat16", lora=LoraConfig(rank=8), model=base, lr=0.1, eps=1e-8)
    named = [pair for stage in inside(built).stages for pair in stage.named_parameters()]
    before = {name: value.detach().clone() for name, value in named}
    for seed in range(2):  # A stands still while B is zero
        built.train_batch(rows(seed), GRPO())
    trained = {name for name, value in named if value.requires_grad}
    assert trained == {name for name, value in named if not torch.equal(value, before[name])}
    assert len(trained) < len(named)
