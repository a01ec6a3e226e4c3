"""Command lines in the style of other trainers: each word gets its flag here, and every flag named exists."""

from collections.abc import Mapping

import pytest

from apps.common.cli import peer_flags as hints
from apps.common.cli.flags import flag, leaves
from apps.grpo.config import OWNED as GRPO_OWNED
from apps.grpo.config import GrpoConfig
from apps.grpo.main import configure as configure_grpo
from apps.sft.config import OWNED as SFT_OWNED
from apps.sft.config import SftConfig
from apps.sft.main import configure as configure_sft

LINES = {
    "--learning_rate 1e-6 --num_generations 8": ["--engine.lr", "--group-size"],
    "--num-generations=16 --max-completion-length 512": ["--group-size", "--sampling.max-new-tokens"],
    "--max-response-length 1024": ["--sampling.max-new-tokens"],
    "--per-device-train-batch-size 4 --gradient_accumulation_steps 8": [
        "--prompts-per-step",
        "--engine.max-tokens-per-rank",
    ],
    "--cluster.rollout.tp 2 --prompts 8 --processes 2": ["--rollout.tp", "--prompts-per-step", "--nproc-per-node"],
    "--cluster.environment A=1 --keep-groups 1 --control none": ["--env", "--log-groups", "--control-run"],
    "--model_name_or_path dir --dataset_name file.jsonl": ["--model", "--data"],
    "--output_dir out --save_steps 50 --save_total_limit 2": ["--run-dir", "--save-every", "--keep-checkpoints"],
    "--beta 0.04": ["--objective.kl-coef", "reference policy"],
    "--use_peft --lora_r 16 --lora_alpha 32": ["--engine.lora.rank", "--engine.lora.alpha"],
    "--epsilon 0.2 --epsilon_high 0.28 --loss_type dapo": [
        "--objective.clip-low",
        "--objective.clip-high",
        "--objective.aggregation",
    ],
    "--bf16 --gradient_checkpointing": ["--engine.dtype", "--engine.gradient-checkpointing"],
    "--use_vllm --vllm_mode colocate": ["native engine"],
    "--lr_scheduler_type cosine --warmup_ratio 0.1": ["--engine.lr-schedule", "--engine.warmup-steps"],
    "actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.optim.lr=1e-6": ["--group-size", "--engine.lr"],
    "data.train_files=x.parquet data.train_batch_size=64": ["--data", "--prompts-per-step"],
    "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True": ["--advantage", "reference policy"],
    "actor_rollout_ref.model.path=dir trainer.n_gpus_per_node=8 trainer.total_epochs=3": [
        "--model",
        "--nproc-per-node",
        "--steps",
    ],
    "--temperature 0.7 --top_p 0.9": ["--sampling.temperature", "whole vocabulary"],
    "+actor_rollout_ref.actor.clip_ratio_high=0.28": ["--objective.clip-high"],
    "+actor_rollout_ref.actor.megatron.max_seqlen_per_dp_cp_rank=4096": ["--engine.max-tokens-per-rank"],
    "--seq-length 4096": ["--engine.max-tokens-per-rank"],
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
    assert all(name in printed for name in ("--batch-size", "--max-tokens", "--engine.batching"))


@pytest.mark.parametrize(
    ("kind", "table", "owned"), [(GrpoConfig, hints.GRPO, GRPO_OWNED), (SftConfig, hints.SFT, SFT_OWNED)]
)
def test_every_hint_names_a_flag_that_exists_and_none_hides_one_of_ours(
    kind: type[GrpoConfig] | type[SftConfig], table: Mapping[str, str], owned: Mapping[str, str]
) -> None:
    known = {flag(path) for path, _, _ in leaves(kind()) if path not in owned}
    for name, hint in table.items():
        for word in hint.replace("(", " ").replace(",", " ").split():
            if word.startswith("--"):
                assert word in known, (name, hint)
    for own in known:
        assert not hints.peer_hints([own], sorted(known), table)
        assert not hints.peer_hints([own.replace("-", "_").replace("__", "--", 1)], sorted(known), table)


def test_the_longest_known_ending_counts() -> None:
    table = {"lr": "--a", "optim.lr": "--b"}
    assert hints.peer_hints(["x.optim.lr=1"], [], table) == ["x.optim.lr is --b here"]
    assert hints.peer_hints(["x.other.lr=1"], [], table) == ["x.other.lr is --a here"]
    assert hints.peer_hints(["plain", "--unknown", "value=1"], [], table) == []
