"""Evidence about other trainers' wheels: each kind that does not hold is told, by a wheel that is made here."""

import json
import zipfile
from pathlib import Path
from typing import Any

import check_peers
import pytest

FILES = {"a/x.py": "class Known:\n    pass\n", "a/y.py": "call(1)\ncall(2)\n", "a/t.jinja": "{}\n"}
HOLDS: list[dict[str, Any]] = [
    {"files": "a/x.py", "has": r"class Known\b"},
    {"files": "*.py", "lacks": "Unknown"},
    {"files": "*.jinja", "count": 1},
    {"files": "a/*.py", "has": r"call\(", "count": 2},
    {"files": "*.py", "longest": 2},
    {"note": "of another package"},
]
FAILS: list[tuple[dict[str, Any], str]] = [
    ({"files": "a/x.py", "has": "class Gone"}, "a/x.py has 'class Gone' 0 times"),
    ({"files": "*.py", "lacks": "Known"}, "a/x.py has 'Known'"),
    ({"files": "*.jinja", "count": 2}, "*.jinja has files 1 times"),
    ({"files": "a/*.py", "has": r"call\(", "count": 3}, r"a/*.py has 'call\\(' 2 times"),
    ({"files": "*.py", "longest": 3}, "*.py: the longest has 2 lines"),
    ({"files": "b/*", "has": "x"}, "there is no file b/*"),
]


def test_evidence_holds_or_is_told() -> None:
    assert [check_peers.problem(one, FILES) for one in HOLDS] == [None] * len(HOLDS)
    assert [check_peers.problem(one, FILES) for one, _ in FAILS] == [text for _, text in FAILS]
    with pytest.raises(ValueError, match="no known kind"):
        check_peers.problem({"files": "*"}, FILES)


def test_a_wheel_is_read_and_its_cells_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "a-1.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    cells = {"A": {"says": "yes", "evidence": [HOLDS[0], FAILS[0][0]]}}
    peers = {"peers": {"A": {"wheel": "a-1.0-py3-none-any.whl"}}, "rows": [{"row": "Speed", "cells": cells}]}
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(peers))
    monkeypatch.setattr(check_peers, "PEERS", path)
    assert check_peers.main([str(wheel)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a-1.1-py3-none-any.whl: the table is of a-1.0-py3-none-any.whl",
        "A, Speed (yes): a/x.py has 'class Gone' 0 times",
        "1 wheels, 1 cells differ",
    ]
    assert check_peers.main([str(tmp_path / "b-1.0.whl")]) == check_peers.main([]) == 2


def test_each_cell_of_a_peer_with_a_wheel_has_evidence() -> None:
    peers = json.loads(check_peers.PEERS.read_text())
    wheels = [name for name, peer in peers["peers"].items() if "wheel" in peer]
    assert wheels == ["verl", "TRL"]
    assert all(peer["date"] for peer in peers["peers"].values())
    assert all(row["cells"][name]["evidence"] for row in peers["rows"] for name in wheels)
    assert len(peers["rows"]) > 10
