"""Words of the public names of libraries and apps, compared with those of other packages for post-training.

Newcomers know TRL, verl, torchtitan, vLLM and PyTorch. So each word of a public name, or its singular, occurs in an
identifier of one of them (field_words.txt.gz, written by proofs/field_words.py from their wheels), or it is a line of
field_words_exceptions.txt: the word, then why no word of the field says it. Aliases, which keep an earlier name
(`old = new`, `old = renamed("new")`), may have other words.
"""

import ast
import gzip
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

FIELD = Path(__file__).parent / "field_words.txt.gz"
EXCEPTIONS = Path(__file__).parent / "field_words_exceptions.txt"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
FLAG = re.compile(r"--[a-z][\w.-]*")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def words(name: str) -> list[str]:
    """Return the parts of a name in lower case, without digits: `GRPOConfig_v2` is grpo, config, v."""
    return [word.lower() for word in WORD.findall(name)]


def read_field() -> set[str]:
    """Return the words of the field's identifiers."""
    return set(gzip.decompress(FIELD.read_bytes()).decode().split())


def read_exceptions() -> dict[str, str]:
    """Return the words that the field lacks, with the reasons for them."""
    lines = EXCEPTIONS.read_text().splitlines()
    return {word: reason for word, _, reason in (line.partition(" ") for line in lines if line)}


def public_names(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the public names of the libraries' and apps' files, by path, each with the last file that has it."""
    names: dict[str, str] = {}
    for path, text in texts.items():
        if is_public(path):
            names |= dict.fromkeys(names_of(path, ast.parse(text)), path)
    return names


def is_public(path: str) -> bool:
    """Return whether others import a file: neither a test nor a benchmark."""
    parts = PurePosixPath(path).parts
    shipped = parts[0] == "apps" or (parts[0] == "libs" and len(parts) > 3)
    return shipped and {"benchmarks", "tests", "site"}.isdisjoint(parts) and not path.endswith("_test.py")


def names_of(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield the public names of a file: its packages and module, what it defines, arguments, fields and flags."""
    yield from (part for part in PurePosixPath(path).with_suffix("").parts[1:] if not part.startswith("_"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".add_argument", "conf.arg")):
            yield from FLAG.findall(ast.unparse(node))
    yield from _defined(tree.body)


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield name
                yield from _defined(node.body)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("_") or name == "__init__":
                    yield from (one for one in (name, *_arguments(node)) if not one.startswith("_"))
            case ast.Assign(value=ast.Name() | ast.Call(func=ast.Name(id="renamed"))):
                pass  # an alias
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield from [] if name.startswith("_") else [name]


def _arguments(node: Function) -> Iterator[str]:
    every = node.args
    for one in (*every.posonlyargs, *every.args, every.vararg, *every.kwonlyargs, every.kwarg):
        if one is not None and one.arg not in ("self", "cls"):
            yield one.arg


def names_by_word(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names that hold each word."""
    result: dict[str, list[str]] = {}
    for name in names:
        for word in set(words(name)):
            result.setdefault(word, []).append(name)
    return result


def missing_words(ours: Iterable[str], field: Collection[str]) -> list[str]:
    """Return the words of ours that the field has neither as they are nor in the singular."""
    return [word for word in ours if not any(form in field for form in (word, *_singulars(word)))]


def _singulars(word: str) -> list[str]:
    endings = {"ies": "y", "es": "", "s": ""}
    return [word.removesuffix(plural) + end for plural, end in endings.items() if word.endswith(plural)]


def check_public_words(names: Mapping[str, str], field: Collection[str], exceptions: Mapping[str, str]) -> list[str]:
    """Return complaints about words that the field lacks, and about exceptions that no name needs."""
    used = names_by_word(names)
    complaints = [
        f"{names[used[word][0]]}: {used[word][0]}: {word!r} is in no identifier of TRL, verl, torchtitan, vLLM or "
        f"PyTorch: take a word of theirs, or give a reason in build/{EXCEPTIONS.name}"
        for word in missing_words(used, {*field, *exceptions})
    ]
    needed = {form for word in missing_words(used, field) for form in (word, *_singulars(word))}
    return complaints + [
        f"build/{EXCEPTIONS.name}: {word!r} has no reason, or is of the field, or of no public name"
        for word, reason in exceptions.items()
        if not reason or word not in needed
    ]
