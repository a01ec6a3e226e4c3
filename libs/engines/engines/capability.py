"""Capabilities as code, before any device is touched: Supported with its test, or Unsupported with the reason."""

from collections.abc import Iterator
from dataclasses import replace

from engines.backends import TRAIN_BACKENDS, supports_backend
from engines.config import EngineConfig, parse_options
from seqpack.capability import No as No  # an earlier name, as Yes
from seqpack.capability import Supported as Supported
from seqpack.capability import Unsupported as Unsupported
from seqpack.capability import Yes as Yes

FSDP2: dict[str, Supported | Unsupported] = {
    "packed": Supported("step_executors_test.py::test_packed_equals_padded_in_any_micro_batches"),
    "padded": Supported("step_executors_test.py::test_packed_equals_padded_in_any_micro_batches"),
    "cpu": Supported("step_executors_test.py::test_steps_equal_a_plain_loop"),
    "cuda": Supported("cuda_test.py::test_float32_equals_the_cpu"),
    "npu": Supported("devices/npu_test.py::test_steps_equal_the_cpus"),  # a stand-in: no hardware was at hand
    "data_parallel": Supported("step_two_test.py::test_same_curve"),
    "context_parallel": Supported("inputs/context_parallel_test.py::test_same_curves_scores_and_weights"),
    "tensor_parallel": Unsupported("FSDP2 shards over data-parallel ranks alone"),
    "pipeline_parallel": Unsupported("FSDP2 shards over data-parallel ranks alone"),
    "virtual_pipeline_parallel": Unsupported("FSDP2 shards over data-parallel ranks alone"),
    "uneven_stages": Unsupported("FSDP2 shards over data-parallel ranks alone"),
    "moe": Supported("families/router_test.py::test_one_step_equals_transformers_on_the_whole_batch"),
    "router_loss": Supported("families/router_test.py::test_two_ranks_equal_one"),
    "router_z_loss": Supported("families/router_z_loss_test.py::test_steps_equal_a_plain_loop"),
    "router_forwards_ahead": Supported("families/router_test.py::test_one_step_equals_transformers_on_the_whole_batch"),
    "routing_replay": Supported("experts/routers_test.py::test_the_experts_of_another_are_those_of_stock_transformers"),
    "expert_parallel": Supported("experts/parallel_test.py::test_ranks_that_share_the_experts_give_the_steps_of_one"),
    "expert_tensor_parallel": Unsupported(
        "ranks share experts, not their matrices: use expert_parallel, or backend='megatron'"
    ),
    "bfloat16": Supported("step_executors_test.py::test_bfloat16_compute_with_float32_weights"),
    "bfloat16_masters": Supported("proofs/checkpoint_matrix_test.py::test_resumed_runs_have_the_bits_of_straight_ones"),
    "bfloat16_moments": Supported("execution/optimizer_test.py::test_bfloat16_moments_train_as_float32_ones"),
    "compiled_layers": Supported("fast/cuda_test.py::test_compiled_layers_equal_plain_ones"),
    "replicated_weights": Supported("replicated/replicated_two_test.py::test_two_ranks_equal_one"),
    "hybrid_sharding": Supported("fsdp2/hybrid_test.py::test_copies_of_shards_give_the_steps_of_one_process"),
    "gradient_checkpointing": Supported("step_executors_test.py::test_gradient_checkpointing_recomputes_the_layers"),
    "activation_offload": Supported(
        "step_executors_test.py::test_the_inputs_of_a_layer_are_freed_once_they_are_on_the_host"
    ),
    "tied_weights": Supported("storage/checkpoint_test.py::test_resume_is_bitwise"),
    "shared_weights": Supported("weight_sharing_test.py::test_they_are_the_values_of_an_export_in_place"),
    "offload": Supported("devices/host_copies_test.py::test_an_engine_goes_to_memory_that_is_kept"),
    "optimizer_on_host": Supported(
        "devices/npu_test.py::test_moments_on_the_host_change_no_bit"
    ),  # a stand-in, and CPU
    "parameters_on_host": Supported(
        "devices/npu_host_test.py::test_parameters_on_the_host_change_no_bit"
    ),  # a stand-in
    "core_optimizer": Unsupported("megatron-core's optimizer is over Megatron's buffers: leave megatron_optimizer out"),
    "deepep": Unsupported("the experts of FSDP2 are sent their tokens by torch's all-to-all"),
    "distributed_optimizer": Unsupported("FSDP2 shards optimizer states over all ranks already: leave it out"),
    "own_rows": Supported("step_two_test.py::test_ranks_that_hold_their_own_rows_give_the_whole_batchs_steps"),
    "dropout": Unsupported("the model is trained as it is scored: no dropout, whatever its config says"),
    "muon": Supported("muon/muon_test.py::test_steps_are_those_of_torchs_muon"),
    "learning_rates": Supported(
        "execution/learning_rates_test.py::test_steps_are_those_of_torchs_adamw_with_a_group_for_each_rate"
    ),
    "lora": Supported("adapters/lora_test.py::test_log_probs_and_gradients_are_those_of_peft"),
    "mtp": Supported("mtp/engine_test.py::test_the_heads_loss_and_gradient_are_those_of_one_sequence_at_a_time"),
    "lora_experts": Supported("adapters/lora_test.py::test_log_probs_and_gradients_are_those_of_peft"),
    "async_save": Supported("storage/writer_test.py::test_training_goes_on_while_a_checkpoint_is_written"),
    "vision": Supported("media/engine_test.py::test_packed_rows_equal_stock_transformers_one_at_a_time"),
    "trained_vision": Supported("media/engine_test.py::test_packed_rows_equal_stock_transformers_one_at_a_time"),
    "multi_axis_positions": Supported(
        "scoring/packed_model_test.py::test_multi_axis_positions_reach_the_rotary_embedding"
    ),
    "collective_timeout": Supported("collective_timeout_test.py::test_a_late_rank_ends_the_others_wait"),
}


