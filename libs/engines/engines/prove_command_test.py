"""Words of `python -m engines prove`, and a proof at true width that it makes here."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import SmolLM3Config

from engines import EngineConfig, LoraConfig
from engines.__main__ import main
from engines.proofs.device import device_path
from engines.proofs.run_proofs import certificates_of
from engines.prove_command import parse_engine_options


def test_words_give_the_settings_that_they_name() -> None:
    words = (
        "--engine.expert-parallel 8 --engine.optimizer-on-host --engine.reshard-after-forward false "
        "--engine.device cpu --engine.lora.rank 4 --engine.lora.targets q_proj v_proj --engine.betas 0.9 0.95 "
        "--engine.learning-rates a=1 b=2"
    )
    assert parse_engine_options(words.split()) == EngineConfig(
        expert_parallel=8, optimizer_on_host=True, reshard_after_forward=False, device="cpu", betas=(0.9, 0.95),
        lora=LoraConfig(rank=4, targets=("q_proj", "v_proj")), learning_rates=("a=1", "b=2"), prove="always",
    )  # fmt: skip
    assert parse_engine_options(()) == EngineConfig(prove="always")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("8", "prove takes --engine.NAME VALUE, got '8'"),
        ("--tensor-parallel 2", "got '--tensor-parallel'"),
        (
            "--engine.tensor-paralel 2",
            r"--engine\.tensor_paralel is no setting of .*, did you mean tensor_parallel",
        ),
        ("--engine.prove full", r"prove makes certificates anew: leave --engine\.prove out"),
        ("--engine.lora 2", r"--engine\.lora is no setting of EngineConfig"),
        ("--engine.lora.size 2", r"--engine\.lora\.size is no setting of LoraConfig"),
        ("--engine.expert-parallel two", "expert_parallel must be int, got 'two'"),
    ],
)
def test_other_words_are_refused(words: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_engine_options(words.split())


def test_a_proof_at_true_width_is_printed_and_kept_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SmolLM3Config(
        vocab_size=320, hidden_size=96, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, sliding_window=300, use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"] * 3,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path / "kept"))
    words = ["engines", "prove", str(tmp_path / "model"), "--prove", "full", "--engine.device", "cpu"]
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["width"], printed["subject"], printed["place"]["device"]) == ("true", "device", "cpu")
    assert {299, 300, 301, 601, 700} <= {*printed["lengths"]}
    assert printed["log_probs"] < 1e-4
    assert printed["not_exercised"] == []
    (kept,) = (tmp_path / "kept").glob("smollm3-*-device-*.json")
    assert json.loads(kept.read_text()) == printed
    full = EngineConfig(device="cpu", prove="full")
    assert [one.hash for one in certificates_of(full, config, 1, 600) if one.width == "true"] == [printed["hash"]]
    assert device_path(full, config, torch.device("cpu"), 701) != device_path(full, config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "prove takes a model directory, or --all"),
        ("DIR --all", "--all and --published prove configs in small"),
        ("--all --prove full", "--all and --published prove configs in small"),
        ("DIR --longest 9", "--longest is the longest row of a proof at true width: add --prove full"),
        ("--all llamma", "transformers has no type llamma among its causal and image-text models"),
        ("--all llama --docs DIR", "model is not the folder of docs/certificates.md: name it by --docs"),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    words: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    SmolLM3Config().save_pretrained(tmp_path / "model")
    given = ["engines", "prove", *(str(tmp_path / "model") if word == "DIR" else word for word in words.split())]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit):
        main()
    assert text in " ".join(capsys.readouterr().err.split())


def test_other_commands_take_none_of_these_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["engines", "families", "--prove", "full"])
    with pytest.raises(SystemExit):
        main()
    assert "families takes no --prove" in capsys.readouterr().err


def test_warmed_kernels_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SmolLM3Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    words = ["engines", "warm-kernels", str(tmp_path), "--engine.device", "cpu", "--engine.max-tokens-per-rank", "999"]
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 0
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"tokens", "layers", "first_s", "second_s", "graphs", "later_graphs"}
    assert 700 <= told["tokens"] <= 999
    assert told["layers"] < 6
    assert told["later_graphs"] == 0
    monkeypatch.setattr(sys, "argv", [*words, "--ranks", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "warm-kernels takes a model directory" in capsys.readouterr().err
