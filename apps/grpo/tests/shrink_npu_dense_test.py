"""The NPU recipe of a dense model that sees images, shrunk, through the stand-in for device npu."""

from pathlib import Path

import pytest

from apps.grpo.tests.shrink_npu_test import run_recipe
from engines.fake_npu.build import reason_against


@pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
def test_a_recipe_runs_through_device_npu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe("qwen3-5-27b-fsdp2-npu", tmp_path, capfd, monkeypatch, 2)
