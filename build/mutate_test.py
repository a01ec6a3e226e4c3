"""Mutants end to end on a small library, and the parts: what is mutated, what counts, the table and the page."""

import ast
import json
import subprocess
from pathlib import Path

import mutate
import mutate_tree
import pytest
from mutate_kept import Kept
from mutate_report import (
    HEAD,
    RULE,
    Equivalent,
    Mutant,
    Row,
    diff_of,
    functions_of,
    is_own_check,
    name_equivalents,
    read_equivalents,
    recorded,
    rows_of,
    stale,
    table,
    together,
    verdict_of,
)
from mutate_tree import PRAGMA, Group, files_of, groups_of, is_mutable, without_texts

CODE = '''"""A toy."""


def larger(a: int, b: int) -> int:
    """The larger one."""
    if a < 0 or b < 0:
        raise ValueError(
            "neither may be below 0, "
            f"got {a + 1 - 1} and {b}"
        )
    return a if a > b else b
'''
STRONG = """import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy.numbers import larger


@given(st.integers(0, 5), st.integers(0, 5))
def test_larger(a, b):
    assert larger(a, b) == max(a, b)


@pytest.mark.parametrize("pair", [(-1, 1), (1, -1)])
def test_refused(pair):
    with pytest.raises(ValueError):
        larger(*pair)
"""
WEAK = """from toy.numbers import larger


def test_larger():
    assert larger(2, 1) == 2
"""
EQUIVALENT = """[[equivalent]]
file = "libs/toy/toy/numbers.py"
change = ["-return a if a > b else b", "+return a if a >= b else b"]
reason = "of two equal numbers either is the larger one"
"""


def tree(folder: Path, test: str) -> Path:
    """A tree with one library of one file."""
    package = folder / "libs/toy/toy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "numbers.py").write_text(CODE)
    (package / "numbers_test.py").write_text(test)
    (folder / "build/equivalent").mkdir(parents=True)
    return folder


def counts(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def measure(folder: Path, monkeypatch, capsys, *arguments: str) -> tuple[int, str, dict[str, list[str]]]:
    """(status, what was printed, cells of the table by its first)."""
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(folder))
    status = mutate.main(["libs/toy", *arguments])
    out = capsys.readouterr().out
    rows = [counts(line) for line in out.splitlines() if line.startswith("| ")]
    return status, out, {row[0]: row[1:] for row in rows}


def test_a_strong_test_kills_all_but_the_equivalent_one(tmp_path, monkeypatch, capsys):
    folder = tree(tmp_path, STRONG)
    (folder / "build/equivalent/toy.toml").write_text(EQUIVALENT)
    record = folder / "mutation.json"
    record.write_text('{"command": "x", "runs": []}')
    status, out, rows = measure(folder, monkeypatch, capsys, "--cold", "--record", "mutation.json")
    total, measured, killed, timeout, survived, untested, equivalent, score = rows["libs/toy/toy/numbers.py"]
    assert status == 0
    assert int(total) == int(measured) == int(killed) >= 6
    assert (timeout, survived, untested, equivalent, score) == ("0", "0", "0", "1", "100.0 %")
    assert "survived:" not in out
    assert "not equivalent" not in out
    (run,) = json.loads(record.read_text())["runs"]
    assert run["values"]["libs/toy/toy/numbers.py"]["mutants"] == int(total)


def test_a_weak_test_leaves_survivors_and_says_which(tmp_path, monkeypatch, capsys):
    folder = tree(tmp_path, WEAK)
    (folder / "build/equivalent/toy.toml").write_text(EQUIVALENT.replace(">= b else b", ">= b else c"))
    status, out, rows = measure(folder, monkeypatch, capsys)
    assert status == 0
    assert int(rows["libs/toy/toy/numbers.py"][4]) >= 2
    assert "    -if a < 0 or b < 0:\n    +if a < 0 and b < 0:" in out
    assert "got" not in "".join(line for line in out.splitlines() if line.startswith("    "))
    assert "build/equivalent/toy.toml names a change that is not made or not equivalent: libs/toy/toy/numbers.py" in out


