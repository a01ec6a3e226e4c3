"""Presets of well-known data sets, so that one flag names the columns, the prompt and the answer.

| preset | made for files of | question | answer |
| --- | --- | --- | --- |
| gsm8k | openai/gsm8k | `question` | `answer`: a solution, its number after #### |
| math | MATH and its subsets | `problem` | `solution`, its answer in a box |
| aime | AIME 2024, 2025 | `problem` | `answer`, an integer |
| geo3k | hiyouga/geometry3k | `problem` | `answer`; `images` stand where the question says <image> |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PresetName = Literal["gsm8k", "math", "aime", "geo3k"]
BOXED = "Think step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Preset:
    """The columns and the system prompt of a data set."""

    prompt_column: str
    answer_column: str
    system_prompt: str = BOXED
    repository: str = ""
    """Where `apps.grpo.commands.prepare_data` finds it."""
    subset: str | None = None
    """Its configuration; "all" where it has several that belong together."""


PRESETS: Mapping[PresetName, Preset] = {
    "gsm8k": Preset("question", "answer", repository="openai/gsm8k", subset="main"),
    "math": Preset("problem", "solution", repository="EleutherAI/hendrycks_math", subset="all"),
    "aime": Preset("problem", "answer", repository="HuggingFaceH4/aime_2024"),
    "geo3k": Preset("problem", "answer", repository="hiyouga/geometry3k"),
}
