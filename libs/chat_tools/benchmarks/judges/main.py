"""Judge our parsers by vLLM's, SGLang's and llama.cpp's on the same texts: agreement by format, each difference named.

    PYTHONPATH=libs/chat_tools python libs/chat_tools/benchmarks/judges/main.py [CACHE] [--json OUT] [--show]

Fetches vLLM's and llama-cpp-python's source distributions, SGLang's wheel and some small packages with pip into CACHE
(`conformance/living_corpus_test.py` has them from its hub); nothing of them comes into the tree. vLLM's and SGLang's
parsers run (`server_process.py`); llama.cpp's cases say which calls a turn holds. `judged.json` beside this file says
who is right where they differ and why. Ends with 1 where a difference is not judged. Needs transformers, for the
formats of llama.cpp's templates.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chat_tools import parse
from chat_tools.conformance.corpus import sources
from chat_tools.testing.reference_cases import Calls, Case, format_of, llama_cases, server_cases
from chat_tools.testing.samples import MALFORMED_TOOLS

HERE = Path(__file__).parent
MALFORMED = HERE.parent.parent / "chat_tools/parsing/malformed.jsonl"
JUDGED = HERE / "judged.json"
PACKAGES = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llama-cpp-python"}
NEEDED = (
    *("regex", "pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
    *("partial-json-parser", "orjson", "msgspec"),
)


def needed(cache: Path | None) -> str:
    """Return where the packages lie that the servers' parsers import, as a path for Python."""
    if cache is None:
        folders = (glob.glob(f"{place}/{name.replace('-', '_')}-*.dist-info") for name in NEEDED for place in sys.path)
        return os.pathsep.join(dict.fromkeys(os.path.dirname(folder[0]) for folder in folders if folder))
    place = cache / "needed"
    if not place.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), *NEEDED]
        subprocess.run(command, check=True)
    return str(place)


def answers(judge: str, cases: list[Case], cache: Path | None) -> list[dict[str, Any]]:
    """Return the judge's answer to each case."""
    if judge == "llama.cpp":
        return [{"calls": case.expected} for case in cases]
    lines = "\n".join(json.dumps({"name": c.name, "text": c.text, "tools": c.tools}) for c in cases)
    place = sources(PACKAGES[judge], cache)
    command = [sys.executable, "-S", str(HERE / "server_process.py"), judge, str(place)]  # without what is installed
    environment = {"PYTHONPATH": needed(cache), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the process of {judge} ended: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def theirs_of(answer: dict[str, Any]) -> Calls | None:
    """Return the calls of an answer with their arguments read; None where a judge gives none."""
    if "calls" not in answer:
        return None
    calls: Calls = []
    for name, arguments in answer["calls"]:
        try:
            calls.append((name, json.loads(arguments or "{}") if isinstance(arguments, str) else arguments))
        except ValueError:
            calls.append((name, arguments))
    return calls


def key_of(case: Case) -> str:
    """Return a short name of a case."""
    return f"{case.source}/{case.name}/{hashlib.sha256(case.text.encode()).hexdigest()[:10]}"


def compare(judge: str, cases: Iterable[Case], cache: Path | None) -> list[dict[str, Any]]:
    """Return each case's outcome: whether ours and the judge's calls are the same."""
    listed = list(cases)
    rows = []
    for case, answer in zip(listed, answers(judge, listed, cache), strict=True):
        fmt = format_of(judge, case.name)
        ours = [(call.name, call.arguments_dict()) for call in parse(case.text, fmt, case.tools).tool_calls]
        theirs = theirs_of(answer)
        outcome = "no answer" if theirs is None else "agree" if theirs == ours else "differ"
        if outcome == "differ" and judge != "llama.cpp" and case.expected == ours:
            outcome = "ours"  # malformed.jsonl says which calls such a turn holds, and why
        rows.append(
            {"key": key_of(case), "format": fmt.name, "judge": judge, "outcome": outcome, "text": case.text,
             "ours": ours, "theirs": theirs if theirs is not None else answer["error"]}
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]], judged: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """Return the counts by judge and format."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        outcome = row["outcome"]
        if outcome == "differ":
            outcome = judged.get(row["key"], {"right": "unjudged"})["right"]
        counts[row["judge"], row["format"]][outcome] += 1
    fields = ("agree", "ours", "theirs", "either", "unjudged", "no answer")
    return [
        {"judge": judge, "format": name, "texts": count.total(), **{f.replace(" ", "_"): count[f] for f in fields}}
        for (judge, name), count in sorted(counts.items())
    ]


def by_format(counted: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the table as cases of a benchmark: a format's agreement with each judge, and what is not agreed on."""
    cases: dict[str, dict[str, str]] = defaultdict(dict)
    for row in counted:
        if answered := row["texts"] - row["no_answer"]:
            cell = f"{row['agree']} of {answered}"
            rest = [f"{row[what]} {what}" for what in ("ours", "theirs", "either", "unjudged") if row[what]]
            cases[row["format"]][row["judge"]] = f"{cell} ({', '.join(rest)})" if rest else cell
    return dict(sorted(cases.items()))


def main() -> int:
    """Print the table and the differences that nobody has judged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, nargs="?", help="without it, packages that lie on the path are taken")
    parser.add_argument("--json", type=Path, help="a file for the table")
    parser.add_argument("--show", action="store_true", help="print the texts of the differences without a verdict")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for judge in PACKAGES:
        place = sources(PACKAGES[judge], options.cache)
        cases = llama_cases(place) if judge == "llama.cpp" else server_cases(judge, place, MALFORMED, MALFORMED_TOOLS)
        rows += compare(judge, cases, options.cache)
    judged = json.loads(JUDGED.read_text()) if JUDGED.exists() else {}
    counted = table(rows, judged)
    print(
        f"{'judge':10}{'format':16}{'texts':>6}{'agree':>6}{'ours':>6}"
        f"{'theirs':>7}{'either':>7}{'open':>6}{'no answer':>10}"
    )
    for row in counted:
        print(
            "{judge:10}{format:16}{texts:6}{agree:6}{ours:6}{theirs:7}{either:7}{unjudged:6}{no_answer:10}".format(
                **row
            )
        )
    if options.json:
        options.json.write_text(json.dumps(by_format(counted), indent=1) + "\n")
    unjudged = [row for row in rows if row["outcome"] == "differ" and row["key"] not in judged]
    for row in unjudged if options.show else ():
        print(json.dumps(row, ensure_ascii=False))
    print(f"{len(rows)} texts, {len(unjudged)} differences without a verdict")
    return int(bool(unjudged))


if __name__ == "__main__":
    raise SystemExit(main())
