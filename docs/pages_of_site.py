"""The pages of the site: those of the tree by chapter, their links, and the reference's lists of public names.

`./bazelw run //docs:draw_pages` writes docs/README.md, the same menu for those who read the files.
"""

import ast
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

LIBRARIES = ("seqpack", "dyncp", "chat_tools", "objectives", "engines", "rollout", "schedules", "runlog", "runplan")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
PAGES: Mapping[str, Sequence[str]] = {
    "Start": ["README.md", "docs/README.md"],
    "Tutorials": [
        "docs/tutorial-first-run.md", "docs/tutorial-reward-and-environment.md", "docs/tutorial-sft.md",
        "docs/tutorial-gpu.md",
    ],
    "How to": [
        "docs/running.md", "docs/troubleshooting.md", "docs/extend.md", "docs/bring-an-environment.md",
        "docs/add-an-advantage.md", "docs/add-a-loss.md", "docs/add-a-metric.md", "docs/add-a-recipe.md",
        "docs/add-a-sampler.md", "docs/add-a-schedule.md", "docs/add-a-backend.md", "docs/add-a-model-family.md",
        "docs/add-a-tool-call-format.md", "docs/from-verl.md", "docs/use-objectives-in-a-loop.md",
        "docs/use-objectives-with-trl.md", "docs/use-dyncp-with-fsdp2.md", "docs/use-dyncp-with-megatron.md",
    ],
    "Reference": [
        "apps/README.md", "apps/sft/README.md", "docs/metrics.md", "docs/objectives.md", "docs/status.md",
        "docs/real-size.md", "libs/engines/CAPABILITIES.md", "libs/rollout/CAPABILITIES.md",
    ],
    "Explanation": [
        "docs/architecture.md", "docs/the-batch.md", "docs/schedules.md", "docs/certificates.md", "docs/plans.md",
        "docs/engines.md", "docs/engines-megatron.md", "docs/engines-speed.md", "docs/rollout.md", "docs/samplers.md",
        "docs/ascend.md",
    ],
    "Benchmarks": [
        "docs/benchmark_history.md", "libs/seqpack/MEASURED.md", "libs/dyncp/MEASURED.md",
        "libs/chat_tools/MEASURED.md", "libs/rollout/MEASURED.md", "docs/mutation.md",
        "docs/readers.md",
    ],
    "Project": [
        "CONTRIBUTING.md", "AGENTS.md", "build/README.md", "SECURITY.md", "CHANGELOG.md", "third_party/README.md",
    ],
}  # fmt: skip
"""Pages of the tree by chapter; decisions are explanations, libraries' READMEs references, added by their names."""


def public_names(text: str, package: str) -> list[str]:
    """Return the full names of what a library's `__init__` hands out, sorted; modules are among them."""
    full_names: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
            full_names |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    return sorted({full for name, full in full_names.items() if not name.startswith("_")}, key=str.lower)


def reference(library: str, text: str) -> str:
    """Return the page of a library: its public names by module, each to be drawn from its docstring."""
    lines = [
        f"# {library}",
        "",
        f"Public names of `{library}`; its [README](../libs/{library}/README.md) has the first example.",
    ]
    module = ""
    for name in sorted(public_names(text, library), key=lambda full: full.rpartition(".")[::2]):
        where = name.rpartition(".")[0]
        if where != module:
            module = where
            lines += ["", f"## {module}"]
        lines += ["", f"::: {name}"]
    return "\n".join(lines) + "\n"


def linked(text: str, page: str, pages: Iterable[str]) -> str:
    """Return a page's text whose links lead to `pages` and elsewhere on the web; of other links the text is left."""
    kept = set(pages)

    def one(match: re.Match[str]) -> str:
        target = match[3].partition("#")[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page
        outside = "://" in match[3] or match[3].startswith("mailto:")
        return match[0] if outside or place in kept else match[2]

    return LINK.sub(one, text)


def chapters(root: Path) -> dict[str, list[str]]:
    """Return all pages of the tree by chapter, in the order of the menu."""
    parts = {name: list(pages) for name, pages in PAGES.items()}
    parts["Explanation"] += sorted(f"docs/decisions/{path.name}" for path in (root / "docs/decisions").glob("*.md"))
    parts["Reference"] += [f"libs/{name}/README.md" for name in LIBRARIES]
    return parts


def menu(root: Path) -> str:
    """Return the text of docs/README.md: the pages by kind, each by its own title."""
    lines = [
        "# Pages",
        "",
        "The [front page](../README.md) says what the project is. Drawn by `./bazelw run //docs:draw_pages`.",
    ]
    for chapter, pages in chapters(root).items():
        if chapter != "Start":
            lines += ["", f"## {chapter}", ""]
            lines += [f"- [{_title(root, page)}]({posixpath.relpath(page, 'docs')})" for page in pages]
    return "\n".join(lines) + "\n"


def _title(root: Path, page: str) -> str:
    """Return the heading of a page of docs, and the name of another, which a test of this folder does not see."""
    if page.startswith("docs/"):
        return (root / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    folder, name = posixpath.split(page.removeprefix("libs/").removesuffix(".md"))
    return folder if name == "README" else f"{folder} {name.lower()}".strip()


def main() -> None:
    """Write docs/README.md."""
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    (root / "docs/README.md").write_text(menu(root), encoding="utf-8")


if __name__ == "__main__":
    main()
