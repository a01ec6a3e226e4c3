"""The names of tool-call parsers in the newest vLLM and SGLang, beside those that `known_formats.servers` lists.

    PYTHONPATH=libs/chat_tools python libs/chat_tools/benchmarks/server_names.py [CACHE]

Fetches vLLM's source distribution and SGLang's wheel with pip into CACHE (delete it to fetch newer ones); nothing of
them is installed or run, their sources are read. Ends with 1 where a name is missing here, or there.
"""

from __future__ import annotations

import argparse
import ast
import email
from pathlib import Path

from chat_tools.conformance.corpus import sources
from chat_tools.known_formats.servers import NAMES, VERSIONS

SOURCES = {
    "vllm": ("vllm/tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "sglang": ("sglang/srt/function_call/function_call_parser.py", "ToolCallParserEnum"),
}


def keys_of(source: str, name: str) -> set[str]:
    """Return the keys of the dict that a module or class gives this name."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    raise SystemExit(f"no dict {name} in the source: the registry has moved")


def main() -> int:
    """Print what differs by server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, nargs="?", help="without it, packages that lie on the path are taken")
    cache = parser.parse_args().cache
    differ = False
    for server, (path, name) in SOURCES.items():
        place = sources(server, cache)
        (about,) = [*place.glob("PKG-INFO"), *place.glob(f"{server}-*.dist-info/METADATA")]
        version = email.message_from_string(about.read_text(encoding="utf-8"))["Version"]
        there, here = keys_of((place / path).read_text(encoding="utf-8"), name), set(NAMES[server])
        print(f"{server} {version} (listed: {VERSIONS[server]}): {len(there)} names")
        print(f"  not listed: {sorted(there - here)}; listed, not there: {sorted(here - there)}")
        differ |= there != here
    return int(differ)


if __name__ == "__main__":
    raise SystemExit(main())
