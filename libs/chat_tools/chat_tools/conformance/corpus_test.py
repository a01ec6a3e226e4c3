"""What is fetched is unpacked once, and a file of one's own is tried like a template of the wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chat_tools.__main__ import main
from chat_tools.conformance.corpus import TEMPLATES, fetched_templates, sources
from chat_tools.testing import templates

CHATML = templates.TEMPLATES["chatml"][0]


def test_the_templates_of_wheels_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is replaced by what it leaves: a wheel, an unpacked tree."""
    asked: list[str] = []

    def download(command: list[str], env: dict[str, str], **_: Any) -> None:
        package, place = command[-1], Path(command[-2])
        asked.append(package)
        if package == "trl":
            with zipfile.ZipFile(place / "a.whl", "w") as wheel:
                wheel.writestr("trl/chat_templates/x.jinja", CHATML)
                wheel.writestr("trl/chat_templates/y.jinja", "{{ text }}")
            return
        tree = Path(env["TMPDIR"]) / "pip-download" / package
        (tree / TEMPLATES[package]).mkdir(parents=True)
        (tree / "PKG-INFO").touch()
        (tree / TEMPLATES[package] / "z.jinja").write_text(CHATML.replace("\n", " ") if package == "vllm" else CHATML)

    monkeypatch.setattr(subprocess, "run", download)
    paths = fetched_templates(tmp_path)
    assert [path.name for path in paths] == ["x.jinja", "z.jinja"]  # one text once, no template of embeddings
    assert fetched_templates(tmp_path) == paths
    assert asked == list(TEMPLATES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "trl-sources")])
    assert sources("vllm", None) == tmp_path / "vllm-sources"
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert sources("trl", None) == tmp_path / "trl-sources"  # as installed
    with pytest.raises(ValueError, match="no files of vllm are on the path"):
        sources("vllm", None)


def test_what_did_not_come_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stderr="no such package"))
    with pytest.raises(ValueError, match="no files of trl: no such package"):
        fetched_templates(tmp_path)


def test_a_template_file_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(CHATML.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", ""))
    assert main(["conformance", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 templates conform" in printed
    assert "mine" in printed
