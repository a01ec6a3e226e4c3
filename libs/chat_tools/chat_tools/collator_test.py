"""The collator and the weighted loss, held to transformers' own Trainer and to float64 by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from chat_tools.collator import ConversationCollator, WeightedLoss, weighted_loss
from chat_tools.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer("chatml", marks=False)
USER, BYE = {"role": "user", "content": "hi"}, {"role": "user", "content": "bye"}
HELLO, THOUGHT = ({"role": "assistant", "content": text} for text in ("hello", "<think>hm</think>see you"))
ROWS: list[dict[str, Any]] = [
    {"messages": [USER, HELLO, BYE, THOUGHT], "weights": [None, 0.5, None, 2]},
    {"messages": [USER, HELLO], "tools": "[]"},
]
END = "<|im_end|>"


def texts(batch: dict[str, torch.Tensor], row: int) -> dict[float, str]:
    weights = batch.get("loss_weights", (batch["labels"] != -100).float())[row]
    assert ((weights != 0) == (batch["labels"][row] != -100)).all()
    return {w: TOKENIZER.decode(batch["input_ids"][row][weights == w]) for w in set(weights.tolist()) - {0.0}}


def test_rows_are_rendered_weighed_and_padded() -> None:
    batch = ConversationCollator(TOKENIZER, reasoning=0.25)(ROWS)
    assert texts(batch, 0) == {0.5: f"hello{END}<think>hm</think>", 2.0: f"see you{END}"}
    assert texts(batch, 1) == {1.0: f"hello{END}"}
    for row, ids, count in zip(ROWS, batch["input_ids"], batch["attention_mask"].sum(1), strict=True):
        assert ids[:count].tolist() == TOKENIZER.apply_chat_template(row["messages"])["input_ids"]
    last = ConversationCollator(TOKENIZER, train="last", reasoning=0)([{"messages": ROWS[0]["messages"]}])
    assert texts(last, 0) == {1.0: f"see you{END}"}
    assert "loss_weights" not in last
    count = int((batch["labels"][1] != -100).sum())
    ramp = [0.25 * (at + 1) for at in range(count)]
    by_token = ConversationCollator(TOKENIZER)([{**ROWS[1], "weights": [None, ramp]}])
    assert by_token["loss_weights"][0][by_token["labels"][0] != -100].tolist() == ramp
    with pytest.raises(ValueError, match=f"message 1 has 1 weights for {count} trained tokens"):
        ConversationCollator(TOKENIZER)([{**ROWS[1], "weights": [None, [1]]}])
    glm = tiny_tokenizer("glm", marks=False)
    ended = ConversationCollator(glm, end_of_turn="<|user|>")([ROWS[1]])
    assert ended["labels"][0, -1] == glm.convert_tokens_to_ids("<|user|>")


def test_rows_without_a_proven_or_trained_token_are_refused() -> None:
    with pytest.raises(ValueError, match="row 0 of the batch: none of its first 3 tokens is trained"):
        ConversationCollator(TOKENIZER, max_length=3)([ROWS[1]])
    silent = tiny_tokenizer("chatml", template="{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(ValueError, match="its mask is not proven: message 1: the template leaves out"):
        ConversationCollator(silent)([{"messages": [USER, call]}])


class Weighted(WeightedLoss, Trainer):  # type: ignore[misc]
    """transformers' Trainer with weights."""


def trained(tmp_path: Path, kind: type[Trainer], collator: Any, accumulate: int) -> list[float]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), num_key_value_heads=1, **sizes))
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4 // accumulate,
        gradient_accumulation_steps=accumulate,
        remove_unused_columns=False,
        logging_steps=1,
        learning_rate=0.1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = kind(model, arguments, data_collator=collator, train_dataset=ROWS * 4)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_transformers_trainer_takes_both(tmp_path: Path) -> None:
    rows = ConversationCollator(TOKENIZER, weights_column="none")
    plain = trained(tmp_path, Trainer, rows, 1)
    assert trained(tmp_path, Weighted, rows, 1) == plain

    def ones(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        made = rows(batch)
        return {**made, "loss_weights": torch.ones(made["labels"].shape)}

    assert trained(tmp_path, Weighted, ones, 1) == pytest.approx(plain, abs=1e-3)
    weighted = trained(tmp_path, Weighted, ConversationCollator(TOKENIZER), 1)
    assert weighted[0] != pytest.approx(plain[0], rel=0.05)
    assert trained(tmp_path, Weighted, ConversationCollator(TOKENIZER), 2) == pytest.approx(weighted, abs=1e-3)


def test_the_loss_is_the_weighted_sum_over_the_number_of_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[-100, 1, 2, -100, 3], [-100, -100, 4, 6, -100]])
    weights = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    want, count = 0.0, 0
    for row in range(2):
        for at in range(1, 5):
            if (label := int(labels[row, at])) >= 0:
                scores = logits[row, at - 1]
                want += float(weights[row, at] * (scores.exp().sum().log() - scores[label]))
                count += 1
    assert float(weighted_loss(logits, labels, weights)) == pytest.approx(want / count, rel=1e-6)
    assert float(weighted_loss(logits, labels, weights, 10)) == pytest.approx(want / 10, rel=1e-6)
