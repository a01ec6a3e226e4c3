"""vLLM's own tests of its tool parsers, run over this library's: how many agree, by format.

    VLLM_VERSION_OVERRIDE=0.32.0 pip download --no-deps --no-binary vllm vllm==0.32.0
    PYTHONPATH=libs/chat_tools python libs/chat_tools/benchmarks/vllm_tests.py vllm-0.32.0.tar.gz [--show] [-k WORDS]

Run it in vLLM's Python, with pytest. (Without the variable, pip refuses a source distribution whose version says "+cpu"
where there is no CUDA.) The tests are read from the source distribution into a folder that is removed
again; nothing of them is kept. Each parser class for which there is a format here is replaced by the plug-in
(`chat_tools.serving.vllm_plugin`), so that their assertions judge our results, whole and streamed. Their tokenizers,
which would have to be downloaded, are replaced by one that cuts text into words. A test counts if it asked our parser
for something, and if it passes over theirs in this environment; the others look at insides.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import pkgutil
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import transformers
import vllm.tokenizers
import vllm.tool_parsers
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from chat_tools.parsing.formats import ALIASES, FORMATS
from chat_tools.serving.vllm_plugin import PREFIX, FormatToolParser

FOLDERS = (
    "tests/__init__.py",
    "tests/tool_parsers/",
    "tests/tool_use/__init__.py",
    "tests/tool_use/test_kimi_k3",
    "tests/entrypoints/tool_parsers/",
    "tests/entrypoints/__init__.py",
)
# Names of vLLM's that are no alias of ours, for parsers of a grammar that is here.
SAME = {"qwen3_coder": "qwen3_xml", "kimi_k2": "kimi_k2", "granite": "granite", "gemma4": "gemma"}


class Words:
    """A tokenizer whose tokens are words, spaces and signs; markers in angle brackets are one token."""

    bos_token, eos_token, pad_token, unk_token = "<s>", "</s>", "<pad>", "<unk>"
    is_fast, chat_template, name_or_path = True, None, "words"
    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()
    added_tokens_encoder: dict[str, int] = {}  # noqa: RUF012  theirs is a dict

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        for fmt in FORMATS.values():  # parsers look for their markers when they are made
            self.encode("".join([fmt.example, *fmt.ends]))

    def tokenize(self, text: str, **_: Any) -> list[str]:
        return re.findall(r"</?[^<>\s]{1,60}>|\w+|\s|.", text, re.DOTALL)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.ids.setdefault(token, len(self.ids)) for token in self.tokenize(text)]

    def decode(self, ids: Any, **_: Any) -> str:
        names = list(self.ids)
        return "".join(names[i] for i in ([ids] if isinstance(ids, int) else ids))

    def get_vocab(self) -> dict[str, int]:
        return self.ids

    @property
    def vocab(self) -> dict[str, int]:
        return self.ids

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        one = isinstance(tokens, str)
        ids = [self.ids.setdefault(token, len(self.ids)) for token in ([tokens] if one else tokens)]
        return ids[0] if one else ids

    def convert_ids_to_tokens(self, ids: Any, **_: Any) -> Any:
        names = list(self.ids)
        return names[ids] if isinstance(ids, int) else [names[i] for i in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def add_tokens(self, tokens: Any, **_: Any) -> int:
        self.convert_tokens_to_ids([tokens] if isinstance(tokens, str) else tokens)
        return 0

    def __len__(self) -> int:
        return len(self.ids)


def without_downloads() -> None:
    """Replace all tokenizers by the tokenizer of words."""
    transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *_, **__: Words())
    vllm.tokenizers.get_tokenizer = lambda *_, **__: Words()


def format_of(name: str) -> str | None:
    """Return the format of a parser's registered name, or None."""
    known = SAME.get(name, ALIASES.get(name, name))
    return known if known in FORMATS else None


ASKED: Counter[str] = Counter()  # how often a format was asked for something


