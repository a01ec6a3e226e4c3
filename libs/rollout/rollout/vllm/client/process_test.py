"""How vLLM's process begins and ends: refusals before anything is loaded, and nothing left behind."""

import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.testing.processes import abandoned, assert_ends, leftover_files
from rollout.vllm.client.process import known_arguments
from rollout.vllm.engine import VllmEngine
from rollout.vllm.limits.cpu import HEAD_DIMS
from rollout.vllm.settings.arguments import OWNED, check_arguments
from rollout.vllm.settings.config import VllmConfig
from rollout.vllm.testing.served import config, served

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    served().save_pretrained(folder)
    return folder


PARENT = """
import os, sys
from pathlib import Path
from rollout.config import RolloutConfig
from rollout.vllm.settings.config import VllmConfig
from rollout.vllm.engine import VllmEngine
engine = VllmEngine(Path(sys.argv[1]), RolloutConfig(backend="vllm", max_length=256, vllm=VllmConfig()))
print(engine.pid, flush=True)
sys.stdin.read()
"""


def test_a_killed_parent_leaves_nothing_behind(directory: Path, tmp_path: Path) -> None:
    before = leftover_files()
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, str(script), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    session = os.getsid(child)
    parent.kill()
    parent.wait()
    assert_ends(session)
    assert abandoned(before) == set()


def test_what_vllm_cannot_do_is_refused_by_name_before_anything_is_loaded(directory: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    served(head_dim=16).save_pretrained(narrow)
    whole = tmp_path / "whole"
    shutil.copytree(directory, whole)
    cases = [
        (narrow, VllmConfig(), "head_dim 16 of its attention"),
        (whole, VllmConfig(dtype="float32"), "float32.*bfloat16 alone"),
        (
            whole,
            VllmConfig(arguments={"kv_cache_dtipe": "auto"}),
            "no engine argument 'kv_cache_dtipe'.*kv_cache_dtype",
        ),
        (whole, VllmConfig(arguments={"quantization": "a-kind-that-is-none"}), "a-kind-that-is-none"),
    ]

    def refused(case: tuple[Path, VllmConfig, str]) -> None:
        folder, own, problem = case
        with pytest.raises(ValueError, match=problem):
            VllmEngine(folder, replace(config(), vllm=own))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(refused, cases))


def test_an_interpreter_tells_what_its_vllm_takes() -> None:
    known = known_arguments(VllmConfig())
    assert OWNED.keys() - {"aux_output_config"} <= set(known.names)
    check_arguments(["block_size", "kv_cache_dtype"], known)
    with pytest.raises(ValueError, match=rf"vLLM {known.version} has no engine argument 'block_sise'.*block_size"):
        check_arguments(["block_sise"], known)


def test_the_head_dims_are_vllms_own() -> None:
    code = (
        "from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as b; print(b.get_supported_head_sizes())"
    )
    python = os.environ["TESSERA_VLLM_PYTHON"]
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert tuple(int(n) for n in done.stdout.splitlines()[-1].strip("[]").split(",")) == HEAD_DIMS
