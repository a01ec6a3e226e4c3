import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from seqpack.__main__ import main
from seqpack.drawing.view import render
from seqpack.planning.balancing import BalancePlan, balance
from seqpack.planning.micro_batches import MicroBatchPlan, plan_micro_batches
from seqpack.planning.mixes import bimodal
from seqpack.planning.packing import PackPlan, pack

LENGTHS = bimodal(300, 16384).tolist()


def drawings(page: str) -> list[ET.Element]:
    parts = ["<svg" + part.split("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]
    return [ET.fromstring(part) for part in parts]


def tips(page: str) -> list[str]:
    return [title.text or "" for svg in drawings(page) for title in svg.iter("title")]


def test_every_sequence_of_a_packing_is_drawn_once() -> None:
    page = render(pack(LENGTHS, 16384).to_json())
    drawn = [tip.split("\nsequence ")[1] for tip in tips(page) if "\nsequence " in tip]
    assert sorted(drawn) == sorted(f"{i}: {n:,}" for i, n in enumerate(LENGTHS))
    assert "lower bound" in page


def test_every_micro_batch_of_a_plan_is_drawn_on_its_rank() -> None:
    plan = plan_micro_batches(LENGTHS, 32768, 6, cost=lambda s: 3e4 * s + s * s)
    page = render(plan.to_json())
    words = tips(page)
    for rank, batches in enumerate(plan.tokens):
        for number, tokens in enumerate(batches):
            assert any(
                tip.startswith(f"rank {rank}, micro-batch {number}: ") and f"{tokens:,} tokens" in tip for tip in words
            )
    assert f"{plan.hash:x}" in page
    assert f"{plan.max_over_mean:.4f}" in page


def test_nothing_is_drawn_outside_and_bars_are_as_long_as_loads() -> None:
    plan = balance([3.0, 1.0, 2.0, 2.0], 2)
    (svg,) = drawings(render(plan.to_json()))
    bars = [float(r.get("height", "0")) for r in svg.iter("rect")]
    assert bars[0] == pytest.approx(bars[1], rel=1e-3)
    for name in ("pack", "micro"):
        text = (pack(LENGTHS, 16384) if name == "pack" else plan_micro_batches(LENGTHS, 16384, 4)).to_json()
        for svg in drawings(render(text)):
            _, _, width, height = map(float, svg.get("viewBox", "").split())
            for shape in svg.iter("rect"):
                x, y, w, h = (float(shape.get(k, "0")) for k in ("x", "y", "width", "height"))
                assert x >= -0.01
                assert x + w <= width + 0.01
                assert y >= -0.01
                assert y + h <= height + 0.01


@pytest.mark.parametrize("text", [pack(LENGTHS, 16384).to_json(), plan_micro_batches(LENGTHS, 16384, 4).to_json()])
def test_the_page_is_self_contained(text: str) -> None:
    page = render(text)
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "src=" not in page


def test_large_plans_say_what_is_left_out() -> None:
    page = render(pack([60] * 21_000, 100).to_json())
    assert "Only the 4,000 emptiest of 21,000 are drawn." in page
    assert "Sequences are not told apart" in render(pack([1] * 20_001, 100).to_json())
    assert len(page) < 3_000_000


@pytest.mark.parametrize("plan", [pack([], 8), plan_micro_batches([], 8, 2), balance([], 2), balance([0.0], 1)])
def test_empty_plans(plan: PackPlan | MicroBatchPlan | BalancePlan) -> None:
    assert "<h1>" in render(plan.to_json())


@pytest.mark.parametrize("text", ["nothing", "[]", "{}", '{"kind": "Other"}'])
def test_what_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a plan|cannot draw a plan of kind"):
        render(text)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, plan = tmp_path / "lengths.json", tmp_path / "plan.json"
    lengths.write_text(json.dumps(LENGTHS))
    assert main(["plan", str(lengths), "--max-tokens", "16384", "--out", str(plan)]) == 0
    assert plan.read_text() == pack(LENGTHS, 16384).to_json()
    assert main(["view", str(plan)]) == 0
    assert (tmp_path / "plan.html").read_text() == render(plan.read_text())
    assert main(["plan", str(lengths), "--max-tokens", "16384", "--ranks", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "MicroBatchPlan"
    assert main(["plan", str(lengths), "--max-tokens", "100"]) == 2
    assert "does not fit in 100" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "missing.json")]) == 2


def test_as_a_module(tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "out.html"
    plan.write_text(pack([5, 3], 8).to_json())
    paths = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-m", "seqpack", "view", str(plan), "--out", str(page)]
    done = subprocess.run(command, env=paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Packing plan" in page.read_text()
