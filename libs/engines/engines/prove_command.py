"""`python -m engines prove MODEL [--prove full] [--engine.NAME VALUE ...] [--ranks N]`: print a certificate;
`python -m engines prove --all [TYPE ...]`, `--published [NAME ...]`: write the tables of types, published configs."""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_origin

from engines.capability import refuse_unsupported
from engines.config import EngineConfig
from engines.loading import read_config
from engines.lora_config import LoraConfig
from engines.proofs.device import device_certificate
from engines.proofs.every_type import all_types
from engines.proofs.every_type import main as write_tables
from engines.proofs.published_configs import measure
from engines.proofs.warm_kernels import warm_kernels
from engines.prove.admission import make_certificate
from engines.prove.certificate import Certificate
from engines.prove.options_admission import make_options_certificate
from engines.weights.hub import model_directory

PREFIX = "--engine."


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, options: Sequence[str] = ()) -> int:
    """Print a certificate as JSON and return 1 where it fails; or prove all types and write their tables.

    The certificate is of a model's config in small, with `--prove full` at true width on this machine's device, with
    options or `--ranks` of these options on ranks: of the CPU, with `--prove full` of this machine's devices.
    """
    if arguments.all is not None or arguments.published is not None:
        return _tables(parser, arguments, options)
    if arguments.model is None:
        parser.error("prove takes a model directory, or --all")
    try:
        certificate = _certificate(arguments, options)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(certificate.as_json(), indent=1))
    print(certificate, file=sys.stderr)
    return int(not certificate.holds)


def warm(parser: argparse.ArgumentParser, model: str, options: Sequence[str]) -> int:
    """Print as JSON what it took to warm the kernels of a model directory with these options; return 0."""
    try:
        config = parse_engine_options(options)
        refuse_unsupported(config)
        print(json.dumps(warm_kernels(config, read_config(model_directory(model)))))
    except ValueError as error:
        parser.error(str(error))
    return 0


def _certificate(arguments: argparse.Namespace, options: Sequence[str]) -> Certificate:
    config, ranks = parse_engine_options(options), arguments.ranks
    if arguments.longest and (arguments.prove != "full" or ranks is not None):
        raise ValueError("--longest is the longest row of a proof at true width: add --prove full, without --ranks")
    described = read_config(model_directory(str(Path(arguments.model))))
    if options or ranks is not None:
        refuse_unsupported(config)
    if arguments.prove == "full" and ranks is None:
        return device_certificate(config, described, arguments.longest)
    if arguments.prove == "full":
        return make_options_certificate(replace(config, prove="full"), described, ranks, mode="always")
    if options or ranks is not None:
        return make_options_certificate(config, described, 1 if ranks is None else ranks)
    return make_certificate(described, "always")


def _tables(parser: argparse.ArgumentParser, arguments: argparse.Namespace, options: Sequence[str]) -> int:
    docs = Path(arguments.docs)
    if arguments.model or options or arguments.ranks is not None or arguments.longest or arguments.prove != "small":
        parser.error("--all and --published prove configs in small: they take names and --docs alone")
    if unknown := sorted({*(arguments.all or ())} - {*all_types()}):
        parser.error(f"transformers has no type {', '.join(unknown)} among its causal and image-text models")
    if not (docs / "certificates.md").is_file():
        parser.error(f"{docs} is not the folder of docs/certificates.md: name it by --docs")
    date = datetime.now(UTC).date().isoformat()
    if arguments.published is not None:
        return measure(docs, arguments.published, date)
    write_tables(docs, date, arguments.all)
    return 0


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
    if "prove" in given:
        raise ValueError("prove makes certificates anew: leave --engine.prove out (--prove full is of true width)")
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
