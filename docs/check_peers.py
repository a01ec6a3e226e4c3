"""Hold the table beside other trainers to their wheels: `python docs/check_peers.py WHEEL ...`, run by hand.

Each cell of docs/peers.json has evidence: a pattern that files of the wheel have or lack, how often, how many files
there are, or the lines of the longest one. Prints what does not hold, and exits with 1 then; no wheel is fetched.
"""

import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers.json"


def read_wheel(path: Path) -> dict[str, str]:
    """Return the text files of a wheel by name."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        return {name: wheel.read(name).decode("utf-8", "replace") for name in names}


def problem(evidence: Mapping[str, Any], files: Mapping[str, str]) -> str | None:
    """Return what of one piece of evidence does not hold in a wheel's files; None where it holds.

    Raises:
        ValueError: it is evidence of no known kind.
    """
    if "note" in evidence:  # of what is in no wheel of the peer's
        return None
    pattern = evidence["files"]
    texts = {name: text for name, text in files.items() if fnmatchcase(name, pattern)}
    if not texts:
        return f"there is no file {pattern}"
    if "longest" in evidence:
        longest = max(text.count("\n") for text in texts.values())
        return None if longest == evidence["longest"] else f"{pattern}: the longest has {longest} lines"
    if "lacks" in evidence:
        holding = [name for name, text in texts.items() if re.search(evidence["lacks"], text)]
        return f"{holding[0]} has {evidence['lacks']!r}" if holding else None
    if "has" not in evidence and "count" not in evidence:
        raise ValueError(f"evidence of no known kind: {dict(evidence)}")
    what = evidence.get("has")
    count = len(texts) if what is None else sum(len(re.findall(what, text)) for text in texts.values())
    wanted = evidence.get("count")
    if count == wanted or (wanted is None and count):
        return None
    return f"{pattern} has {'files' if what is None else repr(what)} {count} times"


def problems(peers: Mapping[str, Any], name: str, files: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each cell of a peer whose evidence does not hold."""
    for row in peers["rows"]:
        cell = row["cells"][name]
        for evidence in cell["evidence"]:
            if why := problem(evidence, files):
                yield f"{name}, {row['row']} ({cell['says']}): {why}"


def main(paths: Sequence[str]) -> int:
    """Check wheels; return 1 where something does not hold, 2 where a wheel is of no peer."""
    peers = json.loads(PEERS.read_text(encoding="utf-8"))
    known = {peer["wheel"].partition("-")[0]: name for name, peer in peers["peers"].items() if "wheel" in peer}
    if not paths or any(Path(path).name.partition("-")[0] not in known for path in paths):
        sys.stderr.write(f"name wheels of {', '.join(known)}\n")
        return 2
    differing: list[str] = []
    for path in map(Path, paths):
        name = known[path.name.partition("-")[0]]
        differing += problems(peers, name, read_wheel(path))
        if path.name != peers["peers"][name]["wheel"]:
            sys.stdout.write(f"{path.name}: the table is of {peers['peers'][name]['wheel']}\n")
    sys.stdout.write(
        "".join(f"{line}\n" for line in differing) + f"{len(paths)} wheels, {len(differing)} cells differ\n"
    )
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
