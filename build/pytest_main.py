"""Run pytest files in one process under Bazel: the main program of every package_test and module_test.

Bazel's test protocol is honoured (JUnit file, --test_filter), the surroundings are made the same everywhere, and in CI
a skip that build/allowed_skips.txt does not list is a failure. A file in which pytest finds nothing to run fails too.
`--test_filter` with the name of one of the files (`packing_test`) runs that file alone; anything else is pytest's -k.
"""

import atexit
import fnmatch
import gc
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DEVICES = ("gpu", "gpu2", "gpu4")
KERNELS = "pypi_kernels"
"""The hub whose packages compute on CUDA devices alone (`--config=cuda`)."""


def prepare_environment() -> None:
    """Set a home of its own, no hub access and one thread, before anything else is imported."""
    scratch = os.environ.get("TEST_TMPDIR")
    if scratch:
        os.environ["HOME"] = scratch
        os.environ["TMPDIR"] = short_name(scratch)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["PYTHONNOUSERSITE"] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    # Python puts the folder of this file first, or the one that it is a link into: for nobody to import from. A target
    # that wants build/ declares it, and has it further down.
    own = (os.path.realpath(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.path.realpath(__file__)))
    if os.path.realpath(sys.path[0] or ".") in own:
        del sys.path[0]


def leave_kernels_out() -> None:
    """Remove the kernels' hub from this process and its children: transformers would pass it tensors in host memory."""
    sys.path[:] = without_kernels(sys.path)
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(without_kernels(os.environ["PYTHONPATH"].split(os.pathsep)))


def without_kernels(paths: Iterable[str]) -> list[str]:
    """Return the paths that are not in the kernels' hub, whatever prefix Bazel gives its name."""
    return [path for path in paths if not any(part.endswith(KERNELS) for part in path.split("/"))]


def short_name(folder: str) -> str:
    """Return the folder, or a short link to it where a socket's path (108 bytes) would not fit below its own name."""
    if len(folder) < 50:
        return folder
    link = os.path.join(tempfile.mkdtemp(prefix="t"), "t")
    tempfile.tempdir = None  # it is remembered otherwise, and TMPDIR not looked at
    os.symlink(folder, link)
    atexit.register(shutil.rmtree, os.path.dirname(link), ignore_errors=True)
    return link


def fork_for_spawn() -> Any:
    """Install forked_processes, from beside this file, which is not on the path, and return it."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        "forked_processes", Path(__file__).absolute().with_name("forked_processes.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["forked_processes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
    return module


def load_hypothesis_profile() -> None:
    """Load a profile for property tests, where hypothesis is declared: fixed examples and no deadline."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:
        return
    slow_is_fine = [HealthCheck.too_slow]
    settings.register_profile("ci", derandomize=True, deadline=None, database=None, suppress_health_check=slow_is_fine)
    settings.load_profile("ci")


def allowed_skips(path: Path) -> list[tuple[str, str]]:
    """Return (glob of test ids, start of the reason) of each line."""
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return [(pair[0], pair[1] if len(pair) > 1 else "") for pair in pairs]


class SkipKeeper:
    """A pytest plug-in that prints each skip with its reason; an unlisted one fails in CI."""

    def __init__(self, allowed: list[tuple[str, str]], strict: bool) -> None:
        self.allowed = allowed
        self.strict = strict
        self.skips: list[tuple[str, str]] = []

    def is_allowed(self, test: str, reason: str) -> bool:
        """Return whether a line of the list covers this skip."""
        return any(fnmatch.fnmatch(test, glob) and reason.startswith(start) for glob, start in self.allowed)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the skip of a phase of a test."""
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips.append((report.nodeid, reason.removeprefix("Skipped: ")))

    def pytest_collectreport(self, report: Any) -> None:
        """Record the skip of a whole file."""
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips.append((report.nodeid, reason.removeprefix("Skipped: ")))

    def failures(self) -> list[str]:
        """Return the skips that CI refuses."""
        if not self.strict:
            return []
        unlisted = [(test, reason) for test, reason in self.skips if not self.is_allowed(test, reason)]
        return [f"skip not in build/allowed_skips.txt: {test}: {reason}" for test, reason in unlisted]


class FoundIn:
    """A pytest plug-in that finds files without a test, unless pytest could not look because of an error."""

    def __init__(self, files: list[str]) -> None:
        self.missing = {os.path.realpath(file): file for file in files}

    def pytest_itemcollected(self, item: Any) -> None:
        """Record that the file of a test has one, before any test is left out by its name."""
        self.missing.pop(os.path.realpath(item.path), None)

    def pytest_collectreport(self, report: Any) -> None:
        """Forget all files after an error, which pytest reports itself."""
        if report.failed:
            self.missing.clear()

    def failures(self) -> list[str]:
        """Return a text for each file without a test."""
        return [f"no test was found in {file}" for file in self.missing.values()]


class Imports:
    """A pytest plug-in that spares the collector, and the processes that tests start, work on what is imported."""

    def __init__(self, forked: Any) -> None:
        self.forked = forked

    def pytest_collection(self) -> None:
        """Let nothing be collected while tests are imported: all of it stays."""
        gc.disable()

    def pytest_runtestloop(self, session: Any) -> None:
        """Keep what is imported out of the collector's way; fork the server of processes, with the files of before."""
        gc.enable()
        gc.freeze()
        if self.forked is not None:
            with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                self.forked.start()


