import re
from pathlib import Path
from typing import Any

import pytest

from chat_tools.parsing.formats import FORMATS
from chat_tools.rendering.format_detection import detect_format
from chat_tools.testing.tokenizer import tiny_tokenizer

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("family", ["chatml", "thinking", "deepseek"])
def test_the_example_of_the_readme(family: str) -> None:
    (example,) = re.findall(r"```py\n(.*?)```", README.read_text(), re.DOTALL)
    tokenizer = tiny_tokenizer(family)
    turn = FORMATS[detect_format(tokenizer)].write([("weather", {"city": "Paris"})]) + tokenizer.eos_token

    def sample(ids: list[int]) -> Any:
        assert tokenizer.decode(ids)
        return tokenizer(turn, add_special_tokens=False)["input_ids"]

    names: dict[str, Any] = {"tokenizer": tokenizer, "sample": sample}
    exec(compile(example, "README.md", "exec"), names)
    assert "Paris: 1 day of rain" in names["longer"].text
    assert not names["longer"].problems
