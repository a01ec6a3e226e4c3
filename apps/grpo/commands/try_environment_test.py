"""A few episodes before training: everything of each is shown, a failed one with its error, and nothing is written."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from apps.common.cli.command_line import main as run_command
from apps.grpo.commands.play_episodes import try_episodes, visible, warnings_of
from apps.grpo.commands.try_environment import main
from apps.grpo.main import configure
from apps.quickstart.model import save_tiny_model
from apps.quickstart.tokenizer import build_tokenizer
from rollout import Episode, RolloutEngine, Score
from rollout.environments.environment import End
from rollout.testing.scripted import ScriptedEngine

EXAMPLES = "apps.grpo.testing.plugins"
SMALL = ["--trainer.device", "cpu", "--sampling.max-new-tokens", "6"]
TOKENIZER = build_tokenizer()
CALL = "<tool_call>\n<function=echo>\n<parameter=text>\nhello\n</parameter>\n</function>\n</tool_call>"


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def shown(
    argv: list[str], count: int = 1, terminal: bool = False, engine: RolloutEngine | None = None
) -> tuple[list[Episode], str]:
    out = io.StringIO()
    console = Console(
        file=out, width=100, force_terminal=terminal, highlight=False, color_system="standard" if terminal else None
    )
    return try_episodes(configure([*SMALL, *argv]), count, console=console, engine=engine), out.getvalue()


def test_an_episode_is_shown_with_its_prompt_tokens_and_reward_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    episodes, text = shown(["--environment", f"{EXAMPLES}:Digits"], count=2)
    assert text.count("task Digits/Digits-") == 2
    assert "say " in text
    assert "6 of them trained" in text
    for episode in episodes:
        assert episode.score is not None
        assert f"reward: {episode.reward:g}, digits {episode.score.reward_components['digits']:g}, cut 1" in text
    assert "2 episodes, 0 failed, mean reward" in text
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_sees_images_is_tried() -> None:
    episodes, text = shown(["--recipe", "quickstart-image"])
    assert episodes[0].error is None
    assert "1 episodes, 0 failed" in text


def test_all_that_refuses_an_attempt_is_told_at_once(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", 0)
    argv = ["--model", str(model), "--data", "nowhere.jsonl", "--max-episode-tokens", "9999"]
    argv += ["--sampling.stop-token-ids", "999999", "--trainer.vision", "frozen"]
    texts = ["--max-episode-tokens 9999 is over the 2048", "999999 is no token", "nowhere.jsonl", "leave vision at"]
    with pytest.raises(ValueError, match="9999") as refused:
        try_episodes(configure([*SMALL, *argv]), 1)
    assert not [text for text in texts if text not in str(refused.value)], str(refused.value)


def test_tokens_are_coloured_by_what_is_trained() -> None:
    _, text = shown(["--environment", f"{EXAMPLES}:Digits"], terminal=True)
    dim, trained = "\x1b[2m", "\x1b[1;32m"
    assert text.index(dim) < text.index("say") < text.index(trained)


def test_a_failed_episode_is_shown_with_its_error_and_ends_the_program_with_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: main(["--environment", f"{EXAMPLES}:Broken", "--episodes=1", *SMALL]))
    assert stop.value.code == 1
    printed = capsys.readouterr().out
    assert "failed: the maze collapsed\u241b[2J" in printed
    assert "1 episodes, 1 failed, no reward" in printed


def test_a_file_a_tool_and_a_reward_of_ones_own(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", 0)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1), "more": i} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--model", str(model), "--data", str(tmp_path / "a.jsonl"), "--tool", f"{EXAMPLES}:echo"]
    argv += ["--reward", f"{EXAMPLES}:by_everything", "--max-turns", "3", "--max-episode-tokens", "1024"]
    argv += ["--max-prompt-tokens", "512", "--system-prompt", "Use the tool.", "--sampling.max-new-tokens", "64"]
    engine = ScriptedEngine(lambda prompt, turn: encode((CALL, "done")[turn] + "<|im_end|>"))
    (episode,), text = shown(argv, engine=engine)
    assert "Use the tool." in text
    assert "call: echo {'text': 'hello'}" in text
    assert "result: hello" in text
    assert "expected: " in text
    assert "row 3, results 1" in text
    assert episode.metrics["tool/echo/calls"] == 1


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--episodes", "none"], "--episodes takes a number"),
        (["--episodes"], "--episodes takes a number"),
        (["--environment", f"{EXAMPLES}:Closed"], "open() of the environment of 'Closed/"),
        (["--environment", f"{EXAMPLES}:Strange"], "give an Observation"),
        (["--recipe", "quickstart-vllm"], "--rollout.engine vllm is for runs"),
    ],
)
def test_what_cannot_be_played_is_refused(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: main([*argv, *SMALL]))
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_a_terminal_obeys_nothing_that_a_model_says() -> None:
    assert visible("a\x1b[31m\x07\x7f\x9b\u202e\n\tb") == "a\u241b[31m\u2407\u2421\ufffd\ufffd\n\tb"
    assert visible(str(Path("plain"))) == "plain"


def test_episodes_that_would_teach_nothing_are_told() -> None:
    def episode(reward: float, end: End) -> Episode:
        return Episode("t/0/0", "t", 0, (), Score(reward), end)

    cut, same = "every response was cut off by a limit", "every reward is the same"
    for episodes, told in (
        ([episode(0, "length"), episode(1, "max_turns")], [cut]),
        ([episode(0, "length"), episode(0, "length")], [cut, same]),
        ([episode(0, "done"), episode(0, "done")], [same]),
        ([episode(0, "done"), episode(1, "length")], []),
        ([episode(0, "done")], []),
    ):
        lines = list(warnings_of(episodes))
        assert [line[: len(start)] for line, start in zip(lines, told, strict=True)] == told
