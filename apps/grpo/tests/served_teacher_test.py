"""Teachers beside a run: a server of stock transformers, and the native engine, teach as one in this process does."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from apps.common.cli.untested import untested_parts
from apps.grpo.config import GrpoConfig, TeacherConfig, WarmStart
from apps.grpo.main import configure, run
from apps.grpo.registry import spec_of
from apps.grpo.teachers import KEYS, Teachers, check_teachers
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.quickstart.tokenizer import build_tokenizer
from engines.proofs.forked_ranks import launch_forked
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from objectives import Distillation
from rollout import Episode, Score
from rollout.chat.segment import Segment
from rollout.scoring import ScoringError
from rollout.testing.stock_server import StockServer, stock_server

SEGMENT = Segment((1, 2), (False, True), (0.0, -1.0), (-1, 0))
LENGTHS = [5, 3, 7, 2, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained teacher of another seed."""
    assert RECIPE.make_model is not None
    return RECIPE.make_model(tmp_path_factory.mktemp("teacher") / "model", 7)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[StockServer]:
    with stock_server(folder) as server:
        yield server


def config_of(*teacher: str, **settings: Any) -> GrpoConfig:
    teachers = TeacherConfig(teacher, **{"teacher_top_k": 16, **settings})
    return replace(
        RECIPE.config,
        steps=3,
        eval_every=3,
        save_every=3,
        group_size=1,
        mini_batches=2,
        warm_start=WarmStart(),
        teachers=teachers,
        distillation=Distillation("jsd"),
    )


def scored(config: GrpoConfig, names: list[str]) -> TensorDict:
    """Return a batch with what the teachers of a configuration add to it, rows of these environments."""
    batch = tiny_batch(LENGTHS)
    batch["episode"] = torch.arange(len(LENGTHS))
    episodes = [Episode("e", f"{name}/1", 0, (SEGMENT,), Score(1.0), "done") for name in names]
    nothing: Any = None  # no privileged prompts, and the policy is not asked
    with ExitStack() as stack:
        teachers = Teachers.of(config, nothing, nothing, stack)
        assert teachers is not None
        teachers.score(batch, episodes, nothing)
    return batch


def assert_same_scores(one: TensorDict, other: TensorDict, atol: float = 2e-5) -> None:
    for place in range(len(LENGTHS)):
        tokens, log_probs, rest = ([batch[key].unbind()[place] for batch in (one, other)] for key in KEYS)
        assert tokens[0].equal(tokens[1])
        torch.testing.assert_close(log_probs[0], log_probs[1], rtol=0, atol=atol)
        torch.testing.assert_close(rest[0], rest[1], rtol=0, atol=atol)


def test_a_teacher_of_each_kind_gives_the_scores_of_one_in_this_process(folder: Path, served: StockServer) -> None:
    names = ["math", "code", "math", "talk", "code"]
    here = scored(config_of(str(folder)), names)
    assert (here[KEYS[0]].values() >= 0).any()
    kinds = (f"math={served.url}", f"code=native:{folder}", f"talk={folder}")
    for teacher in ((served.url,), (f"{served.url}/v1",), (f"native:{folder}",), kinds):
        assert_same_scores(here, scored(config_of(*teacher), names))


def on_ranks(teacher: str) -> list[Any]:
    """Return the batch as each rank has it."""
    found = scored(config_of(teacher), ["x"] * len(LENGTHS))
    mine: list[Any] = [{key: [x.clone() for x in found[key].unbind()] for key in KEYS}]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine[0])
    return everyone


def lost_on_ranks(teacher: str, rank_of_server: int) -> str:
    """Return the error of each rank, where the server of one of them is gone."""
    config = config_of(teacher, teacher_answer_seconds=1.0)
    nothing: Any = None
    batch = tiny_batch(LENGTHS)
    with ExitStack() as stack:
        teachers = Teachers.of(config, nothing, nothing, stack)
        assert teachers is not None
        (only,) = teachers.engines.values()
        if dist.get_rank() == rank_of_server:
            lost: Any = only
            lost.engine._own = replace(lost.engine._own, base_url="http://127.0.0.1:9/v1")
        try:
            only.forward(batch, top_k=4)  # type: ignore[union-attr]
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_share_the_rows_and_the_error_of_one_is_that_of_all(served: StockServer, folder: Path) -> None:
    here = scored(config_of(str(folder)), ["x"] * len(LENGTHS))
    for ranks in launch_forked(on_ranks, (served.url,), world_size=2):
        for key in KEYS:
            torch.testing.assert_close(ranks[key], [*here[key].unbind()], rtol=0, atol=2e-5)
    told = launch_forked(lost_on_ranks, (served.url, 1), world_size=2)
    assert "rank 1 got no scores of teacher http://127.0.0.1" in told
    assert "has scored nothing for 1 s" in told


def test_a_run_with_a_served_teacher_has_the_losses_of_one_in_this_process(
    folder: Path, served: StockServer, tmp_path: Path
) -> None:
    rows = {}
    for name, teacher in (("here", str(folder)), ("served", served.url), ("native", f"native:{folder}")):
        run(replace(config_of(teacher), run_dir=tmp_path / name), RECIPE)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()[1:]
        rows[name] = [json.loads(line) for line in lines]
    for name in ("served", "native"):
        for want, got in zip(rows["here"], rows[name], strict=True):
            for key in ("train/loss", "train/grad_norm", "train/distill/divergence", "train/distill/teacher_mass"):
                assert got[key] == pytest.approx(want[key], rel=1e-4), (name, key)
            assert want["train/loss"] > 0


