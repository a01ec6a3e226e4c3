"""Packed rows in stock transformers models and trainers equal the sequences one by one, losses and weights."""

import copy
import pickle
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from seqpack.adapters import IGNORED, PackedCollator, adapt_for_packing, packed_dataloader, packed_forward
from seqpack.adapters.huggingface import MIXERS
from seqpack.adapters.loader import PackedDataLoader
from seqpack.batches.batch import make_batch
from seqpack.batches.packed import pack_sequences
from seqpack.testing import assert_packing_isolated

pytestmark = pytest.mark.skipif(
    find_spec("fla") is not None,
    reason="transformers runs flash-linear-attention where it is installed, also in host memory: nothing to compare to",
)

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "sliding_window": 5,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 16}
ROW = 384  # tokens of a packed row
MORE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": EXPERTS,
    "qwen3_next": SHARED,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": SHARED,
}


def tiny(model_type: str = "qwen3_5_text", **changes: Any) -> Any:
    """A random model with weights so large that a leak would show."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **MORE.get(model_type, {}), **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    return model


@pytest.mark.parametrize("model_type", sorted(MIXERS))
def test_each_known_model_keeps_sequences_apart(model_type: str) -> None:
    model = tiny(model_type)
    adapt_for_packing(model)
    assert_packing_isolated(model, packed_forward=packed_forward, lengths=(9, 1, 70, 6))


def test_each_sequence_has_the_rotary_table_of_its_own_length() -> None:
    """Where a stock call takes one table for all: both sides of 4,096 in one row, all of a small one, a pickled one."""
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "factor": 4.0}
    long |= {"long_factor": [2.0, 4.0, 6.0, 8.0], "original_max_position_embeddings": 4096}
    model = tiny("llama", rope_parameters=long, num_hidden_layers=1)
    plain = copy.deepcopy(model)
    adaptation = adapt_for_packing(model)
    assert "model.rotary_emb: class" in adaptation.changes
    rows = [torch.randint(2, 48, (length,)) for length in (100, 4200, 1, 4096)]
    with torch.no_grad():
        packed = packed_forward(model, pack_sequences(make_batch([{"input_ids": ids} for ids in rows])))
        alone = torch.cat([plain(ids[None]).logits[0] for ids in rows])
        padded = {"input_ids": torch.stack([rows[1]] * 2), "logits_to_keep": 1}
        assert torch.equal(model(**padded).logits, plain(**padded).logits)
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)
    adaptation.undo()
    assert type(model.model.rotary_emb) is type(plain.model.rotary_emb)
    small = tiny("llama", rope_parameters={**long, "original_max_position_embeddings": 16})
    adapt_for_packing(small)
    lengths = (9, 17, 1, 16, 70)
    assert_packing_isolated(pickle.loads(pickle.dumps(small)), packed_forward=packed_forward, lengths=lengths)


def test_without_it_the_model_leaks_or_refuses() -> None:
    with pytest.raises(AssertionError, match="LEAKS"):
        assert_packing_isolated(tiny(), lengths=(9, 1, 70, 6))
    with pytest.raises(ValueError, match="flash-linear-attention"):
        assert_packing_isolated(tiny(), packed_forward=packed_forward, lengths=(9, 1, 70, 6))


def test_a_call_without_boundaries_is_the_stock_models_and_undo_restores() -> None:
    model = tiny()
    plain = copy.deepcopy(model)
    adaptation = adapt_for_packing(model)
    assert adapt_for_packing(model) == adaptation
    ids = torch.randint(2, 48, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    assert torch.equal(model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
    adaptation.undo()
    adaptation.undo()
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert [set(vars(module)) for module in model.modules()] == [set(vars(module)) for module in plain.modules()]
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no config"):
        adapt_for_packing(torch.nn.Linear(2, 2))
    mamba = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="model type 'mamba' is not known"):
        adapt_for_packing(mamba)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope type 'dynamic'"):
        adapt_for_packing(tiny("llama", rope_parameters=dynamic))
    model = tiny("qwen3")
    adapt_for_packing(model)
    row = PackedCollator()([{"input_ids": [2, 3]}, {"input_ids": [4, 5, 6]}])
    model(**row)
    for wrong, message in [
        ({"input_ids": row["input_ids"].repeat(2, 1)}, "one row"),
        ({"position_ids": None}, "position_ids that begin again"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "no padding"),
        ({"use_cache": True}, "no cache"),
        ({"past_key_values": DynamicCache()}, "no cache"),
        ({"cache": DynamicCache()}, "no cache"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4])}, "ends at 4, the row has 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**{**row, **wrong})
    layer = model.model.layers[1]
    inner = layer.forward
    layer.forward = lambda *args, packed_context=None, **kwargs: inner(*args, **kwargs)
    with pytest.raises(RuntimeError, match="1 of 2 layers"):
        model(**row)


Run = tuple[list[float], Any, float, type[Any]]
"""Losses, model, tokens a second and the collator's class."""


