"""The README's example runs as it stands."""

import re
from pathlib import Path
from types import SimpleNamespace

from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of


def test_the_example() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    tokenizer = tiny_tokenizer()
    trained = tiny_model(len(tokenizer), seed=1)
    trainer = SimpleNamespace(export_weights=lambda: pieces_of(trained.named_parameters()))
    names = {"model": tiny_model(len(tokenizer)), "trainer": trainer, "tokenizer": tokenizer}
    exec(compile(example, "README.md", "exec"), names)  # our own README
    assert len(names["episodes"]) == 8
    assert names["batch"].batch_size[0] == 8
    assert names["engine"].version == 1
