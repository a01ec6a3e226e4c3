"""The NPU recipes, shrunk, through device npu by the stand-in that computes on the CPU; the native engine samples."""

from pathlib import Path

import pytest

from apps.grpo.registry import recipes
from apps.grpo.testing.shrink import ONE_RANK, check, run_whole
from engines.fake_npu.build import reason_against

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
CASES = {
    "qwen3-5-35b-a3b-fsdp2-npu": (2, ("--trainer.dtype", "float32")),
    "qwen3-235b-a22b-async-npu": (1, ONE_RANK),
}
"""Most ranks, and flags. The last is fully asynchronous: one rank beside a process that samples."""


def run_recipe(
    name: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ranks: int, *flags: str
) -> None:
    for entry in recipes()[name].config.cluster.env:  # as the command starts itself again with them
        monkeypatch.setenv(*entry.split("="))
    argv = ["--recipe", name, f"--shrink={ranks}", "--run-dir", str(folder / "run"), "--no-vllm", *flags]
    output, rows = run_whole(argv, folder, capfd)
    check(name, "float32" if "float32" in flags else "bfloat16", output, rows, folder / "run")


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_runs_through_device_npu(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of FSDP2 that see images, with experts; Megatron, with a process that samples."""
    ranks, flags = CASES[name]
    run_recipe(name, tmp_path, capfd, monkeypatch, ranks, *flags)
