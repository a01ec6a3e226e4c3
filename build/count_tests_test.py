"""The closing count: all outcomes, targets without cases, and a later run that takes an earlier one's place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from build import pytest_main
from build.count_tests import main

JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><skipped type="pytest.skip" message="no device"/></testcase>
<testcase name="d"><skipped type="pytest.xfail" message="known"/></testcase>
</testsuite></testsuites>"""
GOOD = '<testsuites><testsuite><testcase name="a"/><testcase name="b"/></testsuite></testsuites>'


def _events(path: Path, targets: dict[str, tuple[str, str | None]]) -> str:
    lines = []
    for number, (label, (status, junit)) in enumerate(targets.items()):
        outputs = []
        if junit is not None:
            xml = path.with_suffix(f".{number}.xml")
            xml.write_text(junit)
            outputs = [{"name": "test.xml", "uri": xml.as_uri()}]
        result = {"status": status, "testActionOutput": outputs}
        lines.append(json.dumps({"id": {"testResult": {"label": label}}, "testResult": result}))
    path.write_text("\n".join(lines))
    return str(path)


def test_counts_cases_and_targets_without_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that timed out is one failure; an expected failure is a pass."""
    targets = {"//a": ("FAILED", JUNIT), "//b": ("TIMEOUT", None), "//c": ("PASSED", GOOD)}
    assert main([_events(tmp_path / "fast", targets)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "4 passed, 2 failed, 1 skipped"
    assert "skipped: //a c: no device" in out
    assert "failed: //b: TIMEOUT" in out


def test_status_of_a_clean_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The later file holds the same target again: it is counted once."""
    first, second = (
        _events(tmp_path / "fast", {"//a": ("PASSED", GOOD)}),
        _events(tmp_path / "full", {"//a": ("PASSED", GOOD)}),
    )
    assert main([first, second, str(tmp_path / "absent")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"


def test_the_last_attempt_counts_and_an_earlier_failure_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = {"first": "FAILED", "again": "PASSED"}
    first, again = (_events(tmp_path / name, {"//a": (status, GOOD)}) for name, status in attempts.items())
    both = tmp_path / "both"
    both.write_text("\n".join(Path(name).read_text() for name in (first, again)))
    assert main([str(both)]) == 0
    assert capsys.readouterr().out.count("flaky: //a: failed, and passed") == 1
    both.write_text("\n".join(Path(name).read_text() for name in (again, first)))
    assert main([str(both)]) == 1
    assert "flaky" not in capsys.readouterr().out


def test_what_an_interrupted_run_did_not_end_counts_as_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bazel names such a target with no result, only with why."""
    file = Path(_events(tmp_path / "fast", {"//a": ("PASSED", GOOD)}))
    for kind in ("testResult", "testSummary"):
        event = {"id": {kind: {"label": "//b"}}, "aborted": {"reason": "USER_INTERRUPTED"}}
        file.write_text(file.read_text().rstrip() + "\n" + json.dumps(event))
    assert main([str(file)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "failed: //b: ABORTED" in out
    assert out[-1] == "2 passed, 1 failed, 0 skipped"


def test_instructions_are_counted_once_for_each_run_of_a_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same target under two sets of instructions counts for both, for one once."""
    with_torch = GOOD.replace(
        "<testcase", '<properties><property name="torch-instructions" value="{}"/></properties><testcase', 1
    )
    first, again, other = (
        _events(tmp_path / name, {"//a": ("PASSED", with_torch.format(capability)), "//b": ("PASSED", GOOD)})
        for name, capability in [("fast", "AVX512"), ("full", "AVX512"), ("default", "DEFAULT")]
    )
    assert main([first, again, other]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["torch computed with AVX512: 2 cases", "torch computed with DEFAULT: 2 cases"]
    assert out[-1] == "4 passed, 0 failed, 0 skipped"


def test_a_run_says_what_torch_computed_with(tmp_path: Path) -> None:
    """pytest_main's line and property are those that the processor was told to have."""
    file, junit = tmp_path / "some_test.py", tmp_path / "test.xml"
    file.write_text("import torch\n\ndef test_sum():\n    assert torch.ones(2).sum() == 2\n")
    surroundings = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "XML_OUTPUT_FILE": str(junit)}
    surroundings.pop("TESTBRIDGE_TEST_ONLY", None)
    ran = subprocess.run(
        [sys.executable, pytest_main.__file__, str(file)], env=surroundings, capture_output=True, text=True
    )
    assert "torch computes with DEFAULT" in ran.stdout, ran.stdout + ran.stderr
    assert 'name="torch-instructions" value="DEFAULT"' in junit.read_text()


def test_where_the_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By target with its imports, by file and by case; the slowest first, and no more than are asked for."""
    case = '<testcase name="{}" file="{}_test.py" time="{}"/>'
    cases = case.format("one", "x", 1.5), case.format("two", "x", 2.5), case.format("three", "y", 3)
    slow = f'<testsuites><testsuite time="9.25">{"".join(cases)}</testsuite></testsuites>'
    file = _events(tmp_path / "fast", {"//a": ("PASSED", GOOD), "//b": ("PASSED", slow), "//c": ("TIMEOUT", None)})
    assert main([file, "--slowest", "1"]) == 1
    assert capsys.readouterr().out.splitlines()[:6] == [
        "9 s in 2 targets, imports and all; the slowest:",
        "     9.2  //b",
        "7 s in 3 files; the slowest:",
        "     4.0  x_test.py",
        "7 s in 5 cases; the slowest:",
        "     3.0  y_test.py: three",
    ]


def test_nothing_run_is_a_failure(tmp_path: Path) -> None:
    """An empty account is not a green one."""
    assert main([str(tmp_path / "absent")]) == 1
