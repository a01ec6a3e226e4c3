"""TRL's side of `against_trl`: its SFTTrainer over rows that are tokenised already, in the order that they have."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import SequentialSampler
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from apps.sft.benchmarks.setting import VARIANTS, Curve, Stopwatch, Task


class _InOrder(SFTTrainer):  # type: ignore[misc]
    """A sampler of rows in their order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        del args, kwargs
        return SequentialSampler(self.train_dataset)


class _Clock(TrainerCallback):  # type: ignore[misc]
    def __init__(self, device: str) -> None:
        self.device = device
        self.watch: Stopwatch | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self.watch = Stopwatch(self.device)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        assert self.watch is not None
        self.watch.mark()


def train(task: Task, variant: str, folder: Path) -> Curve:
    """Train a fresh copy of the model on all rows once."""
    options = VARIANTS[variant]
    packs = "packing" in options or "padding_free" in options
    device = task.engine.device
    rows = [
        {"input_ids": row["input_ids"].tolist(), "completion_mask": row["loss_mask"].int().tolist()}
        for step in task.steps
        for row in step
    ]
    attention = _attention() if packs and device == "cuda" else "sdpa"
    loaded = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, attn_implementation=attention)
    clock = _Clock(device)
    trainer = _InOrder(
        loaded,
        _config(task, options, folder),
        train_dataset=Dataset.from_list(rows),
        processing_class=task.tokenizer,
        peft_config=_adapter(task),
    )
    trainer.add_callback(clock)
    trainer.train()
    assert clock.watch is not None
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    tokens = task.tokens
    if "packing" in options:
        tokens = [len(row["input_ids"]) for row in trainer.train_dataset][: len(losses)]
    return Curve(losses, tokens, clock.watch.seconds, clock.watch.peak_gib())


def _config(task: Task, options: dict[str, Any], folder: Path) -> SFTConfig:
    engine = task.engine
    own_options: dict[str, Any] = {
        "per_device_train_batch_size": len(task.steps[0]),
        "max_length": None,
        "use_cpu": engine.device == "cpu",
        "bf16": engine.device != "cpu",
        "dataloader_pin_memory": engine.device != "cpu",
        **options,
    }
    return SFTConfig(
        output_dir=str(folder),
        num_train_epochs=1,
        learning_rate=engine.lr,
        lr_scheduler_type="constant",
        adam_beta1=engine.betas[0],
        adam_beta2=engine.betas[1],
        adam_epsilon=engine.eps,
        weight_decay=engine.weight_decay,
        max_grad_norm=1.0,
        completion_only_loss=True,
        logging_steps=1,
        logging_strategy="steps",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **own_options,
    )


def _adapter(task: Task) -> Any:
    """Return adapters of the same rank and scale on the same layers; each side draws its own initial values."""
    lora = task.engine.lora
    if not lora.rank:
        return None
    return LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _attention() -> str:
    """Register attention over sequences of several lengths by torch, packed rows apart as in flash attention; return
    its name."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *unused: Any,
        scaling: float | None = None,
        cu_seq_lens_q: torch.Tensor,
        max_length_q: int,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        del module, unused, others
        q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
        edges, longest = cu_seq_lens_q, int(max_length_q)
        out = varlen_attn(q, k, v, edges, edges, longest, longest, scale=scaling, window_size=(-1, 0))
        assert isinstance(out, torch.Tensor)  # no auxiliary outputs were asked for
        return out[None], None

    AttentionInterface.register("varlen", attend)
    AttentionMaskInterface.register("varlen", lambda *args, **kwargs: None)  # noqa: ARG005
    return "varlen"
