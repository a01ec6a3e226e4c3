"""Pictures end to end: what is drawn is asked, a small run of quickstart-image, and a file laid out as geo3k."""

import io
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from apps.common.data.tokenizer import load_tokenizer
from apps.common.testing.weight_delta import assert_trained, load_tensors
from apps.grpo.config import DataConfig, GrpoConfig, WarmStart
from apps.grpo.main import configure, run
from apps.grpo.registry import recipes
from apps.grpo.tasks.prompt_tasks import prompt_tasks
from apps.quickstart.image_tasks import make_tasks
from apps.quickstart.shapes import BAR, CELL, CELLS, SHAPE_COLORS, ImageProblem, draw, image_problems, is_held_out
from schedules.config import Mode, ScheduleConfig

RECIPE = recipes()["quickstart-image"].config
SHAPE_OF = {"squares?": "s", "discs?": "d"}
SMALL_GAP = 1e-3
"""Between the sampler's log-probs and the trainer's: both see the same image in the same place, or it is far larger."""


def some(count: int, held_out: bool = False, seed: int = 3) -> list[ImageProblem]:
    return list(itertools.islice(image_problems(random.Random(seed), held_out), count))


@pytest.mark.parametrize("held_out", [False, True])
def test_what_is_drawn_is_what_is_asked(held_out: bool) -> None:
    """Read back from the pixels: the ink in the middle of a cell, the height of a bar."""
    for problem in some(60, held_out):
        assert is_held_out(problem) == held_out
        image = draw(problem.spec)
        if problem.question.startswith("bar"):
            column = (int(problem.question[4]) - 1) * CELL + CELL // 2
            filled = sum(image.getpixel((column, y)) == BAR for y in range(CELLS * CELL))
            assert str(filled * 2 / CELL) == f"{problem.answer}.0"
            continue
        found = 0
        for y, x in itertools.product(range(CELLS), repeat=2):
            middle, corner = (image.getpixel((x * CELL + at, y * CELL + at)) for at in (CELL // 2, 1))
            if middle in SHAPE_COLORS and (corner in SHAPE_COLORS) == (SHAPE_OF[problem.question] == "s"):
                found += 1
        assert str(found) == problem.answer


def test_the_two_sides_never_meet_and_seeds_differ() -> None:
    trained, held_out = some(500), some(200, held_out=True)
    assert not {(p.spec, p.question) for p in trained} & {(p.spec, p.question) for p in held_out}
    assert some(5, seed=1) != some(5, seed=2)
    assert {p.answer for p in trained} == set("01234567")


def test_what_has_no_effect_is_refused() -> None:
    for change, problem in (
        ({"data": DataConfig(digits=3)}, "--digits goes with"),
        ({"max_turns": 2}, "--max-turns has no effect"),
        ({"engine": replace(RECIPE.engine, vision="off")}, "the tasks are pictures"),
    ):
        with pytest.raises(ValueError, match=problem):
            make_tasks(replace(RECIPE, **change), None)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def small(run_dir: Path, **changes: Any) -> GrpoConfig:
    warm = WarmStart(steps=2, eval_every=2, eval_prompts=4, batch_size=6, warmup_steps=0)
    sizes = {"steps": 2, "prompts_per_step": 3, "group_size": 4, "eval_every": 2, "save_every": 2}
    data = replace(RECIPE.data, eval_prompts=4)
    return replace(RECIPE, **{"run_dir": run_dir, "warm_start": warm, "data": data, **sizes, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("pictures") / "run"
    run(small(run_dir))
    return run_dir


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_pictures_are_sampled_ahead(tmp_path: Path, mode: Mode) -> None:
    """From the ledger and from another process: the first step's are on policy, and the trainer sees the same."""
    cluster = replace(RECIPE.cluster, schedule=ScheduleConfig(mode))
    run(small(tmp_path / "run", cluster=cluster, warm_start=WarmStart(steps=0)))
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert metrics[1]["log_prob_difference_max"] < SMALL_GAP


def test_a_run_samples_and_trains_on_the_same_pictures(finished: Path) -> None:
    for row in rows(finished)[1:]:
        assert row["log_prob_difference_max"] < SMALL_GAP
    assert_trained(finished / "warm-start", start=finished / "model")
    assert any(name.startswith("model.visual.blocks.0.attn") for name in load_tensors(finished / "export"))
    assert (finished / "export/preprocessor_config.json").is_file()


def geo3k(path: Path, count: int = 24, broken: int | None = None) -> Path:
    """A Parquet file as hiyouga/geometry3k lays it out: images as bytes, <image> where they stand in the problem."""
    out = []
    for number, problem in enumerate(some(count)):
        png = io.BytesIO()
        draw(problem.spec).resize((48, 40)).save(png, format="PNG")
        data = b"no picture" if number == broken else png.getvalue()
        images = [{"bytes": data, "path": f"{number}.png"}]
        out.append({"images": images, "problem": f"<image>{problem.question}", "answer": problem.answer})
    pq.write_table(pa.Table.from_pylist(out), path)
    return path


def flags(finished: Path, data: Path, run_dir: Path, *more: str) -> GrpoConfig:
    small = (
        "--max-steps 1 --prompts-per-step 3 --group-size 4 --max-turns 1 --eval-prompts 2 --sampling.max-new-tokens 4"
    )
    engine = "--trainer.device cpu --max-prompt-tokens 200 --max-episode-tokens 256"
    paths = ["--model", str(finished / "export"), "--data", str(data), "--run-dir", str(run_dir), "--preset", "geo3k"]
    return configure([*paths, *small.split(), *engine.split(), *more])


def test_a_file_laid_out_as_geo3k_runs_through_the_same_flags(finished: Path, tmp_path: Path) -> None:
    data = geo3k(tmp_path / "train.parquet")
    run(flags(finished, data, tmp_path / "run", "--trainer.vision", "frozen"))
    assert rows(tmp_path / "run")[1]["log_prob_difference_max"] < SMALL_GAP
    before, after = (load_file(at / "export/model.safetensors") for at in (finished, tmp_path / "run"))
    tower = [name for name in before if name.startswith("model.visual.")]
    assert tower
    assert all(before[name].equal(after[name]) for name in tower)


def test_a_column_of_images_may_have_any_name(finished: Path, tmp_path: Path) -> None:
    table = pq.read_table(geo3k(tmp_path / "geo3k.parquet"))
    renamed = tmp_path / "renamed.parquet"
    pq.write_table(table.rename_columns(["drawing", *table.column_names[1:]]), renamed)
    named = ("--trainer.vision", "frozen", "--media.images-column")
    never: Any = None  # nothing is answered, so nothing is scored
    asked = [
        [
            row.data["prompt"].messages
            for row in prompt_tasks(config, load_tokenizer(finished / "export"), never).tasks(0, 8)
        ]
        for config in (
            flags(finished, renamed, tmp_path / "a", *named, "drawing"),
            flags(finished, tmp_path / "geo3k.parquet", tmp_path / "b", *named[:2]),
        )
    ]
    assert asked[0] == asked[1]
    assert [part["type"] for part in asked[0][0][-1]["content"]] == ["image", "text"]
    with pytest.raises(ValueError, match=r"row 1: no column 'picture'; it has drawing, .* --media"):
        run(flags(finished, renamed, tmp_path / "c", *named, "picture"))
    with pytest.raises(ValueError, match=r"the model is trained on text: set --trainer\.vision"):
        run(flags(finished, renamed, tmp_path / "d", *named[2:], "drawing"))


def test_files_that_cannot_be_asked_are_refused_by_row(finished: Path, tmp_path: Path) -> None:
    data = geo3k(tmp_path / "broken.parquet", broken=4)
    with pytest.raises(ValueError, match=r"broken\.parquet, row 5: picture 0: it cannot be read"):
        run(flags(finished, data, tmp_path / "run", "--trainer.vision", "trained"))
    with pytest.raises(
        ValueError, match=r"row 1: it holds images or other media: leave such rows out, or set --trainer\.vision"
    ):
        run(flags(finished, geo3k(tmp_path / "good.parquet"), tmp_path / "run"))
