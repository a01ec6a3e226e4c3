"""DeepEP's dispatcher gives the steps of the all-to-all, over a stand-in for its package."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

from engines.capability import DEEPEP
from engines.launch import launch
from engines.megatron.runtime.process_groups import release
from engines.proofs.deep_ep_gloo import Buffer, write_package
from engines.proofs.megatron_layouts import LayoutCase, Measured, largest_difference, measure
from engines.testing.same_runs import assert_same_run
from objectives import GRPO

BY_DEEPEP = (f"{DEEPEP[0]}=deepep", f"{DEEPEP[1]}=8")
MODEL = "Qwen3.5 MoE, router's losses"
SIZES: dict[str, dict[str, Any]] = {
    "expert parallelism": {"expert_parallel": 2},
    "cut experts": {"expert_parallel": 2, "expert_tensor_parallel": 2, "tensor_parallel": 2},
    "recomputed": {"expert_parallel": 4, "gradient_checkpointing": True},
}


def install(folder: Path) -> None:
    """Let megatron-core look for the package once more: a rank may be forked from a process that lacks it."""
    write_package(folder / str(dist.get_rank()))
    sys.path.insert(0, str(folder / str(dist.get_rank())))
    importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
    torch.compiler.set_stance("force_eager")  # megatron-core compiles a function of it, which wants a compiler


def both_ways(folder: Path) -> dict[str, list[Measured]]:
    """Measure each layout by the all-to-all and by DeepEP's dispatcher, on this rank."""
    install(folder)
    made: list[object] = []
    begin = MoEFlexTokenDispatcher.__init__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        made.append(self)

    out: dict[str, list[Measured]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engines.capability._of_deepep", lambda config: iter(()))  # of CUDA and bfloat16
        patch.setattr(MoEFlexTokenDispatcher, "__init__", counted)
        for name, sizes in SIZES.items():
            asked = {"transformer_options": BY_DEEPEP, "allow_untested": ("deepep",)}
            for number, more in enumerate(({}, asked)):
                before = len(made)
                saved = folder / f"{name} {number}"
                out.setdefault(name, []).append(measure(LayoutCase(MODEL, {**sizes, **more}), GRPO(), saved, [saved]))
                assert (len(made) > before) == bool(more)
                release()
    assert Buffer.sms == 8
    return out


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = launch(both_ways, (tmp_path_factory.mktemp("deepep"),), 4, "cpu")
    return found


@pytest.mark.parametrize("name", SIZES)
def test_steps_are_those_of_the_all_to_all(name: str, measured: dict[str, list[Measured]]) -> None:
    plain, deep = measured[name]
    assert_same_run(plain, deep)
    assert largest_difference(plain.exported, plain.trained) > 1e-3
    assert deep.same_bits
