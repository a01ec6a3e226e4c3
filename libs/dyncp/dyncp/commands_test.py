"""The commands: a plan drawn, a trace replayed, a machine measured, a mistake explained."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dyncp.__main__ import main
from dyncp.planning.simulation import markdown, replay, simulate, trace_lengths
from dyncp.planning.types import DynamicPlan


class Titles(HTMLParser):
    """Collects the tool tips and checks that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def test_plan_then_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[3000, 100, 200, 900]")
    words = ["plan", str(lengths), "--ranks", "6", "--cap", "1000", "--out", str(tmp_path / "plan.json")]
    assert main(words) == 0
    assert main(["view", str(tmp_path / "plan.json")]) == 0
    plan = DynamicPlan.from_json((tmp_path / "plan.json").read_text())
    page = Titles()
    page.feed((tmp_path / "plan.html").read_text())
    assert not page.open
    assert len(page.titles) == 1 + sum(len(step.groups) for step in plan.steps)
    assert any("lengths [3000" in title for title in page.titles)
    assert "http" not in (tmp_path / "plan.html").read_text()
    assert main(["plan", str(lengths), "--ranks", "6", "--cap", "1000"]) == 0
    assert DynamicPlan.from_json(capsys.readouterr().out.splitlines()[-1]) == plan


def test_a_mistake_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[3000]")
    assert main(["plan", str(lengths), "--ranks", "2", "--cap", "1000"]) == 2
    assert "raise max_tokens_per_rank to 1500" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "missing.json")]) == 2
    assert main(["simulate", "--cap", "10", "--trace", "nonsense"]) == 2
    assert "neither a file nor one of" in capsys.readouterr().err


def test_calibrate_writes_what_simulate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    small = {
        "model_type": "qwen3_5_text",
        "num_key_value_heads": 2,
        "linear_conv_kernel_dim": 4,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "vocab_size": 64,
        "num_attention_heads": 2,
    }
    small |= {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    }
    config.write_text(json.dumps(small | {"layer_types": ["linear_attention", "full_attention"]}))
    out = tmp_path / "cost.json"
    assert main(["calibrate", "--config", str(config), "--tokens", "64", "--out", str(out)]) == 0
    assert min(json.loads(out.read_text())["cost"][key] for key in ("linear", "pair", "delta", "fixed")) > 0
    assert main(["simulate", "--cost", str(out), "--cap", "64", "--ranks", "4", "--bandwidth", "1e9"]) == 0
    assert "| 4 | 64 |" in capsys.readouterr().out


def test_replays_are_never_slower_than_static() -> None:
    found = list(simulate([8, 16], 1024, "bimodal"))
    assert all(r.speedup >= 1 - 1e-9 for r in found)
    assert [r.ranks for r in found] == [8, 16]
    assert sum(found[0].chosen.values()) == 2
    assert "| 16 |" in markdown(found)
    alone = replay([[5, 6]], 1, 16)
    assert alone.best_static == 1


def test_traces(tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    known.write_text("[3, 500]")
    assert trace_lengths(str(known), 3, 100) == [3, 100, 3]
    for trace in ("lognormal", "bimodal", "uniform"):
        drawn = trace_lengths(trace, 200, 1000)
        assert drawn == trace_lengths(trace, 200, 1000)
        assert min(drawn) >= 1
        assert max(drawn) <= 1000
