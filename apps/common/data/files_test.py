"""The files behind a name: paths, directories with splits, patterns, data sets in a local cache of the hub."""

import json
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from apps.common.data.files import data_files, split_of


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    return folder


def names(folder: Path, name: object) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in data_files(str(name))]


def test_files_directories_and_patterns(tmp_path: Path) -> None:
    made(tmp_path, "b/y.jsonl", "b/x.json.gz", "b/.hidden/z.jsonl", "b/notes.md", "c.csv", "a:b.jsonl")
    assert names(tmp_path, tmp_path / "c.csv") == ["c.csv"]
    assert names(tmp_path, tmp_path / "a:b.jsonl") == ["a:b.jsonl"]
    assert names(tmp_path, tmp_path / "b") == ["b/x.json.gz", "b/y.jsonl"]
    assert names(tmp_path, tmp_path / "b/*.jsonl") == ["b/y.jsonl"]
    assert names(tmp_path, f"{tmp_path}/**/*.[jc]s*") == ["a:b.jsonl", "b/x.json.gz", "b/y.jsonl", "c.csv"]
    for name, words in (
        ("d.csv", r"no such data file: .*d\.csv; did you mean c\.csv\?"),
        ("*.parquet", "no data file matches"),
        ("e", "no such data file"),
        ("b/y.jsonl:train", "no such data file"),
    ):
        with pytest.raises(ValueError, match=words):
            data_files(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00001.parquet", "train"),
        ("main/test.jsonl", "test"),
        ("test/part-1.jsonl", "test"),
        ("my_training_data.json", "training"),
        ("constraints.jsonl", ""),
        ("latest.jsonl", ""),
    ],
)
def test_a_split_is_a_word_of_its_own(name: str, split: str) -> None:
    assert split_of(name) == split


def test_a_directory_of_several_splits_is_never_read_as_one(tmp_path: Path) -> None:
    made(tmp_path, "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl", "README.json")
    with pytest.raises(ValueError, match="holds several splits: there are test, train; name one"):
        data_files(tmp_path)
    assert names(tmp_path, f"{tmp_path}:train") == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert names(tmp_path, f"{tmp_path}:test") == ["test.jsonl"]
    with pytest.raises(ValueError, match="has no split 'dev'"):
        data_files(f"{tmp_path}:dev")
    (tmp_path / "train-00001-of-00002.jsonl").unlink()
    with pytest.raises(ValueError, match="1 of 2 parts are here"):
        data_files(f"{tmp_path}:train")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path / "hub"


def cached(hub: Path, repository: str, *files: str, readme: str = "") -> Path:
    """A repository as `huggingface_hub` keeps it."""
    folder = hub / f"datasets--{repository.replace('/', '--')}"
    snapshot = made(folder / "snapshots" / ("0" * 40), *files)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    if readme:
        (snapshot / "README.md").write_text(readme)
    return snapshot


def test_a_data_set_is_read_from_the_cache_of_the_hub(hub: Path) -> None:
    snapshot = cached(hub, "some/talks", "data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl")
    assert names(snapshot, "some/talks") == ["data/train-00000-of-00001.jsonl"]
    assert names(snapshot, "some/talks:test") == ["data/test-00000-of-00001.jsonl"]
    with pytest.raises(ValueError, match="has no split 'dev': there are test, train"):
        data_files("some/talks:dev")


def test_a_data_set_without_splits_is_its_training_split(hub: Path) -> None:
    snapshot = cached(hub, "some/plain", "talks.json")
    assert names(snapshot, "some/plain") == ["talks.json"]
    with pytest.raises(ValueError, match="has no split 'test': its files name none"):
        data_files("some/plain:test")


CARD = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: m/a.jsonl
  - split: test
    path: [m/b.jsonl, m/c*.jsonl]
- config_name: extra
  data_files: x/*.jsonl
---
# Talks
"""


def test_the_card_says_which_files_a_subset_has(hub: Path) -> None:
    snapshot = cached(hub, "some/card", "m/a.jsonl", "m/b.jsonl", "m/c1.jsonl", "x/train.jsonl", readme=CARD)
    assert names(snapshot, "some/card") == ["m/a.jsonl"]
    assert names(snapshot, "some/card:test") == ["m/b.jsonl", "m/c1.jsonl"]
    assert names(snapshot, "some/card/extra") == ["x/train.jsonl"]
    with pytest.raises(ValueError, match="has no subset 'other': name one of main, extra"):
        data_files("some/card/other")


def test_the_card_is_read_as_datasets_reads_it(hub: Path, tmp_path: Path) -> None:
    """The rows of each subset and split are those that `datasets` loads from the same directory."""
    snapshot = cached(hub, "some/card", "m/a.jsonl", "m/b.jsonl", "m/c1.jsonl", "x/train.jsonl", readme=CARD)
    for subset, split, name in (
        ("main", "train", "some/card"),
        ("main", "test", "some/card:test"),
        ("extra", "train", "some/card/extra"),
    ):
        loaded = datasets.load_dataset(str(snapshot), subset, split=split, cache_dir=str(tmp_path / "cache"))
        assert sorted(row["text"] for row in loaded) == sorted(names(snapshot, name))


def test_a_data_set_that_is_not_here_names_what_helps(hub: Path) -> None:
    with pytest.raises(ValueError, match=r"hf download some/thing --repo-type dataset \(the cache is .*HF_HOME"):
        data_files("some/thing:test")
