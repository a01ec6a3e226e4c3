"""Capabilities as code: Yes with the test that showed it, or No with the reason, before any device is touched."""

from importlib.util import find_spec

from engines.config import EngineConfig
from engines.extras import asked
from seqpack.capability import No as No
from seqpack.capability import Yes as Yes

FSDP2: dict[str, Yes | No] = {
    "packed": Yes("step_executors_test.py::test_packed_equals_padded_in_any_micro_batches"),
    "padded": Yes("step_executors_test.py::test_packed_equals_padded_in_any_micro_batches"),
    "cpu": Yes("step_executors_test.py::test_steps_equal_a_plain_loop"),
    "cuda": Yes("cuda_test.py::test_float32_equals_the_cpu"),
    "npu": Yes("devices/npu_test.py::test_steps_equal_the_cpus"),  # a stand-in: no hardware was at hand
    "data_parallel": Yes("step_two_test.py::test_same_curve"),
    "context_parallel": Yes("inputs/context_parallel_test.py::test_same_curves_scores_and_weights"),
    "tensor_parallel": No("FSDP2 shards over data-parallel ranks alone"),
    "pipeline_parallel": No("FSDP2 shards over data-parallel ranks alone"),
    "virtual_pipeline_parallel": No("FSDP2 shards over data-parallel ranks alone"),
    "uneven_stages": No("FSDP2 shards over data-parallel ranks alone"),
    "moe": Yes("families/router_test.py::test_one_step_equals_transformers_on_the_whole_batch"),
    "router_loss": Yes("families/router_test.py::test_two_ranks_equal_one"),
    "router_z_loss": Yes("families/router_z_loss_test.py::test_steps_equal_a_plain_loop"),
    "routing_replay": Yes("experts/routers_test.py::test_the_experts_of_another_are_those_of_stock_transformers"),
    "expert_parallel": Yes("experts/parallel_test.py::test_ranks_that_share_the_experts_give_the_steps_of_one"),
    "expert_tensor_parallel": No("ranks share experts, not their matrices: use expert_parallel, or backend='megatron'"),
    "bfloat16": Yes("step_executors_test.py::test_bfloat16_compute_with_float32_weights"),
    "bfloat16_masters": Yes("proofs/checkpoint_matrix_test.py::test_resumed_runs_have_the_bits_of_straight_ones"),
    "bfloat16_moments": Yes("execution/optimizer_test.py::test_bfloat16_moments_train_as_float32_ones"),
    "compiled_layers": Yes("fast/cuda_test.py::test_compiled_layers_equal_plain_ones"),
    "replicated_weights": Yes("replicated/replicated_two_test.py::test_two_ranks_equal_one"),
    "hybrid_sharding": Yes("fsdp2/hybrid_test.py::test_copies_of_shards_give_the_steps_of_one_process"),
    "gradient_checkpointing": Yes("step_executors_test.py::test_gradient_checkpointing_recomputes_the_layers"),
    "activation_offload": Yes("step_executors_test.py::test_the_inputs_of_a_layer_are_freed_once_they_are_on_the_host"),
    "tied_weights": Yes("storage/checkpoint_test.py::test_resume_is_bitwise"),
    "shared_weights": Yes("weight_sharing_test.py::test_they_are_the_values_of_an_export_in_place"),
    "offload": Yes("devices/host_copies_test.py::test_an_engine_goes_to_memory_that_is_kept"),
    "optimizer_on_host": Yes("devices/npu_test.py::test_moments_on_the_host_change_no_bit"),  # a stand-in, and CPU
    "parameters_on_host": Yes("devices/npu_host_test.py::test_parameters_on_the_host_change_no_bit"),  # a stand-in
    "core_optimizer": No("megatron-core's optimizer is over Megatron's buffers: leave megatron_optimizer out"),
    "distributed_optimizer": No("FSDP2 shards optimizer states over all ranks already: leave it out"),
    "own_rows": Yes("step_two_test.py::test_ranks_that_hold_their_own_rows_give_the_whole_batchs_steps"),
    "dropout": No("the model is trained as it is scored: no dropout, whatever its config says"),
    "learning_rates": Yes(LEARNING_RATES),
    "lora": Yes("adapters/lora_test.py::test_log_probs_and_gradients_are_those_of_peft"),
    "async_save": Yes("storage/writer_test.py::test_training_goes_on_while_a_checkpoint_is_written"),
    "vision": Yes("media/engine_test.py::test_packed_rows_equal_stock_transformers_one_at_a_time"),
    "trained_vision": Yes("media/engine_test.py::test_packed_rows_equal_stock_transformers_one_at_a_time"),
    "multi_axis_positions": Yes("scoring/packed_model_test.py::test_multi_axis_positions_reach_the_rotary_embedding"),
    "collective_timeout": Yes("collective_timeout_test.py::test_a_late_rank_ends_the_others_wait"),
}


