"""The run without Bazel, over a tree of one library: what is run, what is left out and why, and the total."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).absolute().parent
FILES = {
    "plain_test.py": "def test_one():\n    pass\n\n\ndef test_two():\n    pass\n",
    "named_test.py": "import os\n\n\ndef test_env():\n    assert os.environ['WORD'] == 'yes'\n",
    "late_test.py": "def test_late():\n    __import__('absent_package')\n",
    "typo_test.py": "def test_typo():\n    import no_such_thing\n",
    "wrong_test.py": "def test_wrong():\n    assert 1 == 2\n",
    "stop_test.py": "import os\nimport signal\n\n\ndef test_stop():\n    os.kill(os.getppid(), signal.SIGINT)\n",
    "never_test.py": "raise AssertionError('not to be run')\n",
    "rooms/near_test.py": "def test_near():\n    pass\n",
    "rooms/far_test.py": "import absent_package\n\n\ndef test_far():\n    pass\n",
    "rooms/own_test.py": "def test_own():\n    pass\n",
}
RULES = """
module(name = "alpha/other")
module_test(name = "plain_test", size = "small")
module_test(name = "by_name", srcs = ["alpha/named_test.py"], env = {"WORD": "yes"})
module_test(name = "late_test")
module_test(name = "never_test", tags = ["gpu"])
module_test(name = "absent", srcs = ["alpha/never_test.py"], deps = [":x", requirement("absent-package")])
module_test(name = "hub", srcs = ["alpha/never_test.py"], hub = "pypi_tf517")
module_test(name = "made", srcs = ["alpha/never_test.py"], env = {"X": "$(rootpath :x)"})
"""


@pytest.fixture
def tree(tmp_path):
    """A tree with one library and this program."""
    (tmp_path / "build/locks").mkdir(parents=True)
    for name in ("fast_tests", "forked_processes", "gazelle", "gazelle_rules", "install_hub", "pytest_main"):
        shutil.copy(BUILD / f"{name}.py", tmp_path / "build")
    (tmp_path / "build/allowed_skips.txt").write_text("")
    for lock in ("cpu", "extras"):
        (tmp_path / f"build/locks/{lock}.txt").write_text("absent-package==1.0 \\\n    --hash=sha256:00\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npython_files = ["*_test.py"]\n')
    (tmp_path / "libs/alpha/alpha").mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / "libs/alpha/alpha" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "libs/alpha/alpha" / name).write_text(text)
    return tmp_path


def run(tree, rules, *words):
    """(exit status, lines) of the program over these rules."""
    (tree / "libs/alpha/BUILD.bazel").write_text(rules)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TEST") and key != "CI"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(tree / "build/fast_tests.py"), *words]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # in the background it is ignored
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_what_is_missing_is_left_out_and_counted(tree):
    status, lines = run(tree, RULES, "--jobs", "2")
    assert (status, lines[-1]) == (0, "3 passed, 0 failed, 0 skipped"), lines
    assert sorted(line for line in lines if line.startswith("left out: ")) == [
        "left out: 1 cases without absent-package",
        "left out: 1 files of the hub pypi_tf517",
        "left out: 1 files tagged gpu",
        "left out: 1 files with files that Bazel makes",
        "left out: 1 files without absent-package",
    ]


@pytest.mark.parametrize("name", ["wrong", "typo"])
def test_a_failure_is_one(tree, name):
    status, lines = run(tree, f'{RULES}module_test(name = "{name}_test")\n')
    assert (status, lines[-1]) == (1, "3 passed, 1 failed, 0 skipped"), lines
    assert f"failed: //libs/alpha:{name}_test test_{name}" in lines


def test_the_files_of_a_folder_run_one_by_one(tree):
    """Each in its own process: what one of them imports keeps the others from nothing."""
    rule = 'package_test(name = "rooms_test", deps = [requirement("absent-package")])\n'
    own = 'module_test(name = "rooms/own_test", tags = ["gpu"])\n'
    status, lines = run(tree, own + rule)
    assert (status, lines[-1]) == (0, "1 passed, 0 failed, 0 skipped"), lines
    assert "left out: 1 files without absent-package" in lines
    assert [line.split("  ")[-1] for line in lines if " s  //" in line] == ["//libs/alpha:rooms/near_test: 1 passed"]
    others = sorted(f"alpha/{name}" for name in FILES if name != "plain_test.py")
    top = f'module_tests(name = "others", srcs = {others}, tags = ["gpu"])\npackage_test(name = "alpha_test")\n'
    status, lines = run(tree, top)
    assert (status, lines[-1]) == (0, "2 passed, 0 failed, 0 skipped"), lines
    flat = [name for name in others if "/rooms/" not in name]
    both = f'module_tests(name = "others", srcs = {flat}, tags = ["gpu"])\n'
    status, lines = run(tree, own + both + 'package_test(name = "alpha_test", folders = ["rooms"])\n')
    assert any(line.endswith("  //libs/alpha:plain_test: 2 passed") for line in lines), lines
    assert "//libs/alpha:rooms/near_test" in str(lines)


def test_files_of_one_rule_are_its_files_each(tree):
    names = ", ".join(f'"alpha/rooms/{name}_test.py"' for name in ("near", "far", "own"))
    deps = 'deps = [requirement("absent-package")], env = {"WORD": "yes"}'
    status, lines = run(tree, f'module_tests(name = "some", srcs = [{names}], {deps})\n')
    assert (status, lines[-1]) == (0, "2 passed, 0 failed, 0 skipped"), lines
    assert "left out: 1 files without absent-package" in lines


def test_those_of_one_tag_alone_each_within_its_seconds(tree):
    """Those that are run by hand too; the first takes too long and is ended, the second passes."""
    (tree / "libs/alpha/alpha/long_test.py").write_text("import time\n\n\ndef test_long():\n    time.sleep(300)\n")
    rules = RULES.replace('name = "late_test"', 'name = "late_test", tags = ["slow", "gpu2"]')
    rules = rules.replace('name = "never_test", tags = ["gpu"]', 'name = "long_test", tags = ["slow"]')
    rules = rules.replace('name = "plain_test"', 'name = "plain_test", tags = ["slow", "manual"]')
    status, lines = run(tree, rules, "--only", "slow", "--seconds", "10", "--jobs", "2")
    assert (status, lines[-1]) == (1, "2 passed, 1 failed, 0 skipped"), lines
    assert "ended after 10 s" in lines
    assert sorted(line.split("  ")[-1] for line in lines if " s  //" in line) == [
        "//libs/alpha:long_test: 0 passed",
        "//libs/alpha:plain_test: 2 passed",
    ]
    assert "left out: 1 files tagged gpu2" in lines


def test_each_file_has_a_device_of_its_own(tree):
    """Two that wait for each other to begin, and a third that has the device of the first that ended."""
    text = """import os, pathlib, time


