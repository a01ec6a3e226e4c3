"""Tokens a second of trainers: rows packed by seqpack.adapters against the trainers' own padding, on this machine.

    python libs/seqpack/benchmarks/trainer_tokens.py [SAMPLES]     (trl and datasets for TRL's trainer)

One tiny Qwen3.5, the same samples, the same optimizer; lengths are log-normal, as conversations' are. Padded batches
are the trainer's own: its sampler, and a collator of its package (transformers' for causal models, as `Trainer` alone
pads no labels; the one that SFTTrainer makes for itself). They hold as many samples as packed rows do on average.
Seconds are the process's own (CPU), so that a busy machine matters little; tokens are true ones, without padding.
"""

import sys
import time
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from seqpack.adapters import PackedBatchSampler, adapt_for_packing, packed_dataloader

MAX_TOKENS = 2048
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}


def samples_of(count: int) -> list[dict[str, torch.Tensor]]:
    """Return random tokens of lengths between 16 and 2,000, median about 180."""
    rng = torch.Generator().manual_seed(0)
    lengths = (torch.randn(count, generator=rng) * 0.9 + 5.2).exp().clamp(16, 2000).int().tolist()
    return [{"input_ids": torch.randint(1, 512, (n,), generator=rng)} for n in lengths]


class Clock(TrainerCallback):  # type: ignore[misc]
    """CPU seconds of the steps, without the first, which warms up."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the CPU time."""
        del args, kwargs
        self.seconds.append(time.process_time())


def rate(base: type[Trainer], packed: bool, samples: list[Any], arguments: dict[str, Any]) -> float:
    """Return true tokens a CPU second of one epoch."""
    loaders = []

    class Ours(base):  # type: ignore[misc]
        """The trainer with packed rows, or with its own loader over padded batches."""

        def get_train_dataloader(self) -> Any:
            """Return the loader."""
            loader = packed_dataloader(samples, MAX_TOKENS) if packed else super().get_train_dataloader()
            loaders.append(loader)
            return loader

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SIZES))
    if packed:
        adapt_for_packing(model)
    clock = Clock()
    trainer = Ours(model=model, train_dataset=samples, callbacks=[clock], **arguments)
    start = time.process_time()
    trainer.train()
    return sum(len(s["input_ids"]) for s in samples) / (clock.seconds[-1] - start)


def main(count: int) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    samples = samples_of(count)
    rows = len(PackedBatchSampler([len(s["input_ids"]) for s in samples], MAX_TOKENS))
    common = {
        "per_device_train_batch_size": max(1, round(count / rows)),
        "num_train_epochs": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
    }
    print(
        f"{count} samples, {rows} packed rows of {MAX_TOKENS}, {common['per_device_train_batch_size']} samples a batch"
    )
    print("trainer                 padded tok/s   packed tok/s   gain")
    with TemporaryDirectory() as folder:
        bases: list[tuple[str, type[Trainer], dict[str, Any]]] = [
            (
                "transformers.Trainer",
                Trainer,
                {
                    "args": TrainingArguments(folder, remove_unused_columns=False, **common),
                    "data_collator": DataCollatorForLanguageModeling(tokenizer(), mlm=False),
                },
            )
        ]
        if find_spec("trl") is not None:
            bases.append(_trl(folder, common))
        for name, base, arguments in bases:
            data: Any = samples
            if name.startswith("trl"):
                from datasets import Dataset

                data = Dataset.from_list(
                    [{key: s["input_ids"].tolist() for key in ("input_ids", "labels")} for s in samples]
                )
            before, after = (rate(base, packed, data, arguments) for packed in (False, True))
            print(f"{name:22}  {before:12,.0f}   {after:12,.0f}   {after / before:.2f}x")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word a token, by which collators pad."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")


def _trl(folder: str, common: dict[str, Any]) -> tuple[str, type[Trainer], dict[str, Any]]:
    from trl import SFTConfig, SFTTrainer

    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None, "bf16": False}
    config = SFTConfig(folder, remove_unused_columns=False, gradient_checkpointing=False, **prepared, **common)
    return "trl.SFTTrainer", SFTTrainer, {"args": config, "processing_class": tokenizer()}


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
