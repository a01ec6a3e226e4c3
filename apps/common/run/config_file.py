"""Configurations as files: nested frozen dataclasses to JSON and back, nothing lost and nothing unknown accepted."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import cattrs
from cattrs.preconf.json import make_converter

from runlog.store import DEFAULTS

C = TypeVar("C")
CONFIG_NAME = "config.json"


def _converter() -> cattrs.Converter:
    converter = make_converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(Path, str)
    converter.register_structure_hook(Path, lambda value, _: Path(str(value)))
    return converter


def as_plain(config: Any) -> dict[str, Any]:
    """Return the configuration as nested dicts of plain values."""
    result: dict[str, Any] = _converter().unstructure(config)
    return result


def dump_config(config: Any) -> str:
    """Return the configuration as JSON text, fields in their order of definition."""
    return json.dumps(as_plain(config), indent=2, ensure_ascii=False) + "\n"


def write_config(config: Any, run_dir: Path, name: str = CONFIG_NAME) -> None:
    """Write a configuration into the run folder atomically."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / (name + ".writing")
    temporary.write_text(dump_config(config), encoding="utf-8")
    os.replace(temporary, run_dir / name)


def write_configs(config: Any, recipe: Any, run_dir: Path) -> None:
    """Write a run's configuration, and its recipe's, against which the report marks what is changed."""
    write_config(config, run_dir)
    write_config(replace(recipe, run_dir=config.run_dir, resume=config.resume), run_dir, DEFAULTS)


def load_config(kind: type[C], path: Path) -> C:
    """Read what `dump_config` wrote.

    Raises:
        ValueError: the file doesn't fit `kind`; the text lists every field that is unknown, missing or of a wrong type.
    """
    try:
        return _converter().structure(json.loads(path.read_text(encoding="utf-8")), kind)
    except cattrs.BaseValidationError as error:
        reasons = "; ".join(cattrs.transform_error(error))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reasons = str(error)
    raise ValueError(f"{path} doesn't describe a run of this version: {reasons}")
