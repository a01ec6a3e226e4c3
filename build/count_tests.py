"""Count the test cases of Bazel runs: each skip and failure by name, then `N passed, M failed, K skipped`.

Reads the event files of the runs (--build_event_json_file) and the JUnit files that they name. A failed target without
a failed case (it timed out, or could not be built) counts as one failure, so nothing that went wrong is left out.
`--slowest 20` says before that where the time went, in seconds of the tests' own processes: the 20 slowest targets with
what they import, files without it, and cases.
"""

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlparse


def results(events: Path) -> dict[str, tuple[str, Path | None]]:
    """Return (status, JUnit file) of each test target in an event file; the last attempt counts.

    ABORTED for one that an interrupted run did not end. One that failed and then passed is told as flaky.
    """
    targets: dict[str, tuple[str, Path | None]] = {}
    for line in events.read_text().splitlines():
        event = json.loads(line)
        label = event["id"].get("testResult", {}).get("label")
        if label and "testResult" in event:
            result = event["testResult"]
            files = {output["name"]: output["uri"] for output in result.get("testActionOutput", [])}
            xml = Path(unquote(urlparse(files["test.xml"]).path)) if "test.xml" in files else None
            if targets.get(label, ("PASSED",))[0] != "PASSED" and result["status"] == "PASSED":
                print(f"flaky: {label}: failed, and passed at once after that")
            targets[label] = (result["status"], xml)
        summary = event["id"].get("testSummary", {}).get("label")
        if summary and summary not in targets:
            targets[summary] = (event.get("testSummary", {}).get("overallStatus", "ABORTED"), None)
    return targets


def count_cases(label: str, status: str, xml: Path | None) -> Counter[str]:
    """Return the number of cases of one target by outcome."""
    counts: Counter[str] = Counter()
    cases = list(ET.parse(xml).iter("testcase")) if xml and xml.exists() else []
    for case in cases:
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif skipped is not None and skipped.get("type") != "pytest.xfail":
            counts["skipped"] += 1
            print(f"skipped: {label} {case.get('name')}: {skipped.get('message')}")
        else:
            counts["passed"] += 1
    if status != "PASSED":
        print(f"failed: {label}: {status}")
        counts["failed"] += not counts["failed"]
    return counts


def instructions(label: str, xml: Path | None) -> dict[tuple[str, str], int]:
    """Return {(target, torch's processor instructions as in pytest_main.Capability): cases}; {} without torch."""
    suites = list(ET.parse(xml).iter("testsuite")) if xml and xml.exists() else []
    named = ((suite, suite.find("properties/property[@name='torch-instructions']")) for suite in suites)
    return {(label, prop.get("value", "")): len(suite.findall("testcase")) for suite, prop in named if prop is not None}


def slowest(targets: dict[str, tuple[str, Path | None]], most: int) -> list[str]:
    """Return lines with the seconds by target (of the JUnit file), by test file and by case (of the cases)."""
    seconds = {"targets, imports and all": Counter[str](), "files": Counter[str](), "cases": Counter[str]()}
    by_target, by_file, by_case = seconds.values()
    for label, (_, xml) in targets.items():
        for suite in ET.parse(xml).iter("testsuite") if xml and xml.exists() else ():
            by_target[label] += float(suite.get("time", 0))
            for case in suite.iter("testcase"):
                file = case.get("file", label)
                by_file[file] += float(case.get("time", 0))
                by_case[f"{file}: {case.get('name')}"] += float(case.get("time", 0))
    lines = []
    for what, times in seconds.items():
        lines.append(f"{times.total():.0f} s in {len(times)} {what}; the slowest:")
        lines += [f"{value:8.1f}  {name}" for name, value in times.most_common(most)]
    return lines


def main(argv: list[str]) -> int:
    """Print the account; return 1 if anything failed or nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", nargs="*", help="files that --build_event_json_file wrote")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="say where the time went")
    arguments = parser.parse_args(argv)
    targets: dict[str, tuple[str, Path | None]] = {}
    computed: dict[tuple[str, str], int] = {}
    for name in arguments.events:
        finished = results(Path(name)) if Path(name).exists() else {}
        for label, (_, xml) in finished.items():
            computed |= instructions(label, xml)
        targets |= finished
    if arguments.slowest:
        print("\n".join(slowest(targets, arguments.slowest)))
    for name in sorted({name for _, name in computed}):
        print(f"torch computed with {name}: {sum(n for (_, its), n in computed.items() if its == name)} cases")
    counts = sum((count_cases(label, *target) for label, target in sorted(targets.items())), Counter())
    print(f"{len(targets)} test targets")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return int(bool(counts["failed"]) or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
