"""The estimate counts what seqpack counts for the config, and is near what H200s measured (docs/engines-speed.md)."""

from dataclasses import replace

import pytest
from transformers import PretrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from apps.common.plan.model_shape import shape_of
from apps.common.plan.step_time import StepWork, flops_of, training_flops, training_seconds
from seqpack import SequenceCost

MEASURED = Qwen3_5TextConfig(
    vocab_size=65536, hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, tie_word_embeddings=True,
)  # fmt: skip
SHAPE = shape_of(MEASURED, "0.67B")
ONE = StepWork(sequences=14, length=585, ranks=1)
LONG = replace(ONE, sequences=56)


@pytest.mark.parametrize("config", [MEASURED, Qwen3_5MoeTextConfig(), Qwen3MoeConfig(head_dim=64)])
def test_operations_are_those_that_seqpack_reads_from_the_config(config: PretrainedConfig) -> None:
    found = SequenceCost.of(flops_of(shape_of(config, "any")))
    assert found(1000) == pytest.approx(SequenceCost.from_config(config)(1000), rel=1e-3)


@pytest.mark.parametrize(
    ("work", "measured", "within"),
    [
        (ONE, 0.0725, 0.03),
        (LONG, 0.2806, 0.08),
        (replace(LONG, recompute=True), 0.3489, 0.1),
        (replace(ONE, sequences=28, ranks=2), 0.0788, 0.12),
        (ONE, 0.0916, 0.25),
    ],
)
def test_it_is_near_what_was_measured(work: StepWork, measured: float, within: float) -> None:
    found = training_seconds(SHAPE, work, "cuda")
    assert found is not None
    print(f"{found:.4f} {measured} {found / measured - 1:+.1%}")
    assert found == pytest.approx(measured, rel=within)


def test_what_is_done_again_costs_again_and_stages_wait() -> None:
    plain = training_flops(SHAPE, ONE)
    assert training_flops(SHAPE, replace(ONE, epochs=2)) == pytest.approx(2 * plain)
    assert training_flops(SHAPE, replace(ONE, forwards=3)) == pytest.approx(2 * plain)
    assert plain < training_flops(SHAPE, replace(ONE, recompute=True)) < plain * 4 / 3
    waiting = replace(ONE, stages=3, micro_batches=2)
    alone, waited = (training_seconds(SHAPE, work, "cuda") for work in (ONE, waiting))
    assert alone is not None
    assert waited == pytest.approx(2 * alone)
    assert training_seconds(SHAPE, ONE, "npu") is None
