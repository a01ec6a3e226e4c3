"""What a plan says of a rank's memory, against what the arithmetic counts."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engines import EngineConfig
from runplan.estimates.logits import megatron_head
from runplan.estimates.peak_memory import peak_memory
from runplan.model.model_shape import ModelShape
from runplan.plain_settings import PlainCluster, PlainPools
from runplan.report.memory_lines import head_of, memory_lines, peak_of, states_by_stage, states_of
from runplan.run_spec import RunSpec

GIB = 2**30
SHAPE = ModelShape(
    "mixture", "qwen3_moe", "here", layers=12, hidden=2048, heads=8, kv_heads=2, head_dim=256, vocab=65_536,
    experts=16, experts_per_token=2, expert_intermediate=1024,
)  # fmt: skip
CLUSTER = PlainCluster(pools=PlainPools(device_memory_gib=80))
SPEC = RunSpec("sft", "any", EngineConfig(device="cuda"), CLUSTER, 8, steps=10, rows=8, longest=64)


def planned(spec: RunSpec, layers: Sequence[int]) -> list[str]:
    return memory_lines(spec, SHAPE, spec.grid, layers)[0]["Memory"]


def piped(**settings: Any) -> RunSpec:
    settings = {
        "backend": "megatron",
        "device": "cuda",
        "pipeline_parallel": 4,
        "max_tokens_per_rank": 8192,
        **settings,
    }
    return replace(SPEC, engine=EngineConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "said", "logits"),
    [
        ({"max_tokens_per_rank": 8192}, "4096 of 8192 tokens at a time, 4.5 GiB", 4096 * 18),
        ({"max_tokens_per_rank": 4096}, "all 4096 tokens at once, 4.5 GiB", 4096 * 18),
        ({"max_tokens_per_rank": 8192, "logit_chunk": 512}, "512 of 8192 tokens at a time, 0.6 GiB", 512 * 18),
        ({"dtype": "float32", "max_tokens_per_rank": 2048}, "all 2048 tokens at once, 2.5 GiB", 2048 * 20),
    ],
    ids=["chunked", "at once", "small chunks", "float32"],
)
def test_logits_have_a_line_of_their_own(settings: dict[str, Any], said: str, logits: int) -> None:
    spec = replace(SPEC, engine=EngineConfig(device="cuda", **settings))
    (line,) = [line for line in planned(spec, [12]) if line.startswith("logits")]
    width = 4 if "dtype" in settings else 2
    head = SHAPE.vocab * SHAPE.hidden * (4 + width)
    assert line == f"logits and what is made of them: {said}; gradients of the head beside them {head / GIB:.1f} GiB"
    assert head_of(spec, SHAPE, spec.grid).bytes == logits * SHAPE.vocab + head


def test_weights_that_a_sampler_shares_are_counted_once() -> None:
    """No set of its own, no staged one, no tensor put together for a weight sync: on one GPU; on two it has copies."""
    one = replace(SPEC, app="grpo", processes=1)
    sections, _ = memory_lines(one, SHAPE, one.grid, [12])
    assert sections["Pool"] == ["weights of each sampler: training's own, in place"]
    assert not any(line.startswith("export") for line in sections["Buffers"])
    assert [line for line in sections["Kept"] if line.startswith("sampler")] == [
        line for line in sections["Kept"] if line.startswith("sampler caches")
    ]
    two = replace(one, processes=2)
    sections, _ = memory_lines(two, SHAPE, two.grid, [12])
    assert sections["Pool"] == ["weights of each sampler: a copy of its own"]
    rows = [line.partition(":")[0] for line in sections["Kept"] if line.startswith(("sampler", "weight sync"))]
    assert rows == ["weight sync buckets", "sampler weights", "sampler staged weights", "sampler caches"]
    assert any(line.startswith("export") for line in sections["Buffers"])


def test_the_line_says_what_the_peak_counts() -> None:
    """Of the last stage, which alone has the head; ranks of a tensor-parallel group share the vocabulary."""
    spec = piped(tensor_parallel=2, gradient_checkpointing=True)
    line = next(line for line in planned(spec, [3] * 4) if line.startswith("logits"))
    head = megatron_head(SHAPE, spec.engine, 8192, 2, 2)
    assert f"on the last stage: 4096 of 8192 tokens at a time, {head.logits / GIB:.1f} GiB" in line
    single = replace(spec, engine=replace(spec.engine, pipeline_parallel=1))
    moments = peak_memory(SHAPE, single.engine, single.grid, [12], single.shards).moments
    states = states_of(single, SHAPE, single.grid, [12]).device
    assert moments["head"] - states > head_of(single, SHAPE, single.grid).bytes > 0.5 * (moments["head"] - states)


def test_each_pipeline_stage_has_a_line() -> None:
    """The first has the embedding, the last the head, those between layers alone; the fullest is the headline's."""
    spec, layers = piped(), [4, 3, 3, 2]
    lines = [line for line in planned(spec, layers) if line.startswith("stage ")]
    states = states_by_stage(spec, SHAPE, spec.grid, layers)
    for stage, (line, held) in enumerate(zip(lines, states, strict=True)):
        parts = (held.weights, held.gradients, held.optimizer)
        weights, gradients, optimizer = (f"{part / GIB:.1f} GiB" for part in parts)
        assert line == (
            f"stage {stage}, {layers[stage]} layers: weights {weights} + gradients {gradients} + optimizer {optimizer} "
            f"= {sum(parts) / GIB:.1f} GiB"
        )
    first, second, third, last = (one.device for one in states)
    matrix = 18 * SHAPE.vocab * SHAPE.hidden
    assert second == third
    assert first - second * 4 / 3 == pytest.approx(matrix)
    assert last - second * 2 / 3 == pytest.approx(matrix)
    assert states_of(spec, SHAPE, spec.grid, layers).device == first == max(one.device for one in states)


