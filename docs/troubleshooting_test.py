"""Each text of the page is one that the code says: a string of its source matches it, or torch says so itself."""

import ast
import datetime as dt
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apps.grpo.main import main as grpo

ROOT = Path(__file__).absolute().parents[1]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^### (.+)$", re.M)
QUOTE = re.compile(r"^```text\n(.*?)\n```", re.M | re.S)
SOURCES = {
    "The model is not on this machine": "libs/engines/engines/weights/hub.py",
    "A run is there already": "apps/common/run/run_dir.py",
    "A resumed run is refused": "apps/common/cli/command_line.py",
    "A column is missing": "apps/common/data/prompts.py",
    "Rows that can't be used": "apps/sft/reading/tokenized.py",
    "Prompts are too long": "apps/grpo",
    "The tokenizer has no chat template": "apps/common/data/tokenizer.py",
    "The arguments of a reward": "apps/common/plugins.py",
    "A step trained nothing": "libs/runlog/runlog/notices.py",
    "Every answer is cut off": "apps/common/run/idle_reason.py",
    "The run stops by itself": "apps/common/run/idle_steps.py",
    "The loss is not finite": "libs/engines/engines/nonfinite.py",
    "No GPU is seen": "libs/engines/engines/loading.py",
    "A rank died": "libs/engines/engines/launch.py",
    "A rank says nothing": "libs/engines/engines/heartbeats.py",
    "A sequence does not fit": "libs/runplan/runplan/layout/batches.py",
    "Ranks and parallel sizes": "libs/runplan/runplan/layout/grid.py",
    "No space left": "apps/common/run/full_disk.py",
    "vLLM is not found": "libs/rollout/rollout/vllm/client/process.py",
    "vLLM does not start": "libs/rollout/rollout/vllm/client/process.py",
    "The sampler has another distribution": "libs/schedules/schedules/sampling/first_batch.py",
    "Tools are never called": "apps/grpo",
    "A model can't be used": "apps/common/data/model_files.py",
}
"""The file or folder of each section's texts."""
RAISED = "A flag of TRL or verl"
OF_TORCH = {"Out of memory", "The port is in use", "A collective timed out"}


def quotes() -> dict[str, list[str]]:
    parts = SECTION.split(PAGE)
    return {title: QUOTE.findall(text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def texts(source: Path) -> Iterator[list[str]]:
    """Yield the strings of a file or folder, each as the pieces between what an f-string fills in."""
    files = [source] if source.is_file() else [path for path in source.rglob("*.py") if "_test" not in path.name]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield [str(value.value) for value in node.values if isinstance(value, ast.Constant)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield [node.value]


def is_written(quote: str, pieces: list[str]) -> bool:
    """Whether the pieces stand in the quote in their order; the quote may end before they do. At least 15 letters."""
    at = found = 0
    for piece in pieces:
        place = quote.find(piece, at)
        if place < 0:
            cut = next((n for n in range(len(piece) - 1, 0, -1) if quote[at:].endswith(piece[:n])), 0)
            return bool(cut) and found + cut >= 15
        at, found = place + len(piece), found + len(piece)
    return found >= 15


def is_said(quote: str, source: Path) -> bool:
    """Whether a string of the source is the quote."""
    return any(is_written(quote, pieces) for pieces in texts(source))


def test_there_are_twenty_and_each_has_a_source() -> None:
    assert set(quotes()) == SOURCES.keys() | OF_TORCH | {RAISED}
    assert len(quotes()) >= 20
    assert all(quotes().values())


@pytest.mark.parametrize("title", sorted(SOURCES))
def test_the_code_says_so(title: str) -> None:
    for quote in quotes()[title]:
        assert is_said(quote, ROOT / SOURCES[title]), quote


def test_a_text_that_nothing_says_is_found() -> None:
    assert not is_said("step 1 trains nothing at all", ROOT / SOURCES["A step trained nothing"])
    assert not is_said("the run is there already", ROOT / SOURCES["A run is there already"])


def test_torch_says_so_of_a_port_in_use() -> None:
    (quote,) = quotes()["The port is in use"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(dist.DistNetworkError) as error:
            dist.TCPStore("127.0.0.1", port, 1, True, dt.timedelta(seconds=3))
    assert re.sub(r"port: \d+", "port: 0", quote) in re.sub(r"port: \d+", "port: 0", str(error.value))


def test_torch_has_the_error_of_a_full_device() -> None:
    (quote,) = quotes()["Out of memory"]
    assert quote.startswith(f"torch.{torch.OutOfMemoryError.__name__}: ")


def test_a_flag_of_trl_is_answered_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grpo(["--num_generations", "8", "--per_device_train_batch_size", "4"])
    (quote,) = quotes()[RAISED]
    assert f"error: {quote}." in capsys.readouterr().err


def test_flags_of_the_page_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Of grpo, or of sft and torchrun."""
    with pytest.raises(SystemExit):
        grpo(["--help-all"])
    known = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    others = {"--messages-column", "--completion-column", "--text-column", "--bad-rows", "--master-port"}
    commands = {"--help", "--help-all", "--help-reward"}
    named = {word for text in re.findall(r"`([^`\n]+)`", PAGE) for word in re.findall(r"--[\w.-]+", text)}
    assert named - known - others - commands == set()