def training_samples(prompts: bool, count: int = 48) -> list[dict[str, list[int]]]:
    """Lengths as conversations have them, a few long among many short; with `prompts` their first third is no label."""
    rng = torch.Generator().manual_seed(2)
    lengths = (torch.randn(count, generator=rng) * 0.9 + 3.6).exp().clamp(2, ROW).int().tolist()
    samples = []
    for length in lengths:
        ids = torch.randint(2, 48, (length,), generator=rng)
        labels = torch.where(torch.arange(length) < length // 3, IGNORED, ids)
        samples.append({"input_ids": ids.tolist(), **({"labels": labels.tolist()} if prompts else {})})
    return samples


def trained(base: type[Any], pack: bool, samples: Any, **arguments: Any) -> Run:
    """Losses and model of a few optimizer steps on the same samples a step, and its tokens a second.

    Packed, or each sequence a row of its own that the trainer's own collator pads. Tokens are true ones, seconds the
    processor's.
    """

    class OverRows(base):  # type: ignore[misc]
        def get_train_dataloader(self) -> PackedDataLoader:
            args = self.args
            loader = packed_dataloader(
                self.train_dataset, ROW, rank=args.process_index, world_size=args.world_size, seed=args.seed
            )
            if not pack:
                loader.collate_fn = self.data_collator
            return loader

    model = tiny()
    if pack:
        adapt_for_packing(model)
    trainer = OverRows(model=model, train_dataset=samples, **arguments)
    begun = time.process_time()
    trainer.train()
    tokens = sum(len(sample["input_ids"]) for sample in samples) * trainer.args.num_train_epochs
    rate = tokens / (time.process_time() - begun)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, model, rate, type(trainer.data_collator)


OPTIONS = {
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "optim": "sgd",  # weights add gradients up; Adam would bring the rounding of tiny ones to the size of all others
    "learning_rate": 1.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "remove_unused_columns": False,
}


def assert_same_training(packed: Run, padded: Run) -> None:
    """Losses of every step, and weights that moved to the same place."""
    (losses, model, *_), (want_losses, want, *_) = packed, padded
    assert len(losses) >= 6
    assert losses == pytest.approx(want_losses, rel=1e-5)
    start = tiny().state_dict()
    moved = {name: (value - start[name]).norm() for name, value in want.state_dict().items()}
    assert min(moved.values()) > 1e-3
    for name, value in model.state_dict().items():
        assert (value - want.state_dict()[name]).norm() < 1e-3 * moved[name], name


def tell_gain(capsys: pytest.CaptureFixture[str], trainer: str, packed: Run, padded: Run) -> None:
    """Print what packing gained on these short rows; `benchmarks/trainer_tokens.py` has lengths of conversations."""
    rate, (*_, plain, collator) = packed[2], padded
    with capsys.disabled():
        gain = f"{rate:,.0f} tokens a second packed, {plain:,.0f} padded by {collator.__name__}"
        print(f"\n{trainer}: {gain}: {rate / plain:.2f} times")


@pytest.mark.parametrize("prompts", [False, True])
def test_transformers_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str], prompts: bool) -> None:
    """Beside the collators that transformers has for causal models: all tokens are labels, or labels are padded too.

    `Trainer`'s own choice, DataCollatorWithPadding, makes no labels and does not pad them.
    """
    collator = (
        DataCollatorForSeq2Seq(tokenizer()) if prompts else DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    )
    samples = training_samples(prompts)
    arguments = {"args": TrainingArguments(output_dir=str(tmp_path), **OPTIONS), "data_collator": collator}
    runs = [trained(Trainer, pack, samples, **arguments) for pack in (True, False)]
    assert_same_training(*runs)
    tell_gain(capsys, "transformers' Trainer", *runs)


def test_trl_sft_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the collator that SFTTrainer makes where it is given none."""
    import pyarrow as pa
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    samples = training_samples(prompts=True)
    columns = {key: [sample[key] for sample in samples] for key in samples[0]}
    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    config = SFTConfig(output_dir=str(tmp_path), gradient_checkpointing=True, bf16=False, **prepared, **OPTIONS)
    arguments = {"args": config, "processing_class": tokenizer()}
    dataset = Dataset(pa.table(columns), fingerprint="rows")
    runs = [trained(SFTTrainer, pack, dataset, **arguments) for pack in (True, False)]
    assert runs[1][-1].__module__.startswith("trl.")
    assert_same_training(*runs)
    tell_gain(capsys, "TRL's SFTTrainer", *runs)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token: SFTTrainer asks for a tokenizer, which prepared rows do not need."""
    words = {f"w{i}": i for i in range(48)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1", unk_token="w0")
