"""What cannot work is refused with status 2 before a token is sampled: flags, files, models, lengths, runs.

Each row of a table is a name, what is given, and what the message must name (patterns, all of them).
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Never, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from apps.common.cli.command_line import main
from apps.grpo.main import configure, run
from apps.quickstart.model import save_tiny_model
from rollout import NativeEngine


class Refuse(Protocol):
    """Runs a command line that must be refused; what it printed, in one line."""

    def __call__(self, *argv: str, run_dir: Path | None = None) -> str: ...


FLAGS = [
    ("--max-steps 0", ["--max-steps must be at least 1"]),
    ("--max-steps many", ["--max-steps", "many"]),
    ("--nproc-per-node 0", ["--nproc-per-node must be at least 1"]),
    ("--threads 0", ["--threads must be at least 1"]),
    ("--epochs 0", ["--epochs must be at least 1"]),
    ("--save-every 0", ["--save-every must be at least 1"]),
    ("--keep-checkpoints -1", ["--keep-checkpoints"]),
    ("--logging.groups -1", ["--logging.groups"]),
    ("--logging.failures -1", ["--logging.failures"]),
    ("--logging.tracker comet", ["--logging.tracker", "comet", "trackio"]),
    ("--environment Maze", ["--environment 'Maze'", "FILE.py:NAME or package.module:name"]),
    ("--environment nowhere.py:Maze", ["there is no file", "nowhere.py", "--environment"]),
    ("--environment apps.grpo.nowhere:Maze", ["no module", "apps.grpo.nowhere", "--environment"]),
    ("--environment apps.grpo.testing.plugins:Digit", ["did you mean Digits"]),
    ("--environment apps.grpo.testing.plugins:Halved", ["no async method step, finish, close"]),
    ("--environment apps.grpo.testing.plugins:Closed", ["open", "raised OSError: the door is locked"]),
    ("--environment apps.grpo.testing.plugins:Shut", [r"open\(\)", "raised OSError: the door is locked"]),
    ("--environment apps.grpo.testing.plugins:FailsToClose", [r"close\(\) of the", "raised OSError: the door is"]),
    ("--environment apps.grpo.testing.plugins:Strange", ["gave list: give an Observation"]),
    ("--environment apps.grpo.testing.plugins:Digits --tasks nowhere.jsonl", ["no such data file"]),
    ("--environment apps.grpo.testing.plugins:Digits --reward apps.grpo.testing.plugins:by_end", ["--reward goes"]),
    ("--environment apps.grpo.testing.plugins:Digits --tool apps.grpo.testing.plugins:echo", ["--tool goes with"]),
    ("--environment apps.grpo.testing.plugins:Digits --data x.jsonl", ["--data has no effect with --environment"]),
    ("--environment apps.grpo.testing.plugins:Digits --environment-shares Digits=1", ["--environment-shares"]),
    ("--environment apps.grpo.testing.plugins:Digits --eval-share 0.3", ["--eval-share has no effect without --tasks"]),
    ("--recipe quickstart --environment apps.grpo.testing.plugins:Digits", ["--environment goes with"]),
    ("--recipe environment", ["add --environment FILE.py:NAME"]),
    ("--tasks x.jsonl", ["--tasks goes with --environment"]),
    ("--environment-column kind", ["--environment-column goes with --environment"]),
    ("--system-prompt Hello", ["--system-prompt goes with"]),
    ("--template-options x=1", ["--template-options goes with"]),
    ("--template-options x", ["--template-options", "NAME=VALUE"]),
    ("--environment apps.grpo.testing.plugins:Digits --template-options x=1", ["--template-options x has no effect"]),
    ("--reward apps.grpo.testing.plugins:by_end", ["--reward goes"]),
    ("--tool apps.grpo.testing.plugins:echo", ["--tool goes with"]),
    ("--preset gsm9k", ["--preset", "gsm9k", "gsm8k"]),
    ("--preset gsm8k", ["add --model DIR"]),
    ("--mini-batches 1000", ["--mini-batches 1000", "--group-size"]),
    (
        "--rollout.engine vllm --rollout.weights-on-device",
        ["--rollout.no-weights-on-device", "a CUDA device"],
    ),
    ("--rollout.engine vllm --rollout.sleep", ["--rollout.no-sleep", "on a CPU"]),
    ("--group-size 1", ["group size of at least 2"]),
    ("--group-size 1 --advantage dr_grpo", ["group size of at least 2"]),
    ("--advantage best", ["--advantage", "best", "dr_grpo"]),
    ("--control-run sideways", ["--control-run", "shuffled-advantages"]),
    ("--recipe quikstart", ["quikstart", "perhaps you meant 'quickstart'"]),
    ("--stesp 3", ["--stesp", "--max-steps"]),
    ("--digits 0", ["--digits"]),
    ("--digits 1", ["raise digits"]),
    ("--eval-prompts 0", ["--eval-prompts"]),
    ("--max-turns 2", ["--max-turns", "no tool"]),
    ("--prompt-column ask", ["--prompt-column goes with --recipe math"]),
    ("--eval-data x.jsonl", ["--eval-data goes with --data"]),
    ("--data x.jsonl", ["add --model DIR"]),
    ("--max-prompt-tokens 9", ["--max-prompt-tokens goes with --recipe math"]),
    ("--max-episode-tokens 10 --sampling.max-new-tokens 4", ["a prompt has", "--max-episode-tokens 10"]),
    ("--sampling.max-new-tokens 64", ["--sampling.max-new-tokens 64", "--max-episode-tokens 64"]),
    ("--sampling.max-new-tokens 0", ["--sampling.max-new-tokens must be at least 1"]),
    ("--sampling.temperature 0", ["--sampling.temperature must be above 0"]),
    ("--sampling.temperature nan", ["--sampling.temperature must be"]),
    ("--sampling.top-p 0.9", ["--sampling.top-p", "whole vocabulary"]),
    ("--sampling.top-k 5", ["--sampling.top-k", "whole vocabulary"]),
    ("--sampling.greedy", ["--sampling.greedy", "must differ"]),
    ("--sampling.seed 1", ["--seed"]),
    ("--sampling.stop-token-ids 5 99999", ["--sampling.stop-token-ids 99999", "vocabulary of 277"]),
    ("--learning-rate -1", ["--learning-rate"]),
    ("--learning-rate nan", ["--learning-rate"]),
    ("--trainer.grad-clip 0", ["--trainer.grad-clip"]),
    ("--trainer.lr-schedule constant --trainer.min-lr-ratio 0.5", ["--trainer.min-lr-ratio has no effect"]),
    ("--recipe quickstart-tool --trainer.lr-schedule cosine", ["needs total_steps"]),
    ("--parallel.context sideways", ["--parallel.context must be"]),
    ("--parallel.context static:2", ["1 ranks are no multiple", "cp", "use 2 ranks"]),
    ("--parallel.context dynamic --trainer.batching padded", ["batching='packed'"]),
    ("--trainer.max-tokens-per-rank 32", ["64 tokens", "raise --trainer.max-tokens-per-rank"]),
    ("--parallel.tensor 2", ["1 ranks are no multiple of tp", "use 2 ranks"]),
    ("--trainer.backend megatron --trainer.batching padded", ["padded", "batching='packed'"]),
    ("--trainer.device npu", ["npu"]),
    ("--trainer.model dir", ["--model"]),
    ("--trainer.temperature 0.5", ["--sampling.temperature"]),
    ("--objective.clip-high 0.3", ["no effect with one update a batch"]),
    ("--epochs 2 --objective.clip-low 1.5", ["--objective.clip-low"]),
    ("--epochs 2 --objective.clip-high nan", ["--objective.clip-high"]),
    ("--epochs 2 --objective.policy-loss cispo --objective.dual-clip 3", ["--objective.dual-clip"]),
    ("--objective.policy-loss cipso", ["cipso"]),
    ("--objective.aggregation constant", ["max_tokens"]),
    ("--objective.max-tokens 5", ["--objective.max-tokens"]),
    ("--objective.entropy-coef -1", ["--objective.entropy-coef"]),
    ("--objective.off-policy-cap 3", ["--objective.off-policy-cap"]),
    ("--warm-start.steps -1", ["--warm-start.steps"]),
    ("--warm-start.lr nan", ["--warm-start.lr"]),
    ("--warm-start.until-accuracy 2", ["--warm-start.until-accuracy"]),
    ("--warm-start.steps 0 --warm-start.batch-size 8", ["--warm-start.batch-size has no effect"]),
]  # fmt: skip
if not torch.cuda.is_available():
    FLAGS.append(("--trainer.device cuda", ["cuda"]))

GOOD = '{"question": "1+1=", "answer": "2"}\n'


def ask(question: Any) -> bytes:
    return (GOOD + json.dumps({"question": question, "answer": "2"}) + "\n").encode()


def answer(value: Any) -> bytes:
    return (GOOD + json.dumps({"question": "2+2=", "answer": value}) + "\n").encode()


USER = {"role": "user", "content": "x"}
LONG = b"".join(json.dumps({"question": "x" * 300 + str(i), "answer": "1"}).encode() + b"\n" for i in range(4))
FILES = [
    ("an ending of another kind", "a.txt", GOOD.encode(), [r"a\.txt", r"\.csv, \.parquet"]),
    ("empty", "a.jsonl", b"", [r"a\.jsonl", "no rows"]),
    ("blank lines", "a.jsonl", b"\n \n", [r"a\.jsonl", "no rows"]),
    ("another encoding", "a.jsonl", GOOD.encode() + b'{"question": "caf\xe9"}\n', [r"a\.jsonl, line 2", "UTF-8"]),
    ("cut short", "a.jsonl", (GOOD + GOOD[:20]).encode(), [r"a\.jsonl, line 2", "not JSON"]),
    ("a list", "a.jsonl", (GOOD + "[1]\n").encode(), [r"a\.jsonl, line 2", "expected an object"]),
    ("another column", "a.jsonl", b'{"prompt": "x", "answer": "1"}\n', ["line 1", "no column 'question'", "prompt"]),
    ("no answer in line 2", "a.jsonl", (GOOD + '{"question": "x"}\n').encode(), ["line 2", "no column 'answer'"]),
    ("an empty question", "a.jsonl", ask(" "), ["line 2", "'question'"]),
    ("a number as question", "a.jsonl", ask(3), ["line 2", "'question'", "int"]),
    ("no messages", "a.jsonl", ask([]), ["line 2", "'question'"]),
    ("a role that is none", "a.jsonl", ask([{"role": "usr", "content": "x"}]), ["line 2", "a message needs a role"]),
    ("no content", "a.jsonl", ask([{"role": "user"}]), ["line 2", "needs its content"]),
    ("an image", "a.jsonl", ask([{"role": "user", "content": [{"type": "image"}]}]), ["line 2", "only text"]),
    ("tool calls as text", "a.jsonl", ask([{**USER, "tool_calls": "f()"}]), ["line 2", "tool_calls"]),
    ("already answered", "a.jsonl", ask([USER, {"role": "assistant", "content": "y"}]), ["line 2", "nothing is left"]),
    ("a late system", "a.jsonl", ask([USER, {"role": "system", "content": "y"}]), ["line 2", "template refuses"]),
    ("no reference", "a.jsonl", answer(None), ["line 2", "'answer'"]),
    ("an empty reference", "a.jsonl", answer(" "), ["line 2", "'answer'"]),
    ("yes as reference", "a.jsonl", answer(True), ["line 2", "'answer'", "bool"]),
    ("NaN as reference", "a.jsonl", (GOOD + '{"question": "x", "answer": NaN}\n').encode(), ["line 2", "'answer'"]),
    ("one row", "a.jsonl", GOOD.encode(), ["too few"]),
    ("long prompts", "a.jsonl", LONG, ["too few", "--max-prompt-tokens 64"]),
    ("no Parquet", "a.parquet", b"PAR1 and nonsense PAR1", [r"a\.parquet", "Parquet"]),
]  # fmt: skip

NORM, WEIGHTS = "model.norm.weight", "model.safetensors"
MODELS = [
    ("no config", lambda d: (d / "config.json").unlink(), ["no config.json"]),
    ("config cut short", lambda d: cut(d / "config.json"), [r"config\.json is not JSON"]),
    ("config a list", lambda d: (d / "config.json").write_text("[1]"), [r"config\.json", "expected an object"]),
    ("config of no model", lambda d: (d / "config.json").write_text("{}"), ["model_type"]),
    ("config of an unknown model", lambda d: edit(d, model_type="nope"), ["nope"]),
    ("config of a family that a proof refuses", lambda d: bert(d), ["bert", "it is no causal model"]),
    ("config of another family than the weights", lambda d: gpt2(d), ["transformer.wte.weight"]),
    ("a size that is text", lambda d: edit(d, hidden_size="wide"), ["hidden_size"]),
    ("layers that do not add up", lambda d: edit(d, num_hidden_layers=2), ["num_hidden_layers"]),
    ("a small vocabulary", lambda d: edit(d, vocab_size=276), ["embed_tokens", r"\(277, 64\)", r"\(276, 64\)"]),
    ("a model that can't be built", lambda d: edit(d, vocab_size=100), ["can't be built"]),
    ("no tokenizer", lambda d: [p.unlink() for p in d.glob("tokenizer*")], ["no tokenizer.json"]),
    ("tokenizer cut short", lambda d: cut(d / "tokenizer.json"), [r"tokenizer\.json is not JSON"]),
    ("tokenizer of nothing", lambda d: (d / "tokenizer.json").write_text("{}"), ["tokenizer", "can't be read"]),
    ("its settings cut short", lambda d: cut(d / "tokenizer_config.json"), [r"tokenizer_config\.json is not JSON"]),
    ("no template", lambda d: (d / "chat_template.jinja").unlink(), ["no chat template"]),
    ("a broken template", lambda d: (d / "chat_template.jinja").write_text("{% if"), ["template", "does not work"]),
    ("no weights", lambda d: (d / "model.safetensors").unlink(), ["neither model.safetensors nor"]),
    ("weights cut short", lambda d: cut(d / "model.safetensors"), ["safetensors is missing or damaged"]),
    ("weights of no bytes", lambda d: (d / "model.safetensors").write_bytes(b""), ["missing or damaged"]),
    ("weights of nothing", lambda d: save_file({}, d / "model.safetensors"), ["lacks model"]),
    ("a shard is missing", lambda d: index(d, {"x": "shard.safetensors"}), [r"shard\.safetensors is missing"]),
    ("an index of nothing", lambda d: index(d, {}), ["lacks model"]),
    ("an index without a map", lambda d: index(d, None), ["no index of weights"]),
    ("a tensor is missing", lambda d: tensors(d, {NORM: None}), [f"lacks {NORM}"]),
    ("a tensor of another shape", lambda d: tensors(d, {NORM: torch.ones(32)}), [NORM, r"\(32,\)", r"\(64,\)"]),
    ("an adapter beside it", lambda d: (d / "adapter_config.json").write_text("{}"), ["holds an adapter"]),
    ("another model's tokenizer", lambda d: grow(d), ["has a token 277", "vocabulary of 277"]),
]  # fmt: skip


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = directory / "model.safetensors"
    merged = {name: value for name, value in (load_file(path) | changes).items() if value is not None}
    save_file(merged, path, metadata={"format": "pt"})


def grow(directory: Path) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": 300, "content": "<new>"})
    path.write_text(json.dumps(content))


def bert(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertLMHeadModel"]}))


def gpt2(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))


def index(directory: Path, names: Mapping[str, str] | None) -> None:
    (directory / WEIGHTS).unlink()
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refuse:
    """Run a command line that must be refused; what it printed, in one line."""

    def sampled(*args: Any, **kwargs: Any) -> Never:
        raise AssertionError("a token was sampled")

    monkeypatch.setattr(NativeEngine, "generate", sampled)

    def refuse(*argv: str, run_dir: Path | None = None) -> str:
        folder = run_dir or tmp_path / "run"
        with pytest.raises(SystemExit) as stop:
            main(lambda: run(configure([*argv, "--run-dir", str(folder)])))
        assert stop.value.code == 2
        assert run_dir or not list(folder.rglob("metrics.jsonl"))
        printed = capsys.readouterr()
        return " ".join(re.sub("[\u2500-\u257f]", " ", printed.err + printed.out).split())

    return refuse


def on_a_file(model: Path, path: Path) -> tuple[str, ...]:
    words = f"--model {model} --data {path} --trainer.device cpu --max-episode-tokens 128 --max-prompt-tokens 64"
    return (*words.split(), "--sampling.max-new-tokens", "4")


def assert_names(printed: str, patterns: list[str]) -> None:
    for pattern in patterns:
        assert re.search(pattern, printed), printed


@pytest.mark.parametrize(("line", "patterns"), FLAGS, ids=[line for line, _ in FLAGS])
def test_flags(refused: Refuse, line: str, patterns: list[str]) -> None:
    if "--rollout.engine vllm" in line:
        pytest.importorskip("rollout.vllm")
    assert_names(refused(*line.split()), patterns)


@pytest.mark.parametrize(("name", "content", "patterns"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_files(refused: Refuse, model: Path, tmp_path: Path, name: str, content: bytes, patterns: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    printed = refused(*on_a_file(model, tmp_path / name))
    assert_names(printed, patterns)
    assert name in printed


@pytest.mark.parametrize(("damage", "patterns"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS])
def test_models(
    refused: Refuse, model: Path, tmp_path: Path, damage: Callable[[Path], object], patterns: list[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    damage(broken)
    (tmp_path / "a.jsonl").write_text("".join(GOOD.replace("1+1", f"1+{i}") for i in range(40)))
    printed = refused(*on_a_file(broken, tmp_path / "a.jsonl"))
    assert_names(printed, patterns)
    assert str(tmp_path) in printed


def test_files_and_models_that_are_not_there(refused: Refuse, model: Path, tmp_path: Path) -> None:
    good = tmp_path / "train.jsonl"
    good.write_text("".join(GOOD.replace("1+1", f"1+{i}") for i in range(40)))
    assert_names(
        refused(*on_a_file(model, tmp_path / "trian.jsonl")), [r"no such data file.*did you mean train\.jsonl"]
    )
    (tmp_path / "empty").mkdir()
    assert_names(refused(*on_a_file(model, tmp_path / "empty")), ["has no data files"])
    assert_names(refused(*on_a_file(tmp_path / "nowhere", good)), ["no model directory"])
    assert_names(refused(*on_a_file(good, good)), ["no model directory"])
    assert_names(refused(*on_a_file(model, good), "--eval-data", "nowhere.jsonl"), ["no such data file: nowhere"])
    assert_names(refused(*on_a_file(model, good), "--digits", "3"), ["--digits"])
    assert_names(refused(*on_a_file(model, good), "--max-turns", "2"), ["--max-turns"])
    own = "apps.grpo.testing.plugins"
    for name, text in (("reward", "by_nobody"), ("reward", "by_others"), ("tool", "NUMBER"), ("tool", "nothing")):
        words = (f"--{name}", f"{own}:{text}", *(("--max-turns", "2") if name == "tool" else ()))
        assert_names(refused(*on_a_file(model, good), *words), [f"--{name}", own])
    assert_names(refused(*on_a_file(model, good), "--tool", f"{own}:echo"), ["raise --max-turns"])
    assert_names(refused(*on_a_file(model, good), "--preset", "math"), ["no column 'problem'"])
    assert_names(refused(*on_a_file(model, good), "--warm-start.steps", "2"), ["no demonstrations"])
    assert_names(refused(*on_a_file(model, good), "--eval-data", str(good), "--eval-share", "0.2"), ["--eval-share"])
    assert_names(refused("--recipe", "quickstart", *on_a_file(model, good)), ["--data goes with --recipe math"])


def test_a_truncated_parquet_file(refused: Refuse, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": ["1+1="] * 50, "answer": ["2"] * 50}), path)
    cut(path)
    assert_names(refused(*on_a_file(model, path)), [r"a\.parquet", "Parquet"])


@pytest.mark.parametrize(
    ("line", "patterns"),
    [
        ("--max-episode-tokens 4096", ["--max-episode-tokens 4096", "2048 positions"]),
        ("--max-prompt-tokens 128", ["--max-prompt-tokens 128 must be below --max-episode-tokens 128"]),
        ("--sampling.max-new-tokens 128", ["--sampling.max-new-tokens 128 must be below"]),
        ("--trainer.max-tokens-per-rank 100", ["128 tokens", "raise --trainer.max-tokens-per-rank"]),
    ],
)
def test_lengths_that_cannot_fit(refused: Refuse, model: Path, tmp_path: Path, line: str, patterns: list[str]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(GOOD.replace("1+1", f"1+{i}") for i in range(40)))
    assert_names(refused(*on_a_file(model, tmp_path / "a.jsonl"), *line.split()), patterns)


def test_runs_that_cannot_be_gone_on_with(refused: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert_names(refused(run_dir=tmp_path / "file"), ["--run-dir", "can't be made"])
    assert_names(refused("--resume", run_dir=tmp_path / "empty"), ["nothing to resume"])
    (tmp_path / "broken").mkdir()
    config = tmp_path / "broken" / "config.json"
    config.write_text("{")
    assert_names(refused("--resume", run_dir=tmp_path / "broken"), [r"broken.config\.json doesn't describe a run"])
    config.write_text('{"steppes": 3}')
    assert_names(refused("--resume", run_dir=tmp_path / "broken"), ["steppes"])
    config.write_text('{"recipe": "quickstart", "steps": 3}')
    for line in ("--model x", "--recipe math", "--warm-start.steps 3", "--lora.rank 4"):
        assert_names(refused("--resume", *line.split(), run_dir=tmp_path / "broken"), ["can't change", line.split()[0]])
    config.write_text('{"recipe": "quickstart", "steps": 3, "cluster": {"schedule": {"mode": "fully_async"}}}')
    for line in ("--prompts-per-step 3", "--group-size 3"):
        assert_names(refused("--resume", *line.split(), run_dir=tmp_path / "broken"), ["can't change", line.split()[0]])
    assert_names(refused(run_dir=tmp_path / "broken"), ["holds a run already"])