LAYOUTS = "proofs/megatron_layouts_test.py::test_every_layout_gives_the_steps_of_one_process"
MEGATRON: dict[str, Yes | No] = {
    "packed": Yes(LAYOUTS),
    "padded": No("Megatron's layers get packed tokens alone: set batching='packed'"),
    "cpu": Yes(LAYOUTS),
    "cuda": Yes("megatron/cuda_test.py::test_same_curve_as_fsdp2"),
    "npu": Yes("devices/npu_test.py::test_megatron_steps_equal_the_cpus"),  # a stand-in: no hardware was at hand
    "data_parallel": Yes(LAYOUTS),
    "context_parallel": Yes(LAYOUTS),
    "tensor_parallel": Yes(LAYOUTS),
    "pipeline_parallel": Yes(LAYOUTS),
    "virtual_pipeline_parallel": Yes(LAYOUTS),
    "uneven_stages": Yes(LAYOUTS),
    "moe": Yes(LAYOUTS),
    "router_loss": Yes(LAYOUTS),
    "router_z_loss": Yes(LAYOUTS),
    "routing_replay": Yes(LAYOUTS),
    "expert_parallel": Yes(LAYOUTS),
    "expert_tensor_parallel": Yes(LAYOUTS),
    "bfloat16": Yes("megatron/engine_test.py::test_bfloat16_layers_with_float32_masters"),
    "bfloat16_masters": No("Megatron's layers keep masters in float32: leave master_dtype at its default"),
    "bfloat16_moments": No("Megatron's optimizer keeps its moments in float32: leave moments_dtype at its default"),
    "compiled_layers": No("megatron-core's layers are not compiled whole: 'auto' fuses pieces of them on a GPU"),
    "replicated_weights": No("Megatron's weights are laid out by tensor, pipeline and expert parallelism"),
    "hybrid_sharding": No("Megatron's weights are no shards: leave shard_ranks out, or set backend='fsdp2'"),
    "gradient_checkpointing": Yes("megatron/recomputed_test.py::test_recomputed_layers_change_nothing"),
    "activation_offload": No("megatron-core's layers keep what they recompute from on the device"),
    "tied_weights": Yes(LAYOUTS),
    "shared_weights": No("Megatron lays weights out in its own way: they are put together for an export"),
    "offload": Yes("megatron/runtime/buffer_offload_test.py::test_buffers_go_away_and_come_back"),
    "optimizer_on_host": Yes("megatron/engine_test.py::test_an_optimizer_on_the_host_takes_the_same_steps"),
    "parameters_on_host": No("Megatron's layers compute from weights on the device: leave it out, or use fsdp2"),
    "core_optimizer": Yes("megatron/optimizers/core_optimizer_test.py::test_its_steps_have_the_bits_of_torchs"),
    "distributed_optimizer": Yes(LAYOUTS),
    "own_rows": Yes("proofs/megatron_layouts_test.py::test_ranks_that_hold_their_own_rows_give_the_same_steps"),
    "dropout": No("the model is trained as it is scored: no dropout, whatever its config says"),
    "learning_rates": Yes("megatron/rates_test.py::test_parameters_have_the_learning_rates_that_patterns_give_them"),
    "lora": Yes(LAYOUTS),
    "async_save": Yes("megatron/engine_test.py::test_a_checkpoint_is_written_while_training_goes_on"),
    "vision": Yes("megatron/model/vision_test.py::test_every_layout_gives_the_steps_of_one_process"),
    "trained_vision": Yes("megatron/model/vision_test.py::test_every_layout_gives_the_steps_of_one_process"),
    "multi_axis_positions": Yes("megatron/engine_test.py::test_positions_of_several_axes"),
    "collective_timeout": Yes("collective_timeout_test.py::test_a_late_rank_ends_the_others_wait"),
}
BACKENDS = {"fsdp2": FSDP2, "megatron": MEGATRON}


def supports(config: EngineConfig, feature: str) -> Yes | No:
    """Return whether an engine of this configuration has the feature. ValueError lists the features for an unknown
    name."""
    if feature == "fsdp2":
        return FSDP2["cpu"]
    if feature == "megatron":
        return _megatron()
    table = BACKENDS[config.backend]
    if feature not in table:
        raise ValueError(f"unknown feature {feature!r}; known are {', '.join(sorted([*table, *BACKENDS]))}")
    return table[feature]


def _megatron() -> Yes | No:
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return No(asked("megatron-core is not installed", "megatron"))
    return MEGATRON["cpu"]


def core_optimizer(config: EngineConfig) -> Yes | No:
    """Return whether megatron-core's own optimizer could update what this configuration trains, on some device."""
    if config.device == "npu":
        return No("megatron-core's optimizers have not been run on an NPU")
    if config.optimizer_on_host:
        return No("masters that are on the host (optimizer_on_host) step there, by torch's AdamW")
    if config.learning_rates:
        return No("learning_rates by name are of torch's AdamW")
    return MEGATRON["core_optimizer"]


