"""One step of an engine that opens a directory, against stock transformers; a type that does not open has no row."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from engines.build import build_engine
from engines.config import EngineConfig
from engines.proofs import opened
from engines.proofs.every_type import result_of
from engines.proofs.opened import step_difference, step_problem
from engines.prove import proof
from engines.testing.one_rank import one_rank  # noqa: F401  a group for every test


@pytest.mark.parametrize(
    ("kind", "batching"), [("granite", "packed"), ("glm_moe_dsa", "packed"), ("llava", "packed"), ("bart", "padded")]
)
def test_a_step_is_equal(kind: str, batching: str) -> None:
    found = step_difference(AutoConfig.for_model(kind), batching=batching)
    assert not step_problem(found), found


def test_a_step_that_differs_has_a_number() -> None:
    """BART computes positions by the place in a row."""
    assert "log-probs 2." in step_problem(step_difference(AutoConfig.for_model("bart"), batching="packed"))


def _refuse(*args: Any) -> Any:
    raise AttributeError("no such field")


def _warmer(config: EngineConfig) -> Any:
    return build_engine(replace(config, temperature=1.1))


@pytest.mark.parametrize(
    ("built", "reason"),
    [(_refuse, "an engine does not open it: AttributeError: no such field"), (_warmer, "a step of an engine differs")],
)
def test_a_type_that_is_proven_and_does_not_open_is_refused(
    built: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "flips", lambda *args: ())
    monkeypatch.setattr(opened, "build_engine", built)
    result = result_of("granite")
    assert result.verdict == "refused"
    assert reason in result.reason