def test_a_stage_says_what_of_it_is_on_the_host() -> None:
    lines = planned(piped(optimizer_on_host=True), [3] * 4)
    states = states_by_stage(piped(optimizer_on_host=True), SHAPE, piped().grid, [3] * 4)
    said = [line for line in lines if line.startswith("stage ")]
    assert len(said) == 4
    assert all(
        f"optimizer {one.host / GIB:.1f} GiB (on the host) = " in line for line, one in zip(said, states, strict=True)
    )


def test_one_stage_needs_no_line() -> None:
    assert not any(line.startswith("stage ") for line in planned(SPEC, [12]))
    assert not any(line.startswith("stage ") for line in planned(piped(pipeline_parallel=1), [12]))


def test_what_does_not_fit_names_the_nearest_setting_that_does() -> None:
    def problems(memory: float, **settings: Any) -> list[str]:
        pools, engine = PlainPools(device_memory_gib=memory), EngineConfig(device="cuda", **settings)
        spec = replace(SPEC, engine=engine, cluster=PlainCluster(pools=pools))
        return memory_lines(spec, SHAPE, spec.grid, [12])[1]

    spec = replace(SPEC, engine=EngineConfig(device="cuda", max_tokens_per_rank=65_536))
    states = states_of(spec, SHAPE, spec.grid, [12])
    whole = peak_of(spec, SHAPE, spec.grid, [12], states).bytes / GIB
    (problem,) = problems(0.9 * whole, max_tokens_per_rank=65_536)
    found = re.search(r"; --trainer.max-tokens-per-rank (\d+) is enough \((\d+) GiB\)$", problem)
    assert found is not None
    assert problems(0.9 * whole, max_tokens_per_rank=int(found[1])) == []
    less = 0.9 * states.device / GIB
    (problem,) = problems(less, max_tokens_per_rank=64)
    assert "; --trainer.optimizer-on-host --trainer.parameters-on-host is enough (" in problem
    assert problems(less, max_tokens_per_rank=64, optimizer_on_host=True) != []
    assert problems(less, max_tokens_per_rank=64, optimizer_on_host=True, parameters_on_host=True) == []
    (problem,) = problems(0.001, max_tokens_per_rank=64)
    assert problem.endswith("or --trainer.optimizer-on-host"), "nothing is enough"
