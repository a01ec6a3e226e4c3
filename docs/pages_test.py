"""The pages of docs/ are programs: their Python blocks run from top to bottom, each page in a process of its own.

A block that begins with `# apps/grpo/recipes/NAME.py` is that file: it is found like the recipes of the tree. A page
that says `torchrun --nproc-per-node N train.py` is run so, in as many processes.
"""

import multiprocessing
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import apps.grpo.config  # noqa: F401  for the processes of the pages: pytest_main.py forks them from this one

DOCS = Path(__file__).parent
KINDS = ("add", "bring", "from", "the", "use")
PAGES = sorted(page.name for kind in KINDS for page in DOCS.glob(f"{kind}-*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
FILE = re.compile(r"# apps/grpo/recipes/(\w+\.py)\n")
TORCHRUN = re.compile(r"^torchrun --nproc-per-node (\d+) train\.py$", re.M)
FIND_RECIPES = "import apps.grpo.recipes\napps.grpo.recipes.__path__.append({folder!r})\n"


def test_every_page_is_linked() -> None:
    """The architecture page lists them all, and nothing that is not there."""
    linked = re.findall(rf"\(((?:{'|'.join(KINDS)})-[\w-]+\.md)\)", (DOCS / "architecture.md").read_text())
    assert sorted(linked) == PAGES


def under_torchrun(script: Path, processes: str) -> int:
    """Run a script as the page says, at an address that needs no name, and return its exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes, *place, str(script)]
    return subprocess.run(command, cwd=script.parent, check=False).returncode


def as_program(script: Path) -> None:
    """Run a script in this process as Python runs one that it is given."""
    os.chdir(script.parent)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("name", PAGES)
def test_the_page_runs(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    if processes := TORCHRUN.search(page):
        status: int | None = under_torchrun(script, processes[1])
    else:
        program = multiprocessing.get_context("spawn").Process(target=as_program, args=(script,))
        program.start()
        program.join()
        status = program.exitcode
    said, told = capfd.readouterr()
    assert status == 0, said[-2000:] + told[-4000:]


def test_dyncp_under_fsdp2_takes_40_lines() -> None:
    """The page says so of everything but the model, blank lines apart."""
    training = BLOCK.findall((DOCS / "use-dyncp-with-fsdp2.md").read_text())[1]
    assert all(word in training for word in ("init_process_group", "fully_shard(", "plan(", "optimizer.step()"))
    assert sum(bool(line.strip()) for line in training.splitlines()) <= 40