def test_a_run_goes_on_from_kept_verdicts(tmp_path, monkeypatch, capsys):
    """Nothing is run twice but what survived, once the tests changed; the rows count what earlier runs found."""
    folder = tree(tmp_path, WEAK)
    keep = str(folder / "kept.json")
    _, _, first = measure(folder, monkeypatch, capsys, "--keep", keep)
    _, out, again = measure(folder, monkeypatch, capsys, "--keep", keep)
    assert again == first
    assert "mutants," not in out  # no batch was run
    (folder / "libs/toy/toy/numbers_test.py").write_text(STRONG)
    survived = int(first["libs/toy/toy/numbers.py"][4])
    _, out, better = measure(folder, monkeypatch, capsys, "--keep", keep)
    assert f"toy: {survived} of {survived} mutants" in out
    assert better["libs/toy/toy/numbers.py"][4] == "1"  # the equivalent one


def test_what_is_kept_is_for_the_same_source(tmp_path):
    top = tree(tmp_path, STRONG)
    file, test = Path("libs/toy/toy/numbers.py"), Path("libs/toy/toy/numbers_test.py")
    group = Group(Path("libs/toy"), "toy", (file,), (test,))
    meta = tmp_path / "run/mutants/toy/numbers.py.meta"
    meta.parent.mkdir(parents=True)
    meta.write_text('{"exit_code_by_key": {"a": 1, "b": 0, "c": null, "d": 36}}')
    page, names = tmp_path / "kept.json", {"toy/numbers.py": str(file)}
    Kept.of(page, top, group).save(tmp_path / "run", names)
    assert Kept.of(page, top, group).codes == {str(file): {"a": 1, "b": 0, "d": 36}}
    assert Kept.of(None, top, group).codes == {}
    (top / test).write_text(WEAK)
    changed = Kept.of(page, top, group)
    assert changed.codes == {str(file): {"a": 1, "d": 36}}
    assert changed.first == {"b"}
    meta.write_text('{"exit_code_by_key": {"a": null, "b": null, "e": null}, "more": 1}')
    changed.restore(tmp_path / "run", names)
    assert meta.read_text() == '{"exit_code_by_key": {"a": 1, "b": null, "e": null}, "more": 1}'
    changed.save(tmp_path / "run", names)  # b was not run: it is the first of the next run too
    assert Kept.of(page, top, group).first == {"b"}
    (top / file).write_text(CODE + "\n")
    assert Kept.of(page, top, group).codes == {}


def test_survivors_count_until_they_are_run_again():
    mutants = [
        Mutant("a.py", name, verdict) for name, verdict in zip("abc", ("waiting", "waiting", "killed"), strict=True)
    ]
    found = mutate.still_surviving(mutants, frozenset({"a", "c"}))
    assert [one.verdict for one in found] == ["survived", "waiting", "killed"]


def test_tests_that_fail_unchanged_are_an_error(tmp_path, monkeypatch, capsys):
    status, out, _ = measure(tree(tmp_path, WEAK.replace("== 2", "== 3")), monkeypatch, capsys)
    assert status == 1
    assert "the tests fail on unchanged code" in out
    assert "assert larger(2, 1) == 3" in out


def test_no_time_is_no_failure(tmp_path, monkeypatch, capsys):
    status, out, _ = measure(tree(tmp_path, STRONG), monkeypatch, capsys, "--minutes", "0")
    assert status == 0
    assert "out of time" in out


def test_messages_are_left_alone():
    marked = without_texts(CODE)
    assert ast.dump(ast.parse(marked)) == ast.dump(ast.parse(CODE))
    lines = [line for line in marked.splitlines() if PRAGMA in line]
    assert [line.split("#")[0].strip() for line in lines] == [
        "raise ValueError(",
        '"neither may be below 0, "',
        'f"got {a + 1 - 1} and {b}"',
        ")",
    ]
    calls = 'def f():\n    x = 1 + 2\n    return No("a" + "b") if x else Yes("c")\n'
    assert [PRAGMA in line for line in without_texts(calls).splitlines()] == [False, False, True]
    inside = 'raise ValueError("""first\nsecond""")\n'
    assert ast.dump(ast.parse(without_texts(inside))) == ast.dump(ast.parse(inside))


def test_what_is_mutable():
    yes = ["libs/a/a/b.py", "libs/a/a/room/b.py", "apps/x/step.py"]
    no = ["libs/a/a/b_test.py", "libs/a/a/__init__.py", "libs/a/benchmarks/b.py", "libs/a/a/testing/b.py"]
    no += ["libs/a/a/testing_b.py", "build/mutate.py", "libs/a/a/b.txt", "README.md", "libs/a/setup.py"]
    assert all(is_mutable(Path(path)) for path in yes)
    assert not any(is_mutable(Path(path)) for path in no)


