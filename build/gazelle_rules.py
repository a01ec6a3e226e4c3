"""BUILD files as gazelle reads and writes them: calls of the macros of defs.bzl, laid out as buildifier does."""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE_RULES = {"python_package", "package_test"}
"""Rules with one target a folder."""
FILE_RULES = {"module", "module_test", "module_tests"}
"""Rules with one target a file."""
TEST_RULES = {"module_test", "module_tests", "package_test"}
MANAGED = PACKAGE_RULES | FILE_RULES | {"library", "app"}
MACROS = MANAGED | {"requirement"}
DEFS = "//build:defs.bzl"


@dataclass
class Rule:
    """One call in a BUILD file: its function, the source of each keyword but `deps`, the deps to keep, its files."""

    kind: str
    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    deps: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def hub(self) -> str:
        """The hub of its third-party packages."""
        return str(ast.literal_eval(self.attributes.get("hub", '"pypi"')))

    @property
    def sources(self) -> list[str]:
        """The files that it spells out, `srcs` or a program's `main`; none where its name says the file."""
        if self.kind == "app":
            return [ast.literal_eval(self.attributes["main"])]
        return list(ast.literal_eval(self.attributes.get("srcs", "[]")))

    @property
    def folders(self) -> list[str]:
        """The further folders whose tests a package_test runs."""
        return list(ast.literal_eval(self.attributes.get("folders", "[]")))

    @property
    def is_apart(self) -> bool:
        """Whether this is `module_tests` with a target for each file."""
        return self.kind == "module_tests" and "together" not in self.attributes


@dataclass
class Build:
    """A BUILD file: its head (loads, package), the rules that are written anew, other statements as they stand."""

    head: str
    rules: list[Rule]
    others: list[str]


def order(dep: str) -> tuple[int, str]:
    """Return a sort key: own package, other packages, third-party; each by name."""
    return (2 if dep.startswith("requirement") else 1 if dep.startswith('"//') else 0, dep.strip('"').replace(":", "!"))


def kept_entries(deps: str) -> list[str]:
    """Return the entries of a list in the source whose last line is marked `# keep`; each on one line."""
    lines = deps.splitlines()
    listed = ast.parse(deps, mode="eval").body
    entries = [node for node in listed.elts if node.end_lineno] if isinstance(listed, ast.List) else []
    return [one_line(node) for node in entries if lines[(node.end_lineno or 0) - 1].rstrip().endswith("# keep")]


def one_line(node: ast.expr) -> str:
    """Return a label or a requirement() call in this file's own form, on one line."""
    if isinstance(node, ast.Call):
        words = [one_line(word) for word in [*node.args, *(keyword.value for keyword in node.keywords)]]
        return f"{ast.unparse(node.func)}({', '.join(words)})"
    return f'"{ast.literal_eval(node)}"'


def segment(lines: list[str], node: ast.expr) -> str:
    """Return the source of an expression in ASCII lines with their ends, as `ast.get_source_segment`, but fast."""
    end = node.end_lineno or 0
    text = "".join(lines[node.lineno - 1 : end])
    return text[node.col_offset : len(text) - len(lines[end - 1]) + (node.end_col_offset or 0)]


def parse_build(text: str) -> Build:
    """Return the parsed BUILD file."""
    lines = text.splitlines(keepends=True)
    build = Build("", [], [])
    end = 0
    for node in ast.parse(text).body:
        above = "".join(lines[end : node.lineno - 1]).strip("\n")
        source = "".join(lines[node.lineno - 1 : node.end_lineno])
        end = node.end_lineno or 0
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        kind = call.func.id if call is not None and isinstance(call.func, ast.Name) else ""
        if kind == "load":
            build.head += source
        elif kind == "package":
            build.head += "\n" + (above + "\n" if above else "") + source
        elif call is not None and kind in MANAGED:
            attributes = {word.arg: segment(lines, word.value) for word in call.keywords if word.arg}
            deps = attributes.pop("deps", "[]")
            name = ast.literal_eval(attributes.pop("name"))
            build.rules.append(Rule(kind, name, attributes, kept_entries(deps)))
        else:
            build.others.append((above + "\n" if above else "") + source)
    return build


def layout(rule: Rule) -> str:
    """Return a rule as buildifier writes it."""
    lines = [f'    name = "{rule.name}",\n']
    first = ["size", "srcs"]
    keys = sorted(rule.attributes, key=lambda key: (first.index(key) if key in first else len(first), key))
    lines += [f"    {key} = {rule.attributes[key]},\n" for key in keys]
    kept = [dep for dep in rule.kept if dep not in rule.deps]
    entries = sorted({*rule.deps, *kept}, key=order)
    texts = [dep + (",  # keep" if dep in kept else ",") for dep in entries]
    if len(texts) == 1 and not kept:
        lines.append(f"    deps = [{entries[0]}],\n")
    elif texts:
        lines.append("    deps = [\n" + "".join(f"        {text}\n" for text in texts) + "    ],\n")
    return f"{rule.kind}(\n{''.join(lines)})\n"


def spelled(names: list[str]) -> str:
    """Return a list of words as buildifier writes it: one on its line, more on a line each."""
    if len(names) < 2:
        return "[" + "".join(f'"{name}"' for name in names) + "]"
    return "[\n" + "".join(f'        "{name}",\n' for name in names) + "    ]"


def written(build: Build, rules: list[Rule]) -> str:
    """Return the text of a BUILD file with these rules; it loads the macros of defs.bzl that it calls."""
    body = "".join("\n" + layout(rule) for rule in rules) + "".join("\n" + text for text in build.others)
    called = [name for name in sorted(MACROS) if re.search(rf"\b{name}\(", body)]
    loaded = f'load("{DEFS}", ' + ", ".join(f'"{name}"' for name in called) + ")"
    head = build.head if f'"{DEFS}"' in build.head else f'load("{DEFS}")\n{build.head}'
    return re.sub(rf'load\("{DEFS}"[^)]*\)', loaded, head) + body
