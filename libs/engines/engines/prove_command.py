"""`python -m engines prove MODEL [--engine.NAME VALUE ...] [--ranks N]`: print a certificate."""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_origin

from engines.capability import refuse_unsupported
from engines.config import EngineConfig
from engines.loading import read_config
from engines.lora_config import LoraConfig
from engines.prove.admission import make_certificate
from engines.prove.options_admission import make_options_certificate
from engines.weights.hub import model_directory

PREFIX = "--engine."


def main(
    parser: argparse.ArgumentParser, model: str | None, options: Sequence[str] = (), ranks: int | None = None
) -> int:
    """Print the certificate of a model's config, or of options over `ranks` ranks, as JSON; return 1 where it fails."""
    if model is None:
        parser.error("prove takes a model directory")
    try:
        config = parse_engine_options(options)
        described = read_config(model_directory(str(Path(model))))
        if options or ranks is not None:
            refuse_unsupported(config)
            certificate = make_options_certificate(config, described, 1 if ranks is None else ranks)
        else:
            certificate = make_certificate(described, "always")
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(certificate.as_json(), indent=1))
    print(certificate, file=sys.stderr)
    return int(not certificate.holds)


def parse_engine_options(words: Sequence[str]) -> EngineConfig:
    """Return the settings of words `--engine.NAME VALUE ...`, `--engine.lora.NAME` among them; a switch needs no value.

    Certificates are made anew. ValueError for an unknown name, or a value that the field does not take.
    """
    given: dict[str, list[str]] = {}
    for word in words:
        if word.startswith(PREFIX):
            given[word.removeprefix(PREFIX).replace("-", "_")] = values = []
        elif not given:
            raise ValueError(f"prove takes {PREFIX}NAME VALUE, got {word!r}")
        else:
            values.append(word)
    lora = {name.removeprefix("lora."): value for name, value in given.items() if name.startswith("lora.")}
    own = {name: value for name, value in given.items() if not name.startswith("lora.")}
    config = EngineConfig(**_values(EngineConfig, own), lora=LoraConfig(**_values(LoraConfig, lora, f"{PREFIX}lora.")))
    return replace(config, prove="always")


def _values(kind: type[Any], given: dict[str, list[str]], prefix: str = PREFIX) -> dict[str, Any]:
    types = {entry.name: entry.type for entry in fields(kind)}
    if unknown := sorted(given.keys() - types.keys() | (given.keys() & {"lora"})):
        near = difflib.get_close_matches(unknown[0], [*types], n=1)
        hint = f", did you mean {near[0]}?" if near and near[0] != unknown[0] else ""
        raise ValueError(f"{prefix}{unknown[0]} is no setting of {kind.__name__}{hint}")
    return {name: _value(types[name], words) for name, words in given.items()}


def _value(kind: Any, words: Sequence[str]) -> Any:
    """Return a field's value: words of a tuple, a switch, or one word, read as JSON where it is JSON."""
    if get_origin(kind) is tuple:
        return tuple(float(word) if kind == tuple[float, float] else word for word in words)
    if not words:
        return True
    try:
        return json.loads(" ".join(words).lower() if kind is bool else " ".join(words))
    except json.JSONDecodeError:
        return " ".join(words)
