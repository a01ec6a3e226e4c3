"""What a run stands on, as its report shows it: certificates of proofs, and what was accepted untested.

Both are files of the run directory that other packages write; what they hold is data, and shown as text.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CERTIFICATES = "certificates"
"""Folder of certificates: a JSON object a file."""
UNTESTED = "untested.json"
"""Reasons by name, of what was accepted untested."""
MOST = 20
"""Certificates on a page, at most; the newest of them."""
MOST_NAMES = 40


def read_untested(run_dir: Path) -> dict[str, str]:
    """Return the reasons of what was accepted untested, by name; empty where nothing was."""
    path = run_dir / UNTESTED
    return {str(name): str(reason) for name, reason in _object(path).items()} if path.is_file() else {}


def untested_lines(untested: Mapping[str, str]) -> list[str]:
    """Return the line for the head of a report; none where nothing was accepted untested."""
    if not untested:
        return []
    reasons = "; ".join(f"{name} ({reason})" for name, reason in untested.items())
    return [f"accepted untested, by name: {reasons}"]


def read_proofs(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Return a run's certificates as a page shows them, the newest first, and how many found no room."""
    paths = sorted((run_dir / CERTIFICATES).glob("*.json"), key=lambda path: (-path.stat().st_mtime, path.name))
    return [proof_view(_object(path)) for path in paths[:MOST]], max(0, len(paths) - MOST)


def proof_view(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return a certificate as a title, whether it holds, and rows of a name and a text."""
    problems = [str(problem) for problem in certificate.get("problems") or ()]
    sampled = certificate.get("subject") == "sampler"  # held to the trainer, by a mean, without gradients
    rows = {
        "result": "; ".join(problems) or ("within its bound" if sampled else "equal to stock transformers"),
        "width": certificate.get("width"),
        "lengths": _listed(certificate.get("lengths") or ()),
        "mean difference of log-probs" if sampled else "largest difference of a log-prob": _number(
            certificate.get("log_probs")
        ),
        "the same of stock transformers": _number(certificate.get("stock_error")),
        "the same of padded rows": _number(certificate.get("padded")),
        "largest difference of a gradient": None if sampled else _number(certificate.get("gradients")),
        "other differences": _pairs(certificate.get("differences") or {}),
        "planted errors move a log-prob by": _pairs(certificate.get("sensitivity") or {}),
        "not exercised": _listed(certificate.get("not_exercised") or ()),
        "options": _pairs(certificate.get("options") or {}),
        "device": _pairs(certificate.get("place") or {}),
        "versions": _pairs(certificate.get("versions") or {}),
        "seconds": _number(certificate.get("seconds")),
        "hash": certificate.get("hash"),
    }
    title = f"{certificate.get('subject', 'proof')} of {certificate.get('model_type', 'a model')}"
    shown = [(name, str(text)) for name, text in rows.items() if text not in (None, "")]
    return {"title": title, "holds": not problems, "rows": shown}


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected an object; remove it")
    return value


def _number(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return f"{value:.2g}"


def _listed(values: Sequence[Any]) -> str:
    more = f" and {len(values) - MOST_NAMES} more" if len(values) > MOST_NAMES else ""
    return ", ".join(map(str, values[:MOST_NAMES])) + more


def _pairs(values: Mapping[str, Any]) -> str:
    texts = [f"{name}: {_number(value) if isinstance(value, float) else value}" for name, value in values.items()]
    return _listed(texts)
