"""Fused pieces in a stage give the step of plain layers, and each piece the gradient that torch derives."""

from typing import Any

import pytest
import torch
from torch import nn

from engines.capability import Unsupported
from engines.config import EngineConfig
from engines.megatron.gpu import fused_functions as pieces
from engines.megatron.gpu.fused_layers import fused_pieces, use_fused_pieces
from engines.proofs.megatron_layouts import LENGTHS, LayoutCase, engine_of
from engines.testing.executors import inside
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO

CASE = LayoutCase("Qwen3.5")
SHAPES = {
    "NORM": ((7, 1, 6), (6,), 1e-6),
    "GATED_NORM": ((7, 3, 6), (7, 3, 6), (6,), 1e-6),
    "SWIGLU": ((7, 1, 8),),
    "DECAY": ((7, 3), (3,), (3,)),
    "GATE": ((7, 5), (7, 5)),
    "ROTATE": ((7, 2, 8), (7, 4), (7, 4)),
}


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_torchs(name: str, backend: str | None) -> None:
    torch.manual_seed(0)
    piece = getattr(pieces, name)
    made: list[Any] = [torch.randn(x, dtype=torch.float64) if isinstance(x, tuple) else x for x in SHAPES[name]]
    if name == "ROTATE":  # both halves turn by the same angles
        made[1:] = [half.chunk(2, -1)[0].repeat(1, 2) for half in made[1:]]
    trained = made[:1] if name == "ROTATE" else [x for x in made if isinstance(x, torch.Tensor)]
    for one in trained:
        one.requires_grad_()
    want = piece.forward(*made)
    grad = torch.randn_like(want)
    wanted = torch.autograd.grad(want, trained, grad)
    result = pieces.run(piece, backend, *made)
    torch.testing.assert_close(result, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(result, trained, grad), wanted, atol=1e-10, rtol=1e-10)


def test_a_stage_of_fused_pieces_takes_the_step_of_a_plain_one() -> None:
    plain, fused = engine_of(CASE), engine_of(CASE)
    (stage,) = inside(fused).stages
    changed = use_fused_pieces(stage, backend=None)
    kinds = {type(module).__name__ for module in stage.modules()}
    assert kinds >= {"FusedNorm", "FusedMLP", "FusedDeltaNet", "FusedCoreAttention", "FusedSelfAttention"}
    assert use_fused_pieces(stage, backend=None) is changed
    batch = tiny_batch(list(LENGTHS))
    results = [engine.train_batch(batch, GRPO()) for engine in (plain, fused)]
    for name in ("loss", "grad_norm"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-5)
    assert results[0]["grad_norm"] > 1e-2
    scores = [engine.forward(batch)["log_probs"].values() for engine in (plain, fused)]
    torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=1e-5)
    changed.undo()
    assert not any(type(module).__name__.startswith("Fused") for module in stage.modules())


def test_layers_that_no_gpu_has_run_stay_plain() -> None:
    cuda, dense = torch.device("cuda"), tiny_model("dense").config
    settings = EngineConfig(backend="megatron")
    off = EngineConfig(backend="megatron", compile="off")
    cpu = torch.device("cpu")
    for config, model, device, dtype, says in (
        (off, dense, cuda, torch.bfloat16, "compile='off'"),
        (settings, dense, cpu, torch.bfloat16, "on a CPU"),
        (settings, dense, cuda, torch.float32, "bfloat16 alone"),
        (settings, tiny_model("moe").config, cuda, torch.bfloat16, "Qwen3.5 \\(dense\\)"),
    ):
        answer = fused_pieces(config, model, device, dtype)
        assert isinstance(answer, Unsupported)
        assert says.replace("\\", "") in answer.reason
    assert not use_fused_pieces(nn.Linear(2, 2)).changed