LAYOUTS = "proofs/megatron_layouts_test.py::test_every_layout_gives_the_steps_of_one_process"
MEGATRON: dict[str, Supported | Unsupported] = {
    "packed": Supported(LAYOUTS),
    "padded": Unsupported("Megatron's layers get packed tokens alone: set batching='packed'"),
    "cpu": Supported(LAYOUTS),
    "cuda": Supported("megatron/cuda_test.py::test_same_curve_as_fsdp2"),
    "npu": Supported("devices/npu_test.py::test_megatron_steps_equal_the_cpus"),  # a stand-in: no hardware was at hand
    "data_parallel": Supported(LAYOUTS),
    "context_parallel": Supported(LAYOUTS),
    "tensor_parallel": Supported(LAYOUTS),
    "pipeline_parallel": Supported(LAYOUTS),
    "virtual_pipeline_parallel": Supported(LAYOUTS),
    "uneven_stages": Supported(LAYOUTS),
    "moe": Supported(LAYOUTS),
    "router_loss": Supported(LAYOUTS),
    "router_z_loss": Supported(LAYOUTS),
    "routing_replay": Supported(LAYOUTS),
    "expert_parallel": Supported(LAYOUTS),
    "expert_tensor_parallel": Supported(LAYOUTS),
    "bfloat16": Supported("megatron/engine_test.py::test_bfloat16_layers_with_float32_masters"),
    "bfloat16_masters": Unsupported("Megatron's layers keep masters in float32: leave master_dtype at its default"),
    "bfloat16_moments": Unsupported(
        "Megatron's optimizer keeps its moments in float32: leave moments_dtype at its default"
    ),
    "compiled_layers": Unsupported(
        "megatron-core's layers are not compiled whole: 'auto' fuses pieces of them on a GPU"
    ),
    "replicated_weights": Unsupported("Megatron's weights are laid out by tensor, pipeline and expert parallelism"),
    "hybrid_sharding": Unsupported("Megatron's weights are no shards: leave shard_ranks out, or set backend='fsdp2'"),
    "gradient_checkpointing": Supported("megatron/recomputed_test.py::test_recomputed_layers_change_nothing"),
    "router_forwards_ahead": Supported("megatron/recomputed_test.py::test_forward_passes_ahead_spare_those_that_count"),
    "activation_offload": Unsupported("megatron-core's layers keep what they recompute from on the device"),
    "tied_weights": Supported(LAYOUTS),
    "shared_weights": Unsupported("Megatron lays weights out in its own way: they are put together for an export"),
    "offload": Supported("megatron/runtime/buffer_offload_test.py::test_buffers_go_away_and_come_back"),
    "optimizer_on_host": Supported("megatron/engine_test.py::test_an_optimizer_on_the_host_takes_the_same_steps"),
    "parameters_on_host": Unsupported(
        "Megatron's layers compute from weights on the device: leave it out, or use fsdp2"
    ),
    "core_optimizer": Supported("megatron/optimizers/core_optimizer_test.py::test_its_steps_have_the_bits_of_torchs"),
    "deepep": Unsupported(
        "DeepEP's kernels have not run: a stand-in over gloo gives the all-to-all's steps (megatron/deepep_test.py)",
        untested="deepep",
    ),
    "distributed_optimizer": Supported(LAYOUTS),
    "own_rows": Supported("proofs/megatron_layouts_test.py::test_ranks_that_hold_their_own_rows_give_the_same_steps"),
    "dropout": Unsupported("the model is trained as it is scored: no dropout, whatever its config says"),
    "muon": Supported("megatron/optimizers/muon_layouts_test.py::test_every_layout_gives_the_steps_of_torchs_muon"),
    "learning_rates": Supported(
        "megatron/rates_test.py::test_parameters_have_the_learning_rates_that_patterns_give_them"
    ),
    "lora": Supported(LAYOUTS),
    "mtp": Supported("megatron/mtp_test.py::test_every_layout_gives_the_steps_of_one_fsdp2_process"),
    "lora_experts": Supported(
        "megatron/expert_adapters_test.py::test_every_layout_gives_the_steps_and_files_of_one_process"
    ),
    "async_save": Supported("megatron/engine_test.py::test_a_checkpoint_is_written_while_training_goes_on"),
    "vision": Supported("megatron/model/vision_test.py::test_every_layout_gives_the_steps_of_one_process"),
    "trained_vision": Supported("megatron/model/vision_test.py::test_every_layout_gives_the_steps_of_one_process"),
    "multi_axis_positions": Supported("megatron/engine_test.py::test_positions_of_several_axes"),
    "collective_timeout": Supported("collective_timeout_test.py::test_a_late_rank_ends_the_others_wait"),
}


