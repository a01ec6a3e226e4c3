"""Run the fast tests by plain pytest, on a machine without Bazel: `python3.12 build/fast_tests.py [libs/seqpack ...]`.

Which files are tests, with which tags and environment, is read from the BUILD files of libraries and apps. Each file
runs in a process of its own with a home of its own, and sees the whole tree and the machine's network. What this Python
lacks is left out and counted, by package: files that import a package that is not installed, and cases that fail
for one. Files of other hubs, and those that Bazel builds something for, are left out too. The last line is
the total; the exit status is 1 if a case failed or none passed. pytest has to be installed.

The tests that want a GPU, on a machine that has one, one file at a time on a device and each for three minutes at most:

    TRITON_CACHE_DIR=DIR TRITON_CACHE_AUTOTUNING=1 python3.12 build/fast_tests.py --only gpu --devices 0 --seconds 180

With `--devices 0,1,2,3` four files run at a time, each on a device of its own. Kernels tune for minutes where nothing
was kept in DIR.
"""

import argparse
import ast
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from gazelle import DISTRIBUTIONS, LOCKS, imports_of, source_root, target_of
from gazelle_rules import TEST_RULES
from install_hub import lock_entries, normal

ROOT = Path(__file__).absolute().parent.parent
NEEDS = ("gpu", "gpu2", "gpu4", "npu", "vllm", "slow", "browser", "nodes", "manual")
SECONDS = {"small": 240, "medium": 900, "large": 1800, "enormous": 3600}
"""Limits by size, those of .bazelrc."""
MISSING = re.compile(r"No module named '([\w.]+)'")


@dataclass(frozen=True, eq=False)
class Test:
    """A test file, as a rule of a BUILD file has it."""

    label: str
    path: Path
    tags: tuple[str, ...] = ()
    size: str = "small"
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    special: str = ""  # why it cannot run outside of Bazel


def rules(folder: Path) -> list[Test]:
    """Return the tests of a library's or an app's BUILD file."""
    package = str(folder.relative_to(ROOT))
    calls = []
    for node in ast.parse((folder / "BUILD.bazel").read_text()).body:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in TEST_RULES:
            calls.append((call.func.id, {word.arg: word.value for word in call.keywords if word.arg}))
    alone = {file for kind, words in calls if kind != "package_test" for file in _files(package, kind, words)}
    return [
        _test(f"//{package}:{name}", path, kind, words)
        for kind, words in calls
        for name, path in _files(package, kind, words)
        if kind != "package_test" or (name, path) not in alone
    ]


def _files(package: str, kind: str, words: dict[str, ast.expr]) -> list[tuple[str, Path]]:
    """Return the files of a rule, each with the name of a target; a file among others has a name like one alone."""
    name, root = ast.literal_eval(words["name"]), source_root(package)
    if kind == "module_test":
        return [(name, Path(package) / ast.literal_eval(words["srcs"])[0] if "srcs" in words else root / f"{name}.py")]
    if kind == "module_tests":
        paths = [Path(package) / source for source in ast.literal_eval(words["srcs"])]
    else:
        folders = [name.removesuffix("_test"), *ast.literal_eval(words.get("folders", ast.List([])))]
        places = [root if folder == root.name else root / folder for folder in folders]
        paths = [place / file.name for place in places for file in sorted((ROOT / place).glob("*_test.py"))]
    return [(target_of(path, root), path) for path in paths]


