"""Conversations with images: every layout of a row gives the same sample, a run's loss is stock transformers'."""

import base64
import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText

from apps.common.data.images import image_processor_of
from apps.common.data.tokenizer import load_tokenizer
from apps.common.testing.weight_delta import load_tensors
from apps.quickstart.shapes import ImageProblem, draw, image_problems, resized
from apps.quickstart.vision import IMAGE, ensure_vision_model
from apps.sft.config import SftConfig
from apps.sft.data import Conversations, load_conversations
from apps.sft.main import configure, run
from apps.sft.own_rows import read_ahead, step_batch
from apps.sft.reading.row_images import with_row_images
from apps.sft.reading.samples import Sample, sample_of
from apps.sft.reading.sources import Source
from chat_tools import Renderer
from engines import EngineConfig, LocalBatch, build_engine
from engines.media.image_reader import ImageReader
from engines.proofs.forked_ranks import launch_forked
from seqpack.comm.collectives import gather_plain

SIZES = [(32, 32), (48, 40), (24, 56)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_vision_model(tmp_path_factory.mktemp("seeing") / "model", 0)


def problems(count: int = 40) -> list[ImageProblem]:
    return list(itertools.islice(image_problems(random.Random(5)), count))


def picture(number: int, problem: ImageProblem) -> str:
    return resized(problem, SIZES[number % len(SIZES)])


def conversation(problem: ImageProblem, first: Sequence[Any]) -> list[dict[str, Any]]:
    """A user's turn that begins with `first`, and its answer."""
    turn = {"role": "user", "content": [*first, {"type": "text", "text": problem.question}]}
    return [turn, {"role": "assistant", "content": problem.solution}]


def in_parts(count: int = 40) -> list[dict[str, Any]]:
    """Every row has its picture in its messages; each fifth is text alone."""
    out = []
    for number, problem in enumerate(problems(count)):
        seen = [{"type": "image", "image": picture(number, problem)}] if number % 5 else []
        out.append({"messages": conversation(problem, seen)})
    return out


def in_a_column(form: str, count: int = 40, column: str = "images") -> list[dict[str, Any]]:
    """The same rows, their pictures in a column: where a part without one stands, or <image>, or nothing."""
    out = []
    for number, problem in enumerate(problems(count)):
        first, text = [], problem.question
        if number % 5 and form == "bare":
            first = [{"type": "image"}]
        messages = conversation(problem, first)
        if form != "bare":
            messages[0]["content"] = ("<image>" if form == "marked" and number % 5 else "") + text
        out.append({"messages": messages, column: [picture(number, problem)] if number % 5 else []})
    return out


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As the datasets library writes pictures: a struct of bytes and path."""

    def stored(uri: str) -> dict[str, Any]:
        return {"bytes": base64.b64decode(uri.partition(",")[2]), "path": None}

    pq.write_table(pa.Table.from_pylist([row | {"images": [stored(i) for i in row["images"]]} for row in rows]), path)
    return path


def config(model: Path, data: Path, run_dir: Path, *more: str) -> SftConfig:
    small = "--max-steps 2 --batch-size 6 --eval-every 2 --save-every 2 --eval-share 0.3 --max-tokens 80"
    small += " --trainer.device cpu"
    engine = "--trainer.max-tokens-per-rank 160 --learning-rate 0.01"
    paths = ["--model", str(model), "--data", str(data), "--run-dir", str(run_dir)]
    return configure([*paths, *small.split(), *engine.split(), *more])


def load(model: Path, path: Path, *more: str) -> Conversations:
    settings = config(model, path, path.parent / "unused", "--trainer.vision", "frozen", *more)
    image_processor, column = image_processor_of(settings.engine, model), settings.cluster.media.images_column
    cache = path.parent / "tokens"
    return load_conversations(
        settings.data, [Source(path)], load_tokenizer(model), None, cache, image_processor, column
    )


def assert_same(found: Sequence[Sample], wanted: Sequence[Sample]) -> None:
    assert len(found) == len(wanted) > 0
    for left, right in zip(found, wanted, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


LAYOUTS = {
    "bare parts": lambda at: write(at / "a.jsonl", in_a_column("bare")),
    "marks": lambda at: write(at / "a.jsonl", in_a_column("marked")),
    "a column alone": lambda at: write(at / "a.jsonl", in_a_column("alone")),
    "Parquet": lambda at: write_parquet(at / "a.parquet", in_a_column("marked")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_rows_gives_the_samples_of_grpo(model: Path, tmp_path: Path, layout: str) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "other").mkdir()
    parts = load(model, write(tmp_path / "parts/a.jsonl", in_parts()))
    other = load(model, LAYOUTS[layout](tmp_path / "other"))
    samples = [[*found.train, *found.held_out] for found in (parts, other)]
    by_ids = [
        sorted(found, key=lambda s: (s["input_ids"].tolist(), s["pixel_values"].sum().item())) for found in samples
    ]
    assert_same(*by_ids)
    image_processor = image_processor_of(EngineConfig(vision="frozen"), model)
    renderer = Renderer(load_tokenizer(model))
    direct = [sample_of(renderer, row["messages"], image_processor=image_processor) for row in in_parts()]
    direct.sort(key=lambda s: (s["input_ids"].tolist(), s["pixel_values"].sum().item()))
    assert_same(by_ids[0], direct)
    counts = [int((s["input_ids"] == load_tokenizer(model).convert_tokens_to_ids(IMAGE)).sum()) for s in direct]
    assert set(counts) == {0, 16, 21, 30}


def stock_loss(directory: Path, rows: list[dict[str, Any]]) -> float:
    """Of the answers' tokens, one conversation at a time: stock model and image processor, tokens put in by hand."""
    module = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer, reader = load_tokenizer(directory), ImageReader.of(directory)
    image, total, count = tokenizer.convert_tokens_to_ids(IMAGE), 0.0, 0
    for row in rows:
        (asked, answer), given = row["messages"], {}
        prompt = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        seen = [part["image"] for part in asked["content"] if part["type"] == "image"]
        if seen:
            patches, grid = reader(seen)
            given = {"pixel_values": patches, "image_grid_thw": grid}
            at = ids.index(image)
            ids[at : at + 1] = [image] * int(grid.prod() // 4)
        end = len(ids)
        ids += tokenizer(answer["content"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        tokens = torch.tensor([ids])
        module.model.rope_deltas = None
        with torch.no_grad():
            table = module(
                input_ids=tokens, mm_token_type_ids=(tokens == image).long(), use_cache=False, **given
            ).logits[0]
        scores = table.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None]).squeeze(1)[end - 1 :]
        total, count = total - scores.sum().item(), count + len(scores)
    return total / count


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_runs_losses_are_those_of_stock_transformers_one_at_a_time(model: Path, tmp_path: Path, vision: str) -> None:
    """Packed, before training and of what is exported; the tower is trained, or stays bit for bit."""
    data, held_out = in_parts(36), in_parts(48)[36:]
    options = ("--eval-data", str(write(tmp_path / "held-out.jsonl", held_out)), "--trainer.vision", vision)
    settings = config(model, write(tmp_path / "data.jsonl", data), tmp_path / "run", *options, "--eval-share", "None")
    result = run(settings)
    assert result.loss_before == pytest.approx(stock_loss(model, held_out), rel=1e-5)
    assert result.loss_after == pytest.approx(stock_loss(tmp_path / "run/export", held_out), rel=1e-5)
    assert result.loss_after < 0.9 * result.loss_before
    before, after = load_tensors(model), load_tensors(tmp_path / "run/export")
    assert before.keys() == after.keys()
    same = {name for name in before if before[name].equal(after[name])}
    tower = {name for name in before if name.startswith("model.visual.")}
    assert (same & tower == tower) if vision == "frozen" else not same & tower
    assert not same - tower


def test_each_rank_reads_the_pictures_of_its_own_rows(model: Path, tmp_path: Path) -> None:
    """Two ranks' losses are one's, and no picture of a step is read by both."""
    if dist.is_initialized():  # an engine of an earlier test, in this process
        dist.destroy_process_group()
    data, held_out = write(tmp_path / "data.jsonl", in_parts(36)), write(tmp_path / "held-out.jsonl", in_parts(48)[36:])
    options = ("--eval-data", str(held_out), "--trainer.vision", "trained", "--eval-share", "None")
    alone = run(config(model, data, tmp_path / "one", *options))
    shared = run(config(model, data, tmp_path / "two", *options, "--nproc-per-node", "2"))
    assert shared.loss_before == pytest.approx(alone.loss_before, rel=1e-6)
    assert shared.loss_after == pytest.approx(alone.loss_after, rel=1e-4)
    read = launch_forked(read_by_ranks, (model, data), world_size=2)
    assert all(read)
    assert sorted(itertools.chain(*read)) == sorted(set(itertools.chain(*read)))
    assert len(set(itertools.chain(*read))) == 16  # of 20 rows, each fifth is text alone


def read_by_ranks(model: Path, data: Path) -> list[list[str]]:
    """Return the pictures that each rank reads for a step of the first 20 rows."""
    conversations = load(model, data)
    settings = config(model, data, data.parent / "run", "--trainer.vision", "frozen")
    engine = build_engine(replace(settings.engine, model=str(model)))
    asked: list[str] = []
    plain = ImageReader.__call__

    def counted(self: ImageReader, pictures: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        asked.extend(pictures)
        return plain(self, pictures)

    every = replace(conversations.train, places=np.array([[0, entry] for entry in range(20)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageReader, "__call__", counted)
        read_ahead(engine, every, range(20), settings.objective)
        batch = step_batch(engine, every, range(20), settings.objective)
    assert isinstance(batch, LocalBatch)
    assert set(batch.rows) < set(range(20))
    return [*gather_plain(asked)]


def broken(rows: list[dict[str, Any]], number: int, change: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    change(rows[number])
    return rows


BAD = {
    "unreadable": (
        lambda row: row.update(images=["data:image/png;base64,AAAA"]),
        r"line 8: picture 0: it cannot be read",
    ),
    "no file": (lambda row: row.update(images=["nowhere.png"]), r"line 8: picture 0: it cannot be read.*nowhere\.png"),
    "too many": (lambda row: row.update(images=row["images"] * 2), r"line 8: .* has 2 images for 1 places"),
    "too few": (lambda row: row.update(images=[]), r"line 8: an image part has no 'image'"),
    "no picture": (lambda row: row.update(images=[7]), r"line 8: images: a int is no picture"),
    "a video": (lambda row: row.update(video="a.mp4"), r"line 8: column 'video' holds media"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused_by_file_and_row_before_a_step(model: Path, tmp_path: Path, name: str) -> None:
    change, words = BAD[name]
    path = write(tmp_path / "bad.jsonl", broken(in_a_column("bare"), 7, change))
    with pytest.raises(ValueError, match=rf"bad\.jsonl, {words}"):
        run(config(model, path, tmp_path / "run", "--trainer.vision", "frozen"))
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_images_need_a_model_that_sees_and_a_column_that_is_there(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", in_a_column("marked", column="drawing"))
    with pytest.raises(ValueError, match=r"line 1: no column 'picture'; it has messages, drawing"):
        load(model, path, "--media.images-column", "picture")
    conversations = load(model, path, "--media.images-column", "drawing")
    assert sum(len(sample["image_grid_thw"]) for sample in (*conversations.train, *conversations.held_out)) == 32
    with pytest.raises(ValueError, match=r"the model is trained on text: set --trainer\.vision"):
        run(config(model, path, tmp_path / "run", "--media.images-column", "drawing"))
    with pytest.raises(ValueError, match=r"line 2: column 'images' holds media.* set --trainer\.vision to frozen"):
        run(config(model, write(tmp_path / "b.jsonl", in_a_column("marked")), tmp_path / "run"))
    with pytest.raises(ValueError, match=r"line 2: .* a part of kind 'image'.* --trainer\.vision frozen"):
        run(config(model, write(tmp_path / "c.jsonl", in_parts()), tmp_path / "run"))


def test_a_picture_that_is_gone_is_missed_where_tokens_were_kept(model: Path, tmp_path: Path) -> None:
    rows = in_a_column("bare")
    file = tmp_path / "one.png"
    file.write_bytes(base64.b64decode(rows[7]["images"][0].partition(",")[2]))
    rows[7]["images"] = [str(file)]
    path = write(tmp_path / "a.jsonl", rows)
    first = load(model, path)
    assert_same(load(model, path).train, first.train)
    file.unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl, line 8: there is no image .*one\.png"):
        load(model, path)


def test_another_picture_of_as_many_bytes_in_the_same_file_is_noticed(model: Path, tmp_path: Path) -> None:
    """What was tokenised is used again while pictures are as they were, and made anew when a file has changed."""
    rows, file = in_a_column("bare"), tmp_path / "one.bmp"  # as many bytes for as many pixels
    rows[7]["images"] = [str(file)]
    path, spec = write(tmp_path / "a.jsonl", rows), draw(problems()[7].spec)
    spec.resize((32, 128)).save(file)
    first, size = load(model, path), file.stat().st_size
    (store,) = tmp_path.rglob("*.arrow")
    modified = store.stat().st_mtime_ns
    assert_same(load(model, path).train, first.train)
    assert store.stat().st_mtime_ns == modified  # read, not written
    spec.resize((64, 64)).save(file)
    assert file.stat().st_size == size
    conversations = load(model, path)
    assert store.stat().st_mtime_ns > modified
    store.unlink()
    anew = load(model, path)
    for got, want in ((conversations.train, anew.train), (conversations.held_out, anew.held_out)):
        assert_same(got, want)


def test_rows_with_images_are_left_out_where_they_are_too_long_and_others_cut(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", in_parts())
    longest = max(len(sample["input_ids"]) for sample in load(model, path).train)
    assert longest > 30
    conversations = load(model, path, "--truncation", "left", "--max-tokens", "24")
    reasons = list(conversations.skipped.counts)
    assert any("with images, which are not cut" in reason for reason in reasons)
    assert all(len(sample["input_ids"]) <= 24 for sample in conversations.train)


def test_pictures_stand_in_the_order_of_their_places() -> None:
    def image_processor(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
        return [part["image"] for message in messages for part in message["content"] if part.get("type") == "image"]

    bare = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]}] * 2
    assert image_processor(with_row_images(bare, ["a", "b", "c", "d"], "images")) == ["a", "b", "c", "d"]
    marked = [{"role": "user", "content": "<image>x<image>"}, {"role": "user", "content": "y<image>z"}]
    actual = with_row_images(marked, ["a", "b", "c"], "images")
    assert image_processor(actual) == ["a", "b", "c"]
    assert [part.get("text", part.get("image")) for part in actual[1]["content"]] == ["y", "c", "z"]
    for rows, given, words in (
        (bare, ["a"], "has 1 images for 4 places"),
        ([{"role": "assistant", "content": "<image>"}], ["a"], "no turn of a user that could show them"),
        ([{"role": "user", "content": [{"type": "image", "image": "a"}]}], ["b"], "keep one of the two"),
    ):
        with pytest.raises(ValueError, match=words):
            with_row_images(rows, given, "images")