DEEPEP = ("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_flex_dispatcher_num_sms")
"""`transformer_options` of DeepEP, which sends tokens to their experts in place of the all-to-all."""
RUN_OPTIONS = frozenset(["deallocate_pipeline_outputs", "microbatch_group_size_per_vp_stage"])
"""`transformer_options` that layouts' tests have run: they change the pipeline's schedule, not its results."""


def supports(config: EngineConfig, feature: str) -> Supported | Unsupported:
    """Return whether an engine of this configuration has the feature. ValueError lists the features for an unknown
    name."""
    if feature in TRAIN_BACKENDS:
        return supports_backend(feature)
    table = TRAIN_BACKENDS[config.backend].features
    if feature not in table:
        raise ValueError(f"unknown feature {feature!r}; known are {', '.join(sorted([*table, *TRAIN_BACKENDS]))}")
    return table[feature]


def core_optimizer(config: EngineConfig) -> Supported | Unsupported:
    """Return whether megatron-core's own optimizer could update what this configuration trains, on some device."""
    asked = config.megatron_optimizer == "core" and "npu" in config.allow_untested
    if config.device == "npu" and not asked:
        return Unsupported("megatron-core's optimizers have not been run on an NPU", untested="npu")
    if config.optimizer_on_host:
        return Unsupported("masters that are on the host (optimizer_on_host) step there, by torch's AdamW")
    if config.optimizer == "muon":
        return Unsupported("Muon is over torch's AdamW here: megatron-core's wants a package of its own")
    if config.learning_rates:
        return Unsupported("learning_rates by name are of torch's AdamW")
    return MEGATRON["core_optimizer"]


