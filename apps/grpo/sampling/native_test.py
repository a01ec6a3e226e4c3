"""The app's own sampler: when a request begins (`--rollout.admit`), and what computes in host memory."""

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen3_5 import modeling_qwen3_5

from apps.common.cluster import Admit, Cluster, RolloutLayout
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.registry import recipes
from apps.grpo.sampling.native import NativeBackend, admission
from apps.grpo.testing.recipe import RECIPE
from apps.quickstart.model import ensure_tiny_model
from apps.quickstart.vision import ensure_vision_model
from engines.families.torch_operations import _OPERATIONS
from rollout import Completion, OnTokens, Sampling
from schedules.config import Mode, ScheduleConfig

LONG, SHORT = Sampling(max_new_tokens=200, seed=0), Sampling(max_new_tokens=1, seed=0)


def asking(admit: Admit | None = None, mode: Mode = "sync") -> GrpoConfig:
    return replace(RECIPE.config, cluster=Cluster(rollout=RolloutLayout(admit=admit), schedule=ScheduleConfig(mode)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    ensure_tiny_model(folder, 0)
    return folder


@pytest.mark.parametrize(("admit", "first"), [(None, "long"), ("rounds", "long"), ("any_step", "short")])
def test_a_short_request_beside_a_long_one(model: Path, admit: Admit | None, first: str) -> None:
    """It is asked when the long one has its first token, and in rounds begins when that has its last."""
    engine = NativeBackend().build(asking(admit), model, 0)
    ended = []

    async def play() -> None:
        under_way = asyncio.Event()

        async def ask(name: str, sampling: Sampling, told: OnTokens | None) -> None:
            await engine.generate([5, 6, 7], sampling, on_tokens=told)
            ended.append(name)

        long = asyncio.create_task(ask("long", LONG, lambda *_: under_way.set()))
        await under_way.wait()
        await asyncio.gather(long, ask("short", SHORT, None))

    asyncio.run(play())
    assert ended[0] == first


@pytest.mark.parametrize(
    ("admit", "mode", "found"),
    [
        (None, "sync", "rounds"),
        (None, "one_step_off", "rounds"),
        (None, "fully_async", "any_step"),
        ("any_step", "sync", "any_step"),
        ("any_step", "fully_async", "any_step"),
    ],
)
def test_without_a_word_only_a_schedule_that_waits_for_nobody_lets_in_at_any_step(
    admit: Admit | None, mode: Mode, found: Admit
) -> None:
    assert admission(asking(admit, mode)) == found


def test_kernels_that_transformers_picked_are_left_alone_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where flash-linear-attention is installed its kernels stand in these places, and take no tensor of a CPU."""
    config = recipes()["quickstart-image"].config
    ensure_vision_model(tmp_path / "model", 0)

    def sampled() -> Completion:
        engine = NativeBackend().build(config, tmp_path / "model", 0)
        return asyncio.run(engine.generate([5, 6, 7, 8], Sampling(max_new_tokens=6, seed=0)))

    plain = sampled()
    for name in _OPERATIONS:
        stock = getattr(modeling_qwen3_5, name)

        @functools.wraps(stock)
        def kernel(*args: Any, **options: Any) -> Any:
            raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

        monkeypatch.setattr(modeling_qwen3_5, name, kernel)
    assert sampled().ids == plain.ids


def test_a_run_trains_with_requests_that_join_at_any_step(tmp_path: Path) -> None:
    config = replace(asking("any_step"), steps=2, prompts_per_step=2, group_size=2, eval_every=2, save_every=2)
    assert run(replace(config, run_dir=tmp_path / "run"), RECIPE).steps == 2
    assert_trained(tmp_path / "run")


def test_rounds_are_refused_where_nothing_is_sampled_in_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"admit rounds.*at any step"):
        run(replace(asking("rounds", "fully_async"), run_dir=tmp_path / "run"), RECIPE)
    vllm = Cluster(rollout=RolloutLayout(engine="vllm", admit="any_step"))
    with pytest.raises(ValueError, match=r"vLLM lets requests begin as it sees fit"):
        run(replace(RECIPE.config, cluster=vllm, run_dir=tmp_path / "run"), RECIPE)
    with pytest.raises(ValueError, match="admit must be one of 'rounds', 'any_step', got 'any'"):
        RolloutLayout(admit="any")  # type: ignore[arg-type]
