"""The files of prompts that a configuration names: their columns, and what is wrong with them without a tokenizer."""

from functools import partial
from pathlib import Path

from apps.common.cli.refusals import Refusals
from apps.common.data.files import file_problems, on_hub
from apps.common.data.presets import PRESETS
from apps.common.data.prompts import read_prompts
from apps.grpo.config import DataConfig, GrpoConfig


def layout(settings: GrpoConfig) -> tuple[str, str, str | None]:
    """Return the columns of question and answer, and the system prompt: those named, else those of the preset."""
    config, own = settings.data, settings.plugins
    if own.preset is None:
        return config.prompt_column, config.answer_column, own.system_prompt
    preset = PRESETS[own.preset]
    columns = (config.prompt_column, config.answer_column)
    usual = (DataConfig.prompt_column, DataConfig.answer_column)
    of_preset = (preset.prompt_column, preset.answer_column)
    prompt, answer = (a if a != b else c for a, b, c in zip(columns, usual, of_preset, strict=True))
    return prompt, answer, own.system_prompt or preset.system_prompt


def missing_files(settings: GrpoConfig) -> list[str]:
    """Return which files of a run are missing; the hub's data sets are left."""
    names = (settings.data.data, settings.data.eval_data, settings.plugins.tasks)
    return file_problems([name for name in names if name is not None], Path.is_file)


def data_problems(settings: GrpoConfig) -> list[str]:
    """Return what is wrong with the files of a run, as far as no tokenizer is needed; the hub's data sets are left."""
    prompt_column, answer_column, _ = layout(settings)
    refusals, config = Refusals(), settings.data
    for name in (config.data, config.eval_data):
        if name is not None and not on_hub(name):
            refusals.of(partial(read_prompts, name, prompt_column, answer_column))
    tasks = settings.plugins.tasks
    return refusals.lines + file_problems([] if tasks is None else [tasks], Path.is_file)
