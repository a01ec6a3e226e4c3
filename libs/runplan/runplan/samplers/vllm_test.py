"""vLLM in a plan, held to the bytes of the tensors that its engine allocates; and its plugin on this machine."""

import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from engines import EngineConfig
from engines.tiny import tiny_model
from rollout.vllm.weights.shared_weights import SharedWeights
from runplan.checks.machine import seen_here
from runplan.model.model_shape import shape_of
from runplan.plain_settings import PlainCluster, PlainRollout
from runplan.run_spec import RunSpec
from runplan.samplers.vllm import VllmPlan, stage_share, vllm_weights


@pytest.mark.parametrize("kind", ["dense", "moe", "attention"])
def test_vllm_has_two_sets_of_weights_in_memory(kind: str) -> None:
    model = tiny_model(kind).bfloat16()
    shape = shape_of(model.config, kind)
    shapes = {name: p.detach() for name, p in model.named_parameters()}
    shared = SharedWeights(shapes, {}, 0)
    try:
        (buffer,) = VllmPlan().buffers(shape, PlainRollout(engine="vllm"), 2)
        assert buffer.always
        assert buffer.host == pytest.approx(2 * shared.nbytes, rel=0.02)  # slots are aligned
        assert vllm_weights(shape, PlainRollout(engine="vllm")) * 2 == buffer.host
        (there,) = VllmPlan().buffers(shape, PlainRollout(engine="vllm", weights_on_device=True), 2)
        assert (there.device, there.host) == (buffer.host, 0)
    finally:
        shared.close()


def test_a_stage_has_its_layers_and_both_ends_of_the_model_at_most() -> None:
    shape = shape_of(tiny_model("attention").config, "attention")
    whole, halves = (vllm_weights(shape, PlainRollout(engine="vllm", pp=pp)) for pp in (1, 2))
    assert whole / 2 < halves < whole
    assert stage_share(shape, PlainRollout(engine="vllm", pp=shape.layers)) == 1 / shape.layers
    assert stage_share(shape, PlainRollout(engine="vllm", pp=shape.layers - 1)) == 2 / shape.layers


@pytest.mark.parametrize(
    ("path", "words", "untested"),
    [
        ("rollout.ray_nodes", "NCCL between them", "nodes"),
        ("rollout.pp", "no accelerator has run it", None),
    ],
)
def test_what_ran_on_cpus_alone_is_not_yet_an_accelerators(path: str, words: str, untested: str | None) -> None:
    def answer(
        device: Literal["cuda", "cpu"], sampling: Literal["auto", "cpu"] = "auto", dp: int = 1, tp: int = 1
    ) -> Any:
        rollout = PlainRollout(engine="vllm", tp=tp, pp=2, dp=dp, ray_workers=1, ray_nodes=2, device=sampling)
        run = RunSpec("grpo", "r", EngineConfig(device=device), PlainCluster(rollout=rollout), 1, 1, 1, longest=8)
        return VllmPlan().setting(run, path)

    assert answer("cpu")
    assert answer("cuda", "cpu")
    assert words in answer("cuda").reason
    assert answer("cuda").untested == untested
    assert "one copy" in answer("cpu", dp=2).reason
    assert bool(answer("cpu", tp=2)) == (path == "rollout.pp"), "on a CPU a machine of several has one worker"


def seen_by(engine: str, device: Literal["auto", "cpu"] = "auto") -> list[str]:
    """Lines on a machine that trains on NPUs."""
    cluster = PlainCluster(rollout=PlainRollout(engine=engine, device=device))
    npus = EngineConfig(device="npu", npu_operators="off")
    return seen_here(RunSpec("grpo", "r", npus, cluster, processes=2, steps=1, rows=1, longest=8), {})


def test_the_version_of_vllms_plugin_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own interpreter, whose packages are others; only where vLLM is to sample."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("TESSERA_VLLM_PYTHON", str(python))
    assert (
        seen_by("vllm")[-1]
        == "missing: vLLM on NPUs needs vllm-ascend >=0.23.0,<0.24, which is not installed beside it"
    )
    folder = tmp_path / "vllm_ascend-0.23.0.post1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_ascend\nVersion: 0.23.0.post1\n")
    assert seen_by("vllm")[-1] == f"vllm-ascend 0.23.0.post1 in the environment of {python}"
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_ascend\nVersion: 0.18.0\n")
    assert "missing: the adaptation of vLLM on NPUs was written for vllm-ascend >=" in seen_by("vllm")[-1]
    assert "vllm-ascend" not in "".join(seen_by("native"))
    assert "vllm-ascend" not in "".join(seen_by("vllm", device="cpu"))
