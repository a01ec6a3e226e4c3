from pathlib import Path

import pytest

from apps.sft.reading.sources import Source, parse_sources


@pytest.mark.parametrize(
    ("texts", "sources"),
    [
        (("a.jsonl",), [("a.jsonl", None)]),
        (("a.jsonl:1", "b.parquet:0.5"), [("a.jsonl", 1.0), ("b.parquet", 0.5)]),
        (("c:/a.jsonl", "b:c.jsonl"), [("c:/a.jsonl", None), ("b:c.jsonl", None)]),
        ((), []),
    ],
)
def test_files_and_weights(texts: tuple[str, ...], sources: list[tuple[str, float | None]]) -> None:
    assert parse_sources(texts) == tuple(Source(Path(path), weight) for path, weight in sources)


@pytest.mark.parametrize("weights", [(":1", ""), (":0", ":1"), (":inf", ":1"), (":nan", ":1"), (":-2", ":1")])
def test_a_bad_weight_is_refused(weights: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="--data"):
        parse_sources([f"{name}.jsonl{weight}" for name, weight in zip("ab", weights, strict=True)])
