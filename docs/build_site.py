"""Build the documents as a site, readable in a browser without a server: `./bazelw run //docs:site [-- --out FOLDER]`.

The pages are those of the tree, at the same relative places, so that their links work in both. What a page links to
and the site has not (code, folders) keeps its text alone. The reference has a page for each library, made of the
docstrings of its public names, and the flags of the apps as their own help prints them.
"""

import argparse
import contextlib
import io
import logging
import os
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mkdocs.commands.build import build
from mkdocs.config import load_config

from apps.grpo.main import main as grpo
from apps.sft.main import main as sft
from docs.pages_of_site import LIBRARIES, chapters, linked, reference

THEME = {
    "name": "material",
    "font": False,  # fonts of the reader's machine: nothing is fetched
    "features": ["navigation.indexes", "navigation.top", "navigation.tabs", "content.code.copy", "toc.follow"],
    "palette": [
        {"media": "(prefers-color-scheme: light)", "scheme": "default"},
        {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
    ],
}
SHIM = re.compile(r"https://unpkg.com/iframe-worker/shim")
"""What the theme would fetch for pages without a server; `WORKER` does it instead."""
WORKER = """// A page that is opened as a file may start no worker: its script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc =
        "<script>var postMessage = data => parent.dispatchEvent(new MessageEvent('worker', {data}));" +
        "var importScripts = () => {};<\\/script><script src='" + url + "'><\\/script>";
      this.ready = new Promise(done => this.frame.addEventListener("load", done));
      window.addEventListener("worker", event => {
        const message = new MessageEvent("message", {data: event.data});
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      document.documentElement.appendChild(this.frame);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() { this.frame.remove(); }
  };
}
"""
DOCSTRINGS = {
    "docstring_style": "google", "heading_level": 3, "show_root_heading": True, "show_source": False,
    "show_root_full_path": False, "show_bases": False, "separate_signature": True, "show_signature_annotations": True,
    "preload_modules": list(LIBRARIES), "members_order": "source", "filters": ["!^_"], "merge_init_into_class": True,
}  # fmt: skip


def help_text(main: Callable[[Sequence[str]], Any]) -> str:
    """Return what an app prints for `--help-all`."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["--help-all"])
    return text.getvalue()


def write_pages(root: Path, folder: Path) -> list[dict[str, Any]]:
    """Write all pages into the folder, and return the menu."""
    menu: list[dict[str, Any]] = [{name: pages} for name, pages in chapters(root).items()]
    pages = [page for part in menu for page in next(iter(part.values()))]
    pictures = [f"docs/{path.name}" for kind in ("svg", "png") for path in (root / "docs").glob(f"*.{kind}")]
    figures = [f"docs/benchmarks/{path.name}" for path in (root / "docs/benchmarks").glob("*.json")]
    for name in (*pages, *pictures, *figures, "LICENSE"):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            place.write_text(linked((root / name).read_text(), name, [*pages, *pictures, *figures, "LICENSE"]))
        else:
            shutil.copyfile(root / name, place)
    (folder / "reference").mkdir()
    for name in LIBRARIES:
        text = (root / "libs" / name / name / "__init__.py").read_text()
        (folder / "reference" / f"{name}.md").write_text(reference(name, text))
    flags = f"# Flags\n\n## grpo\n\n```text\n{help_text(grpo)}```\n\n## sft\n\n```text\n{help_text(sft)}```\n"
    (folder / "reference/flags.md").write_text(flags)
    made = ["reference/flags.md", *(f"reference/{name}.md" for name in LIBRARIES)]
    next(part for part in menu if "Reference" in part)["Reference"] += made
    return menu


def build_site(root: Path, out: Path) -> int:
    """Build the site of a tree into the folder `out`, and return the number of its pages.

    Raises:
        mkdocs.exceptions.Abort: a link leads nowhere, or a public name cannot be drawn.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "pages")
        folder.mkdir()
        menu = write_pages(root, folder)
        python = {"paths": [str(root / "libs" / name) for name in LIBRARIES], "options": DOCSTRINGS}
        config = load_config(
            config_file=io.BytesIO(b"site_name: Tessera\n"),
            docs_dir=str(folder), site_dir=str(out), strict=True, use_directory_urls=False, theme=THEME, nav=menu,
            markdown_extensions=["admonition", "attr_list", "md_in_html", "pymdownx.superfences", "toc"],
            plugins=["search", "offline", {"mkdocstrings": {"handlers": {"python": python}}}],
            validation={"links": {"anchors": "warn"}},
        )  # fmt: skip
        build(config)
    pages = list(out.rglob("*.html"))
    (out / "assets/file_worker.js").write_text(WORKER)
    for page in pages:
        script = posixpath.relpath("assets/file_worker.js", page.parent.relative_to(out).as_posix())
        page.write_text(SHIM.sub(script, page.read_text()))
    return len(pages)


def main() -> None:
    """Build the site and say where it is."""
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=root / "site", help="the folder to write (default: site)")
    out = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), parser.parse_args().out).absolute()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    print(f"{build_site(root.absolute(), out)} pages: open {out / 'index.html'}")


if __name__ == "__main__":
    main()
