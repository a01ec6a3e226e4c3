"""The files of rows that a configuration names: what is wrong with them without a tokenizer."""

from itertools import islice
from pathlib import Path

from apps.common.data.files import file_problems
from apps.common.data.rows import error_text, named
from apps.sft.config import DataConfig
from apps.sft.reading.examples import BadRow, read_examples

FIRST_ROWS = 1000
"""Rows of a file that are read for a run that is refused for another reason."""


def data_problems(config: DataConfig, rows: bool) -> list[str]:
    """Return what is wrong with the files, as far as no tokenizer is needed: missing ones, and by `rows` the first rows
    that can't be used of each."""

    def read(path: Path) -> None:
        first = islice(read_examples(path, config.columns), FIRST_ROWS)
        problems = [f"{named(path, one.row)}: {one.problem}" for one in first if isinstance(one, BadRow)]
        if problems and config.bad_rows == "error":
            raise ValueError(error_text(path, problems))

    names = [*(source.path for source in config.sources), *([config.eval_data] if config.eval_data else [])]
    return file_problems(names, read if rows else Path.is_file)
