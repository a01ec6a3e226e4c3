"""A file system without space, a real one: one line that names the directory and how to go on, and then going on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = "--save-every 1 --eval-rows 4 --batch-size 4 --demonstrations 64 --steps 3"
SFT = f"-m apps.sft.main {FLAGS}"
GRPO = (
    "-m apps.grpo.main --steps 2 --save-every 1 --eval-every 2 --eval-prompts 4 --warm-start.steps 2 "
    "--warm-start.eval-prompts 4 --prompts-per-step 2 --group-size 2"
)
MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


def in_small_disk(folder: Path, size: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a namespace of its own, with a file system of so many bytes on DISK."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = f"mount -t tmpfs -o size={size} tmpfs {disk} && {script}"
    command = [*MOUNTS, "sh", "-c", mounted.replace("DISK", str(disk)).replace("PYTHON", sys.executable)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run([*MOUNTS, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no namespace of its own for mounts")


@pytest.mark.parametrize(
    ("app", "size", "what", "then"),
    [
        (SFT, "100k", "the tiny model or the demonstrations", "start again"),
        (f"{SFT} --demonstrations 5000 --cache-dir DISK", "1700k", "the tokens of", "start again"),
        (SFT, "4m", "the checkpoint of step 2", "--resume --run-dir DISK/run goes on from step 1"),
        (f"{SFT} --nproc-per-node 2", "4m", "the checkpoint of step 2", "--resume --run-dir DISK/run goes on from"),
        (GRPO, "1500k", "the export", "--resume --run-dir DISK/run goes on from the start"),
        (GRPO, "4m", "", "--resume --run-dir DISK/run goes on from"),
    ],
)
def test_a_full_disk_is_one_line(tmp_path: Path, app: str, size: str, what: str, then: str) -> None:
    cache = "" if "--cache-dir" in app or app == GRPO else f"--cache-dir {tmp_path}/tokens"
    done = in_small_disk(tmp_path, size, f"PYTHON {app} {cache} --run-dir DISK/run")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: no space is left on the disk of {tmp_path}/disk")
    assert f"run: {what}" in line or f"disk: {what}" in line
    assert then.replace("DISK", f"{tmp_path}/disk") in line


def test_with_room_again_the_run_goes_on(tmp_path: Path) -> None:
    """After a disk that was full for the export; the report of what was logged is written then."""
    first = f"PYTHON {SFT} --cache-dir {tmp_path}/tokens --run-dir DISK/run"
    again = f"PYTHON {SFT} --cache-dir {tmp_path}/tokens --run-dir DISK/run --resume"
    done = in_small_disk(
        tmp_path, "9200k", f"{first} || mount -o remount,size=40m tmpfs DISK && {again} && ls DISK/run DISK/run/export"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == 1
    assert {"report.html", "model.safetensors"} <= set(done.stdout.split())
