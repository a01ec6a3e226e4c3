"""Settings of a server that generates: what can't be is refused where it is made."""

from typing import Any

import pytest

from rollout.openai.settings.config import OpenAIConfig

BAD: dict[str, list[Any]] = {
    "base_url": ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://user:secret@localhost/v1", "http://localhost/v1?a=b"],
    "model": [""],
    "key_variable": ["", "A B"],
    "answer_seconds": [0, float("inf"), float("nan")],
}


@pytest.mark.parametrize("name", BAD)
def test_every_setting_refuses_what_it_cannot_be(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ValueError, match=name):
            OpenAIConfig(**{name: value})


def test_another_machine_is_asked_for_and_never_in_the_clear() -> None:
    for url in ("http://example.org/v1", "https://10.0.0.1/v1"):
        with pytest.raises(ValueError, match="allow_remote=True"):
            OpenAIConfig(url)
    with pytest.raises(ValueError, match="use https"):
        OpenAIConfig("http://example.org/v1", allow_remote=True)
    assert OpenAIConfig("https://example.org/v1/", allow_remote=True).url("models") == "https://example.org/v1/models"
    assert OpenAIConfig("http://[::1]:8000/v1")
