"""The README's example runs as it stands."""

import re
from pathlib import Path

from rollout.testing_chat import tiny_tokenizer
from rollout.testing_model import tiny_model


def test_the_example():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    tokenizer = tiny_tokenizer()
    names = {"model": tiny_model(len(tokenizer)), "trained": tiny_model(len(tokenizer), seed=1), "tokenizer": tokenizer}
    exec(compile(example, "README.md", "exec"), names)  # our own README
    assert len(names["trajectories"]) == 8
    assert names["batch"].batch_size[0] == 8
    assert names["engine"].version == 1
