"""The README's example trains as it stands, in processes of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_dense_model

README = Path(__file__).parents[1] / "README.md"


def test_the_example_trains_fully_asynchronously(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_dense_model(len(tokenizer)).save_pretrained(tmp_path / "model")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    steps = [eval(line) for line in done.stdout.splitlines() if line.startswith("{'step'")]
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    assert [row["weights/version"] for row in steps] == [1.0, 2.0, 3.0, 4.0]
    assert all(row["loss"] == row["loss"] for row in steps)
    assert all(0 < row["weights/check/abs"] < 1e-3 for row in steps[1:]), "each sync is checked at the next step"
