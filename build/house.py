"""How the house is kept, as far as a machine can tell: for //build:check_tree, and a test over the libraries.

Layout of the libraries, names of their packages, where imports stand, heads of the hard algorithms, words. All checks
are pure: they take paths and texts, and return complaints.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from docstrings import check_docstrings

ROOM = 25
"""Modules of a folder of a library or an app, tests left out: past these it is two rooms."""
HARD = (
    "libs/chat_tools/chat_tools/rendering/masks.py",
    "libs/chat_tools/chat_tools/rendering/message_attribution.py",
    "libs/dyncp/dyncp/ops/ring.py",
    "libs/dyncp/dyncp/planning/lower_bound.py",
    "libs/dyncp/dyncp/planning/search.py",
    "libs/rollout/rollout/control/staleness.py",
    "libs/seqpack/seqpack/ops/delta_rule_chunks.py",
    "libs/seqpack/seqpack/planning/balancing_capped.py",
    "libs/seqpack/seqpack/planning/exact_fill.py",
)
"""Algorithms that nobody reads without their strategy, step by step, and what tests hold of them."""
OPTIONAL = {
    "causal_conv1d": "kernels of CUDA machines",
    "fla": "kernels of CUDA machines",
    "flash_qla": "kernels of CUDA machines",
    "megatron": "heavy, and there where its engine is asked for",
    "pyarrow": "for Parquet files alone",
    "tensorboardX": "for its event files alone",
    "tensordict": "two seconds, which plans and operations do without",
    "tqdm": "for a bar alone",
}
"""Packages that a function, or a guard for types, may import where it needs them."""
SPOKEN_TO = ("libs/rollout/rollout/", "libs/runlog/", "libs/chat_tools/")
"""Libraries that read what other processes and machines send."""
OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
"""Collectives of torch that pickle what they send, and unpickle what comes."""
UNPICKLERS = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
OLD_WORDS = re.compile(
    r"\b(silent_rows|PRICE_OF_A_MARK|solvent_at|homeless|dearest|made tasks?|Weights on the move|"
    r"The one way to an engine)\b"
)
"""What plainer words replaced; each has one meaning here, so that finding it is enough."""


def check_house(texts: Mapping[str, str]) -> list[str]:
    """Return all complaints about tracked Python files, by path."""
    shipped = {path: text for path, text in texts.items() if not path.endswith("_test.py")}
    trees = {path: ast.parse(text) for path, text in shipped.items()}
    complaints = [*check_rooms(shipped), *check_names(trees), *check_heads(shipped), *check_words(shipped)]
    for path, tree in trees.items():
        complaints += check_docstrings(path, tree)
        if path.startswith(("libs/", "apps/")) and "/benchmarks/" not in path:
            complaints += check_imports(path, tree, shipped[path].splitlines())
        if path.startswith(("libs/", "apps/")) and not {"testing", "benchmarks", "proofs"} & {*path.split("/")}:
            complaints += check_collectives(path, tree)
        if path.startswith(SPOKEN_TO) and "/testing/" not in path:
            complaints += check_unpickled(path, tree)
    return sorted(complaints)


def check_rooms(texts: Mapping[str, str]) -> list[str]:
    """Return complaints about folders of libraries and apps that are no packages, or hold more than `ROOM` modules.

    A folder `tests` may hold more.
    """
    rooms: dict[str, int] = {}
    for path in map(PurePosixPath, texts):
        of_library = path.parts[0] == "libs" and len(path.parts) > 3 and path.parts[2] != "benchmarks"
        if of_library or path.parts[0] == "apps":
            counts = path.name != "__init__.py" and path.parent.name != "tests"
            rooms[str(path.parent)] = rooms.get(str(path.parent), 0) + counts
    crowded = [f"{room}: {count} modules, more than {ROOM}" for room, count in rooms.items() if count > ROOM]
    bare = [f"{room}: no __init__.py" for room in sorted(rooms) if f"{room}/__init__.py" not in texts]
    return crowded + [one for one in bare if "/site" not in one]  # a stand-in's place on the path is no package


def check_names(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return complaints about modules and sub-packages with the name of another export of their package."""
    complaints = []
    for path, tree in trees.items():
        package = PurePosixPath(path).parent
        if not path.startswith("libs/") or not path.endswith("/__init__.py"):
            continue
        inside = {PurePosixPath(one).relative_to(package).parts[0] for one in trees if one.startswith(f"{package}/")}
        children = {name.removesuffix(".py") for name in inside} - {"__init__"}
        complaints += [f"{path}: {name} is public, and a module" for name in sorted(children & _exported(tree))]
    return complaints


