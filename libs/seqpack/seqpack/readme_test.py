from pathlib import Path

from seqpack.batches.jagged import samples_of


def test_the_example_runs() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 10
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    plan, scored = names["plan"], names["scored"]
    assert all(tokens <= 12 for rank in plan.tokens for tokens in rank)
    assert sorted(i for rank in plan.ranks for mb in rank for i in mb) == [0, 1, 2, 3]
    assert [len(s) for s in samples_of(scored["log_probs"])] == [len(s) for s in samples_of(scored["input_ids"])]
