"""Certificates and what was accepted untested, in a report: folded away, complete, as text alone."""

import json
from pathlib import Path

import pytest

from runlog.proofs import MOST, proof_view, read_proofs, read_untested
from runlog.report import write_report
from runlog.run import RunLog

HOSTILE = "</td><script>document.title='owned'</script>"
CERTIFICATE = {
    "subject": "packed rows",
    "model_type": "lfm2",
    "width": "small",
    "lengths": [1, 33],
    "log_probs": 2.5e-07,
    "gradients": 2.3e-07,
    "padded": None,
    "sensitivity": {"leak in attention": 2.25},
    "not_exercised": ["conv_bias", HOSTILE],
    "problems": [],
    "versions": {"torch": "2.13.0"},
    "place": {"device": "cpu"},
    "seconds": 0.25,
    "hash": "815290ccb3927d7d",
}


def make_run(path: Path) -> Path:
    with RunLog(path, tensorboard=False) as log:
        log.metrics(1, {"loss": 1.0})
    return path


def test_the_report_has_a_runs_proofs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "Proofs" not in write_report(run).read_text(encoding="utf-8")
    (run / "certificates").mkdir()
    (run / "certificates" / "a.json").write_text(json.dumps(CERTIFICATE))
    (run / "certificates" / "b.json").write_text(json.dumps({**CERTIFICATE, "problems": ["wrong by 0.5"]}))
    (run / "untested.json").write_text(json.dumps({"conv_bias": "nothing exercised it"}))
    text = write_report(run).read_text(encoding="utf-8")
    assert "<details><summary>2 certificates" in text
    for words in ("packed rows of lfm2", "1, 33", "2.5e-07", "leak in attention: 2.2", "wrong by 0.5", "torch: 2.13.0"):
        assert words in text
    assert text.index("accepted untested, by name: conv_bias (nothing exercised it)") < text.index("Proofs</h2>")
    assert HOSTILE not in text


def test_a_page_has_the_newest_and_counts_the_rest(tmp_path: Path) -> None:
    (tmp_path / "certificates").mkdir()
    for number in range(MOST + 3):
        (tmp_path / "certificates" / f"{number:03}.json").write_text(json.dumps(CERTIFICATE))
    shown, more = read_proofs(tmp_path)
    assert (len(shown), more) == (MOST, 3)
    assert read_untested(tmp_path) == {}


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "untested.json").write_text("[]")
    with pytest.raises(ValueError, match=r"untested\.json: expected an object"):
        read_untested(tmp_path)


def test_a_sampler_is_shown_as_what_it_was_held_to() -> None:
    shown = dict(proof_view({**CERTIFICATE, "subject": "sampler"})["rows"])
    assert (shown["result"], shown["mean difference of log-probs"]) == ("within its bound", "2.5e-07")
    assert "largest difference of a gradient" not in shown
