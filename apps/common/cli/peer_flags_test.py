"""Command lines in the style of other trainers: each word gets its flag here, and every flag named exists."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from apps.common.cli import peer_flags as hints
from apps.common.cli.command_line import CommandLine
from apps.common.cli.flags import flag, leaves
from apps.grpo.main import command_line as grpo_line
from apps.grpo.main import configure as configure_grpo
from apps.sft.main import command_line as sft_line
from apps.sft.main import configure as configure_sft

LINES = {
    "--adam_beta1 0.9 --num_generations 8": ["--trainer.betas", "--group-size"],
    "--num-generations=16 --max-completion-length 512": ["--group-size", "--sampling.max-new-tokens"],
    "--max-response-length 1024": ["--sampling.max-new-tokens"],
    "--per-device-train-batch-size 4 --gradient_accumulation_steps 8": [
        "--prompts-per-step",
        "--trainer.max-tokens-per-rank",
    ],
    "--model_name_or_path dir --dataset_name file.jsonl": ["--model", "--data"],
    "--output_dir out --save_steps 50 --save_total_limit 2": ["--run-dir", "--save-every", "--keep-checkpoints"],
    "--beta 0.04": ["--objective.kl-coef (", "reference policy"],
    "--use_peft --lora_r 16 --lora_alpha 32": ["--lora.rank", "--lora.alpha"],
    "--epsilon 0.2 --epsilon_high 0.28 --loss_type dapo": [
        "--objective.clip-low",
        "--objective.clip-high",
        "--objective.aggregation",
    ],
    "--bf16 --gradient_checkpointing": ["--trainer.dtype", "--trainer.gradient-checkpointing"],
    "--use_vllm --vllm_mode colocate": ["--rollout.engine vllm", "--rollout.sleep"],
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6": [
        "--rollout.engine",
        "--rollout.gpu-memory-utilization",
    ],
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2": ["is --parallel.tensor here"],
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2": ["is --rollout.tensor-parallel"],
    "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.1": ["--kl-in-reward (the coefficient"],
    "--lr_scheduler_type cosine --warmup_ratio 0.1": ["--trainer.lr-schedule", "--trainer.warmup-steps"],
    "actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.optim.lr=1e-6": ["--group-size", "--learning-rate"],
    "data.train_files=x.parquet data.train_batch_size=64": ["--data", "--prompts-per-step"],
    "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True": ["--advantage", "reference policy"],
    "actor_rollout_ref.model.path=dir trainer.n_gpus_per_node=8 trainer.total_epochs=3": [
        "--model",
        "--nproc-per-node",
        "--max-steps",
    ],
    "--temperature 0.7 --top_p 0.9": ["--sampling.temperature", "whole vocabulary"],
    "+actor_rollout_ref.actor.clip_ratio_high=0.28": ["--objective.clip-high"],
    "+actor_rollout_ref.actor.megatron.max_seqlen_per_dp_cp_rank=4096": ["--trainer.max-tokens-per-rank"],
    "--seq-length 4096": ["--trainer.max-tokens-per-rank"],
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_another_trainer_is_refused_with_our_names(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        configure_grpo(line.split())
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert all(name in printed for name in LINES[line])


def test_sft_has_names_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        configure_sft(["--per_device_train_batch_size", "4", "--max_seq_length", "2048", "--packing"])
    printed = capsys.readouterr().err
    assert all(name in printed for name in ("--batch-size", "--max-tokens", "--trainer.batching"))


APPS: dict[str, tuple[CommandLine[Any], Mapping[str, str]]] = {
    "grpo": (grpo_line(), hints.GRPO),
    "sft": (sft_line(), hints.SFT),
}
BESIDE: dict[str, list[str]] = {
    "--objective.clip-low": ["--mini-batches", "2"],
    "--objective.clip-high": ["--mini-batches", "2"],
    "--objective.dual-clip": ["--mini-batches", "2"],
    "--objective.off-policy-floor": ["--objective.off-policy", "mask"],
    "--objective.kl-estimator": ["--objective.kl-coef", "0.1"],
    "--trainer.muon-momentum": ["--trainer.optimizer", "muon"],
    "--lora.targets": ["--lora.rank", "8"],
    "--lora.target-parameters": ["--lora.rank", "8"],
    "--lora.alpha": ["--lora.rank", "8"],
    "--eval-data": ["--data", "x.jsonl", "--model", "m"],
    "--trainer.lr-schedule": ["--trainer.total-steps", "99"],
    "--trainer.min-lr-ratio": ["--trainer.lr-schedule", "linear", "--trainer.total-steps", "99"],
    "--trainer.activation-offload": ["--trainer.gradient-checkpointing"],
    "--objective.max-tokens": ["--objective.aggregation", "constant"],
    "--objective.off-policy-cap": ["--objective.off-policy", "mask"],
    "--rollout.vllm": ["--rollout.engine", "vllm"],
    "--rollout.expert-parallel": ["--rollout.tensor-parallel", "2"],
    "--schedule.parameter-sync-step": ["--schedule.mode", "fully_async"],
    "--schedule.staleness-threshold": ["--schedule.mode", "fully_async"],
    "--filter-groups.metric": ["--filter-groups.enable"],
    "--filter-groups.max-num-gen-batches": ["--filter-groups.enable"],
    "--form": ["--data", "x.jsonl", "--model", "m"],
    "--template-options": ["--data", "x.jsonl", "--model", "m"],
    "--text-column": ["--data", "x.jsonl", "--model", "m"],
    "--prompt-column": ["--data", "x.jsonl", "--model", "m"],
    "--completion-column": ["--data", "x.jsonl", "--model", "m"],
    "--messages-column": ["--data", "x.jsonl", "--model", "m"],
    "--environment": ["--model", "m"],
    "--tool": ["--data", "x.jsonl", "--model", "m"],
    "--reward": ["--data", "x.jsonl", "--model", "m"],
}
"""What a flag has an effect beside."""
VALUES: dict[str, list[str]] = {
    "--trainer.max-tokens-per-rank": ["4096"],
    "--objective.clip-low": ["0.1"],
    "--trainer.betas": ["0.9", "0.99"],
    "--trainer.lr-schedule": ["cosine"],
    "--trainer.backend": ["megatron"],
    "--trainer.vision": ["frozen"],
    "--trainer.dtype": ["bfloat16"],
    "--objective.aggregation": ["sequence"],
    "--objective.policy-loss": ["cispo"],
    "--objective.off-policy-floor": ["0.5"],
    "--objective.kl-estimator": ["k3"],
    "--advantage": ["dr_grpo"],
    "--rollout.engine": ["vllm"],
    "--rollout.gpu-memory-utilization": ["0.5"],
    "--truncation": ["left"],
    "--export": ["best"],
    "--logging.tracker": ["wandb"],
    "--trainer.batching": ["padded"],
    "--trainer.min-lr-ratio": ["0.1"],
    "--trainer.optimizer": ["muon"],
    "--trainer.muon-momentum": ["0.9"],
    "--trainer.master-dtype": ["bfloat16"],
    "--trainer.compile": ["off"],
    "--trainer.device": ["cpu"],
    "--objective.off-policy": ["mask"],
    "--tool-format": ["hermes"],
    "--template-options": ["a=1"],
    "--schedule.mode": ["one_step_off"],
    "--form": ["text"],
    "--rollout.vllm": ["block_size=32"],
}
SWITCHES = (
    "--rollout.sleep",
    "--rollout.prefix-cache",
    "--rollout.chunked-prefill",
    "--offload",
    "--trainer.optimizer-on-host",
    "--trainer.gradient-checkpointing",
    "--trainer.activation-offload",
    "--trainer.reshard-after-forward",
    "--trainer.routing-replay",
    "--filter-groups.enable",
    "--overlong-filter",
)


@pytest.mark.parametrize("app", APPS)
def test_what_hints_claim_parses(app: str) -> None:
    """Every flag that one names is there, and takes the value that it is named with."""
    line, table = APPS[app]
    claims: dict[tuple[str, str], str] = {}
    for name, hint in table.items():
        flags = re.findall(r"--[a-z.-]+", hint)
        assert flags or hint.endswith("leave it out"), name
        told = re.match(r"--[a-z.-]+ ([^ (]\S*)(?= \(|$)", hint)
        for i, own in enumerate(flags):
            claims[own, told[1].replace(":N", ":2") if told and not i else ""] = name
    claims.pop(("--resume", ""))  # a run is looked for
    for (own, told_value), name in claims.items():
        value = [] if own in SWITCHES else [told_value] if told_value else VALUES.get(own, ["2"])
        try:
            line.parse([own, *value, *BESIDE.get(own, [])])
        except (ValueError, SystemExit) as error:
            pytest.fail(f"{name} -> {own} {value}: {error}")


@pytest.mark.parametrize("app", APPS)
def test_no_hint_hides_a_flag_of_ours(app: str) -> None:
    line, table = APPS[app]
    known = {flag(path) for path, _, _ in leaves(line.recipes["quickstart"]) if path not in line.owned}
    assert "--resume" in known
    for own in known:
        for word in (own, own.replace("-", "_").replace("__", "--", 1)):
            assert hints.peer_hints([word], sorted(known), table) == ([word], [])


def test_the_longest_known_ending_counts() -> None:
    table = {"lr": "--a", "optim.lr": "--b"}
    assert hints.peer_hints(["x.optim.lr=1"], [], table) == ([], ["x.optim.lr is --b here"])
    assert hints.peer_hints(["x.other.lr=1"], [], table) == ([], ["x.other.lr is --a here"])
    words = ["plain", "--unknown", "value=1"]
    assert hints.peer_hints(words, [], table) == (words, [])


def test_earlier_names_of_ours_are_taken_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--engine.lr 2e-6 --prompts 8 --processes=2 --cluster.rollout.tp 2"
    config = configure_grpo(line.split())
    assert (config.engine.lr, config.prompts_per_step, config.nproc_per_node, config.cluster.rollout.tp) == (
        2e-6,
        8,
        2,
        2,
    )
    assert "--prompts is called --prompts-per-step now\n" in capsys.readouterr().err
    assert not configure_sft(["--engine.no-gradient-checkpointing"]).engine.gradient_checkpointing
