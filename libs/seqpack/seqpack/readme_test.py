import subprocess
import sys
from pathlib import Path
from typing import Any

from seqpack.batches.jagged import samples_of

README = Path(__file__).parent.parent / "README.md"


def example() -> str:
    return README.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]


def test_it_fits_a_screen() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 50
    assert len(example().strip().splitlines()) <= 10


def test_the_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(example(), "README.md", "exec"), names)
    plan, packed, scored = names["plan"], names["packed"], names["scored"]
    assert all(tokens <= 12 for rank in plan.tokens for tokens in rank)
    assert sorted(i for rank in plan.ranks for mb in rank for i in mb) == [0, 1, 2, 3]
    assert packed.num_tokens == sum(-(-n // 2) * 2 for n in packed.lengths)
    assert [len(s) for s in samples_of(scored)] == list(packed.lengths)


def test_the_example_needs_torch_and_numpy_alone() -> None:
    # What a plain install has: an import of anything else fails.
    blocked = ("tensordict", "transformers", "hypothesis")
    program = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n{example()}"
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