def test_files_and_groups(tmp_path):
    top = tree(tmp_path, STRONG)
    (top / "apps/x").mkdir(parents=True)
    (top / "apps/x/step.py").write_text("")
    files = files_of(top, ["libs", "libs/toy/toy/numbers.py", "apps"])
    assert [str(file) for file in files] == ["libs/toy/toy/numbers.py", "apps/x/step.py"]
    library, apps = groups_of(top, files, [Path("apps/y_test.py")])
    assert (library.root, library.package) == (Path("libs/toy"), "toy")
    assert (apps.root, apps.package) == (Path(), "apps")
    assert [str(test) for test in library.tests] == ["libs/toy/toy/numbers_test.py", "apps/y_test.py"]
    assert [str(test) for test in apps.tests] == ["apps/y_test.py"]
    assert groups_of(top, files[:1], [Path("t_test.py")], beside=False)[0].tests == (Path("t_test.py"),)
    with pytest.raises(ValueError, match=r"no test lies beside apps/x/step.py"):
        groups_of(top, files[1:], [])
    with pytest.raises(ValueError, match="build has no code to mutate"):
        files_of(top, ["build"])


def test_diffs_are_those_of_the_functions():
    source = (
        "def x_f__mutmut_orig(a):\n    return (a +\n      1)\n\n\ndef x_f__mutmut_2(a):\n    return (a -\n      1)\n"
    )
    functions = functions_of(source)
    assert diff_of(functions["x_f__mutmut_orig"], functions["x_f__mutmut_2"]) == ("-return (a +", "+return (a -")


def test_what_wants_more_than_this_machine_is_no_test_of_a_mutant(tmp_path):
    rooms = tmp_path / "libs/toy/toy/rooms"
    rooms.mkdir(parents=True)
    for name in ("near_test", "cuda_test", "own_test", "slow_test", "slower_test"):
        (rooms / f"{name}.py").write_text("")
    rule = 'module_test(name = "rooms/{}", tags = {})\n'
    (tmp_path / "libs/toy/BUILD.bazel").write_text(
        rule.format("cuda_test", '["gpu"]')
        + rule.format("own_test", '["exclusive"]')
        + 'module(name = "rooms/near")\nmodule_tests(name = "slow", tags = ["slow"], '
        + 'srcs = ["toy/rooms/slow_test.py", "toy/rooms/slower_test.py"])\n'
    )
    found = mutate_tree.tests_beside(tmp_path, Path("libs/toy/toy/rooms/near.py"))
    assert [path.name for path in found] == ["near_test.py", "own_test.py"]


def test_strict_of_a_zip_does_not_count():
    old = "-for a, b in zip(x, y, strict=True):"
    for new in ("zip(x, y, strict=False)", "zip(x, y, strict=None)", "zip(x, y, )"):
        assert is_own_check((old, f"+for a, b in {new}:"))
    for new in ("zip(x, strict=True)", "zip(x, None, strict=True)", "zip(y, x, strict=True)"):
        assert not is_own_check((old, f"+for a, b in {new}:"))
    assert not is_own_check(())


def test_verdicts():
    codes = {1: "killed", 3: "killed", -11: "killed", 0: "survived", 33: "untested", 36: "timeout", None: "waiting"}
    assert {code: verdict_of(code) for code in codes} == codes
    assert verdict_of(2) == "waiting"


def mutant(verdict: str, file: str = "a.py", diff: tuple[str, ...] = ("-x", "+y")) -> Mutant:
    return Mutant(file, "m", verdict, diff)


