import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from chat_tools.__main__ import main
from chat_tools.rendering.render import render
from chat_tools.rendering.view import html_view, pieces, terminal_view
from chat_tools.testing.tokenizer import tiny_tokenizer

TALK = [
    {"role": "user", "content": "what is <b>42</b> & 🌍?\n\ttab"},
    {"role": "assistant", "content": "hello there é"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer("chatml").save_pretrained(path)
    (path / "talks.jsonl").write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": TALK[:1]}) + "\n")
    return path


class Tokens(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, str] = {}
        self.kind = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "i":
            self.kind = (dict(attrs)["class"] or "").split()[0]

    def handle_endtag(self, tag: str) -> None:
        if tag == "i":
            self.kind = ""

    def handle_data(self, data: str) -> None:
        if self.kind:
            self.kinds[self.kind] = self.kinds.get(self.kind, "") + data


def test_pieces_are_the_text() -> None:
    rendered = render(tiny_tokenizer("chatml"), TALK)
    assert "".join(text for _, _, text in pieces(rendered)) == rendered.text
    assert min(start for start, _, _ in pieces(rendered)) == 0
    assert max(end for _, end, _ in pieces(rendered)) == len(rendered.ids)


def test_the_page_shows_each_token_by_its_mask() -> None:
    rendered = render(tiny_tokenizer("chatml"), TALK)
    page = html_view([rendered], "A <talk>")
    tokens = Tokens()
    tokens.feed(page)
    assert tokens.kinds["trained"] == "hello there é<|im_end|>"
    assert "what is <b>42</b> & 🌍?" in tokens.kinds["context"]
    assert "A &lt;talk&gt;" in page
    assert "http" not in page


def test_the_terminal_shows_each_token_by_its_mask() -> None:
    text = terminal_view(render(tiny_tokenizer("chatml"), TALK))
    green = "".join(re.findall(r"\x1b\[30;48;5;1(?:14|50)m([^\x1b]*)\x1b\[0m", text))
    assert green == "hello there é<|im_end|>"
    assert "trained" in text.splitlines()[-1]


def test_commands(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["audit", str(folder), "--option", "enable_thinking=false"]) == 0
    assert "training mask           safe" in capsys.readouterr().out
    short = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content[:3] }}{% endgeneration %}{% endfor %}"
    tiny_tokenizer("chatml", template=short).save_pretrained(tmp_path / "short")
    assert main(["audit", str(tmp_path / "short")]) == 1
    assert "training mask           NOT SAFE" in capsys.readouterr().out
    assert main(["audit", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "hermes"
    assert (
        main(["view", str(folder), str(folder / "talks.jsonl"), "--html", str(tmp_path / "v.html"), "--count", "2"])
        == 0
    )
    assert "2 conversations" in capsys.readouterr().out
    assert "hello" in (tmp_path / "v.html").read_text()
    assert main(["view", str(folder), str(folder / "talks.jsonl")]) == 0
    assert "1 assistant turns" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'<tool_call>{"name": "f"}</tool_call>')))
    assert main(["parse", "hermes"]) == 0
    assert json.loads(capsys.readouterr().out)["tool_calls"][0]["name"] == "f"


def test_user_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["parse", "none", __file__]) == 2
    assert "qwen3_xml" in capsys.readouterr().err
