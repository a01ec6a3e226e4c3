import pytest

from apps.common.launch.flag import parse_launch_flag


def test_the_flag_is_taken_out_wherever_it_stands() -> None:
    assert parse_launch_flag(["--seed", "1"]) == (["--seed", "1"], False)
    for words in (["--launch", "ray"], ["--launch=ray"]):
        assert parse_launch_flag([*words, "--seed", "1"]) == (["--seed", "1"], True)
        assert parse_launch_flag(["--seed", "1", *words]) == (["--seed", "1"], True)


@pytest.mark.parametrize("words", [["--launch"], ["--launch", "slurm"], ["--launch="], ["--launch=ray", "--launch=x"]])
def test_another_launcher_is_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="--launch takes ray"):
        parse_launch_flag(words)


def test_a_launcher_within_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="leave --launch ray out"):
        parse_launch_flag(["--shrink", "--launch", "ray"])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert parse_launch_flag(["--seed", "1"]) == (["--seed", "1"], False)
    with pytest.raises(ValueError, match="leave torchrun out"):
        parse_launch_flag(["--launch", "ray"])