def features_of(config: EngineConfig) -> list[str]:
    """Return the features that a configuration asks for."""
    asked: dict[str, bool] = {config.backend: True, config.batching: True, config.device: config.device != "auto"}
    asked["context_parallel"] = config.context_parallel not in ("off", "static:1")
    for name in ("tensor_parallel", "pipeline_parallel", "virtual_pipeline_parallel"):
        asked[name] = getattr(config, name) > 1
    asked["uneven_stages"] = config.first_stage_layers is not None or config.last_stage_layers is not None
    for name in ("expert_parallel", "expert_tensor_parallel"):
        asked[name] = getattr(config, name) > 1
    asked["gradient_checkpointing"] = config.gradient_checkpointing
    asked["activation_offload"] = config.activation_offload
    asked["optimizer_on_host"] = config.optimizer_on_host
    asked["parameters_on_host"] = config.parameters_on_host
    asked["core_optimizer"] = config.megatron_optimizer == "core"
    asked["distributed_optimizer"] = config.distributed_optimizer
    asked["router_z_loss"] = config.router_z_loss_coef > 0
    asked["routing_replay"] = config.routing_replay
    asked["learning_rates"] = bool(config.learning_rates)
    asked["lora"] = config.lora.rank > 0
    asked["vision"] = config.vision != "off"
    asked["trained_vision"] = config.vision == "trained"
    asked["bfloat16"] = "bfloat16" in (config.dtype, config.master_dtype)
    asked["bfloat16_masters"] = config.master_dtype == "bfloat16"
    asked["bfloat16_moments"] = config.moments_dtype == "bfloat16"
    asked["compiled_layers"] = config.compile == "on" and config.backend == "megatron"
    asked["replicated_weights"] = config.weights == "replicated" and config.backend == "megatron"
    asked["collective_timeout"] = config.collective_timeout_seconds is not None
    asked["hybrid_sharding"] = config.shard_ranks is not None
    return [feature for feature, wanted in asked.items() if wanted]


def refuse_unsupported(config: EngineConfig) -> None:
    """ValueError with the reason for the first thing this configuration asks for that is not there."""
    asked = features_of(config)
    for feature in asked:
        answer = supports(config, feature)
        if isinstance(answer, No):
            raise ValueError(f"{feature} is not supported: {answer.reason}")
    if config.parameters_on_host:
        _refuse_beside_the_host(config)
    if config.backend == "fsdp2" and config.expert_parallel > 1:
        _refuse_beside_experts(config)
    if config.backend == "megatron" and not config.reshard_after_forward:
        raise ValueError("reshard_after_forward is FSDP2's, Megatron gathers no weights: leave it at its default")
    if config.backend != "megatron" and config.transformer_options:
        raise ValueError("transformer_options are Megatron's: leave them out, or set backend='megatron'")
    if config.backend != "megatron" and config.megatron_optimizer != "auto":
        raise ValueError("megatron_optimizer is Megatron's: leave it at its default, or set backend='megatron'")
    if config.megatron_optimizer == "core" and isinstance(answer := core_optimizer(config), No):
        raise ValueError(f"megatron_optimizer='core' cannot be used: {answer.reason}; set it to 'auto' or 'torch'")
    if config.virtual_pipeline_parallel > 1 and config.pipeline_parallel == 1:
        raise ValueError("virtual_pipeline_parallel has no effect without pipeline_parallel: set that above 1")
    if config.virtual_pipeline_parallel > 1 and "uneven_stages" in asked:
        raise ValueError(
            "first_stage_layers and last_stage_layers have not been run with virtual stages: use one of both"
        )
    if "context_parallel" in asked and config.batching != "packed":
        raise ValueError("context parallelism shards packed sequences: set batching='packed'")


def _refuse_beside_the_host(config: EngineConfig) -> None:
    """ValueError for what has not been run with parameters on the host."""
    beside = {
        "lora": config.lora.rank > 0,
        "expert_parallel": config.expert_parallel > 1,
        "shard_ranks": config.shard_ranks is not None,
    }
    for name, wanted in beside.items():
        if wanted:
            raise ValueError(f"{name} has not been run with parameters_on_host: leave one of both out")


def _refuse_beside_experts(config: EngineConfig) -> None:
    """ValueError for what has not been run with expert parallelism under FSDP2."""
    beside = {
        "lora": config.lora.rank > 0,
        "weights='replicated'": config.weights == "replicated",
        "master_dtype='bfloat16'": config.master_dtype == "bfloat16",
    }
    for name, wanted in beside.items():
        if wanted:
            raise ValueError(f"{name} has not been run with expert_parallel under FSDP2: leave one of both out")