def test_equivalents_do_not_count_and_are_named(tmp_path):
    assert read_equivalents(tmp_path / "absent") == []
    (tmp_path / "toy.toml").write_text(EQUIVALENT)
    (tmp_path / "apps.toml").write_text(EQUIVALENT.replace("libs/toy/toy", "apps/toy"))
    first, second = read_equivalents(tmp_path)
    assert (first.file, second.file) == ("apps/toy/numbers.py", "libs/toy/toy/numbers.py")
    assert second.change[0].startswith("-return")
    (tmp_path / "apps.toml").write_text(EQUIVALENT)
    with pytest.raises(ValueError, match=r"apps.toml: libs/toy/toy/numbers.py belongs on toy.toml"):
        read_equivalents(tmp_path)
    (tmp_path / "apps.toml").write_text(EQUIVALENT.replace("of two equal numbers either is the larger one", " "))
    with pytest.raises(ValueError, match="file, change and reason"):
        read_equivalents(tmp_path)
    known = [Equivalent("a.py", ("-x", "+y"), "why"), Equivalent("a.py", ("-x", "+z"), "why")]
    mutants = [mutant("survived"), mutant("survived", "b.py"), mutant("killed", diff=("-x", "+z"))]
    named = name_equivalents(mutants, known)
    assert [m.verdict for m in named] == ["equivalent", "survived", "killed"]
    assert stale(named, known) == [known[1]]
    assert stale([mutant("killed", "b.py")], known) == []
    (first, second) = rows_of(named)
    assert (first.total, first.measured, first.killed, first.equivalent, first.score) == (1, 1, 1, 1, 1.0)
    assert (second.survived, second.score) == (1, 0.0)


def test_the_table_adds_up():
    verdicts = ["killed"] * 5 + ["timeout", "survived", "untested", "waiting", "waiting"]
    rows = rows_of([mutant(v) for v in verdicts] + [mutant("killed", "b.py")])
    assert rows[0] == Row("a.py", 10, 8, 5, 1, 1, 1, 0)
    assert rows[0].score == 0.75
    assert Row("c", 3, 0, 0, 0, 0, 0, 0).score is None
    assert together(rows) == Row("together", 11, 9, 6, 1, 1, 1, 0)
    lines = table(rows).splitlines()
    assert lines[:2] == [HEAD, RULE]
    assert lines[2] == "| a.py | 10 | 8 | 5 | 1 | 1 | 1 | 0 | 75.0 % |"
    assert lines[-1] == "| **together** | 11 | 9 | 6 | 1 | 1 | 1 | 0 | 77.8 % |"
    assert table([Row("c", 3, 0, 0, 0, 0, 0, 0)]).splitlines()[2] == "| c | 3 | 0 | 0 | 0 | 0 | 0 | 0 |  |"


def test_a_record_keeps_its_other_rows_and_runs():
    row, other = Row("b.py", 2, 2, 2, 0, 0, 0, 0), Row("a.py", 3, 0, 0, 0, 0, 0, 0)
    old = {"date": "2026-01-01", "device": "cpu", "versions": {}, "values": {"b.py": {"mutants": 1}}}
    first = recorded(json.dumps({"command": "x", "runs": [old]}), [row], "2026-01-02", "cpu")
    assert recorded(first, [row], "2026-01-02", "cpu") == first
    kept, new = json.loads(recorded(first, [other], "2026-01-02", "cpu"))["runs"]
    assert kept == old
    assert list(new["values"]) == ["a.py", "b.py"]
    assert "score %" not in new["values"]["a.py"]
    assert new["values"]["b.py"]["score %"] == 100.0


def test_a_sample_is_even_and_fits():
    names = [f"m{i}" for i in range(200)]
    order = mutate.shuffled(names, 3)
    assert sorted(order) == sorted(names)
    assert order == mutate.shuffled(reversed(names), 3) != mutate.shuffled(names, 4)
    assert mutate.fitting(order, dict.fromkeys(names, 0.5), 10.2) == 20
    assert mutate.fitting(order, dict.fromkeys(names, 0.5), 0.0) == 0


def test_changed_files_are_those_of_the_branch(tmp_path):
    top = tree(tmp_path, STRONG)

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *words], cwd=top, check=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "one")
    git("checkout", "-qb", "branch")
    (top / "libs/toy/toy/more.py").write_text("x = 1\n")
    (top / "libs/toy/toy/more_test.py").write_text("x = 1\n")
    (top / "README.md").write_text("x\n")
    git("add", ".")
    git("commit", "-qm", "two")
    assert mutate.changed_files(top, "main") == ["libs/toy/toy/more.py"]
    (top / "libs/toy/toy/more.py").unlink()
    git("commit", "-qam", "three")
    assert mutate.changed_files(top, "main") == []


def test_nothing_asked_for_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(mutate, "changed_files", lambda top, revision: [])
    assert mutate.main(["--changed-since", "main"]) == 0
    assert "nothing to mutate" in capsys.readouterr().out
    assert mutate.main([]) == 2
