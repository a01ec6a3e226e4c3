"""Change the code a little, many times, and print which changes no test notices: `./bazelw run //build:mutate -- PATH`.

    ./bazelw run //build:mutate -- libs/objectives                          a library, by the tests beside each file
    ./bazelw run //build:mutate -- apps/grpo/step.py --tests apps/grpo/step_test.py
    ./bazelw run //build:mutate -- --changed-since main --minutes 10        what a branch changed, as CI does

mutmut makes the mutants and runs, for each, the tests that reach its function. Where `--minutes` do not suffice for
all, an even random sample is run: `measured` in the table says how many. `--keep FILE` keeps the verdicts, so that the
next run goes on where this one stopped. Changes of an error's text and of a zip's `strict` do not count; those that no
test can notice are named, with a reason each, in equivalent/, one file a library.
"""

import argparse
import contextlib
import datetime as dt
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mutate_kept import Kept
from mutate_report import (
    Mutant,
    library_of,
    name_equivalents,
    read_equivalents,
    read_mutants,
    recorded,
    rows_of,
    stale,
    table,
)
from mutate_tree import Group, copy_group, files_of, groups_of, is_mutable

EQUIVALENT = "build/equivalent"
MUTMUT = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()"]
NOTHING = "no mutant has this name"
SECONDS_A_MUTANT = 0.5  # forking, collecting
SMALLEST_BATCH = 20  # a batch starts with the unchanged tests


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and the survivors; return 1 where unchanged tests fail, else 0, even out of time."""
    options = parser().parse_args(arguments)
    top = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    wanted = changed_files(top, options.changed_since) if options.changed_since else options.paths
    if not wanted:
        print("nothing to mutate" if options.changed_since else "name a file or folder, or --changed-since REVISION")
        return 0 if options.changed_since else 2
    groups = groups_of(top, files_of(top, wanted), [Path(test) for test in options.tests], not options.only_tests)
    deadline = time.monotonic() + 60 * options.minutes
    mutants: list[Mutant] = []
    failed = False
    for number, group in enumerate(groups):
        left = deadline - time.monotonic()
        measured = measure(top, group, left / (len(groups) - number), options)
        failed |= measured is None
        mutants += measured or []
    known = read_equivalents(top / EQUIVALENT)
    mutants = name_equivalents(mutants, known)
    report(mutants, options)
    for entry in stale(mutants, known):
        page = f"{EQUIVALENT}/{library_of(entry.file)}.toml"
        print(f"{page} names a change that is not made or not equivalent: {entry.file}: {entry.change}")
    return int(failed and not options.changed_since)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("paths", nargs="*", metavar="PATH", help="files or folders below libs/NAME/NAME or apps")
    made.add_argument("--tests", nargs="*", default=[], metavar="TEST", help="further test files")
    made.add_argument("--only-tests", action="store_true", help="--tests alone, not those beside the files")
    made.add_argument("--minutes", type=float, default=60.0, help="time limit (default: 60)")
    made.add_argument("--jobs", type=int, default=1, help="mutants at once (default: 1)")
    cold = "start each mutant without the caches that a run of the tests filled: slower, and sees what they hide"
    made.add_argument("--cold", action="store_true", help=cold)
    made.add_argument("--seed", type=int, default=0, help="of the sample, where time does not suffice for all")
    keep_help = "verdicts of earlier runs, to go on from: what was killed stays so while its file is the same"
    made.add_argument("--keep", type=Path, metavar="FILE", help=keep_help)
    made.add_argument("--changed-since", metavar="REVISION", help="files that differ from this revision")
    made.add_argument("--record", type=Path, metavar="FILE", help="add the rows to this file of docs/benchmarks")
    made.add_argument("--no-survivors", action="store_true", help="print the table alone")
    return made


def changed_files(top: Path, revision: str) -> list[str]:
    """Return files with code to mutate that differ from the common ancestor of a revision and HEAD, by git."""
    command = ["git", "-C", str(top), "diff", "--name-only", "--diff-filter=d", f"{revision}...HEAD"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if is_mutable(Path(name))]


def measure(top: Path, group: Group, seconds: float, options: argparse.Namespace) -> list[Mutant] | None:
    """Return the mutants of a group with their verdicts; None where the tests fail without any change."""
    start = time.monotonic()
    names = {str(file.relative_to(group.root)): str(file) for file in group.files}
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        place = Path(folder)
        tests = copy_group(top, group, place, options.cold)
        environment = environment_of(top, group)
        # A name that no mutant has: mutants are made, tests are timed, and nothing is run.
        status, output = mutmut(place, environment, ["run", "--max-children", str(options.jobs), NOTHING], seconds)
        verdicts = Kept.of(options.keep, top, group)
        verdicts.restore(place, names)
        mutants = read_mutants(place, names)
        costs = costs_of(place, mutants)
        if not costs:
            if status is None:
                print(f"{group.package}: out of time")
                return mutants
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--import-mode=importlib", *tests]
            shown = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
            said = shown.stdout if shown.returncode else output
            print(f"{group.package}: the tests fail on unchanged code", *said.splitlines()[-40:], sep="\n")
            return None
        waiting = {mutant.name for mutant in mutants if mutant.verdict == "waiting"}
        order = [name for name in shuffled(costs, options.seed) if name in waiting]
        order.sort(key=lambda name: name not in verdicts.first)  # stable: the others stay in their random order
        # Even random batches; how long the first, chosen as if no test failed early, takes says how large the next is.
        size, done = fitting(order, costs, 0.1 * (seconds - (time.monotonic() - start))), 0
        while order[done:] and (left := seconds - (time.monotonic() - start)) > 0:
            batch = order[done : done + max(size, SMALLEST_BATCH)]
            started = time.monotonic()
            mutmut(place, environment, ["run", "--max-children", str(options.jobs), *batch], left)
            done += len(batch)
            rate = (time.monotonic() - started) / len(batch)
            left = seconds - (time.monotonic() - start)
            size = int(0.8 * left / rate)
            verdicts.save(place, names)
            print(f"{group.package}: {done} of {len(order)} mutants, {rate:.2f} s each", flush=True)
            if size < SMALLEST_BATCH:
                break
        if order and not done:
            print(f"{group.package}: out of time")
        return still_surviving(read_mutants(place, names), verdicts.first)


def still_surviving(mutants: Iterable[Mutant], names: frozenset[str]) -> list[Mutant]:
    """Return the mutants; those of these names that wait for a run become survivors."""
    return [
        replace(one, verdict="survived") if one.verdict == "waiting" and one.name in names else one for one in mutants
    ]


def environment_of(top: Path, group: Group) -> dict[str, str]:
    """Return this process's environment, with the other libraries of the tree and all packages to import."""
    own = (top / group.root).resolve()
    libraries = [path for path in sorted((top / "libs").resolve().iterdir()) if path.is_dir() and path != own]
    taken = {own, top.resolve(), *libraries}
    rest = [entry for entry in sys.path if entry and Path(entry).resolve() not in taken]
    path = os.pathsep.join([*map(str, libraries), *rest])
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **offline, "PYTHONPATH": path}


