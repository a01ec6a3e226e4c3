"""A file system without space, a real one: one line that names the directory and how to go on, and then going on."""

from pathlib import Path

import pytest

from apps.common.testing.small_disk import assert_one_line, has_namespaces, run_on_small_disk

FLAGS = "--save-every 1 --eval-rows 4 --batch-size 4 --demonstrations 64 --max-steps 3"
SFT = f"-m apps.sft.main {FLAGS}"
pytestmark = pytest.mark.skipif(not has_namespaces(), reason="no namespace of its own for mounts")


@pytest.mark.parametrize(
    ("app", "size", "what", "then"),
    [
        (SFT, "100k", "the tiny model or the demonstrations", "start again"),
        (f"{SFT} --demonstrations 5000 --cache-dir DISK", "1700k", "the tokens of", "start again"),
        (SFT, "4m", "the checkpoint of step 2", "--resume --run-dir DISK/run goes on from step 1"),
        (f"{SFT} --nproc-per-node 2", "4m", "the checkpoint of step 2", "--resume --run-dir DISK/run goes on from"),
    ],
)
def test_a_full_disk_is_one_line(tmp_path: Path, app: str, size: str, what: str, then: str) -> None:
    cache = "" if "--cache-dir" in app else f"--cache-dir {tmp_path}/tokens"
    done = run_on_small_disk(tmp_path, size, f"PYTHON {app} {cache} --run-dir DISK/run")
    assert_one_line(done, tmp_path, what, then)


def test_with_room_again_the_run_goes_on(tmp_path: Path) -> None:
    """After a disk that was full for the export; the report of what was logged is written then."""
    first = f"PYTHON {SFT} --cache-dir {tmp_path}/tokens --run-dir DISK/run"
    again = f"PYTHON {SFT} --cache-dir {tmp_path}/tokens --run-dir DISK/run --resume"
    done = run_on_small_disk(
        tmp_path, "9200k", f"{first} || mount -o remount,size=40m tmpfs DISK && {again} && ls DISK/run DISK/run/export"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == 1
    assert {"report.html", "model.safetensors"} <= set(done.stdout.split())
