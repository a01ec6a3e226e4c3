"""Write which words the identifiers of other packages for post-training are made of, from their unpacked wheels.

    python build/proofs/field_words.py trl=FOLDER verl=FOLDER torchtitan=FOLDER vllm=FOLDER torch=FOLDER

Each FOLDER holds the package's Python files (a wheel is a zip file). The words go to build/field_words.txt.gz, which
public_words.py reads, so that its test needs no wheel. `--report FILE` writes which of our words are missing, and how
many identifiers of others hold each of the rest: a word that few of them hold may be there by chance.
"""

import argparse
import ast
import gzip
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

BUILD = Path(__file__).parents[1]
sys.path.insert(0, str(BUILD))  # a script of a folder below

from public_words import FIELD, missing_words, names_by_word, public_names, read_exceptions, words  # noqa: E402


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the names of a file: functions, classes, arguments, attributes, variables, keywords and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.Attribute(attr=name) | ast.Name(id=name):
                yield name
            case ast.alias(name=name, asname=asname):
                yield from (*name.split("."), *([asname] if asname else []))


def of_package(folder: Path) -> Counter[str]:
    """Return the words of a package's identifiers, each with the number of identifiers that hold it."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        names |= {*path.relative_to(folder).with_suffix("").parts}
        try:
            names |= set(identifiers(ast.parse(path.read_text())))
        except (SyntaxError, UnicodeDecodeError) as error:  # a template or a file of another version
            print(f"{path}: left out: {error}", file=sys.stderr)
    return Counter(word for name in names for word in set(words(name)))


def report(counts: dict[str, Counter[str]], ours: dict[str, list[str]]) -> str:
    """Return our words that no package has, then the rest by how many identifiers hold them."""
    lines = []
    for word, names in ours.items():
        held = {package: count[word] for package, count in counts.items() if count[word]}
        where = " ".join(f"{package}:{number}" for package, number in held.items())
        lines.append((sum(held.values()), -len(names), f"{word}  [{where}]  {len(names)}: {', '.join(names[:12])}"))
    return "\n".join(line for _, _, line in sorted(lines)) + "\n"


def main() -> None:
    """Read the packages and write their words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # invalid escapes in other people's strings
    counts = {name: of_package(Path(folder)) for name, _, folder in (one.partition("=") for one in asked.packages)}
    held = sorted(set().union(*counts.values()))
    FIELD.write_bytes(gzip.compress("\n".join(held).encode(), mtime=0))
    root = BUILD.parent
    files = [path for folder in ("libs", "apps") for path in root.glob(f"{folder}/**/*.py")]
    ours = names_by_word(public_names({path.relative_to(root).as_posix(): path.read_text() for path in files}))
    missing = sorted(set(missing_words(ours, set(held))) - set(read_exceptions()))
    print({name: len(count) for name, count in counts.items()}, f"{len(held)} words, {FIELD.stat().st_size} bytes")
    print(f"{len(ours)} words of our public names, {len(missing)} missing: {' '.join(missing)}")
    if asked.report:
        asked.report.write_text(report(counts, ours))


if __name__ == "__main__":
    main()
