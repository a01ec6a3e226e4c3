"""bazelw on machines that have this and lack that: a PATH of our own with programs that answer as theirs would."""

import os
import shutil
import subprocess
from pathlib import Path

import hub_look
import pytest

ROOT = Path(__file__).absolute().parents[1]
TOOLS = ("bash", "dirname", "grep", "ls", "sort", "tr", "cp", "chmod", "env", "find", "cmp")
"""What the script and the programs below call besides."""
TELLS = 'echo "$0" "$@"; echo "TESSERA_PYTHON=${TESSERA_PYTHON:-} USE_BAZEL_VERSION=${USE_BAZEL_VERSION:-}"'
"""A bazel that says how it was called."""


class Machine:
    """A folder of programs, which is all that is on the PATH, and bazelw beside it."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.tree = folder / "bin", folder / "tree"
        self.programs.mkdir()
        self.tree.mkdir()
        for name in ("bazelw", ".bazeliskrc"):
            shutil.copy(ROOT / name, self.tree / name)
        for name in TOOLS:
            (self.programs / name).symlink_to(str(shutil.which(name)))

    def has(self, name: str, script: str) -> None:
        """Put a program there."""
        path = self.programs / name
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def has_bazel(self, said: str, name: str = "bazel") -> None:
        """Put a Bazel there that says this of its version."""
        self.has(name, f'if [ "$*" = --version ]; then {said}; exit; fi\n{TELLS}')

    def has_python(self, version: str, name: str = "python3", modules: bool = True) -> None:
        """Put a Python of this version there, with or without the modules that make environments."""
        self.has(
            name,
            f"""case "$2" in
  *sys.exit*) {"true" if modules else "false"} &&
    [[ "$2" == *"'{version}'"* || "$2" == *"'{version} "* || "$2" == *" {version}"* ]] ;;
  *) echo python{version} ;;
