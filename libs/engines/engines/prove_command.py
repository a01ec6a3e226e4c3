"""`python -m engines prove MODEL`: prove a config and print its certificate."""

import argparse
import json
import sys
from pathlib import Path

from engines.loading import read_config
from engines.prove.admission import make_certificate
from engines.weights.hub import model_directory


def main(parser: argparse.ArgumentParser, model: str | None) -> int:
    """Print the certificate of a model's config as JSON; return 1 where the proof fails."""
    if model is None:
        parser.error("prove takes a model directory")
    try:
        certificate = make_certificate(read_config(model_directory(str(Path(model)))).get_text_config(), "always")
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(certificate.as_json(), indent=1))
    print(certificate, file=sys.stderr)
    return int(not certificate.holds)