def test_a_run_whose_server_is_killed_ends_with_its_name(folder: Path, tmp_path: Path) -> None:
    with stock_server(folder) as server:
        killer = replace(config_of(server.url, teacher_answer_seconds=1.0), run_dir=tmp_path / "run", steps=50)
        make = RECIPE.make_tasks
        assert make is not None

        def killing(config: GrpoConfig, tokenizer: Any) -> Any:
            tasks = make(config, tokenizer)
            given = tasks.tasks

            def second(first: int, count: int) -> Any:
                if first:
                    server.kill()
                return given(first, count)

            object.__setattr__(tasks, "tasks", second)
            return tasks

        with pytest.raises(
            ScoringError, match=rf"^{re.escape(server.url)} has scored nothing for 1 s .*resume the run"
        ):
            run(killer, replace(RECIPE, make_tasks=killing))


@pytest.mark.parametrize(
    ("server", "settings", "message"),
    [
        (
            {"max_logprobs": 20},
            {"teacher_top_k": 32},
            r"does not tell --teacher-top-k 32 .*Serve it with --max-logprobs -1",
        ),
        (
            {"max_length": 20},
            {},
            r"up to 20 tokens, and scoring --max-episode-tokens \d+ needs one more: serve it with",
        ),
        ({"tokenizer": False}, {}, r"serve with vLLM, and with its tokenizer"),
    ],
)
def test_a_server_that_can_not_teach_is_refused_before_a_run(
    folder: Path, server: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with stock_server(folder, **server) as there, pytest.raises(ValueError, match=message):
        check_teachers(config_of(there.url, **settings), build_tokenizer())


def test_other_tokens_and_no_server_are_refused_before_a_run(folder: Path, served: StockServer) -> None:
    check_teachers(config_of(served.url), build_tokenizer())
    other = build_tokenizer()
    other.add_tokens(["other"])
    for teacher in (served.url, f"native:{folder}", f"vllm:{folder}"):
        with pytest.raises(ValueError, match="has another tokenizer than the model"):
            check_teachers(config_of(teacher), other)
    with pytest.raises(ValueError, match=r"--teacher vllm:.*can't compute with it: head_dim 16 of its attention"):
        check_teachers(config_of(f"vllm:{folder}"), build_tokenizer())
    with pytest.raises(ValueError, match=r"nobody answers at http://127.0.0.1:9/v1/models.*start the server first"):
        check_teachers(config_of("http://127.0.0.1:9"), build_tokenizer())
    with pytest.raises(ValueError, match="would send key and prompts in the clear: use https"):
        check_teachers(config_of("http://teacher.example:8000"), build_tokenizer())
    with pytest.raises(ValueError, match="--teacher vllm:nowhere: there is no such directory"):
        check_teachers(config_of("vllm:nowhere"), build_tokenizer())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--teacher-tokens", "policy"], "--teacher-tokens policy: http://127.0.0.1:9 tells its own likeliest alone"),
        (["--sampling.temperature", "0.5"], "--teacher http://127.0.0.1:9 scores at temperature 1"),
        (["--teacher-answer-seconds", "0"], "--teacher-answer-seconds must be above 0 and finite, got 0"),
        (["--teacher-gpu-memory-utilization", "0.3"], "is of --teacher vllm:DIR: leave it out"),
        (["--teacher-gpu-memory-utilization", "1"], "must lie in [0, 1), got 1"),
    ],
)
def test_settings_that_a_served_teacher_has_not_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        configure(["--teacher", "http://127.0.0.1:9", *argv])
    with pytest.raises(ValueError, match="--teacher-answer-seconds is of --teacher http"):
        configure(["--teacher", "DIR", "--teacher-answer-seconds", "5"])
    for teacher in ("ftp://x", "native:http://127.0.0.1:9"):
        with pytest.raises(ValueError, match=f"{teacher} is no directory and no server: name DIR, http://HOST:PORT"):
            configure(["--teacher", teacher])


def test_a_teacher_beside_training_on_gpus_is_accepted_by_name() -> None:
    spec = spec_of(config_of("a=native:DIR", "b=vllm:DIR", "c=http://127.0.0.1:9", "d=DIR"), RECIPE)
    assert spec.device_teachers == ("native:DIR", "vllm:DIR")
    assert untested_parts(spec, ()) == {}
    on_gpus = replace(spec, engine=replace(spec.engine, device="cuda"))
    assert "--teacher native:DIR: it ran on a CPU alone" in untested_parts(on_gpus, ())["teacher"]


def test_only_a_teacher_in_the_process_of_training_counts_in_its_plan() -> None:
    assert TeacherConfig(("DIR",)).frozen
    assert TeacherConfig(("a=http://x", "b=DIR")).frozen
    assert not TeacherConfig(("http://x",)).frozen
    assert not TeacherConfig(("a=vllm:DIR", "b=native:DIR")).frozen