def counted(kind: type[FormatToolParser]) -> type[FormatToolParser]:
    """Return the parser class with its calls counted."""

    def over(method: Any) -> Any:
        @wraps(method)
        def run(self: Any, *arguments: Any, **options: Any) -> Any:
            ASKED[self.format.name] += 1
            return method(self, *arguments, **options)

        return run

    members = {name: over(getattr(kind, name)) for name in ("extract_tool_calls", "extract_tool_calls_streaming")}
    return type(kind.__name__, (kind,), members)


def replace_parsers() -> dict[str, str]:
    """Replace every registered class that has a format by ours; return the formats by class name."""
    names = [*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers]
    replaced: dict[str, str] = {}
    ours: dict[type[ToolParser], type[FormatToolParser]] = {}
    for name in dict.fromkeys(names):
        known = None if name.startswith(PREFIX) else format_of(name)
        if known is None:
            continue
        theirs = ToolParserManager.get_tool_parser(name)
        ours[theirs] = counted(ToolParserManager.get_tool_parser(PREFIX + known))
        ToolParserManager.tool_parsers[name] = ours[theirs]
        replaced[theirs.__name__] = known
    for info in pkgutil.iter_modules(vllm.tool_parsers.__path__, "vllm.tool_parsers."):
        module = importlib.import_module(info.name)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value in ours:
                setattr(module, attribute, ours[value])
    return replaced


class Verdicts:
    """The outcome of each test, and the format that it used."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        if call.when == "setup":
            ASKED.clear()
        report = yield
        if call.when == "call" or report.failed:
            text = str(report.longrepr)[-1500:] if report.failed else ""
            outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            self.found[item.nodeid] = {"outcome": outcome, "formats": sorted(ASKED), "text": text}
        return report


def run_tests(folder: Path, own: bool, words: str) -> dict[str, dict[str, Any]]:
    """Run the tests below a folder over our parsers or their own."""
    without_downloads()
    if not own:
        replace_parsers()
    verdicts = Verdicts()
    sys.path.insert(0, str(folder))
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-k", words, "-W", "ignore"]
    options += ["--rootdir", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*options, str(folder / "tests")], plugins=[verdicts])
    return verdicts.found


def both(archive: Path, words: str) -> dict[bool, dict[str, dict[str, Any]]]:
    """Run the tests over ours and theirs, each in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(archive) as tar:
            first = tar.next()
            assert first is not None, "an empty archive"
            root = first.name.split("/")[0]
            members = [m for m in tar if m.name.removeprefix(f"{root}/").startswith(FOLDERS)]
            tar.extractall(name, members, filter="data")
        results = {}
        for own in (False, True):
            out = Path(name) / f"{own}.json"
            command = [sys.executable, __file__, str(Path(name) / root), "--into", str(out), "-k", words]
            subprocess.run([*command, *(["--own"] if own else [])], check=True, stdout=subprocess.DEVNULL)
            results[own] = json.loads(out.read_text())
    return results


def print_agreement(results: dict[bool, dict[str, dict[str, Any]]], show: bool) -> None:
    """Print the number of tests that agree, by format."""
    agreed: dict[str, Counter[bool]] = defaultdict(Counter)
    for test, ours in results[False].items():
        if not ours["formats"] or results[True].get(test, {}).get("outcome") != "passed":
            continue
        agrees = ours["outcome"] in ("passed", "xfailed")
        agreed["+".join(ours["formats"])][agrees] += 1
        if show and not agrees:
            print(f"--- {test}\n{ours['text']}")
    print("format              agree   of")
    for name, counts in sorted(agreed.items()):
        print(f"{name:20}{counts[True]:5}{counts.total():5}")
    print(f"{'all':20}{sum(c[True] for c in agreed.values()):5}{sum(c.total() for c in agreed.values()):5}")


def main() -> None:
    """Print the table; inside the two processes, write verdicts to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="vLLM's source distribution")
    parser.add_argument("-k", default="", help="tests whose names have these words, as pytest's -k")
    parser.add_argument("--show", action="store_true", help="print each disagreement")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into is not None:
        options.into.write_text(json.dumps(run_tests(options.source, options.own, options.k)))
    else:
        print_agreement(both(options.source, options.k), options.show)


if __name__ == "__main__":
    main()
