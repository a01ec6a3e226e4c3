"""The proofs that a run stands on: made before ranks start, told in the terminal, written into the run directory."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from apps.common.cli.refusals import Refusals
from apps.common.cli.untested import unknown_names, untested_parts, unused_names
from apps.common.data.model_files import config_fields, config_of_model, open_description, open_model_directory
from apps.common.run.ranks import ranks_of_node
from engines import EngineConfig
from engines.loading import LoadedModel
from engines.proofs.run_proofs import certificates_of
from engines.prove.admission import batching_hint
from engines.prove.certificate import Certificate
from runlog.proofs import CERTIFICATES, UNTESTED, untested_lines
from runplan.run_spec import RunSpec

QUIET = 2.0
"""Seconds that a proof may take without a word."""


def prove_run(config: EngineConfig, model: PretrainedConfig, ranks: int, longest: int = 0) -> tuple[Certificate, ...]:
    """Return the certificates of a run (`certificates_of`), and tell how long they take where it is more than a moment.

    Raises:
        ValueError: no proof could be made, or kept.
    """
    kind = model.get_text_config().model_type
    with report_when_slow(f"proving {kind} against stock transformers"):
        return certificates_of(config, model, ranks, longest)


@dataclass(frozen=True)
class CheckedModel:
    """A model that was opened, None where it was refused, and the proofs that the run stands on."""

    model_config: PretrainedConfig | None
    ranks: int
    opened: LoadedModel | None
    certificates: tuple[Certificate, ...]
    accepted: dict[str, str]
    """What runs untested, accepted by name, each with the reason."""


def open_checked(
    spec: RunSpec, directory: Path, nproc_per_node: int, refusals: Refusals, whole: bool = True
) -> CheckedModel:
    """Prove what a run is to stand on, and open its model; what refuses the run is added to `refusals`.

    `whole`: the directory has weights; else a model without values is made of its config.
    """
    model_config, nodes = config_of_model(directory, None), spec.cluster.pools.nodes
    ranks = ranks_of_node(nproc_per_node, nodes) * nodes
    proofs = (
        () if model_config is None else refusals.of(partial(prove_run, spec.engine, model_config, ranks, spec.longest))
    )
    opener = open_model_directory if whole else open_description
    opened = None if proofs is None else refusals.of(partial(opener, directory, spec.engine))
    certificates = proofs or ()
    if opened is not None:
        refusals.lines += failures(certificates, spec.engine.batching)  # else opening has told it
    return CheckedModel(
        model_config, ranks, opened, certificates, accepted_parts(spec, certificates, model_config, refusals)
    )


def accepted_parts(
    spec: RunSpec, certificates: Sequence[Certificate], model: PretrainedConfig | None, refusals: Refusals
) -> dict[str, str]:
    """Return what the run has untested and was accepted, by name, each with the reason; names that are of nothing are
    added to `refusals`."""
    allowed, parts = spec.engine.allow_untested, untested_parts(spec, certificates)
    if model is not None:
        refusals.lines += unknown_names(allowed, parts, config_fields(model))
    return {name: parts[name] for name in allowed if name in parts}


def tell_proofs(certificates: Sequence[Certificate], allowed: Sequence[str], accepted: Mapping[str, str]) -> None:
    """Print a line for each certificate, what was accepted untested, and names that were not needed."""
    lines = [f"{certificate}; certificate {certificate.hash}" for certificate in certificates]
    lines += [*untested_lines(accepted), *unused_names(allowed, accepted)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@contextmanager
def report_when_slow(text: str, quiet: float = QUIET, tell: Callable[[str], object] | None = None) -> Iterator[None]:
    """Tell `text` with the seconds so far, on standard error, while what is inside takes longer than `quiet` seconds:
    on a terminal each second in place, else once in ten."""
    terminal, ended, begun = sys.stderr.isatty(), threading.Event(), time.monotonic()
    write = tell or sys.stderr.write
    lead, end, every = ("\r", "", 1.0) if terminal else ("", "\n", 10.0)

    def watch() -> None:
        wait = quiet
        while not ended.wait(wait):
            write(f"{lead}{text}: {time.monotonic() - begun:.0f} s{end}")
            wait = every

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if terminal and time.monotonic() - begun > quiet:
            write("\n")


def failures(certificates: Sequence[Certificate], batching: str = "packed") -> list[str]:
    """Return the texts of proofs that failed, but for those of options, which `engines.preflight` tells."""
    failed = [one for one in certificates if not one.admits(batching) and one.subject != "options"]
    return [f"{one}{batching_hint(one, batching)}" for one in failed]


def write_proofs(run_dir: Path, certificates: Sequence[Certificate], accepted: Mapping[str, str]) -> None:
    """Write certificates and what was accepted untested into a run directory; those of earlier starts stay.

    `accepted`: the reason by name.
    """
    for certificate in certificates:
        subject = certificate.subject.replace(" ", "-")
        certificate.save(run_dir / CERTIFICATES / f"{subject}-{certificate.hash}.json")
    if not accepted:
        return
    path = run_dir / UNTESTED
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    part = path.with_suffix(".writing")
    part.write_text(json.dumps({**before, **accepted}, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
