"""The stock layers compute in PyTorch in host memory, also where packages with CUDA kernels can be imported."""

import copy
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.families.torch_operations import choose_torch_operations
from engines.scoring.packed_model import adapt_for_packing
from engines.tiny import tiny_model

IDS = torch.arange(2, 20).view(2, 9)


@pytest.mark.skipif(find_spec("fla") is not None, reason="stock layers cannot run in host memory with fla installed")
@pytest.mark.parametrize("kind", ["dense", "moe", "next", "attention"])
def test_nothing_else_changes_and_undo_restores(kind: str) -> None:
    model: Any = tiny_model(kind).eval()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    plain = copy.deepcopy(model)
    chosen = choose_torch_operations(model)
    assert len(chosen.layers) == (0 if kind == "attention" else 2)
    again = copy.deepcopy(model)
    for kwargs in ({}, {"attention_mask": mask}, {"attention_mask": mask, "use_cache": True}):
        want = plain(IDS, **kwargs).logits
        assert torch.equal(model(IDS, **kwargs).logits, want)
        assert torch.equal(again(IDS, **kwargs).logits, want)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options))
    with torch.no_grad():  # a copy computes with its own weights
        again.model.layers[0].input_layernorm.weight.zero_()
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    chosen.undo()
    chosen.undo()
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


def test_another_adaptation_and_packed_arguments_are_refused() -> None:
    model: Any = tiny_model("dense")
    adapted = adapt_for_packing(model)
    with pytest.raises(ValueError, match=r"another adaptation already changed model\.layers\.0"):
        choose_torch_operations(model)
    adapted.undo()
    choose_torch_operations(model)
    adapt_for_packing(model).undo()  # packing goes over it
    layer = model.model.layers[0].linear_attn
    with pytest.raises(ValueError, match="causal_conv1d_fn takes no seq_idx: pack with adapt_for_packing"):
        layer(torch.randn(1, 4, 32), seq_idx=torch.zeros(1, 4))


KERNELS = {
    "causal_conv1d/__init__.py": """
        def causal_conv1d_fn(x, weight, bias=None, activation=None, seq_idx=None):
            raise RuntimeError("Expected x.is_cuda() to be true")
        def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
            raise RuntimeError("Expected x.is_cuda() to be true")
        """,
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/gated_delta_rule/__init__.py": """
        def chunk_gated_delta_rule(q, k, v, g=None, beta=None, **options):
            raise RuntimeError("Pointer argument cannot be accessed from Triton")
        fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
        """,
}
PROGRAM = """
    import torch
    from engines import EngineConfig, build_engine
    from engines.proofs.family_cases import CASES
    from engines.proofs.family_conformance import measure
    from engines.tiny import tiny_batch, tiny_model
    from objectives import SFT

    for kind in ("dense", "next"):
        try:
            tiny_model(kind)(torch.arange(6)[None])
        except RuntimeError as error:
            print("stock fails:", error)
    for name in ("qwen3_5_text", "qwen3_next"):
        case = next(case for case in CASES if case.model_type == name)
        print(name, measure(case).problems)
    for batching in ("padded", "packed"):
        engine = build_engine(EngineConfig(device="cpu", batching=batching), tiny_model())
        print(batching, round(engine.train_batch(tiny_batch([5, 9, 3]), SFT())["loss"], 4))
    """


def test_with_packages_of_kernels_and_no_device(tmp_path: Path) -> None:
    for name, code in KERNELS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(code))
    path = os.pathsep.join([str(tmp_path), *(str(Path(entry).resolve()) for entry in sys.path if entry)])
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *stock, dense, following, padded, packed = run.stdout.splitlines()
    assert stock == ["stock fails: Expected x.is_cuda() to be true"] * 2
    assert (dense, following) == ("qwen3_5_text []", "qwen3_next []")
    assert padded.removeprefix("padded") == packed.removeprefix("packed")