def features_of(config: EngineConfig) -> list[str]:
    """Return the features that a configuration asks for."""
    requested: dict[str, bool] = {config.backend: True, config.batching: True, config.device: config.device != "auto"}
    requested["context_parallel"] = config.context_parallel not in ("off", "static:1")
    for name in ("tensor_parallel", "pipeline_parallel", "virtual_pipeline_parallel"):
        requested[name] = getattr(config, name) > 1
    requested["uneven_stages"] = config.first_stage_layers is not None or config.last_stage_layers is not None
    for name in ("expert_parallel", "expert_tensor_parallel"):
        requested[name] = getattr(config, name) > 1
    requested["gradient_checkpointing"] = config.gradient_checkpointing
    requested["activation_offload"] = config.activation_offload
    requested["optimizer_on_host"] = config.optimizer_on_host
    requested["parameters_on_host"] = config.parameters_on_host
    requested["deepep"] = uses_deepep(config)
    requested["core_optimizer"] = config.megatron_optimizer == "core"
    requested["distributed_optimizer"] = config.distributed_optimizer
    requested["router_forwards_ahead"] = bool(config.router_forwards_ahead)
    requested["router_z_loss"] = config.router_z_loss_coef > 0
    requested["routing_replay"] = config.routing_replay
    requested["learning_rates"] = bool(config.learning_rates)
    requested["muon"] = config.optimizer == "muon"
    requested["lora"] = config.lora.rank > 0
    requested["mtp"] = config.mtp_loss_scaling_factor is not None
    requested["lora_experts"] = bool(config.lora.target_parameters)
    requested["vision"] = config.vision != "off"
    requested["trained_vision"] = config.vision == "trained"
    requested["bfloat16"] = "bfloat16" in (config.dtype, config.master_dtype)
    requested["bfloat16_masters"] = config.master_dtype == "bfloat16"
    requested["bfloat16_moments"] = config.moments_dtype == "bfloat16"
    requested["compiled_layers"] = config.compile == "on" and config.backend == "megatron"
    requested["replicated_weights"] = config.weights == "replicated" and config.backend == "megatron"
    requested["collective_timeout"] = config.collective_timeout_seconds is not None
    requested["hybrid_sharding"] = config.shard_ranks is not None
    return [feature for feature, wanted in requested.items() if wanted]


def refuse_unsupported(config: EngineConfig, trainable: bool = True) -> None:
    """Raise ValueError with the reason for each unsupported feature that this configuration asks for, and each set of
    options that exclude each other. `trainable`: whether it is to train; some options were only run where it scores."""
    if reasons := unsupported(config, trainable):
        raise ValueError("; ".join(reasons))


def unsupported(config: EngineConfig, trainable: bool = True) -> list[str]:
    """Return the text of all that `refuse_unsupported` refuses; empty where an engine can be asked for."""
    answers = ((feature, supports(config, feature)) for feature in features_of(config))
    missing = [
        f"{name} is not supported: {answer.reason}"
        for name, answer in answers
        if isinstance(answer, Unsupported) and answer.untested not in config.allow_untested
    ]
    return [*missing, *conflicts(config, trainable)]


def conflicts(config: EngineConfig, trainable: bool = True) -> Iterator[str]:
    """Yield the text of each set of options that this backend does not take together, or not at all."""
    if config.prove == "off":
        yield from untested_options(config, trainable)
    if config.backend == "fsdp2" and config.expert_parallel > 1 and config.weights == "replicated":
        yield "weights='replicated' keeps all experts on every rank, so expert_parallel has no effect: leave one out"
    yield from _of_adapted_experts(config)
    yield from _of_deepep(config)
    if config.backend == "megatron" and not config.reshard_after_forward:
        yield "reshard_after_forward is FSDP2's, Megatron gathers no weights: leave it at its default"
    if config.backend != "megatron" and config.transformer_options:
        yield "transformer_options are Megatron's: leave them out, or set backend='megatron'"
    if config.backend != "megatron" and config.megatron_optimizer == "torch":
        yield "megatron_optimizer is Megatron's: leave it at its default, or set backend='megatron'"
    core = config.backend == "megatron" and config.megatron_optimizer == "core"
    if core and isinstance(answer := core_optimizer(config), Unsupported):
        untested = f", or allow_untested={answer.untested}" if answer.untested else ""
        yield f"megatron_optimizer='core' cannot be used: {answer.reason}; set it to 'auto' or 'torch'{untested}"
    if config.virtual_pipeline_parallel > 1 and config.pipeline_parallel == 1:
        yield "virtual_pipeline_parallel has no effect without pipeline_parallel: set that above 1"
    if config.backend == "megatron" and config.router_forwards_ahead and config.pipeline_parallel > 1:
        yield "router_forwards_ahead: stages begin with backward passes early, a pass counts all before: leave it out"
    if config.mtp_loss_scaling_factor and config.vision != "off" and config.context_parallel not in ("off", "static:1"):
        yield "mtp_loss_scaling_factor: ranks that share a row lack the other's images: set context_parallel='off'"
    if config.mtp_loss_scaling_factor and config.vision != "off" and config.backend == "megatron":
        yield "mtp_loss_scaling_factor: Megatron's last stage sees no images, which the head reads: set backend='fsdp2'"
    if config.context_parallel not in ("off", "static:1") and config.batching != "packed":
        yield "context parallelism shards packed sequences: set batching='packed'"


