"""On one CUDA device: adapters, experts (their choice replayed too) and images train as on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from engines import EngineConfig, LoraConfig, build_engine
from engines.adapters.lora import is_adapter
from engines.launch import ensure_group
from engines.media.vision_settings import VisionSettings
from engines.mtp.head import add_head
from engines.testing.images import media_sample
from engines.testing.vision import fused_vision_model
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import GRPO, SFT
from seqpack import make_batch
from seqpack.batches.batch import jagged
from seqpack.batches.schema import ROUTED_EXPERTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [700, 5, 333, 64, 1, 945]
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "output_router_logits": True,
}
LAYERS = 4
GRIDS = [(1, 4, 6), (1, 8, 8), (1, 2, 2)]
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (5e-3, 0.02)}
"""(loss, gradient norm), relative to float32 on the CPU."""
SCORES = {"float32": 1e-5, "bfloat16": 0.02}
"""Mean distance of log-probs. Padded rows run transformers' own layers, whose kernels multiply float32 in TF32."""


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    made = ensure_group("cuda")
    yield
    if made:
        torch.distributed.destroy_process_group()


def made(kind: str) -> Any:
    if kind == "vision":
        return fused_vision_model()
    if kind == "headed":
        model = tiny_model("dense", scale=1.0, **FUSED_SIZES, mtp_num_hidden_layers=1)
        add_head(model)
        return model
    return tiny_model(kind, scale=1.0, **FUSED_SIZES, **(EXPERTS if kind == "moe" else {}))


def rows(kind: str, seed: int = 0) -> TensorDict:
    if kind == "vision":
        settings = VisionSettings.of(fused_vision_model().config)
        texts = [[30, 9], [200], [3, 40, 5], [700]]
        grids = [GRIDS[:1], [], GRIDS[1:], []]
        pairs = enumerate(zip(texts, grids, strict=True))
        return make_batch([media_sample(settings, t, g, seed=seed + 10 * i) for i, (t, g) in pairs])
    return tiny_batch(LENGTHS, seed=seed, vocab=FUSED_SIZES["vocab_size"])


def replayed(seed: int = 0) -> TensorDict:
    """Experts of every token drawn anew: none of them is likely to be the router's own pair everywhere."""
    batch, rng = rows("moe", seed), torch.Generator().manual_seed(seed)
    chosen = [torch.rand(n, LAYERS, 4, generator=rng).topk(2).indices.to(torch.int16) for n in LENGTHS]
    batch[ROUTED_EXPERTS] = jagged(chosen, 0)
    return batch


def engine(kind: str, device: str = "cuda", **options: Any) -> Any:
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    usual: dict[str, Any] = {"device": device, "lr": 1e-3, "eps": 1e-2, "max_tokens_per_rank": 1024}
    return build_engine(EngineConfig(**usual | options), None if "model" in options else made(kind))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("moe", {}),
    "experts, recomputed": ("moe", {"gradient_checkpointing": True}),
    "replayed": ("moe", {"routing_replay": True, "router_aux_loss_coef": 0.0}),
    "head for multi-token prediction": ("headed", {"mtp_loss_scaling_factor": 0.5}),
    "head for multi-token prediction, sharded": ("headed", {"mtp_loss_scaling_factor": 0.5, "weights": "sharded"}),
    "images": ("vision", {"vision": "trained"}),
    "images, padded": ("vision", {"vision": "trained", "batching": "padded"}),
    "images, frozen tower": ("vision", {"vision": "frozen"}),
}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_same_curve_as_on_the_cpu(case: str, dtype: str) -> None:
    """Of bfloat16 a router's choice between two nearly equal experts may differ, and with it the loss."""
    kind, options = CASES[case]
    batches = [replayed(seed) if case == "replayed" else rows(kind, seed) for seed in range(2)]
    curves = []
    for device, precision in (("cpu", "float32"), ("cuda", dtype)):
        built = engine(kind, device, dtype=precision, **options)
        scores = built.forward(batches[0])["log_probs"].values().float().cpu()
        curves.append((scores, [built.train_batch(batch, GRPO()) for batch in batches]))
    (want_scores, want), (got_scores, got) = curves
    distance = (want_scores - got_scores).abs()
    print(f"{case} {dtype}: log-probs mean {distance.mean():.2e} most {distance.max():.2e}")
    print([(step["loss"], step["grad_norm"]) for step in want], [(step["loss"], step["grad_norm"]) for step in got])
    assert distance.mean() < (2e-4 if "padded" in case and dtype == "float32" else SCORES[dtype])
    loss, norm = BOUNDS[dtype]
    for left, right in zip(want, got, strict=True):
        assert right["skipped"] == 0.0
        assert right["loss"] == pytest.approx(left["loss"], rel=loss, abs=loss)
        assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=norm)
        if "mtp_loss" in left:
            assert right["mtp_loss"] == pytest.approx(left["mtp_loss"], rel=loss, abs=loss)


@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_compiled_layers_behind_a_tower_train_as_plain_ones(vision: str) -> None:
    batches, curves = [rows("vision", seed) for seed in range(2)], []
    for mode in ("off", "on"):
        built = engine("vision", dtype="bfloat16", vision=vision, compile=mode)
        scores = built.forward(batches[0])["log_probs"].values().float().cpu()
        curves.append((scores, [built.train_batch(batch, GRPO()) for batch in batches]))
    (want_scores, want), (got_scores, got) = curves
    assert (want_scores - got_scores).abs().mean() < SCORES["bfloat16"]
    loss, norm = BOUNDS["bfloat16"]
    for left, right in zip(want, got, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=loss, abs=loss)
        assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=norm)


def live(built: Any) -> dict[str, torch.Tensor]:
    """What this process holds, a copy: shards on a GPU, on a CPU the weights themselves."""
    named = {name: p.detach() for name, p in built.executor.model.named_parameters()}
    return {name: (p.to_local() if isinstance(p, DTensor) else p).clone() for name, p in named.items()}


def base_of(tmp_path: Path, kind: str = "dense") -> str:
    made(kind).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.parametrize("dtype", BOUNDS)
def test_adapters_learn_as_on_the_cpu_and_the_base_stays_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    base, curves = base_of(tmp_path), []
    for device, precision in (("cpu", "float32"), ("cuda", dtype)):
        built = engine("dense", device, model=base, dtype=precision, lora=LoraConfig(rank=8, alpha=16.0))
        before = live(built)
        curves.append([built.train_batch(rows("dense", seed), SFT()) for seed in range(3)])
        for name, value in live(built).items():
            assert torch.equal(value, before[name]) != is_adapter(name), name
    loss, norm = BOUNDS[dtype]
    print(curves)
    for left, right in zip(*curves, strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=loss)
        assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=norm)


def test_a_frozen_tower_stays_bit_for_bit_in_bfloat16() -> None:
    built = engine("vision", vision="frozen", dtype="bfloat16", lr=0.1, eps=1e-8)
    before = live(built)
    built.train_batch(rows("vision"), SFT())
    moved = {name for name, value in live(built).items() if not torch.equal(value, before[name])}
    assert moved
    assert not any(name.startswith("model.visual.") for name in moved)
