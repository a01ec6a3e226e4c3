"""MindSpeed's patches by the registry: a package of that name, written here, in the place of the real one."""

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
from megatron.core import parallel_state
from megatron.core.transformer import mlp

from engines.devices.adaptations import Applied
from engines.megatron.npu.mindspeed import override_transformer_config

VALUES = {"use_flash_attn": True}
PLAIN = mlp.MLP.forward


Repatch = Callable[[Mapping[str, Any]], object]


def forward(self: Any, *args: Any, **kwargs: Any) -> None:
    """MindSpeed's."""


def installed(monkeypatch: pytest.MonkeyPatch, repatch: Repatch | None) -> None:
    package, adaptor = ModuleType("mindspeed"), ModuleType("mindspeed.megatron_adaptor")
    if repatch is not None:
        adaptor.repatch = repatch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mindspeed", package)
    monkeypatch.setitem(sys.modules, "mindspeed.megatron_adaptor", adaptor)


def patching(values: Mapping[str, Any]) -> None:
    assert values == VALUES
    mlp.MLP.forward = forward
    mlp.bias_swiglu_impl = None


def accepted() -> Applied:
    return override_transformer_config(VALUES, accept_unverified=True, installed="0.12.1")


def test_applied_once_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Mapping[str, Any]] = []

    def counted(values: Mapping[str, Any]) -> None:
        calls.append(values)
        patching(values)

    installed(monkeypatch, counted)
    before = mlp.bias_swiglu_impl
    applied = accepted()
    try:
        assert (mlp.MLP.forward, mlp.bias_swiglu_impl) == (forward, None)
        assert set(applied.changed) == {"MLP.forward", "megatron.core.transformer.mlp.bias_swiglu_impl"}
        assert accepted() is applied
        assert len(calls) == 1
    finally:
        applied.undo()
    assert (mlp.MLP.forward, mlp.bias_swiglu_impl) == (PLAIN, before)


def half_done(values: Mapping[str, Any]) -> None:
    patching(values)
    raise AttributeError("module 'megatron.core' has no attribute 'gone'")


def adding(values: Mapping[str, Any]) -> None:
    mlp.MLP.of_mindspeed = values


@pytest.mark.parametrize(
    ("repatch", "text"),
    [
        (half_done, "MindSpeed failed, nothing was changed: AttributeError: .* 'gone'"),
        (adding, r"cannot be undone: MLP\.of_mindspeed"),
        (None, r"nothing was changed: mindspeed\.megatron_adaptor has no repatch"),
    ],
)
def test_a_failure_is_reported_and_nothing_is_changed(
    repatch: Repatch | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, repatch)
    before = dict(vars(mlp)), dict(vars(mlp.MLP))
    with pytest.raises(ValueError, match=text):
        accepted()
    assert (dict(vars(mlp)), dict(vars(mlp.MLP))) == before


def test_refused_unless_accepted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, patching)
    with pytest.raises(ValueError, match=r"is unverified .*placeholder.* accept it by accept_unverified=True"):
        override_transformer_config(VALUES)
    assert mlp.MLP.forward is PLAIN


def test_refused_of_another_version_and_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"was written for mindspeed >=0\.12,<0\.13, and 0\.0\.1 is installed"):
        override_transformer_config(VALUES, accept_unverified=True, installed="0.0.1")
    with pytest.raises(ValueError, match="mindspeed is not installed"):
        override_transformer_config(VALUES, accept_unverified=True)
    monkeypatch.setitem(sys.modules, "mindspeed", ModuleType("mindspeed"))  # as the placeholder is
    with pytest.raises(ValueError, match=r"nothing was changed: No module named 'mindspeed\.megatron_adaptor'"):
        accepted()


def test_refused_once_model_parallel_groups_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, patching)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    with pytest.raises(ValueError, match="cannot be applied now: model-parallel groups exist"):
        accepted()
    assert mlp.MLP.forward is PLAIN