class Seeds:
    """A pytest plug-in that seeds torch before each test and its fixtures: its own first seed is a random one."""

    def pytest_runtest_protocol(self, item: Any) -> None:
        """Set the seed of torch by the name of the test, so that no two tests draw the same numbers."""
        if torch := sys.modules.get("torch"):
            torch.manual_seed(zlib.crc32(item.nodeid.encode()))


class Groups:
    """A pytest plug-in that ends a process group that the tests of a file left: those of the next file have none."""

    def __init__(self) -> None:
        self.path: Path | None = None

    def pytest_runtest_protocol(self, item: Any) -> None:
        """Destroy torch's default group before the first test of another file, when fixtures of the last are gone."""
        dist = sys.modules.get("torch.distributed")
        if self.path not in (None, item.path) and dist and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        self.path = item.path


class Capability:
    """A pytest plug-in that writes torch's processor instructions (ATEN_CPU_CAPABILITY) to the log and JUnit file."""

    def pytest_collection_finish(self, session: Any) -> None:
        """Record the processor capability, once the tests are imported, and torch with those that compute."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        name = torch.backends.cpu.get_cpu_capability()
        print(f"torch computes with {name}")
        from _pytest.junitxml import xml_key

        junit = session.config.stash.get(xml_key, None)
        if junit is not None:
            junit.add_global_property("torch-instructions", name)


def main(argv: list[str]) -> int:
    """Run pytest on argv and return the exit status for Bazel."""
    prepare_environment()
    tags = [a.removeprefix("--tessera-tag=") for a in argv if a.startswith("--tessera-tag=")]
    if not set(tags) & set(DEVICES):
        leave_kernels_out()
    import pytest

    forked = None if set(tags) & {*DEVICES, "vllm"} else fork_for_spawn()
    load_hypothesis_profile()
    rest = [a for a in argv if not a.startswith("--tessera-tag=")]
    wanted = os.environ.get("TESTBRIDGE_TEST_ONLY", "")
    if named := [a for a in rest if a.endswith("_test.py") and Path(a).stem == wanted.removesuffix(".py")]:
        wanted, rest = "", [*named, *(a for a in rest if not a.endswith("_test.py"))]
    root = Path(__file__).absolute().parent.parent
    options = [
        "-c",
        str(root / "pyproject.toml"),
        f"--rootdir={root}",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    if os.environ.get("XML_OUTPUT_FILE"):
        options += [f"--junitxml={os.environ['XML_OUTPUT_FILE']}", "-o", "junit_family=xunit1"]
    if wanted:
        options += ["-k", wanted]
    keeper = SkipKeeper(allowed_skips(root / "build/allowed_skips.txt"), strict=bool(os.environ.get("CI")))
    missing = FoundIn([a for a in rest if a.endswith("_test.py")])
    plugins = [keeper, missing, Imports(forked), Seeds(), Groups(), Capability()]
    status = int(pytest.main([*options, *rest], plugins=plugins))
    for test, reason in keeper.skips:
        print(f"SKIPPED {test}: {reason}" + (f" [{', '.join(tags)}]" if tags else ""))
    failures = keeper.failures() + missing.failures()
    print("\n".join(failures), end="\n" if failures else "")
    return status or int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