def mutmut(
    place: Path, environment: Mapping[str, str], arguments: Sequence[str], seconds: float
) -> tuple[int | None, str]:
    """Run mutmut in the copy and return (exit status, output); the status is None where the time was over."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*MUTMUT, *arguments],
            cwd=place,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return status, log.read()


def costs_of(place: Path, mutants: Sequence[Mutant]) -> dict[str, float]:
    """Return the seconds of each mutant's tests where none of them fails; empty where no test was timed."""
    stats = place / "mutants" / "mutmut-stats.json"
    if not stats.exists():
        return {}
    data = json.loads(stats.read_text(encoding="utf-8"))
    tests, durations = data["tests_by_mangled_function_name"], data["duration_by_test"]
    return {
        mutant.name: SECONDS_A_MUTANT
        + sum(durations.get(test, 0.0) for test in tests.get(mutant.name.partition("__mutmut_")[0], ()))
        for mutant in mutants
    }


def shuffled(names: Iterable[str], seed: int) -> list[str]:
    """Return the names in a random order, every prefix of which is an even sample; the same for the same seed."""
    order = sorted(names)
    random.Random(seed).shuffle(order)
    return order


def fitting(order: Sequence[str], costs: Mapping[str, float], seconds: float) -> int:
    """Return the number of first mutants that fit into the seconds where no test fails early."""
    ends = itertools.accumulate(costs[name] for name in order)
    return sum(1 for _ in itertools.takewhile(lambda end: end <= seconds, ends))


def report(mutants: Sequence[Mutant], options: argparse.Namespace) -> None:
    """Print the survivors with their changes, then the table; record its rows."""
    if not options.no_survivors:
        for mutant in mutants:
            if mutant.verdict in ("survived", "untested"):
                print(f"\n{mutant.verdict}: {mutant.file} ({mutant.name.rpartition('.')[2]})")
                print("\n".join(f"    {line}" for line in mutant.diff))
    rows = rows_of(mutants)
    print("\n" + table(rows))
    if options.record:
        file = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")) / options.record
        date, device = dt.datetime.now(dt.UTC).date().isoformat(), f"{os.cpu_count()} CPU cores"
        file.write_text(recorded(file.read_text(encoding="utf-8"), rows, date, device), encoding="utf-8")


if __name__ == "__main__":
    if shutil.which("git") is None and "--changed-since" in sys.argv:
        sys.exit("git is needed for --changed-since")
    sys.exit(main())
