r"""Files in the layouts of GSM8K, MATH and geometry3k, by one flag; and answers as people write them (A7)."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import math_verify
import pytest

from apps.common.data.presets import BOXED, PresetName
from apps.grpo.config import DataConfig, GrpoConfig, PluginConfig
from apps.grpo.recipes.math import make_tasks, reward
from apps.grpo.tasks.prompt_tasks import PromptTasks
from apps.quickstart.tokenizer import build_tokenizer
from rollout import Reply

ROWS: dict[PresetName, Callable[[int], dict[str, Any]]] = {
    "gsm8k": lambda i: {"question": f"{i} twice?", "answer": f"Double it.\n#### {2 * i}"},
    "math": lambda i: {"problem": f"{i} twice?", "level": "1", "solution": f"It is $\\boxed{{{2 * i}}}$."},
    "aime": lambda i: {"id": i, "problem": f"{i} twice?", "solution": "...", "answer": f"{2 * i:03}", "year": "2024"},
    "geo3k": lambda i: {"problem": f"{i} twice?", "answer": str(2 * i)},
}


def tasks(
    tmp_path: Path, preset: PresetName, rows: Iterable[Any], system_prompt: str | None = None, **data: Any
) -> PromptTasks:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = PluginConfig(preset=preset, system_prompt=system_prompt)
    return make_tasks(
        GrpoConfig(recipe="math", max_turns=1, data=DataConfig(data=path, **data), plugins=own), build_tokenizer()
    )


@pytest.mark.parametrize("preset", ROWS)
def test_a_preset_knows_columns_prompt_and_reward(preset: PresetName, tmp_path: Path) -> None:
    prompt_tasks = tasks(tmp_path, preset, [ROWS[preset](i) for i in range(1, 40)])
    for row in prompt_tasks.tasks(0, 10):
        system, user = prompt_tasks.environment(row).messages
        number = int(user["content"].split()[0])
        assert system == {"role": "system", "content": BOXED}
        reference = row.data["prompt"].reference
        for said, earned in ((f"\\boxed{{{2 * number}}}", 1.0), (f"\\boxed{{{2 * number + 1}}}", 0.0), ("?", 0.0)):
            assert prompt_tasks.reward(Reply(said, said), reference, {}, ()) == earned


def test_what_is_said_goes_before_the_preset(tmp_path: Path) -> None:
    rows = [{"ask": f"{i}?", "solution": "1"} for i in range(40)]
    prompt_tasks = tasks(tmp_path, "math", rows, system_prompt="Be brief.", prompt_column="ask")
    assert prompt_tasks.environment(prompt_tasks.held_out()[0]).messages[0]["content"] == "Be brief."


def test_rows_with_images_are_refused(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{**ROWS["geo3k"](i)} for i in range(40)]
    rows[7]["images"] = [{"bytes": "...", "path": "a.png"}]
    with pytest.raises(ValueError, match=r"a.jsonl, line 8: it holds images or other media"):
        tasks(tmp_path, "geo3k", rows)


GSM8K = "He makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"
VERDICTS = [
    # GSM8K: a number behind ####, with units, commas and decimals in answers
    (r"So she makes \boxed{18}.", GSM8K, True),
    (r"\boxed{18\text{ dollars}}", GSM8K, True),
    (r"\boxed{\$18}", GSM8K, True),
    (r"\boxed{18.00}", GSM8K, True),
    (r"\boxed{81}", GSM8K, False),
    (r"\boxed{1,200}", "#### 1200", True),
    (r"\boxed{1200}", "#### 1,200", True),
    (r"\boxed{-3}", "#### -3", True),
    (r"\boxed{3}", "#### -3", False),
    # MATH: LaTeX in a box
    (r"\boxed{\frac{1}{2}}", "0.5", True),
    (r"\boxed{\dfrac{3}{4}}", r"Thus $\boxed{\frac34}$.", True),
    (r"\boxed{1+x^2}", r"\boxed{x^2+1}", True),
    (r"\boxed{(x-1)(x+1)}", r"\boxed{x^2-1}", True),
    (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\boxed{\left( 3, \frac{\pi}{2} \right)}", True),
    (r"\boxed{(\frac{\pi}{2}, 3)}", r"\boxed{\left( 3, \frac{\pi}{2} \right)}", False),
    (r"\boxed{2\sqrt{3}}", r"\boxed{\sqrt{12}}", True),
    (r"\boxed{[-2, 7]}", r"\boxed{[-2,7]}", True),
    (r"\boxed{(-2, 7)}", r"\boxed{[-2,7]}", False),
    (r"\boxed{10\%}", r"\boxed{10}", True),
    (r"\boxed{90^\circ}", r"\boxed{90}", True),
    (r"\boxed{\frac{1}{3}}", "0.5", False),
    (r"\boxed{x^2-1}", r"\boxed{x^2+1}", False),
    # AIME: integers of three digits, with zeros in front or without
    (r"\boxed{33}", "033", True),
    (r"\boxed{033}", "33", True),
    (r"\boxed{330}", "033", False),
    (r"\boxed{204}", "204", True),
]
"""An answer, its reference in the layout of a data set, and whether a person calls it right."""


@pytest.mark.parametrize(("said", "reference", "right"), VERDICTS)
def test_answers_as_people_write_them(said: str, reference: str, right: bool) -> None:
    """Scored as a person does, and as math-verify does alone on the two texts."""
    assert reward(Reply(said, said), reference, {}, ()) == right
    gold = reference if "boxed" in reference else f"\\boxed{{{reference.rpartition('####')[2].strip()}}}"
    assert math_verify.verify(math_verify.parse(gold), math_verify.parse(said)) == right


def test_an_answer_without_a_mark_earns_nothing() -> None:
    assert reward(Reply("18", "18"), "18", {}, ()) == 0.0
