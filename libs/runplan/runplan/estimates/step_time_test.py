"""The estimate counts what seqpack counts for the config, and is near what GPUs measured: the rows of
docs/engines-speed.md and docs/engines-megatron.md, models of `engines/benchmarks/step_gpu.py` and `step_kinds.py`."""

from dataclasses import replace

import pytest
from transformers import PretrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from runplan.estimates.rates import COMPILED, COMPILED_SHARDED, EXPERTS, FUSED, MEGATRON, PEAK, PLAIN, Rate
from runplan.estimates.step_time import StepWork, flops_of, training_flops, training_seconds
from runplan.model.model_shape import ModelShape, count_parameters, shape_of
from seqpack import SequenceCost

SIZES = {
    "vocab_size": 65_536, "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
}  # fmt: skip
MEASURED = Qwen3_5TextConfig(**SIZES, intermediate_size=6144)
OF_128 = {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 4}
ROUTED = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
SHAPE = shape_of(MEASURED, "0.67B")
NARROW = shape_of(Qwen3_5TextConfig(**{**SIZES, **OF_128}, intermediate_size=6144), "0.67B, heads of 128")
MIXED = shape_of(Qwen3_5MoeTextConfig(**SIZES, **ROUTED, shared_expert_intermediate_size=768), "1.0B")
ONE = StepWork(sequences=14, length=585, ranks=1)
TWO = replace(ONE, sequences=28, ranks=2)
LONG = replace(ONE, sequences=56)


@pytest.mark.parametrize("config", [MEASURED, Qwen3_5MoeTextConfig(), Qwen3MoeConfig(head_dim=64)])
def test_operations_are_those_that_seqpack_reads_from_the_config(config: PretrainedConfig) -> None:
    cost = SequenceCost.of(flops_of(shape_of(config, "any")))
    assert cost(1000) == pytest.approx(SequenceCost.from_config(config)(1000), rel=1e-3)


def test_the_models_are_those_that_were_measured() -> None:
    assert [count_parameters(shape).total / 1e9 for shape in (SHAPE, NARROW, MIXED)] == pytest.approx(
        [0.67, 0.67, 1.0], rel=0.01
    )


@pytest.mark.parametrize(
    ("shape", "work", "seconds", "rate", "within"),
    [
        (SHAPE, ONE, 0.0725, COMPILED, 0.03),  # docs/engines-speed.md, from here on
        (SHAPE, LONG, 0.2806, COMPILED, 0.08),
        (SHAPE, replace(LONG, recompute=True), 0.3489, COMPILED, 0.1),
        (SHAPE, TWO, 0.0788, COMPILED, 0.12),
        (SHAPE, ONE, 0.0916, COMPILED_SHARDED, 0.03),
        (SHAPE, TWO, 0.0912, COMPILED_SHARDED, 0.03),
        (SHAPE, ONE, 0.136, PLAIN, 0.03),
        (SHAPE, ONE, 0.144, PLAIN, 0.06),
        (MIXED, ONE, 0.141, EXPERTS, 0.03),
        (NARROW, ONE, 0.1046, FUSED, 0.03),  # docs/engines-megatron.md, from here on
        (NARROW, TWO, 0.1065, FUSED, 0.04),
        (NARROW, ONE, 0.1443, MEGATRON, 0.03),
    ],
)
def test_it_is_near_what_was_measured(
    shape: ModelShape, work: StepWork, seconds: float, rate: Rate, within: float
) -> None:
    planned = training_seconds(shape, work, PEAK["cuda"] * rate.share)
    reached = training_flops(shape, work) / (work.ranks * seconds * PEAK["cuda"])
    print(f"{planned:.4f} {seconds} {planned / seconds - 1:+.1%}, {reached:.3f} of the peak")
    assert planned == pytest.approx(seconds, rel=within)
    assert rate.share == pytest.approx(reached, rel=within + 0.02)


def test_what_is_done_again_costs_again_and_stages_wait() -> None:
    plain = training_flops(SHAPE, ONE)
    assert training_flops(SHAPE, replace(ONE, epochs=2)) == pytest.approx(2 * plain)
    assert training_flops(SHAPE, replace(ONE, forwards=3)) == pytest.approx(2 * plain)
    assert plain < training_flops(SHAPE, replace(ONE, recompute=True)) < plain * 4 / 3
    waiting = replace(ONE, stages=3, micro_batches=2)
    alone, waited = (training_seconds(SHAPE, work, 1e14) for work in (ONE, waiting))
    assert alone == pytest.approx(plain / 1e14)
    assert waited == pytest.approx(2 * alone)
