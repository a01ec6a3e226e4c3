"""The recipe of a dense model that sees images, shrunk, with the native sampler."""

from pathlib import Path

import pytest

from apps.grpo.shrink.shrink_test import assert_runs_with_images


def test_a_script_with_images_runs_from_end_to_end_with_the_native_sampler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_runs_with_images("qwen3-5-27b-fsdp2", tmp_path, capsys)
