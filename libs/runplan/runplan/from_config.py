"""Memory and time of a step from an engine's config and a model's, without further settings of a run."""

from transformers import PretrainedConfig

from engines import EngineConfig
from engines.parallel.stages import split_layers
from runplan.estimates.peak_memory import Peak, peak_memory
from runplan.estimates.rates import PEAK, rate_of
from runplan.estimates.step_time import training_seconds
from runplan.model.model_shape import ModelShape, shape_of
from runplan.plain_settings import PlainCluster
from runplan.report.time_lines import step_of
from runplan.run_spec import RunSpec


def memory(config: EngineConfig, model_config: PretrainedConfig, ranks: int = 1) -> Peak:
    """Return the peak memory of a training step on a rank with full micro-batches.

    Raises:
        ValueError: the sizes do not divide the ranks or the layers.
    """
    spec, shape = _spec(config, ranks), _shape(model_config)
    ends = (config.first_stage_layers, config.last_stage_layers)
    stages = split_layers(shape.layers, config.pipeline_parallel, config.virtual_pipeline_parallel, *ends)
    return peak_memory(shape, config, spec.grid, [sum(stage) for stage in stages], spec.shards)


def step_time(
    config: EngineConfig, model_config: PretrainedConfig, sequences: int, length: int, ranks: int = 1
) -> float:
    """Return the seconds of a step's training: `sequences` of `length` tokens, on all ranks together.

    Raises:
        ValueError: no device of its kind was measured, or the sizes do not divide.
    """
    if config.device not in PEAK:
        raise ValueError(f"no step was measured on device {config.device!r}: set device to one of {', '.join(PEAK)}")
    spec, shape = _spec(config, ranks, sequences, length), _shape(model_config)
    step = step_of(spec, spec.grid, spec.batches(spec.grid))
    return training_seconds(shape, step, PEAK[config.device] * rate_of(shape, config, ranks).share)


def _spec(config: EngineConfig, ranks: int, sequences: int = 1, length: int = 1) -> RunSpec:
    return RunSpec("sft", "", config, PlainCluster(), ranks, steps=1, rows=sequences, longest=length)


def _shape(model_config: PretrainedConfig) -> ModelShape:
    return shape_of(model_config, model_config.model_type)
