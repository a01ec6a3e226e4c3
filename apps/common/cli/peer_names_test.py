"""Every setting of TRL's GRPOConfig and SFTConfig (1.16), and verl's common ones (0.9.1), has an answer."""

from collections.abc import Mapping

import pytest

from apps.common.cli import peer_flags
from apps.common.cli.flags import flag, leaves
from apps.grpo.config import GrpoConfig
from apps.sft.config import SftConfig

TRAINER = """
output_dir max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps lr_scheduler_type
warmup_steps warmup_ratio weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon bf16 gradient_checkpointing
save_steps save_total_limit eval_steps logging_steps report_to resume_from_checkpoint seed model_name_or_path
dataset_name attn_implementation use_peft lora_r lora_alpha lora_dropout lora_target_modules
"""
TRL_GRPO = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32
remove_unused_columns num_generations num_generations_eval max_completion_length ds3_gather_for_generation
shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p
generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta
num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards
loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl
log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
vllm_importance_sampling_cap
"""
TRL_SFT = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path dataset_text_field
dataset_kwargs dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy
padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type
activation_offloading pad_token
"""
VERL = """
data.train_files data.val_files data.prompt_key data.train_batch_size data.max_prompt_length
data.max_response_length data.image_key data.shuffle data.filter_overlong_prompts actor_rollout_ref.model.path
actor_rollout_ref.model.enable_gradient_checkpointing actor_rollout_ref.model.use_remove_padding
actor_rollout_ref.model.lora_rank actor_rollout_ref.model.lora_alpha actor_rollout_ref.model.target_modules
actor_rollout_ref.model.enable_activation_offload actor_rollout_ref.model.use_liger
actor_rollout_ref.model.trust_remote_code actor_rollout_ref.actor.strategy actor_rollout_ref.actor.optim.lr
actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps_ratio
actor_rollout_ref.actor.optim.weight_decay actor_rollout_ref.actor.ppo_mini_batch_size
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.ppo_epochs
actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.actor.ppo_max_token_len_per_gpu
actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio_high
actor_rollout_ref.actor.clip_ratio_c actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.use_kl_loss
actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type actor_rollout_ref.actor.loss_agg_mode
actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.use_torch_compile
actor_rollout_ref.actor.ulysses_sequence_parallel_size actor_rollout_ref.actor.fsdp_config.param_offload
actor_rollout_ref.actor.fsdp_config.optimizer_offload actor_rollout_ref.actor.fsdp_config.fsdp_size
actor_rollout_ref.actor.fsdp_config.reshard_after_forward actor_rollout_ref.rollout.n actor_rollout_ref.rollout.name
actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.temperature actor_rollout_ref.rollout.top_p
actor_rollout_ref.rollout.top_k actor_rollout_ref.rollout.prompt_length actor_rollout_ref.rollout.response_length
actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.tensor_model_parallel_size
actor_rollout_ref.rollout.data_parallel_size actor_rollout_ref.rollout.expert_parallel_size
actor_rollout_ref.rollout.max_num_batched_tokens actor_rollout_ref.rollout.max_num_seqs
actor_rollout_ref.rollout.max_model_len actor_rollout_ref.rollout.enforce_eager
actor_rollout_ref.rollout.free_cache_engine actor_rollout_ref.rollout.enable_chunked_prefill
actor_rollout_ref.rollout.enable_prefix_caching actor_rollout_ref.rollout.load_format
actor_rollout_ref.rollout.multi_turn.max_assistant_turns actor_rollout_ref.rollout.multi_turn.tool_config_path
actor_rollout_ref.rollout.multi_turn.format algorithm.adv_estimator algorithm.use_kl_in_reward
algorithm.kl_ctrl.kl_coef algorithm.kl_penalty algorithm.norm_adv_by_std_in_grpo
algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold
custom_reward_function.path trainer.total_epochs trainer.total_training_steps trainer.logger trainer.project_name
trainer.experiment_name trainer.n_gpus_per_node trainer.nnodes trainer.save_freq trainer.test_freq
trainer.val_before_train trainer.resume_mode trainer.resume_from_path trainer.default_local_dir trainer.device
trainer.balance_batch trainer.log_val_generations trainer.max_actor_ckpt_to_keep
"""
WORDS: dict[str, tuple[type, Mapping[str, str], list[str]]] = {
    "TRL's GRPO": (GrpoConfig, peer_flags.GRPO, [f"--{name}=1" for name in (TRAINER + TRL_GRPO).split()]),
    "TRL's SFT": (SftConfig, peer_flags.SFT, [f"--{name}=1" for name in (TRAINER + TRL_SFT).split()]),
    "verl": (GrpoConfig, peer_flags.GRPO, [f"{name}=1" for name in VERL.split()]),
}


@pytest.mark.parametrize("name", WORDS)
def test_each_has_an_answer(name: str) -> None:
    kind, table, words = WORDS[name]
    known = {flag(path) for path, _, _ in leaves(kind())}
    assert len(words) > 45
    silent = [
        word
        for word in words
        if word.partition("=")[0].replace("_", "-") not in known and not peer_flags.peer_hints([word], [], table)[1]
    ]
    assert silent == []