def test_seen():
    device, there = os.environ["CUDA_VISIBLE_DEVICES"], pathlib.Path(__file__).parent
    (there / f"{pathlib.Path(__file__).stem}.{device}").touch()
    while not {path.suffix for path in there.glob("seen*")} >= {".3", ".5"}:
        time.sleep(0.1)
"""
    for number in range(3):
        (tree / f"libs/alpha/alpha/seen{number}_test.py").write_text(text)
    rules = "".join(f'module_test(name = "seen{number}_test")\n' for number in range(3))
    status, lines = run(tree, rules, "--devices", "3,5", "--seconds", "60")
    assert (status, lines[-1]) == (0, "3 passed, 0 failed, 0 skipped"), lines
    for jobs in range(1, 4):
        status, lines = run(tree, rules, "--devices", "3,5", "--jobs", str(jobs))
        assert (status, "not allowed with argument" in lines[-1]) == (2, True), lines


def test_a_file_that_cannot_be_read_is_a_failure(tree):
    status, lines = run(tree, RULES, "--tags", "gpu", str(tree / "libs/alpha"))
    assert (status, lines[-1]) == (1, "3 passed, 1 failed, 0 skipped"), lines


def test_an_interrupted_run_starts_nothing_more_and_is_no_success(tree):
    status, lines = run(tree, f'module_test(name = "stop_test")\n{RULES}', "--jobs", "1")
    assert (status, lines[-1]) == (1, "0 passed, 1 failed, 0 skipped"), lines
    assert "failed: interrupted; files that run are waited for" in lines


def test_nothing_run_is_no_success(tree):
    status, lines = run(tree, 'module_test(name = "never_test", tags = ["gpu"])\n')
    assert (status, lines[-1]) == (1, "0 passed, 0 failed, 0 skipped"), lines
    status, lines = run(tree, RULES, "libs/beta")
    assert status == 2
    assert "no library or app" in lines[-1]
