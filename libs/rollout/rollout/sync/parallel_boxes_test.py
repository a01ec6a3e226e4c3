"""Which boxes vLLM's workers have, against the tensor parallelism that transformers declares for the same layers."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from rollout.sync.boxes import Box
from rollout.sync.parallel_boxes import WorkerLayout, expert_run, worker_boxes

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
DIMENSION = {"colwise": 0, "rowwise": 1, "replicated_with_grad_allreduce": None}


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(config).state_dict().items()}


def counted(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    seen = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        seen[box.index] += 1
    return seen


def test_layers_are_split_along_the_dimensions_that_transformers_declares() -> None:
    """`base_model_tp_plan` of Qwen3: the field's own words for who has rows and who has columns."""
    config = Qwen3Config(**SIZES)
    layout = WorkerLayout.of(config, 4)
    compared = set()
    for name, shape in shapes_of(config).items():
        layer = name.removeprefix("model.").rpartition(".")[0]
        style = next((s for p, s in config.base_model_tp_plan.items() if fnmatchcase(layer, p)), None)
        if style not in DIMENSION:
            continue
        dimension = DIMENSION[style]
        for rank in range(4):
            (box,) = worker_boxes(name, shape, layout, rank)
            if dimension is None:
                assert box == Box.whole(shape)
                continue
            each = shape[dimension] // 4
            chunk = torch.arange(torch.Size(shape).numel()).view(shape).chunk(4, dimension)[rank]
            assert torch.equal(torch.arange(torch.Size(shape).numel()).view(shape)[box.index], chunk)
            assert box.size[dimension] == each
        compared.add(layer.rpartition(".")[2])
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} <= compared


CONFIGS = {
    "dense": Qwen3Config(**SIZES),
    "experts": Qwen3MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=16, num_experts_per_tok=2),
    "hybrid": Qwen3_5TextConfig(
        **SIZES,
        linear_num_key_heads=4,
        linear_key_head_dim=4,
        linear_num_value_heads=8,
        linear_value_head_dim=4,
        layer_types=["linear_attention", "full_attention"],
    ),
}


CASES = [(kind, workers) for kind in CONFIGS for workers in (1, 2, 4, 8)]
CASES.remove(("hybrid", 8))  # four heads of keys of a delta net: vLLM refuses it too


@pytest.mark.parametrize(("kind", "workers"), CASES)
@pytest.mark.parametrize("experts_apart", [False, True])
def test_workers_have_every_element_and_a_split_one_once(kind: str, workers: int, experts_apart: bool) -> None:
    config = CONFIGS[kind]
    layout = WorkerLayout.of(config, workers, experts_apart)
    most: dict[int, int] = dict.fromkeys(range(workers), 0)
    total = 0
    for name, shape in shapes_of(config).items():
        own = [worker_boxes(name, shape, layout, rank) for rank in range(workers)]
        seen = counted(shape, [box for boxes in own for box in boxes])
        assert bool((seen >= 1).all()), name
        copies = workers // config.num_key_value_heads if ".k_proj" in name or ".v_proj" in name else 1
        split = any(box != Box.whole(shape) for boxes in own for box in boxes)
        assert int(seen.max()) == (max(1, copies) if split else workers) or ".experts." in name, name
        total += torch.Size(shape).numel()
        for rank, boxes in enumerate(own):
            most[rank] += sum(box.numel for box in boxes)
    assert max(most.values()) < total * (1 if workers == 1 else 0.75) + 1


@given(st.integers(1, 40), st.integers(1, 16))
def test_runs_of_experts_have_each_once(experts: int, workers: int) -> None:
    layout = WorkerLayout(workers, workers, experts=experts, experts_apart=True)
    runs = [expert_run(layout, rank) for rank in range(workers)]
    assert [e for first, count in runs for e in range(first, first + count)] == list(range(experts))
    assert max(count for _, count in runs) - min(count for _, count in runs) <= 1


def test_what_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match="30 of dimension 1 do not split over 4 workers"):
        worker_boxes("model.layers.0.mlp.down_proj.weight", (8, 30), WorkerLayout(4, 4), 0)
    with pytest.raises(ValueError, match="one must divide the other"):
        WorkerLayout(3, 2)
