"""The figures of pages are those of docs/benchmarks, and a planted one that is not is told."""

from pathlib import Path

import pytest
from draw_benchmarks import Benchmark, Run, drawn_names, with_tables
from figures import PageFigures, Pages, complaints, figures

BENCHMARKS = {
    "speed": Benchmark(
        "speed",
        "A step.",
        "python speed.py",
        [
            Run("2026-01-01", "cpu", {}, {"a": {"ms": 99.0, "tokens/s": 1}, "b": {"ms": 7}}),
            Run("2026-02-01", "cpu", {"torch": "2"}, {"a": {"ms": 1234.56, "tokens/s": 16_700}}, "busy"),
            Run("2026-02-01", "gpu", {}, {"a": {"ms": 5.25, "speed": "1.7 to 1.8", "more": 0.401}}),
        ],
    )
}
PAGES = Pages({"p.md": PageFigures(("speed",), ("10 s",))}, names=("Python", "arXiv"), sizes=("ranks", "seeds"))
GOOD = """It takes 1,235 ms (1,234.6 ms), or 5.25 ms and 7 ms,
makes 16,700 tokens
a second, 1.7 to 1.8 times as many (40.1 % more); it waits 10 s. `9 ms`
[a](b.md#3-ms) The share is 0.4 on 2 and 4 ranks, for 3
seeds, of Python 3.11 to 3.13 (arXiv 2510.11370), SHA-256, Qwen3-5-27B, a 40-line loop, rank 0, 1 or -1, #64.

2. `5`, <img width="9">

    --steps 9

    9 ms
```
9 ms
```
| case | ms | cases |
| --- | --- | --- |
| b | 5.3 | 0.40 |

<!-- table: other -->
| 9 |
<!-- end of table -->
"""


def test_a_page_whose_figures_are_measured_has_no_complaint() -> None:
    assert complaints("p.md", GOOD, PAGES, BENCHMARKS) == []
    drawn = "<!-- figures: speed -->\n9 ms\n<!-- end of figures -->\n10 s"  # held by another test
    assert complaints("p.md", drawn, PAGES, BENCHMARKS) == []


@pytest.mark.parametrize(
    ("added", "complaint"),
    [
        ("1,236 ms", "'1,236 ms': 1,236 in none of its benchmarks"),
        ("1,234.5 ms", "'1,234.5 ms': 1,234.5 in none of its benchmarks"),  # 1,234.56 rounds to 1,234.6
        ("99 ms", "'99 ms': 99 in none of its benchmarks"),  # an older run's
        ("7 s", "'7 s': 7 in none of its benchmarks"),  # another unit
        ("5.25, 8 and 7 ms", "'5.25, 8 and 7 ms': 8 in none of its benchmarks"),
        ("1.5 to 1.8 times", "'1.5 to 1.8 times': 1.5 in none of its benchmarks"),
        ("| | peak GiB |\n| --- | --- |\n| a | 5 |", "'5 peak GiB': 5 in none of its benchmarks"),
        ("| a |\n| --- |\n| so 80 % |", "'80 %': 80 in none of its benchmarks"),
        ("it read 8 of\n 9 turns", "'8 of 9': 8, 9 in none of its benchmarks"),
        ("a share of 0.41", "'0.41': 0.41 in none of its benchmarks"),
        ("off by 4e-1, or 4e-2", "'4e-2': 4e-2 in none of its benchmarks"),
        ("it found 12 of them", "'12': 12 in none of its benchmarks"),
        ("Pythons 3.13", "'3.13': 3.13 in none of its benchmarks"),
        ("| a | b |\n| --- | --- |\n| a | 12 |", "'12': 12 in none of its benchmarks"),
    ],
)
def test_a_planted_figure_is_told(added: str, complaint: str) -> None:
    (said,) = complaints("p.md", f"{GOOD}\n{added}\n", PAGES, BENCHMARKS)
    assert said.startswith(f"p.md: {complaint}")


def test_what_nothing_uses_is_told() -> None:
    assert complaints("p.md", "no figure", Pages({"p.md": PageFigures(("speed", "gone"), ("3 s",))}), BENCHMARKS) == [
        "p.md: gone is no file of docs/benchmarks",
        "p.md: no figure of speed",
        "p.md: '3 s' does not stand there (docs/figures.toml)",
    ]


def test_a_table_of_no_file_and_one_without_an_end_are_told() -> None:
    page = "<!-- figures: gone -->\n<!-- end of figures -->\n<!-- figures: speed -->\n| a |\n"
    assert complaints("p.md", page, Pages({}), BENCHMARKS) == [
        "p.md: a table of gone, which is no file of docs/benchmarks",
        "p.md: a table without its end: <!-- end of figures -->",
    ]


def test_units_of_columns_and_words_are_the_same() -> None:
    text = "4 seconds; 3-minutes run; 5 GB/s; 30 % of 2 rows a second, not 4 rows, v2 s, 1.2.3 s, 3 seconded"
    assert [(one.numbers, one.unit) for one in figures(text, Pages({}))] == [
        (("4",), "s"),
        (("3",), "minutes"),
        (("5",), "a second"),
        (("30",), "%"),
        (("2",), "a second"),
        (("4",), ""),
        (("3",), ""),
    ]


def test_a_table_has_the_newest_run_of_each_case_and_device() -> None:
    page = "before\n<!-- figures: speed -->\nold\n<!-- end of figures -->\nafter\n"
    assert drawn_names(page) == {"speed"}
    drawn = with_tables(Path("docs/p.md"), page, BENCHMARKS)
    assert with_tables(Path("docs/p.md"), drawn, BENCHMARKS) == drawn
    assert "](../../docs/benchmark_history.md#speed)" in with_tables(Path("libs/a/README.md"), page, BENCHMARKS)
    assert drawn.splitlines() == [
        "before",
        "<!-- figures: speed -->",
        "",
        "A step.",
        "",
        "| case | device | ms | tokens/s | speed | more |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a | cpu | 1,234.56 | 16,700 |  |  |",
        "| a | gpu | 5.25 |  | 1.7 to 1.8 | 0.401 |",
        "| b | cpu | 7 |  |  |  |",
        "",
        "cpu, torch 2 (busy); gpu, cpu: `python speed.py` ([all runs](benchmark_history.md#speed))",
        "",
        "<!-- end of figures -->",
        "after",
    ]