def _exported(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_EXPORTS":
            return set(ast.literal_eval(node.value))
    return set()


def check_heads(texts: Mapping[str, str]) -> list[str]:
    """Return complaints about hard algorithms whose docstrings lack numbered steps or the tests' invariants."""
    complaints = []
    for path in HARD:
        head = ast.get_docstring(ast.parse(texts[path])) or "" if path in texts else ""
        if not re.search(r"^1\. .*^2\. ", head, re.M | re.S):
            complaints.append(f"{path}: its head has no strategy in numbered steps")
        if not re.search(r"^Invariants|[Hh]eld by", head, re.M):
            complaints.append(f"{path}: its head does not say what tests hold")
    return complaints


def check_words(texts: Mapping[str, str]) -> list[str]:
    """Return complaints about words that were replaced."""
    return [
        f"{path}:{number}: {word[0]!r} has a plainer name"
        for path, text in texts.items()
        if path.startswith(("libs/", "apps/"))
        for number, line in enumerate(text.splitlines(), 1)
        if (word := OLD_WORDS.search(line))
    ]


def check_imports(path: str, tree: ast.Module, lines: list[str]) -> list[str]:
    """Return complaints about inner imports, except in lazy facades, of packages of `OPTIONAL`, or with a reason.

    A reason is a comment on the import, or on the line above it or its guard; or a handler of ImportError around it.
    """
    complaints = []
    for node, guard, handled in _inner_imports(tree.body, None, False):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        if handled or module.partition(".")[0] in OPTIONAL:
            continue
        if guard is not None and path.endswith("/__init__.py"):
            continue  # a facade's names for type checkers; they are imported when they are asked for
        marked = [lines[node.lineno - 1], lines[node.lineno - 2].strip()[:1]]
        marked += [lines[guard.lineno - 1]] if guard is not None else []
        if not any("#" in line for line in marked):
            complaints.append(f"{path}:{node.lineno}: {ast.unparse(node)}: move it to the top, or say why it is here")
    return complaints


def check_unpickled(path: str, tree: ast.Module) -> list[str]:
    """Return complaints about imports and calls that unpickle: what other processes send is never a program
    (`torch.load`, `numpy.load(allow_pickle=...)`, `recv()` of a multiprocessing connection)."""
    unsafe: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            unsafe += [(node.lineno, one.name) for one in node.names if one.name.partition(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNPICKLERS:
            unsafe.append((node.lineno, node.module or ""))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            unsized = node.func.attr == "recv" and not node.args  # a socket's has a size
            allowed = any(word.arg == "allow_pickle" for word in node.keywords)
            if unsized or allowed or ast.unparse(node.func) == "torch.load":
                unsafe.append((node.lineno, ast.unparse(node.func)))
    return [
        f"{path}:{line}: {what} runs what another process sends: take JSON, bytes or safetensors"
        for line, what in unsafe
    ]


def check_collectives(path: str, tree: ast.Module) -> list[str]:
    """Return complaints about collectives that pickle: ranks of a run may be on several machines."""
    return [
        f"{path}:{node.lineno}: {name} pickles between ranks: take gather_plain or broadcast_plain (seqpack.comm)"
        for node in ast.walk(tree)
        for name in (
            [node.attr]
            if isinstance(node, ast.Attribute)
            else [one.name for one in node.names]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if name in OBJECT_COLLECTIVES
    ]


Import = ast.Import | ast.ImportFrom


def _inner_imports(
    body: list[ast.stmt], guard: ast.If | None, handled: bool, inner: bool = False
) -> Iterator[tuple[Import, ast.If | None, bool]]:
    """Yield imports inside functions or guards for types, with their guard, and whether ImportError is handled."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom) and inner:
            yield node, guard, handled
        guards = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        tries = isinstance(node, ast.Try) and any("ImportError" in ast.unparse(one) for one in node.handlers)
        for name in ("body", "orelse", "finalbody"):
            below = getattr(node, name, None)
            if isinstance(below, list) and below and isinstance(below[0], ast.stmt):
                here = node if guards and isinstance(node, ast.If) else guard
                yield from _inner_imports(below, here, handled or tries, inner or function or guards)