def _of_adapted_experts(config: EngineConfig) -> Iterator[str]:
    """Yield what adapters on experts are not beside."""
    if not config.lora.target_parameters:
        return
    what = "lora.target_parameters puts adapters on experts"
    if config.backend == "fsdp2" and config.expert_parallel > 1:
        yield f"{what}, which no ranks share under FSDP2: leave expert_parallel at 1, or set backend='megatron'"
    if config.expert_tensor_parallel > 1:
        yield f"{what}, whose matrices are not cut: leave expert_tensor_parallel at 1"
    if config.device == "npu":
        yield f"{what}, which have not been run on an NPU: leave it out"


def _of_deepep(config: EngineConfig) -> Iterator[str]:
    """Yield what DeepEP is not beside: it sends bfloat16 between CUDA devices."""
    if not uses_deepep(config):
        return
    if config.expert_parallel * config.expert_tensor_parallel == 1:
        yield f"{DEEPEP[0]} has no effect where a rank has all experts: leave it out, or set expert_parallel above 1"
    if config.dtype == "float32" or config.device in ("cpu", "npu"):
        yield f"{DEEPEP[0]}: DeepEP sends bfloat16 between CUDA devices: leave it out for the all-to-all"


def uses_deepep(config: EngineConfig) -> bool:
    """Return whether tokens go to their experts by DeepEP."""
    return config.backend == "megatron" and parse_options(config.transformer_options).get(DEEPEP[0]) == "deepep"


def without_deepep(config: EngineConfig) -> EngineConfig:
    """Return the settings with the all-to-all in its place: of proofs in float32, or on one device."""
    kept = [word for word in config.transformer_options if word.partition("=")[0] not in DEEPEP]
    return replace(config, transformer_options=tuple(kept))


def untested_options(config: EngineConfig, trainable: bool = True) -> Iterator[str]:
    """Yield the text of each set of options that no test has run together: unless `config.prove` is "off", a proof of
    the run's options admits them (`engines.prove.options_admission`)."""
    host, experts = config.parameters_on_host, config.backend == "fsdp2" and config.expert_parallel > 1
    lora, shards = config.lora.rank > 0, config.shard_ranks is not None
    narrow = config.master_dtype == "bfloat16" and trainable
    ends = config.first_stage_layers or config.last_stage_layers
    for name, other, wanted in (
        ("lora", "parameters_on_host", host and lora),
        ("expert_parallel", "parameters_on_host", host and experts),
        ("shard_ranks", "parameters_on_host", host and shards),
        ("lora", "expert_parallel under FSDP2", experts and lora),
        ("shard_ranks", "expert_parallel under FSDP2", experts and shards),
        ("master_dtype='bfloat16'", "expert_parallel under FSDP2", experts and narrow),
        ("first_stage_layers or last_stage_layers", "virtual stages", ends and config.virtual_pipeline_parallel > 1),
    ):
        if wanted:
            yield f"{name} has not been run with {other}: leave one of both out, or have it proven (prove='cached')"
    if untried := untested_transformer_options(config):
        named = f"transformer_options {', '.join(untried)}"
        yield f"{named} has not been run: leave it out, or have it proven (prove='cached')"


def untested_transformer_options(config: EngineConfig) -> list[str]:
    """Return the names of Megatron's `transformer_options` that no test has run."""
    given = parse_options(config.transformer_options) if config.backend == "megatron" else {}
    return [name for name in given if name not in RUN_OPTIONS and name not in DEEPEP]