def _test(label: str, path: Path, kind: str, words: dict[str, ast.expr]) -> Test:
    """Return the test of a file, as its imports and a rule's keywords describe it."""
    tops = {module.partition(".")[0] for module, _ in imports_of(ROOT / path)}
    imported = {normal(DISTRIBUTIONS.get(top, top)) for top in tops} & locked()
    declared = _requirements(words.get("deps"))
    hubs = [hub for name, hub in declared.items() if kind != "package_test" or name in imported]
    known = {key: ast.literal_eval(words[key]) for key in ("tags", "size", "args", "hub") if key in words}
    other = [hub for hub in hubs if hub not in ("pypi", "pypi_extras")]
    special = f"of the hub {other[0]}" if other else ""
    if known.get("hub", "pypi") != "pypi":
        special = f"of the hub {known['hub']}"
    try:
        env = ast.literal_eval(words["env"]) if "env" in words else {}
    except ValueError:
        env, special = {}, "with an environment that Bazel makes"
    if any("$(" in word for word in [*env.values(), *known.get("args", ())]):
        env, special = {}, "with files that Bazel makes"
    return Test(
        label=label,
        path=path,
        tags=tuple(known.get("tags", ())),
        size=known.get("size", "small"),
        env=env,
        args=tuple(known.get("args", ())),
        packages=tuple(sorted(imported | (declared.keys() if kind == "module_test" else set()))),
        special=special,
    )


def _requirements(deps: ast.expr | None) -> dict[str, str]:
    """Return the packages that a rule declares itself, each with its hub."""
    needs = {}
    for node in ast.walk(deps) if deps is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "requirement":
            name, *hub = (ast.literal_eval(word) for word in [*node.args, *(one.value for one in node.keywords)])
            needs[normal(name)] = hub[0] if hub else "pypi"
    return needs


