"""Console scripts name their apps; what needs a word or an extra says so, without a traceback."""

import sys
from collections.abc import Callable

import pytest

from apps.tessera_apps import console


def ended(script: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *words: str) -> SystemExit:
    monkeypatch.setattr(sys, "argv", ["tessera", *words])
    with pytest.raises(SystemExit) as end:
        script()
    return end.value


def test_a_plan_names_the_app_or_is_of_grpo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(console.plan, monkeypatch).code == 2
    assert "usage: tessera-plan" in capsys.readouterr().out
    for words, app in [((), "grpo"), (("grpo",), "grpo"), (("sft",), "sft")]:
        assert ended(console.plan, monkeypatch, *words, "--recipe", "quickstart").code == 0
        assert f"//apps/{app} -- --recipe quickstart" in capsys.readouterr().out
    assert ended(console.plan, monkeypatch, "sft", "--recipe", "list").code == 0
    assert "| quickstart |" in capsys.readouterr().out


def test_a_wrong_flag_is_a_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for script in (console.grpo, console.sft, console.plan):
        assert ended(script, monkeypatch, "--group-sise", "4").code == 2
        assert "--group-sise" in capsys.readouterr().err


def test_each_script_has_help_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for script, own in (
        (console.grpo, "--group-size"),
        (console.sft, "--batch-size"),
        (console.plan, "tessera-plan sft"),
        (console.try_environment, "--episodes N"),
        (console.evaluate, "--num-generations-eval INT"),
        (console.prepare, "usage: prepare"),
    ):
        for word in ("-h", "--help"):
            assert ended(script, monkeypatch, word).code == 0
            assert own in capsys.readouterr().out, (script, word)


def test_a_package_that_is_not_there_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "find_spec", lambda name: None)
    assert "tessera-apps[hub]" in str(ended(console.prepare, monkeypatch, "--help").code)
