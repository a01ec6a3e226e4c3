"""How much is evaluated: a bounded held-out split, and an interval that training outweighs."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from apps.quickstart.tokenizer import build_tokenizer
from apps.sft.config import DataConfig, SftConfig
from apps.sft.data import load_conversations
from apps.sft.reading.sources import parse_sources
from apps.sft.reading.split import split_off
from apps.sft.step_plan import eval_interval, plan_steps, warnings_of
from engines import EngineConfig


@given(st.integers(1, 10**7), st.floats(1, 10**6), st.integers(1, 10**5))
def test_evaluations_between_steps_read_a_tenth_of_the_tokens_at_most(
    evaluated: int, tokens_a_step: float, steps: int
) -> None:
    every = eval_interval(evaluated, tokens_a_step)
    assert every >= 25
    assert (steps // every) * evaluated <= 0.1 * steps * tokens_a_step * (1 + 1e-9)
    assert every == 25 or (every - 1) * tokens_a_step < 10 * evaluated


@given(st.integers(1, 30_000))
def test_a_twentieth_is_held_out_and_512_rows_at_most(rows: int) -> None:
    split = split_off([str(i) for i in range(rows)], *DataConfig().held_out)
    assert len(split.held_out) == min(512, max(1, round(rows * 0.05)))
    assert len(split.train) + len(split.held_out) == rows


def test_the_default_interval_is_of_the_rows_that_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{i:05} 1+1=2"}}\n' for i in range(2000)))
    data = DataConfig(data=(str(path),), eval_share=0.5)
    rows = load_conversations(data, parse_sources(data.data), build_tokenizer(), None, tmp_path / "tokens")
    length = int(rows.train.lengths[0])
    assert set(rows.train.lengths) == set(rows.held_out.lengths) == {length}
    for config, every in (
        (SftConfig(data=data, batch_size=4), 2500),
        (SftConfig(data=data, batch_size=4, eval_rows=100), 250),
        (SftConfig(data=data, batch_size=4, eval_rows=1), 25),
        (SftConfig(data=data, batch_size=4, eval_every=3), 3),
    ):
        assert plan_steps(config, rows).eval_every == every


def test_a_run_that_can_hardly_learn_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{i:05} 1+1=2"}}\n' for i in range(10)))
    data = DataConfig(data=(str(path),))
    rows = load_conversations(data, parse_sources(data.data), build_tokenizer(), None, tmp_path / "tokens")
    engine = EngineConfig(device="cpu", warmup_steps=10)
    config = SftConfig(data=data, engine=engine, steps=10)
    few, slow = warnings_of(config, plan_steps(config, rows), rows)
    assert few.startswith("9 rows to train on (1 held out), and a step takes 64: a smaller --batch-size")
    assert slow.startswith("the learning rate rises over 10 steps, and there are 10: a smaller --trainer.warmup-steps")
    config = SftConfig(data=data, engine=engine, steps=11, batch_size=9)
    assert warnings_of(config, plan_steps(config, rows), rows) == []
