"""Bad command lines, files and model directories: each is refused in one line, with the fix, before any training."""

import json
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from apps.common.cli import command_line as cli
from apps.quickstart.model import save_tiny_model
from apps.sft.main import main


def chat(question: Any, answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


GOOD = [chat(f"{i}+1=", str(i + 1)) for i in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", 0)


def refusal(argv: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that the program ends with, after status 2 and before anything is trained."""
    with pytest.raises(SystemExit) as stop:
        cli.main(lambda: main([*argv, "--run-dir", str(folder / "run")] if "--run-dir" not in argv else argv))
    printed = capsys.readouterr()
    assert stop.value.code == 2, printed
    assert not list(folder.rglob("metrics.jsonl"))
    assert not list(folder.rglob("export"))
    return " ".join((printed.err + printed.out).split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--recipe", "finetun"], "perhaps you meant 'finetune'"),
        (["--max-steps", "0"], "--max-steps must be at least 1"),
        (["--max-steps", "many"], "--max-steps"),
        (["--logging.tracker", "comet"], "comet"),
        (["--report_to", "wandb"], "--report_to is --logging.tracker"),
        (["--step", "3"], "--max-steps"),
        (["--batch-size", "-1"], "--batch-size must be at least 1"),
        (["--keep-checkpoints", "-1"], "--keep-checkpoints must be at least 0"),
        (["--eval-share", "1.5"], "--eval-share must lie between 0 and 1"),
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--eval-data", "x.jsonl"], "--eval-data goes with --data"),
        (["--messages-column", "talk"], "--messages-column goes with --data"),
        (["--data", "x.jsonl", "--demonstrations", "64"], "--demonstrations is of the synthetic task"),
        (["--data", "x.jsonl", "--task", "calculator"], "--task is of the synthetic task"),
        (["--data", "x.jsonl", "--eval-data", "y.jsonl", "--eval-share", "0.3"], "--eval-share has no effect"),
        (["--max-tokens", "99999"], "raise that to 99999"),
        (["--data", "x.jsonl"], "recipe 'finetune' has no model of its own: add --model"),
        (["--model", "x"], "recipe 'finetune' has no data of its own: add --data"),
        (["--learning-rate", "nan"], "--learning-rate must be a finite number"),
        (["--learning-rate", "-1"], "--learning-rate must be at least 0"),
        (["--trainer.total-steps", "5"], "--trainer.total-steps has no effect"),
        (["--trainer.lr-schedule", "cosine"], "needs total_steps"),
        (["--trainer.temperature", "0.5"], "supervised training has none"),
        (["--parallel.context", "ring"], "'off', 'static:N' or 'dynamic'"),
        (["--parallel.tensor", "2"], "1 ranks are no multiple of tp"),
        (["--trainer.backend", "megatron", "--trainer.batching", "padded"], "Megatron's layers get packed tokens"),
        (["--trainer.device", "npu"], "torch_npu is not installed"),
        (["--layout.tp", "2"], "--layout.tp"),
        (
            ["--trainer.optimizer-on-host", "--trainer.moments-dtype", "bfloat16"],
            "--trainer.optimizer-on-host keeps float32 moments",
        ),
        (["--pools.nodes", "2"], "--pools.nodes 2 is not supported"),
        (["--rollout.engine", "vllm"], "a supervised run samples nothing"),
        (["--env", "TESSERA_UNSET=1"], "start the program with TESSERA_UNSET=1 in front"),
        (["--data", "a.jsonl", "a.jsonl"], "a.jsonl is named twice"),
        (["--data", "a.jsonl:2", "b.jsonl"], "b.jsonl has no weight and a.jsonl has one"),
        (["--data", "a.jsonl:2"], "a weight has no effect on a single file"),
        (["--data", "a.jsonl:0", "b.jsonl:1"], "must be a number above 0, got 0"),
        (["--data", "a.jsonl:nan", "b.jsonl:1"], "must be a number above 0, got nan"),
        (["--data", "a.jsonl:-1", "b.jsonl:1"], "must be a number above 0, got -1"),
        (["--form", "text"], "--form goes with --data"),
        (["--text-column", "t"], "--text-column goes with --data"),
        (["--data", "x.jsonl", "--form", "text", "--prompt-column", "p"], "--prompt-column has no effect with --form"),
        (["--data", "x.jsonl", "--form", "xml"], "--form"),
        (["--truncation", "middle"], "--truncation"),
        (["--data-processes", "0"], "--data-processes must be at least 1"),
        (["--epochs", "0"], "--epochs must be a number above 0"),
        (["--epochs", "inf"], "--epochs must be a number above 0"),
        (["--epochs", "2", "--max-steps", "5"], "--max-steps has no effect with --epochs"),
        (["--epochs", "2", "--plan"], "it can't count --epochs"),
        (["--eval-rows", "0"], "--eval-rows must be at least 1"),
        (["--export", "first"], "--export"),
        (["--load_best_model_at_end", "True"], "--load_best_model_at_end is --export best here"),
        (["--dataset_text_field", "t"], "--dataset_text_field is --text-column here"),
        (["--resume"], "nothing to resume"),
        (["--max_grad_norm", "1"], "--max_grad_norm is --trainer.grad-clip here"),
        (["--num_train_epochs", "3"], "--num_train_epochs is --epochs here"),
        (["--per_device_train_batch_size", "8"], "--batch-size"),
        (["--max_seq_length", "512"], "--max_seq_length is --max-tokens here"),
        (["data.train_files=x.parquet"], "--data"),
    ],
)
def test_a_bad_command_line(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refusal(argv, tmp_path, capsys)


def lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


IMAGE = {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", None, "no such data file"),
        ("a.txt", b"a,b", ".json, .csv, .parquet"),
        ("a.csv", b"a,b", "has no rows"),
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", lines(GOOD) + b"{\n", "line 41: not JSON"),
        ("a.jsonl", lines(GOOD) + b"\xff\n", "UTF-8"),
        ("a.jsonl", b"[1]\n", "line 1: expected an object"),
        ("a.parquet", b"PAR1 cut short", "not a whole Parquet file"),
        ("a.jsonl", lines([*GOOD, {"talk": []}]), "line 41: no column 'messages'"),
        ("a.jsonl", lines([*GOOD, IMAGE]), "line 41: column 'messages', message 1: a part of kind 'image'"),
        ("a.jsonl", lines([*GOOD, chat("x", None)]), "line 41: column 'messages', message 2: it has neither content"),
        ("a.jsonl", lines([*GOOD, chat("x", {"a": 1})]), "line 41: column 'messages', message 2: content must be"),
        ("a.jsonl", lines([{"prompt": "1", "completion": "2"}, {"prompt": "1"}]), "line 2: no column 'completion'"),
        ("a.jsonl", lines([{"prompt": "1", "completion": "2"}, {"completion": "2"}]), "line 2: no column 'prompt'"),
        ("a.jsonl", lines([{"prompt": "1", "completion": ""}]), "line 1: column 'completion': expected a text that is"),
        (
            "a.jsonl",
            lines([{"prompt": "1", "completion": 2}]),
            "column 'completion': expected a text that is not empty",
        ),
        ("a.jsonl", lines([{"prompt": [], "completion": "x"}]), "two texts or two lists of messages"),
        ("a.jsonl", lines([{"prompt": [], "completion": []}]), "column 'prompt': expected a list of messages, got an"),
        ("a.jsonl", lines([{"text": "a"}, {"text": ["a"]}]), "line 2: column 'text': expected a text"),
        ("a.jsonl", lines([{"text": "a", "image": "b.png"}]), "column 'image' holds media"),
        ("a.jsonl", lines([{"content": "a"}]), "Name yours with --messages-column"),
        ("a.jsonl", lines(GOOD[:1]), "too few"),
        ("a.jsonl", lines([GOOD[0]] * 40), "1 different ones can be used"),
        ("a.jsonl", lines([chat("x" * 5000, "y")] * 3), "left out 3 rows: longer than --max-tokens 4096"),
        ("a.jsonl", lines([{"messages": [{"role": "user", "content": str(i)}]} for i in range(9)]), "nothing of the"),
        ("a.jsonl", lines([chat("x" * 3000, str(i)) for i in range(9)]), "lower --max-tokens to 2048"),
    ],
)
def test_a_bad_file(
    name: str, content: bytes | None, words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    argv = ["--model", str(model), "--data", str(tmp_path / name), "--trainer.device", "cpu"]
    message = refusal(argv, tmp_path, capsys)
    assert words in message
    assert name in message or words.startswith("lower")


def test_a_parquet_row_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.Table.from_pylist([*GOOD, chat("", "")]), tmp_path / "a.parquet")
    rows = [*GOOD, {"messages": [{"role": "robot", "content": "x"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    argv = ["--model", str(model), "--data", str(tmp_path / "b.parquet"), "--trainer.device", "cpu"]
    assert "b.parquet, row 41" in refusal(argv, tmp_path, capsys)


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()

    return change


def rewritten(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def cut(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shutil.rmtree, "no model directory"),
        (without("config.json"), "no config.json"),
        (rewritten("config.json", "{"), "config.json is not JSON"),
        (rewritten("config.json", '{"model_type": "perceptron"}'), "can't be used"),
        (rewritten("config.json", '{"model_type": "falcon"}'), "accept that by name (allow_untested="),
        (rewritten("config.json", '{"model_type": "bert"}'), "it is no causal model: "),
        (without("model.safetensors"), "neither model.safetensors"),
        (cut("model.safetensors"), "model.safetensors is missing or damaged"),
        (without("tokenizer.json"), "no tokenizer.json"),
        (rewritten("tokenizer.json", "[]"), "the tokenizer in"),
        (without("chat_template.jinja"), "no chat template"),
        (rewritten("chat_template.jinja", "{% if %}"), "does not work"),
    ],
)
def test_a_bad_model_directory(
    change: Callable[[Path], None], words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    for name in ("tokenizer_config.json",) if words == "no tokenizer.json" else ():
        (own / name).unlink()
    change(own)
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD))
    argv = ["--model", str(own), "--data", str(tmp_path / "a.jsonl"), "--trainer.device", "cpu"]
    assert words in refusal(argv, tmp_path, capsys)


def test_a_finished_run_is_not_written_over_and_not_cut_short(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    argv = ["--max-steps", "2", "--batch-size", "4", "--demonstrations", "64", "--eval-rows", "4"]
    main([*argv, "--run-dir", str(folder)])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for more, words in (
        (argv, "holds a run already"),
        (["--resume", "--max-steps", "1"], "has done 2 steps already"),
        (["--resume", "--max-steps", "3", "--seed", "1"], "--seed can't change when a run is resumed"),
        (["--resume", "--max-steps", "3", "--recipe", "finetune"], "--recipe can't change when a run is resumed"),
        (["--resume", "--max-steps", "3", "--lora.alpha", "7"], "--lora.alpha can't change when a run is"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(partial(main, [*more, "--run-dir", str(folder)]))
        assert stop.value.code == 2
        assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
