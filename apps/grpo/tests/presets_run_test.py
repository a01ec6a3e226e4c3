r"""Whole runs of `--preset`: from a file as the data set has it to episodes, rewards and new weights.

The models were taught to end with one of a few answers in a box, each written unlike the file's own (1000 for 1,000,
0.5 for \frac{1}{2}), so that some of a group are right and texts that are compared do not say which.
"""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from apps.common.data.answers import final_answer
from apps.common.data.presets import BOXED
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.main import configure, run
from apps.quickstart.model import save_tiny_model
from apps.quickstart.vision import save_vision_model

SAME = {
    "gsm8k": {"1,000": "1000", "12": "12.0", "7": "7"},
    "math": {r"\frac{1}{2}": "0.5", r"3\sqrt{2}": r"\sqrt{18}", "x^2+1": "1+x^2"},
    "aime": {"033": "33", "204": "204.0", "070": "70"},
    "geo3k": {r"\frac{7}{2}": "3.5", r"2 \sqrt { 2 }": r"\sqrt{8}", "20": "20"},
}
"""Of each layout, what its files say, and how a model says the same."""
TAUGHT = 150
"""Steps after which it does."""


def row(layout: str, number: int, answer: str) -> dict[str, Any]:
    """A row with the columns of gsm8k, hendrycks_math, aime_2024 and geometry3k as the hub has them."""
    if layout == "gsm8k":
        worked = f"Twice {number} is <<{number}*2={2 * number}>>{2 * number} eggs.\nSo many are left.\n#### {answer}"
        return {"question": f"Ann has {number} eggs. How many are left?", "answer": worked}
    if layout == "math":
        worked = f"We see that $x = {number}$ fails, so it is $\\boxed{{{answer}}}$."
        return {"problem": f"Find $x_{{{number}}}$.", "level": "Level 2", "type": "Algebra", "solution": worked}
    if layout == "aime":
        known = {"id": number, "solution": f"It is {int(answer)}.", "url": "...", "year": "2024"}
        return {**known, "problem": f"Find the least integer, number {number}.", "answer": answer}
    png = io.BytesIO()
    Image.new("RGB", (48, 40), (5 * number % 256, 40, 90)).save(png, format="PNG")
    images = [{"bytes": png.getvalue(), "path": None}]
    return {"images": images, "problem": f"<image>Find x, number {number}.", "answer": answer}


def asked(row: dict[str, Any]) -> str:
    question: str = row["question" if "question" in row else "problem"]
    return question.replace("<image>", "")


def rows_of(layout: str, count: int = 24) -> list[dict[str, Any]]:
    """Rows, their answers in turn."""
    answers = list(SAME[layout])
    return [row(layout, number, answers[number % len(answers)]) for number in range(count)]


def taught(layout: str, path: Path) -> Path:
    """A model that ends its answers as `SAME` says them, each about as often, whatever is asked in this layout."""
    sees = layout == "geo3k"
    (save_vision_model if sees else save_tiny_model)(path, 0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(path)
    end, unseen = tokenizer.eos_token_id, -100
    said = [[*tokenizer.encode(f"It is \\boxed{{{text}}}"), end] for text in SAME[layout].values()]
    longest = max(map(len, said))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for number in range(TAUGHT):
        messages = [{"role": "system", "content": BOXED}, {"role": "user", "content": asked(row(layout, number, "0"))}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([[*prompt, *answer, *[end] * (longest - len(answer))] for answer in said])
        labels = torch.tensor(
            [[*[unseen] * len(prompt), *answer, *[unseen] * (longest - len(answer))] for answer in said]
        )
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("layout", SAME)
def test_a_run_of_a_preset(layout: str, tmp_path: Path) -> None:
    """Episodes are held against the file's answers, their rewards are math-verify's, and every weight moves."""
    rows = rows_of(layout)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    model = taught(layout, tmp_path / "model")
    words = f"--preset {layout} --model {model} --data {tmp_path / 'train.parquet'} --run-dir {tmp_path / 'run'}"
    words += " --max-steps 3 --prompts-per-step 4 --group-size 6 --eval-prompts 3 --eval-share 0.2"
    words += " --eval-every 3 --logging.groups 4"
    words += " --sampling.max-new-tokens 32 --max-prompt-tokens 224 --max-episode-tokens 256"
    words += " --trainer.device cpu --learning-rate 1e-4"
    run(configure([*words.split(), *(["--trainer.vision", "trained"] if layout == "geo3k" else [])]))

    answers = list(SAME[layout])
    answer_to = {asked(row): answers[number % len(answers)] for number, row in enumerate(rows)}
    episodes = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    trained = [e for e in episodes if e["split"] == "training"]
    assert len(trained) >= 3 * 6
    seen: list[tuple[str, bool]] = []
    for episode in trained:
        system, user, reply = (message["content"] for message in episode["messages"])
        question = user if isinstance(user, str) else "".join(part.get("text", "") for part in user)
        expected = answer_to[question]
        assert system == BOXED
        assert final_answer(episode["expected"]) in (expected, None)
        assert expected in episode["expected"]
        boxed = reply.rpartition("\\boxed{")[2].removesuffix("}")
        if boxed in SAME[layout].values():  # it was not always learned to the letter
            right = boxed == SAME[layout][expected]
            assert episode["reward"] == float(right), (reply, expected)
            seen.append((expected, right))
        assert layout != "geo3k" or "<|image_pad|>" in episode["tokens"]
    assert len(seen) > 0.7 * len(trained)
    assert {expected for expected, right in seen if right} == set(answers)
    assert False in {right for _, right in seen}
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert all(0.1 < row["reward"] < 0.9 and row["log_prob_difference_max"] < 1e-3 for row in metrics[1:])
    assert_trained(tmp_path / "run")
