"""The pages of docs/ are programs: their Python blocks run from top to bottom, each page in a process of its own.

A block that begins with `# apps/grpo/recipes/NAME.py` is that file: it is found like the recipes of the tree. A page
that says `torchrun --nproc-per-node N train.py` is run so, in as many processes.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent
KINDS = ("add", "bring", "from", "use")
PAGES = sorted(page.name for kind in KINDS for page in DOCS.glob(f"{kind}-*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
FILE = re.compile(r"# apps/grpo/recipes/(\w+\.py)\n")
TORCHRUN = re.compile(r"^torchrun --nproc-per-node (\d+) train\.py$", re.M)
FIND_RECIPES = "import apps.grpo.recipes\napps.grpo.recipes.__path__.append({folder!r})\n"


def test_every_page_is_linked() -> None:
    """The architecture page lists them all, and nothing that is not there."""
    linked = re.findall(rf"\(((?:{'|'.join(KINDS)})-[\w-]+\.md)\)", (DOCS / "architecture.md").read_text())
    assert sorted(linked) == PAGES


def launcher(page: str) -> list[str]:
    """The words before the script: none, or torchrun's as the page has them, at an address that needs no name."""
    processes = TORCHRUN.search(page)
    if processes is None:
        return []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["-m", "torch.distributed.run", "--nproc-per-node", processes[1], *place]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_runs(name: str, tmp_path: Path) -> None:
    """Without an error; its asserts hold."""
    code = ""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    page = (DOCS / name).read_text()
    for block in BLOCK.findall(page):
        if found := FILE.match(block):
            (recipes / found[1]).write_text(block)
            code += FIND_RECIPES.format(folder=str(recipes))
        else:
            code += block
    assert "assert" in code
    script = tmp_path / "train.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher(page), str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_dyncp_under_fsdp2_takes_40_lines() -> None:
    """The page says so of everything but the model, blank lines apart."""
    training = BLOCK.findall((DOCS / "use-dyncp-with-fsdp2.md").read_text())[1]
    assert all(word in training for word in ("init_process_group", "fully_shard(", "plan(", "optimizer.step()"))
    assert sum(bool(line.strip()) for line in training.splitlines()) <= 40
