"""A model type that no family describes, from its proof to the run directory; what is untested has to be named."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, FalconConfig

from apps.common.cli import command_line as cli
from apps.quickstart.model import save_tiny_model
from apps.sft.main import main

ROWS = [
    {"messages": [{"role": "user", "content": f"{number}+1="}, {"role": "assistant", "content": str(number + 1)}]}
    for number in range(40)
]


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path / "cache"))
    model = save_tiny_model(tmp_path / "model", 0)
    (model / "model.safetensors").unlink()
    config = FalconConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(model)), hidden_size=32, ffn_hidden_size=48, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    where = ["--model", str(model), "--data", str(tmp_path / "rows.jsonl"), "--run-dir", str(tmp_path / "run")]
    return [*where, "--batch-size", "4", "--trainer.device", "cpu"]


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(lambda: main(argv))
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_run_has_the_certificates_that_it_stands_on(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    found = re.search(r"accept that by name \(allow_untested=(\S+);", refusal([*argv, "--max-steps", "1"], capsys))
    assert found is not None
    unseen = found[1].split(",")
    text = refusal([*argv, "--max-steps", "1", "--allow-untested", "num_kv_headss"], capsys)
    assert "--allow-untested num_kv_headss: names are npu, nodes, sampler, deepep, teacher and fields" in text
    assert f"untested here: {', '.join(unseen)}" in text
    old = "--engine.allow-untested"
    assert "--allow-untested x: names are npu, nodes" in refusal([*argv, old, "x"], capsys)
    assert not run.exists()
    main([*argv, "--max-steps", "1", "--allow-untested", f"{found[1]},nodes"])
    printed = capsys.readouterr().out
    (written,) = (run / "certificates").iterdir()
    certificate = json.loads(written.read_text())
    assert written.name == f"packed-rows-{certificate['hash']}.json"
    (line,) = (line for line in printed.splitlines() if line.startswith("proof of falcon"))
    assert line.endswith(f"; certificate {certificate['hash']}")
    assert "--allow-untested nodes was not needed" in printed
    assert json.loads((run / "config.json").read_text())["engine"]["allow_untested"] == [*unseen, "nodes"]
    assert list(json.loads((run / "untested.json").read_text())) == unseen
    page = (run / "report.html").read_text()
    assert page.index(f"accepted untested, by name: {unseen[0]} (") < page.index('<section id="proofs">')
    earlier = run / "certificates" / "packed-rows-of-before.json"
    earlier.write_text(written.read_text())
    main(["--resume", "--run-dir", str(run), "--max-steps", "2"])
    assert {written, earlier} == set((run / "certificates").iterdir())
    assert "2 certificates of what this run stands on" in (run / "report.html").read_text()
