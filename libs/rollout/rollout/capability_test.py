"""Every Yes names a test that is there; every No has a reason."""

import ast
from pathlib import Path

import pytest

from rollout.backends import ENGINE_BACKENDS
from rollout.capability import FEATURES, NATIVE, feature_of
from seqpack.capability import Unsupported


@pytest.mark.parametrize("backend", ENGINE_BACKENDS)
def test_every_answer_has_its_evidence_or_its_reason(backend: str) -> None:
    pytest.importorskip(f"rollout.{backend}")
    here = Path(__file__).parent
    for feature, answer in FEATURES[backend].items():
        if isinstance(answer, Unsupported):
            assert len(answer.reason) > 20, feature
            continue
        file, _, function = answer.evidence.partition("::")
        assert file.endswith("_test.py"), feature
        tree = ast.parse((here / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, feature


def test_an_unknown_feature_is_a_mistake() -> None:
    assert feature_of(NATIVE, "cancel")
    assert not feature_of(NATIVE, "tensor_parallel")
    with pytest.raises(ValueError, match=r"unknown feature 'teleport'; known are cancel, continuous_batching, cpu"):
        feature_of(NATIVE, "teleport")