esac""",
        )

    def has_apt(self, *, packages: str, brings: str = "true", python: str = "python3.11") -> None:
        """Put Debian's commands there: `packages` is a pattern of those that exist, `brings` what installing does."""
        self.has("apt-get", f'echo "apt-get $*" >> "{self.programs}/../asked"\n[ "$1" != install ] || {brings}')
        self.has(
            "apt-cache",
            f"""case "$1" in depends) echo "  Depends: {python}" ;; show) [[ "$2" =~ ^({packages})$ ]] ;; esac""",
        )

    def run(self, *arguments: str, root: bool = True, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Call bazelw as root or not."""
        self.has("id", f"echo {0 if root else 1000}")
        return subprocess.run(
            [str(self.tree / "bazelw"), *arguments],
            env={"PATH": str(self.programs), "HOME": str(self.tree), "PYENV_ROOT": "/nowhere", **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def asked(self) -> list[str]:
        """What apt-get was asked for."""
        path = self.programs.parent / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path)
    found.has_python("3.11")
    return found


@pytest.mark.parametrize("said", ["echo bazel no_version", "echo bazel 4.2.3"])
def test_bazel_4_gets_the_arguments_as_they_are(machine: Machine, said: str) -> None:
    machine.has_bazel(said)
    done = machine.run("test", "//libs/...", "--test_arg=two words")
    assert done.stdout.splitlines()[0] == f"{machine.programs}/bazel test //libs/... --test_arg=two words", done.stderr
    assert "TESSERA_PYTHON= USE_BAZEL_VERSION=" in done.stdout


def test_bazel_7_gets_a_file_of_settings_first(machine: Machine) -> None:
    machine.has_bazel("echo bazel 7.7.1", "bazel-7")
    done = machine.run("info")
    settings = f"--bazelrc={machine.tree}/build/bazel7.bazelrc"
    assert done.stdout.splitlines()[0] == f"{machine.programs}/bazel-7 {settings} info", done.stderr


def test_bazelisk_by_any_name_is_told_the_version(machine: Machine) -> None:
    machine.has_bazel('echo "bazel ${USE_BAZEL_VERSION:-9.0.0}"')
    assert machine.run("info").stdout.splitlines()[1].endswith("USE_BAZEL_VERSION=4.2.3")
    (machine.programs / "bazel").unlink()
    machine.has_bazel("false", "bazelisk")
    assert machine.run("info").stdout.splitlines()[1].endswith("USE_BAZEL_VERSION=4.2.3")
    assert machine.run("info", USE_BAZEL_VERSION="7.4.1").stdout.splitlines()[1].endswith("USE_BAZEL_VERSION=7.4.1")


def test_a_bare_bazelisk_takes_the_same_version(machine: Machine) -> None:
    """It reads .bazeliskrc; a .bazelversion of this version would make Debian's bazel refuse to start."""
    settings = dict(line.split("=") for line in (ROOT / ".bazeliskrc").read_text().splitlines() if line[0] != "#")
    machine.has_bazel("false", "bazelisk")
    assert machine.run("info").stdout.splitlines()[1].endswith(f"USE_BAZEL_VERSION={settings['USE_BAZEL_VERSION']}")
    assert not (ROOT / ".bazelversion").exists()


def test_without_a_package_manager_it_says_what_is_missing(machine: Machine) -> None:
    machine.has_bazel("echo bazel 9.0.0")
    done = machine.run("info")
    assert done.returncode == 1
    assert "this machine lacks bazel-bootstrap" in done.stderr
    assert "Install Bazel 4.2 or 7 (or bazelisk) and Python 3.11, 3.12, 3.13" in done.stderr


def test_who_may_not_install_is_told_what_to_type(machine: Machine) -> None:
    machine.has_apt(packages=".*")
    done = machine.run("info", root=False)
    assert done.returncode == 1
    install = "apt-get update && apt-get install -y --no-install-recommends bazel-bootstrap"
    assert f"Type:  sudo sh -c '{install}'" in done.stderr
    assert machine.asked == []


def test_what_the_distribution_has_is_installed_and_looked_for_again(machine: Machine) -> None:
    machine.has_bazel("echo bazel no_version", "packed")
    machine.has_apt(packages="bazel-bootstrap", brings=f"cp {machine.programs}/packed {machine.programs}/bazel")
    done = machine.run("info")
    assert done.stdout.splitlines()[0] == f"{machine.programs}/bazel info", done.stderr
    assert [line.split()[1] for line in machine.asked] == ["update", "install"]
    assert machine.asked[1].endswith(" bazel-bootstrap")


def test_what_is_still_missing_after_installing_is_said(machine: Machine) -> None:
    machine.has_apt(packages="bazel-bootstrap")
    done = machine.run("info")
    assert done.returncode == 1
    assert "apt-get installed bazel-bootstrap, but bazel-bootstrap is still not to be found on the PATH" in done.stderr


def test_a_package_that_the_distribution_lacks_is_named(machine: Machine) -> None:
    machine.has_apt(packages="python3.*")
    done = machine.run("info")
    assert done.returncode == 1
    assert "this distribution has no package bazel-bootstrap. It has python3.11" in done.stderr
    assert [line.split()[1] for line in machine.asked] == ["update"]


def test_a_chosen_python_goes_to_bazel_with_an_output_base_of_its_own(machine: Machine) -> None:
    machine.has_bazel("echo bazel 4.2.3")
    machine.has_python("3.12", "python3.12")
    first, second = machine.run("info", TESSERA_PYTHON="3.12").stdout.splitlines()
    base = f"--output_user_root={machine.tree}/.cache/bazel/tessera-python3.12"
    assert first == f"{machine.programs}/bazel {base} info"
    assert second.startswith(f"TESSERA_PYTHON={machine.programs}/python3.12 ")
    own = machine.run("--output_base=/elsewhere", "info", TESSERA_PYTHON="3.12").stdout.splitlines()[0]
    assert own == f"{machine.programs}/bazel --output_base=/elsewhere info"


def test_a_python_by_its_path(machine: Machine) -> None:
    machine.has_bazel("echo bazel 4.2.3")
    machine.has_python("3.13", "mine")
    path = str(machine.programs / "mine")
    assert machine.run("info", TESSERA_PYTHON=path).stdout.splitlines()[1].startswith(f"TESSERA_PYTHON={path} ")
    machine.has_python("3.13", "mine", modules=False)
    done = machine.run("info", TESSERA_PYTHON=path)
    assert done.returncode == 1
    assert f"TESSERA_PYTHON={path} is no Python of 3.11, 3.12, 3.13 that has pip or ensurepip, and venv." in done.stderr


@pytest.mark.parametrize("name", ["3.10", "3.1", "three"])
def test_a_version_that_the_locks_lack_is_refused(machine: Machine, name: str) -> None:
    machine.has_bazel("echo bazel 4.2.3")
    done = machine.run("info", TESSERA_PYTHON=name)
    assert done.returncode == 1
    assert f"TESSERA_PYTHON={name} is neither a path nor one of 3.11, 3.12, 3.13." in done.stderr


@pytest.mark.skipif(
    any(Path(f"{folder}/python3.{minor}").exists() for folder in ("/usr/bin", "/usr/local/bin") for minor in (12,)),
    reason="this machine has a Python 3.12 where every machine is looked at",
)
def test_a_version_that_is_nowhere_is_installed_with_what_makes_environments(machine: Machine) -> None:
    machine.has_bazel("echo bazel 4.2.3")
    machine.has_python("3.12", "packed")
    machine.has_apt(packages=".*", brings=f"cp {machine.programs}/packed {machine.programs}/python3.12")
    done = machine.run("info", TESSERA_PYTHON="3.12")
    assert done.returncode == 0, done.stderr
    assert machine.asked[1].endswith(" python3.12 python3.12-venv python3-pip")


def test_it_is_found_from_any_folder(machine: Machine, tmp_path: Path) -> None:
    machine.has_bazel("echo bazel 7.1.0")
    place = os.path.relpath(machine.tree / "bazelw", tmp_path)
    done = subprocess.run(
        [place, "info"],
        cwd=tmp_path,
        env={"PATH": str(machine.programs), "HOME": str(tmp_path), "PYENV_ROOT": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"--bazelrc={machine.tree}/build/bazel7.bazelrc" in done.stdout, done.stderr


class Hubs:
    """An output base with hubs as installed, a Bazel that has it, and a Python that notes what it is to look at."""

    def __init__(self, machine: Machine, *names: str) -> None:
        self.machine, self.base = machine, machine.programs.parent / "base"
        for name in names:
            hub = self.base / "external" / name
            (hub / "tiny/site-packages/tiny").mkdir(parents=True)
            (hub / "tiny/site-packages/tiny/__init__.py").write_text("A = 1\n")
            (hub / "wheels").mkdir()
            (hub / hub_look.SEEN).write_bytes(hub_look.listing(hub))
            (hub / hub_look.INSTALLED).touch()
        answer = f'echo "$*" >> {self.base}/asked; echo {self.base}; exit'
        words = f'case " $* " in *" info "*" output_base ") {answer} ;; esac'
        machine.has("bazel", f'if [ "$*" = --version ]; then echo bazel 4.2.3; exit; fi\n{words}\n{TELLS}')

    def python_answers(self, code: int) -> None:
        """What a look ends with."""
        self.machine.has("python3.11", f'[ "$1" = -c ] || {{ echo "$*" >> {self.base}/looks; exit {code}; }}')

    def looks(self, *arguments: str) -> list[str]:
        """The hubs that Python is asked to look into by a call, whose words reach Bazel in any case."""
        self.python_answers(0)
        (self.base / "looks").write_text("")
        done = self.machine.run(*arguments)
        assert done.stdout.startswith(f"{self.machine.programs}/bazel {' '.join(arguments)}\n"), done.stderr
        lines = (self.base / "looks").read_text().splitlines()
        assert all(line.startswith(f"-BEs {self.machine.tree}/build/hub_look.py {self.base}/") for line in lines)
        return sorted(line.rpartition("/")[2] for line in lines)


def test_hubs_that_are_as_seen_cost_no_python_and_changed_ones_are_looked_into(machine: Machine) -> None:
    hubs = Hubs(machine, "pypi", "pypi_tools")
    assert hubs.looks("test", "//libs/...") == []
    module = hubs.base / "external/pypi/tiny/site-packages/tiny/__init__.py"
    times = module.stat()
    module.write_text("A = 2\n")  # as long as before, and by its times as old
    os.utime(module, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert hubs.looks("test", "//libs/...") == ["pypi"]
    (hubs.base / "external/pypi_tools/tiny/site-packages/new.py").touch()
    assert hubs.looks("run", "//build:ruff") == ["pypi", "pypi_tools"]


def test_what_builds_nothing_looks_at_nothing(machine: Machine) -> None:
    hubs = Hubs(machine, "pypi")
    shutil.rmtree(hubs.base / "external/pypi/tiny")
    for words in [("query", "tests(//...)"), ("--batch", "info", "test"), ("clean", "test"), ("help", "build")]:
        assert hubs.looks(*words) == []
    for words in [("build", "query"), ("coverage", "//..."), ("--batch", "--max_idle_secs", "5", "test", "//...")]:
        assert hubs.looks(*words) == ["pypi"]


def test_the_output_base_is_asked_with_the_options_before_the_command(machine: Machine) -> None:
    hubs = Hubs(machine, "pypi")
    hubs.looks("--output_base", "test", "--nohome_rc", "build", "--config=cuda", "//...")
    hubs.looks("--host_jvm_args=-Xmx1g", "test")
    machine.has("bazel", (machine.programs / "bazel").read_text().replace("4.2.3", "7.7.1"))
    machine.run("test", "--config=modules", "//...")
    settings = f"--bazelrc={machine.tree}/build/bazel7.bazelrc"
    assert (hubs.base / "asked").read_text().splitlines() == [
        "--output_base test --nohome_rc info --noshow_progress output_base",
        "--host_jvm_args=-Xmx1g info --noshow_progress output_base",
        f"{settings} info --noshow_progress --config=modules output_base",
    ]


def test_a_look_that_fails_is_no_build(machine: Machine) -> None:
    hubs = Hubs(machine, "pypi")
    (hubs.base / f"external/pypi/{hub_look.SEEN}").unlink()
    hubs.python_answers(1)
    done = machine.run("test", "//...")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"the hubs in {hubs.base}/external could not be looked at" in done.stderr