@cache
def installed() -> dict[str, str]:
    """Return the version of each distribution that this Python has."""
    return {normal(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}


@cache
def locked() -> frozenset[str]:
    """Return the distributions in the locks of the main hub and its extras."""
    locks = ROOT / "build/locks"
    return frozenset(lock_entries(locks / f"{LOCKS['pypi']}.txt")) | frozenset(lock_entries(locks / "extras.txt"))


def lacking(text: str) -> str:
    """Return the locked package whose absence made a test fail, by its report; "" for another reason."""
    for module in MISSING.findall(text):
        top = module.split(".")[0]
        name = normal(DISTRIBUTIONS.get(top, top))
        if name in locked() and name not in installed():
            return name
    return ""


def left_out(test: Test, tags: set[str], only: str = "") -> str:
    """Return why a test is not started, "" if it is. `only`: a tag that it must have; then it may be a manual test."""
    if only and only not in test.tags:
        return f"not tagged {only}"
    barred = [tag for tag in test.tags if tag in NEEDS and tag not in tags | ({only, "manual"} if only else set())]
    if barred:
        return f"tagged {barred[0]}"
    absent = [name for name in test.packages if name not in installed()]
    return f"without {absent[0]}" if absent else test.special


def run(test: Test, most: float | None = None, device: str = "") -> tuple[Counter[str], list[str]]:
    """Run one file, for `most` seconds or those of its size; return its cases by outcome, and remarks on them.

    It sees the CUDA `device` alone where one is named.
    """
    limit = most or SECONDS[test.size]
    with tempfile.TemporaryDirectory() as scratch:
        xml = Path(scratch) / "test.xml"
        home = Path(scratch) / "home"
        home.mkdir()
        paths = [str(ROOT), *(str(folder.parent) for folder in sorted(ROOT.glob("libs/*/BUILD.bazel")))]
        known = {key: value for key, value in os.environ.items() if not key.startswith("TEST")}
        known |= {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}
        known |= {"TEST_TMPDIR": str(home), "XML_OUTPUT_FILE": str(xml), "OMP_NUM_THREADS": "1", **test.env}
        known |= {"CUDA_VISIBLE_DEVICES": device} if device else {}
        command = [sys.executable, str(ROOT / "build/pytest_main.py"), str(test.path), *test.args]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=known,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said = process.communicate()[0] + f"\nended after {limit:g} s"
        return account(test, process.returncode, xml, said)


def account(test: Test, status: int, xml: Path, said: str) -> tuple[Counter[str], list[str]]:
    """Return cases by outcome: a failure by a missing package is none, a failed file without failed cases is one."""
    counts: Counter[str] = Counter()
    words = []
    wanting = Counter[str]()
    for case in ET.parse(xml).iter("testcase") if xml.exists() else ():
        faults = [*case.iter("failure"), *case.iter("error")]
        skipped = case.find("skipped")
        name = lacking("".join(fault.text or "" for fault in faults))
        if name:
            wanting[name] += 1
        elif faults:
            counts["failed"] += 1
            words.append(f"failed: {test.label} {case.get('name')}")
        elif skipped is not None and skipped.get("type") != "pytest.xfail":
            counts["skipped"] += 1
            words.append(f"skipped: {test.label} {case.get('name')}: {skipped.get('message')}")
        else:
            counts["passed"] += 1
    for name, number in wanting.items():
        counts[f"without {name}"] += number
    if status and not counts["failed"] and not wanting:
        counts["failed"] += 1
        words.append(f"failed: {test.label}: exit status {status}")
    return counts, [said] * bool(counts["failed"]) + words


def run_all(tests: list[Test], places: Sequence[str], most: float | None = None) -> Counter[str]:
    """Run these files, one at a time in each place, and print problems; return cases by outcome, after Ctrl-C so far.

    A place is a CUDA device, or "". The largest begin first, so that none of them is the only one left at the end.
    """
    counts: Counter[str] = Counter()
    tests = sorted(tests, key=lambda test: -SECONDS[test.size])
    pool = ThreadPoolExecutor(len(places))
    free: SimpleQueue[str] = SimpleQueue()
    for place in places:
        free.put(place)

    def timed(test: Test) -> tuple[Counter[str], list[str]]:
        place = free.get()
        start = time.monotonic()
        try:
            done, words = run(test, most, place)
        finally:
            free.put(place)
        words.append(f"{time.monotonic() - start:4.0f} s  {test.label}: {done['passed']} passed")
        return done, words

    try:
        for number, future in enumerate(as_completed([pool.submit(timed, test) for test in tests]), 1):
            done, words = future.result()
            counts += done
            words[-1] = f"{number:3}/{len(tests)} {words[-1]}"
            print("\n".join(words), flush=True)
    except KeyboardInterrupt:
        counts["failed"] += 1
        print("failed: interrupted; files that run are waited for", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return counts


def main() -> int:
    """Run the tests and print the account."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="libraries and apps, such as libs/seqpack; all by default")
    parser.add_argument("--tags", default="", help=f"run these too, with commas between them: {', '.join(NEEDS)}")
    parser.add_argument("--only", default="", metavar="TAG", help="run those with this tag alone")
    parser.add_argument("--seconds", type=float, help="for a file at most; without it by its size")
    at_once = parser.add_mutually_exclusive_group()
    at_once.add_argument("--jobs", type=int, help="files at a time; one a core by default")
    at_once.add_argument("--devices", default="", metavar="0,1", help="a file at a time on each of these CUDA devices")
    options = parser.parse_args()
    if "pytest" not in installed():
        parser.error(f"{sys.executable} has no pytest")
    every = sorted(path.parent for top in ("libs", "apps") for path in ROOT.glob(f"{top}/*/BUILD.bazel"))
    folders = [Path(folder).absolute() for folder in options.folders] or every
    unknown = [str(folder) for folder in folders if folder not in every]
    if unknown:
        parser.error(f"no library or app: {', '.join(unknown)}")
    tests = [test for folder in folders for test in rules(folder)]
    reasons = {test: left_out(test, set(options.tags.split(",")), options.only) for test in tests}
    started = [test for test in tests if not reasons[test]]
    about = [f"{name} {installed()[name]}" for name in ("torch", "transformers", "pytest") if name in installed()]
    print(f"Python {sys.version.split()[0]}; {', '.join(about)}; {len(started)} of {len(tests)} test files", flush=True)
    jobs = options.jobs or len(os.sched_getaffinity(0))
    places = options.devices.split(",") if options.devices else [""] * jobs
    counts = run_all(started, places, options.seconds)
    for why, number in sorted(Counter(filter(None, reasons.values())).items()):
        print(f"left out: {number} files {why}")
    for why, number in sorted(counts.items()):
        if why.startswith("without "):
            print(f"left out: {number} cases {why}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return int(bool(counts["failed"]) or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
