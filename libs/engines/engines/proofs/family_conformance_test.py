"""Every case of every registered family is within its bounds of stock transformers; what the table prints, asserted.
A proof of each case's config says the same."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from engines.families.family import Family
from engines.families.registry import FAMILIES, family_of
from engines.proofs.family_cases import CASES, Case
from engines.proofs.family_conformance import GRADIENT_BOUND, LOG_PROB_BOUND, Row, measure, table
from engines.prove import proof
from engines.prove.proof import prove
from seqpack.adapters.context import LocalOps


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No config field is changed: what the other parts of a proof say."""
    monkeypatch.setattr(proof, "flips", lambda *args: ())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_equals_padded_equals_stock_one_by_one(case: Case) -> None:
    row = measure(case)
    assert row.problems == []
    assert (row.auxiliary is not None) == bool(getattr(case.config(), "output_router_logits", False))
    certificate = prove(case.config())
    assert certificate.holds, certificate
    assert certificate.log_probs <= LOG_PROB_BOUND
    assert certificate.gradients <= GRADIENT_BOUND


attention: Callable[..., Tensor] = LocalOps.attention


def halved(self: LocalOps, q: Any, k: Any, v: Any, *args: Any, **more: Any) -> Tensor:
    """Attend with half of the gradient of values."""
    return attention(self, q, k, 0.5 * v + 0.5 * v.detach(), *args, **more)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_error_in_gradients_alone_fails_a_family_and_its_certificate(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.model_type in family.model_types)
    monkeypatch.setattr(LocalOps, "attention", halved)
    row, certificate = measure(case), prove(case.config())
    assert row.problems
    assert all(problem.startswith("gradient_packed") for problem in row.problems)
    assert not certificate.holds
    assert certificate.log_probs <= LOG_PROB_BOUND
    assert certificate.gradients == pytest.approx(row.gradient_packed, rel=0.9)


def test_every_family_has_cases_with_all_its_kinds() -> None:
    cases = {family.name: [case for case in CASES if family_of(case.config()) is family] for family in FAMILIES}
    for family in FAMILIES:
        configs = [case.config() for case in cases[family.name]]
        ropes = [
            part for c in configs for part in (c.rope_parameters, *c.rope_parameters.values()) if isinstance(part, dict)
        ]
        assert {part.get("rope_type", "default") for part in ropes} == set(family.rope_types), family.name
        layers = {kind for config in configs for kind in (getattr(config, "layer_types", None) or ["full_attention"])}
        assert layers == set(family.layer_types), family.name
        for name, allowed in family.fields.items():
            if allowed and len(allowed) > 1:
                assert {getattr(config, name) for config in configs} == set(allowed), (family.name, name)
        assert not family.routed or any(family.auxiliary_loss(config) for config in configs)
        assert all(config.attention_dropout > 0 for config in configs)


def test_a_row_beyond_its_bounds_is_named() -> None:
    row = Row("x", 1e-6, 2e-5, 0.0, float("nan"), 1e-4, False, 0.0)
    assert [problem.split()[0] for problem in row.problems] == [
        *("exported", "log_prob_padded", "gradient_padded", "auxiliary")
    ]
    assert list(table([row]))[2] == "| x | 1.0e-06 | 2.0e-05 | 0 | nan | 1.0e-04 | DIFFERENT | 0 |"
